"""Verify a conversion: the copy, rotated in its pairing, must attend as the source does, rotated in its own.

For a few attention modules, the projections, biases, norms, scales and adapters of both sides are applied to the same
random inputs and rotated by the same random angles. Then the scores q.k must agree, and all rows that do not rotate
must be equal. No model is built: this takes the memory of a few rows. If two models fit into memory, both folders are
loaded as well and must give the same logits.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
from torch import Tensor

from rope_ext_hf.checkpoints.files.numbers import equal_bytes
from rope_ext_hf.checkpoints.files.weight_files import TensorView
from rope_ext_hf.checkpoints.rows.head_blocks import ScaleBlocks, evenly_spaced
from rope_ext_hf.checkpoints.rows.loaded_rows import reorder
from rope_ext_hf.checkpoints.rows.row_layouts import RotaryTensors, rotary_tensors
from rope_ext_hf.errors import CheckpointError, one_line, size_text
from rope_ext_hf.files.whole import read_json
from rope_ext_hf.models.families import family
from rope_ext_hf.models.model_classes import class_to_load, vocabulary_size
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.rotary.pairing import rotate
from rope_ext_hf.rotary.pairing_names import other_pairing

_MAX_ATTENTIONS = 3  # attention modules that are compared
_TOKENS = 4  # random inputs
_ROWS = 1024  # rows of a weight that are in float64 at a time
_SCORE_TOLERANCE = 1e-5  # in standard deviations of the scores
_LOGIT_TOLERANCE = 1e-3  # in standard deviations of the logits; nearly always they are equal bit for bit
_NOT_RENAMED = "the new folder was not created"
_SCALES = re.compile("scale|magnitude|SCB")  # parameters that multiply the output of others


def compare_views(tensors: RotaryTensors, source: TensorView, written: TensorView, before: str, after: str) -> str:
    """Compare a converted copy with its source, and return a clause that says what was compared.

    If the pairings before and after differ, attention scores are compared, else every tensor.
    """
    if before != after:
        return compare_scores(tensors, source, written, after)
    for name in written.tensors:
        if not equal_bytes(source.read(name), written.read(name)):
            raise CheckpointError(f"verification failed: {name!r} differs from the source's; {_NOT_RENAMED}")
    return f"{len(written.tensors):,} tensors equal to the source's"


def compare_scores(tensors: RotaryTensors, source: TensorView, written: TensorView, to: str) -> str:
    """Compare the attention scores of a few modules that were written in the pairing `to` with those of the source.

    Returns:
        A clause that says what was compared, and the largest difference.

    Raises:
        CheckpointError: they differ.
    """
    attentions: dict[str, dict[str, list[str]]] = {}  # names of tensors by attention and module
    for name, info in source.tensors.items():
        parts = tensors.split_name(name)
        if parts is not None and tensors.find(name, info.shape) is not None:
            _, attention, module = parts
            attentions.setdefault(attention, {}).setdefault(module, []).append(name)
    names = evenly_spaced(list(attentions), _MAX_ATTENTIONS)
    worst = 0.0
    for attention in names:
        expected, before = _scores(tensors, attention, attentions[attention], source, other_pairing(to))
        scores, after = _scores(tensors, attention, attentions[attention], written, to)
        difference = float((scores - expected).abs().max() / expected.std().clamp(min=1e-30))
        if not difference <= _SCORE_TOLERANCE or not torch.equal(before, after):
            raise CheckpointError(
                f"verification failed: the scores of {attention!r} in the copy differ from the source's by "
                f"{difference:.1e} standard deviations; {_NOT_RENAMED}"
            )
        worst = max(worst, difference)
    return (
        f"q.k of {len(names)} of {len(attentions)} layers, {other_pairing(to)} on the source against {to} on the copy: "
        f"{_difference_text(worst)}"
    )


def compare_logits(source: Path, before: str, written: Path, to: str, size: int) -> str:
    """Compare the logits of the models in the source and in the written folder, loaded by transformers.

    Each model, with weights of `size` bytes, is converted in memory to the pairing that its class runs.

    Returns:
        A clause that says what was compared, or why nothing was.

    Raises:
        CheckpointError: the logits differ.
    """
    from transformers import AutoConfig

    model_type = str(read_json(source / "config.json").get("model_type"))
    if family(model_type).remote:
        return f"logits not compared: transformers has no class of {model_type!r}, and code in the folder is not run"
    free = psutil.virtual_memory().available
    if free < 2.5 * size:
        return f"logits not compared: that takes {size_text(round(2.5 * size))} of memory, {size_text(free)} are free"
    logits: list[Tensor] = []
    # trust_remote_code=False: code in the folder is not run, and transformers does not ask about it.
    settings = {"dtype": "auto", "local_files_only": True, "trust_remote_code": False}
    for folder, pairing in ((source, before), (written, to)):
        try:
            loader = class_to_load(AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
            model = loader.from_pretrained(folder, **settings).eval()
        except Exception as error:  # transformers raises anything on folders that it cannot load
            return f"logits not compared: transformers cannot load the folder: {one_line(error, 200)}"
        rows = rotary_tensors(model, ModelRope.of_checkpoint(model.config, model).rotary)
        if rows.pairing is None:
            return "logits not compared: the pairing that its class runs is unknown"
        if rows.pairing != pairing:
            reorder(model, rows, rows.pairing)
        ids = torch.arange(3, 3 + _TOKENS * 8)[None] % vocabulary_size(model)
        with torch.no_grad():
            logits.append(model(ids, use_cache=False).logits.float())
        del model
    expected, copied = logits
    if not expected.isfinite().all():
        return "logits not compared: those of the source are not finite"
    difference = float((expected - copied).abs().max() / expected.std().clamp(min=1e-30))
    if not difference <= _LOGIT_TOLERANCE:
        raise CheckpointError(
            f"verification failed: the logits of the copy differ from the source's by {difference:.1e} standard "
            f"deviations; {_NOT_RENAMED}"
        )
    return f"logits of both folders: {_difference_text(difference)}"


def _difference_text(difference: float) -> str:
    """Return a difference in words; it is in standard deviations of the source's numbers."""
    return f"largest difference {difference:.0e} standard deviations" if difference else "identical"


def _scores(
    tensors: RotaryTensors, attention: str, modules: Mapping[str, list[str]], view: TensorView, pairing: str
) -> tuple[Tensor, Tensor]:
    """Return the attention scores of one module on random inputs, and its rows that do not rotate.

    Args:
        tensors: the row layouts of the checkpoint.
        attention: the name of the attention module.
        modules: the names of its tensors, by the modules inside it.
        view: the tensors of the checkpoint.
        pairing: the pairing that the tensors are in.

    Returns:
        The scores, (heads, tokens, tokens), and the other rows as one flat tensor.
    """
    rotated: dict[str, Tensor] = {}  # by side ("q", "k", ...): (tokens, heads, rotated dims)
    unrotated: list[Tensor] = []
    layouts = tensors.layouts_in(attention)
    for module in sorted(modules, key=lambda name: "norm" in name):  # a norm scales the output of its projection
        for block, rows in layouts[module].heads(_outputs(tensors, modules[module], view)):
            heads, end = rows.permute(2, 0, 1), block.start + block.rotary
            unrotated += [heads[..., : block.start], heads[..., end:]]
            if block.rotary:
                rotated[block.side] = heads[..., block.start : end] * rotated.get(block.side, 1.0)
    scores = []
    for pair in (("q", "k"), ("index_q", "index_k")):
        sides = [rotated[side] for side in pair if side in rotated]
        if sides:
            queries, keys = sides[0], sides[-1]  # an adapter may have one side only, which is compared with itself
            angles = _random("angles", _TOKENS, 1, queries.shape[-1] // 2) * torch.pi
            queries, keys = (rotate(x, angles, pairing) for x in (queries, keys))
            shared = max(1, queries.shape[1] // keys.shape[1])  # query heads per key head
            keys = keys.repeat_interleave(shared, 1)[:, : queries.shape[1]]
            scores.append(torch.einsum("thd,uhd->htu", queries, keys))
    return torch.cat(scores), torch.cat([torch.empty(0), *(rows.flatten() for rows in unrotated)])


def _outputs(tensors: RotaryTensors, names: list[str], view: TensorView) -> Tensor:
    """Apply the parameters of a module to random inputs, and return the outputs, (rows, tokens) float64.

    `names`: the names of the parameters. The outputs of weights, biases and adapters are added; scales multiply the
    sum.
    """
    out: Tensor | None = None
    for name in sorted(names, key=lambda name: bool(_SCALES.search(name))):
        tensor = view.read(name)
        layout = tensors.find(name, tensor.shape)
        if isinstance(layout, ScaleBlocks):
            tensor = tensor.repeat_interleave(layout.size, 0)[: layout.layout.rows]
        elif layout is not None:
            tensor = tensor.reshape(layout.rows, tensor.numel() // layout.rows)
        inputs = _random(name, tensor[0].numel(), _TOKENS)
        # NaN and infinities would make every score NaN; with numbers in their place they are compared as well.
        blocks = (block.double().nan_to_num(nan=0.5, posinf=2.0, neginf=-2.0) for block in torch.split(tensor, _ROWS))
        applied = torch.cat([block @ inputs for block in blocks])
        if out is None:
            out = applied
        elif _SCALES.search(name):
            out = out * applied
        else:
            out = out + applied
    assert out is not None  # a module is listed because it has tensors
    return out


def _random(name: str, *shape: int) -> Tensor:
    """Return normally distributed float64 numbers of this shape, which depend on the name alone."""
    draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*shape, generator=draws, dtype=torch.float64)
