"""Do converted weights give the attention scores of their source? A check of what was written, layer by layer.

Of a few layers the projections, biases, norms, scales and adapters are read from both sides, applied to the same random
inputs, and turned by random angles, each side under the rotation that its weights are for. Then q.k must be the same,
and so must every row that does not rotate. Nothing of a model is built: this takes the memory of a few rows. Where
there is memory for two models, both folders are loaded as well and must give the same logits.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import Tensor

from rope_ext_hf.checkpoints.row_layouts import Blocks, Layout, RotatingRows
from rope_ext_hf.checkpoints.weight_files import SafetensorsFile, TorchFile
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import read_json
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.family_settings import class_pairing
from rope_ext_hf.rotary.pairing import rotate

__all__ = ["compare_logits", "compare_scores"]

LAYERS = 3
TOKENS = 4
ROWS = 1024  # of a weight that are in float64 at a time
MOST = 1e-5  # of the scores' own spread
MOST_LOGITS = 1e-3  # of the logits' own; nearly always they are equal to the bit
_SCALES = re.compile("scale|magnitude|SCB")


def compare_scores(
    rows: RotatingRows,
    source: Mapping[str, SafetensorsFile | TorchFile],
    written: Mapping[str, SafetensorsFile],
    to: str,
) -> str:
    """What was compared, in words; `source` and `written` have the same files by name.

    Raises:
        CheckpointError: scores that differ.
    """
    attentions: dict[str, dict[str, list[tuple[str, str]]]] = {}  # by attention and module: file, tensor
    for file_name, file in source.items():
        for name, entry in file.tensors.items():
            parts = rows.parts(name)
            if parts is not None and rows.find(name, entry.shape) is not None:
                _, attention, module = parts
                attentions.setdefault(attention, {}).setdefault(module, []).append((file_name, name))
    names = list(attentions)
    chosen = dict.fromkeys(names[i * (len(names) - 1) // max(1, LAYERS - 1)] for i in range(LAYERS))
    other = "interleaved" if to == "half" else "half"
    worst = 0.0
    for attention in chosen:
        expected, before = _scores(rows, attentions[attention], source, other)
        found, after = _scores(rows, attentions[attention], written, to)
        difference = float((found - expected).abs().max() / expected.std().clamp(min=1e-30))
        if not difference <= MOST or not torch.equal(before, after):
            raise CheckpointError(
                f"verification failed: the scores of {attention!r} as written differ from the source's by "
                f"{difference:.1e} of their spread; the folder did not get its name"
            )
        worst = max(worst, difference)
    return (
        f"q.k of {len(chosen)} of {len(names)} layers, {other} on the source against {to} on the copy: equal to "
        f"{worst:.0e} of their spread"
    )


def compare_logits(source: Path, before: str, written: Path, to: str, size: int) -> str:
    """What was compared, in words, or why nothing was: logits of both folders, loaded by transformers.

    Each model is brought, in memory, to the pairing that its class runs.

    Args:
        before, to: the pairings of the weights in the two folders.
        size: bytes of the weights.

    Raises:
        CheckpointError: logits that differ.
    """
    from transformers import AutoModelForCausalLM

    from rope_ext_hf.checkpoints.live_model import convert

    model_type = str(read_json(source / "config.json").get("model_type"))
    if family(model_type).own_code is not None:
        return f"logits not compared: transformers has no class of {model_type!r}, and the code beside it is not run"
    if (free := psutil.virtual_memory().available) < 2.5 * size:
        return f"logits not compared: that takes {2.5 * size / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free"
    found: list[Tensor] = []
    settings = {"dtype": "auto", "local_files_only": True, "trust_remote_code": False}  # nor asked for
    for folder, pairing in ((source, before), (written, to)):
        try:
            model = AutoModelForCausalLM.from_pretrained(folder, **settings).eval()
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            return f"logits not compared: {' '.join(str(error).split())[:200]}"
        runs = class_pairing(model.config)
        if runs is None:
            return "logits not compared: which pairing the class runs is not known"
        if runs != pairing:
            convert(model, runs, source=pairing)
        ids = torch.arange(3, 3 + TOKENS * 8)[None] % model.get_input_embeddings().weight.shape[0]
        with torch.no_grad():
            found.append(model(ids, use_cache=False).logits.float())
        del model
    one, other = found
    if not one.isfinite().all():
        return "logits not compared: the source's are not finite"
    difference = float((one - other).abs().max() / one.std().clamp(min=1e-30))
    if not difference <= MOST_LOGITS:
        raise CheckpointError(
            f"verification failed: logits of what was written differ from the source's by {difference:.1e} of their "
            "spread; the folder did not get its name"
        )
    return f"logits of both, loaded: equal to {difference:.0e} of their spread"


@dataclass
class _Side:
    """Queries and keys of one attention on one side, (tokens, heads, rotated dims), and the rows that do not rotate."""

    heads: dict[str, Tensor] = field(default_factory=dict)
    others: list[Tensor] = field(default_factory=list)


def _scores(
    rows: RotatingRows,
    modules: Mapping[str, list[tuple[str, str]]],
    files: Mapping[str, SafetensorsFile | TorchFile],
    pairing: str,
) -> tuple[Tensor, Tensor]:
    side = _Side()
    for module in sorted(modules, key=lambda name: "norm" in name):  # what a norm weighs comes first
        outputs = _outputs(rows, modules[module], files)
        for role, each in _heads(outputs, rows.layouts[module], side.others):
            side.heads[role] = each * side.heads.get(role, 1.0)
    found = []
    for pair in (("q", "k"), ("index_q", "index_k")):
        there = [side.heads[role] for role in pair if role in side.heads]
        if there:
            queries, keys = there[0], there[-1]  # of an adapter to one side alone: with itself
            angles = _random("angles", TOKENS, 1, queries.shape[-1] // 2) * torch.pi
            queries, keys = (rotate(x, angles, pairing) for x in (queries, keys))
            shared = max(1, queries.shape[1] // keys.shape[1])  # queries of one key head
            keys = keys.repeat_interleave(shared, 1)[:, : queries.shape[1]]
            found.append(torch.einsum("thd,uhd->htu", queries, keys))
    others = torch.cat([other.flatten() for other in side.others]) if side.others else torch.empty(0)
    return torch.cat(found), others


def _outputs(
    rows: RotatingRows, tensors: list[tuple[str, str]], files: Mapping[str, SafetensorsFile | TorchFile]
) -> Tensor:
    """(rows, tokens): everything that a module holds, on random inputs; what scales last."""
    out: Tensor | None = None
    for file_name, name in sorted(tensors, key=lambda pair: bool(_SCALES.search(pair[1]))):
        tensor = files[file_name].read(name)
        layout = rows.find(name, tensor.shape)
        if isinstance(layout, Blocks):
            tensor = tensor.repeat_interleave(layout.size, 0)[: layout.layout.rows]
        elif layout is not None:
            tensor = tensor.reshape(layout.rows, -1)
        inputs = _random(name, tensor[0].numel(), TOKENS)
        parts = [tensor[at : at + ROWS].double().nan_to_num() @ inputs for at in range(0, len(tensor), ROWS)]
        each = torch.cat(parts)
        out = each if out is None else out * each if _SCALES.search(name) else out + each
    assert out is not None  # a module is here because it has tensors
    return out


def _heads(outputs: Tensor, layout: Layout, others: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Of each piece that rotates its side, and (tokens, heads, rotated dims); what does not is added to `others`."""
    at = 0
    grouped = outputs.T.reshape(TOKENS, layout.groups, -1)  # (tokens, groups, rows)
    for piece in layout.pieces:
        heads = grouped[..., at : at + piece.count * piece.size].reshape(TOKENS, -1, piece.size)
        at += piece.count * piece.size
        end = piece.start + piece.rotary
        others += [heads[..., : piece.start], heads[..., end:]]
        if piece.rotary:
            yield piece.side, heads[..., piece.start : end]


def _random(name: str, *shape: int) -> Tensor:
    draws = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(*shape, generator=draws, dtype=torch.float64)
