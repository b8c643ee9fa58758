"""Which rows of a checkpoint's tensors rotate: the part of the family table that conversion works by.

    >>> rows = rotating_rows(config, rotary_dim=64)      # of a Hugging Face config
    >>> rows.find("model.layers.0.self_attn.k_proj.weight", (256, 1024))
    Layout(groups=1, pieces=(Piece(count=4, size=64, rotary=64, start=0),))
    >>> rows.find("model.layers.0.mlp.up_proj.weight", (4096, 1024)) is None
    True

A tensor in an attention module that neither rotates nor is known to stay is an error, never a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.errors import CheckpointError, UnsupportedModelError
from rope_ext_hf.patches.families import choose, family
from rope_ext_hf.patches.family_settings import _family, _head_dim, _number
from rope_ext_hf.rotary.pairing import repair

__all__ = ["MOST_LAYERS", "Blocks", "Layout", "Piece", "RotatingRows", "layer_modules", "rotating_rows"]


@dataclass(frozen=True)
class Piece:
    """So many heads of `size` rows, of which `rotary` rotate, from `start` on; none: they only pass by.

    `side` says what scores those that rotate make: "q" with "k", "index_q" with "index_k".
    """

    count: int
    size: int
    rotary: int = 0
    start: int = 0
    side: str = field(default="", compare=False)  # rows move alike on either


@dataclass(frozen=True)
class Layout:
    """How the rows of a tensor are made up: groups, one after the other, each of the same pieces."""

    groups: int
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return self.groups * sum(piece.count * piece.size for piece in self.pieces)

    @property
    def spread(self) -> set[tuple[int, ...]]:
        """Other shapes of a vector with an element for each row: a magnitude of DoRA's, Cohere's norms."""
        return {(1, self.rows)} | {(piece.count, piece.size) for piece in self.pieces if len(self.pieces) == 1}

    def repaired(self, tensor: Tensor, to: str) -> Tensor:
        """The tensor, (rows, ...) or of as many elements, from the other pairing to this one."""
        flat = tensor if tensor.shape[:1] == (self.rows,) else tensor.reshape(self.rows)
        groups = flat.reshape(self.groups, -1, *flat.shape[1:])
        parts, at = [], 0
        for piece in self.pieces:
            part = groups.narrow(1, at, piece.count * piece.size)
            at += part.shape[1]
            if piece.rotary:
                part = repair(part, to, heads=piece.count, rotary_dim=piece.rotary, start=piece.start, dim=1)
            parts.append(part)
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out.reshape(tensor.shape)


@dataclass(frozen=True)
class Blocks:
    """Of the scales of a tensor that is quantised in blocks of `size` rows: which block each of them comes from.

    Raises:
        ValueError: rows of one block go to several, each with a scale of its own.
    """

    layout: Layout
    size: int

    def __post_init__(self) -> None:
        self._order("half")  # the other way is its inverse: what is exact one way is exact both ways

    def repaired(self, tensor: Tensor, to: str) -> Tensor:
        """The scales, (blocks, ...), from the other pairing to this one."""
        return tensor[self._order(to)]

    def _order(self, to: str) -> Tensor:
        came_from = self.layout.repaired(torch.arange(self.layout.rows), to) // self.size
        blocks = torch.split(came_from, self.size)
        if any(bool((block != block[0]).any()) for block in blocks):
            raise ValueError(f"rows of one block of {self.size} go to several blocks, each with a scale of its own")
        return torch.stack([block[0] for block in blocks])


MOST_LAYERS = 10_000
# What stands behind the name of a module. Rows: the first dimension is the module's output, however it is quantised.
_ROWS = re.compile(
    r"(base_layer\.)?(weight|bias)|lora_B(\.\w+)?(\.(weight|bias))?|lora_magnitude_vector(\.\w+)?(\.weight)?"
    r"|weight_scale(_inv)?|weight_zero_point|weight_packed|SCB"
)
_SCALES = re.compile(r"weight_scale(_inv)?")  # one for all rows, one for each, or one for each block of rows
_STAYS = re.compile(
    r"lora_A(\.\w+)?(\.weight)?|(input|output)_(scale|zero_point)|(weight|input)_global_scale"
    r"|weight_(shape|g_idx|format)|(q|k|v|kv)_scale|rotary_emb\..*"
)
_PACKED = re.compile(r"qweight|qzeros|scales|g_idx|weight\.(absmax|quant_map|nested\w*|quant_state\..*)")
_ATTENTION = re.compile(
    r"(?:(?P<prefix>.*?)\.)??(?:(?P<layer>\w+\.\d+(?:\.norm_attn_norm)?)\.)?"
    r"(?P<attention>(?:self_attn|self_attention|attention|attn)(?:\.\d+)?)\.(?P<rest>.+)"
)
_OTHER_MODALITIES = re.compile(
    r"(^|\.)(vision|visual|audio|speech|image|video|mm_|multi_modal|projector|resampler|qformer|perceiver|[va]pm\b|vit\b)"
)
_FURTHER_TOKENS = re.compile(r"(^|\.)(mtp|nextn)")  # layers that predict further tokens; they rotate like the others


@dataclass(frozen=True)
class RotatingRows:
    """The layouts of one checkpoint.

    Attributes:
        model_type: of the text config.
        layouts: by the name of a module inside an attention module.
        stays: names of the modules there whose rows do not rotate.
        block: rows that share a scale, where the weights are quantised in blocks.
    """

    model_type: str
    layouts: dict[str, Layout]
    stays: tuple[str, ...]
    block: int | None = None

    def find(self, name: str, shape: Sequence[int]) -> Layout | Blocks | None:
        """How a tensor's rows are made up, None where none rotates.

        Raises:
            CheckpointError: a tensor of an attention module that the table does not know, packed numbers that no
                permutation of rows is exact for, or a shape that disagrees with the config.
        """
        found = _attention(name)
        if found is None:
            return None
        rest = found["rest"]
        if any(rest == module or rest.startswith(f"{module}.") for module in self.stays) or _STAYS.fullmatch(rest):
            return None
        module = self._module(rest)
        if module is None:
            raise CheckpointError(
                f"{name!r} belongs to an attention of {self.model_type!r}, and whether it rotates is not known; "
                f"known there: {', '.join([*self.layouts, *self.stays])}"
            )
        parameter = re.sub(r"norms\.\d+\.", "", rest.removeprefix(f"{module}."))
        layout = self.layouts[module]
        size = math.prod(shape)
        if _STAYS.fullmatch(parameter):
            return None
        if _PACKED.fullmatch(parameter) or (parameter == "weight" and shape[1:] == (1,) and size > layout.rows):
            raise CheckpointError(
                f"{name!r} packs several rows into one number (GPTQ, AWQ, bitsandbytes): moving rows would not be "
                "exact; convert the weights before they are quantised"
            )
        if not _ROWS.fullmatch(parameter):
            raise CheckpointError(f"{name!r}: what a {parameter!r} holds is not known")
        if size == 1 and parameter.startswith("weight_"):
            return None  # one for all rows
        shape = tuple(shape)
        if shape[:1] == (layout.rows,) or shape in layout.spread:
            return layout
        if _SCALES.fullmatch(parameter) and self.block and shape[:1] == (-(-layout.rows // self.block),):
            try:
                return Blocks(layout, self.block)
            except ValueError as error:
                raise CheckpointError(f"{name!r} cannot be converted exactly: {error}") from error
        raise CheckpointError(
            f"{name!r} has shape {shape}, but by the config {layout.rows} rows"
            + (f" in blocks of {self.block}" if self.block else "")
            + "; config and weights disagree"
        )

    def place(self, name: str) -> tuple[str, str] | None:
        """Of a tensor that rotates: what stands before its layer, and its module as `layers.0.self_attn.q_proj`.

        None for all others, and in layers that predict further tokens, which come beside those of the model itself.
        """
        parts = self.parts(name)
        return None if parts is None else (parts[0], ".".join(parts[1:]))

    def parts(self, name: str) -> tuple[str, str, str] | None:
        """The same with the attention and its module apart: `layers.0.self_attn` and `q_proj`."""
        found = _attention(name)
        module = None if found is None else self._module(found["rest"])
        if found is None or module is None or _FURTHER_TOKENS.search(f"{found['prefix'] or ''}.{found['layer'] or ''}"):
            return None
        return found["prefix"] or "", ".".join(filter(None, (found["layer"], found["attention"]))), module

    def _module(self, rest: str) -> str | None:
        return next((m for m in self.layouts if re.fullmatch(f"{re.escape(m)}(\\.norms\\.\\d+)?\\..+", rest)), None)


def _attention(name: str) -> re.Match[str] | None:
    found = _ATTENTION.fullmatch(name)
    return None if found is None or _OTHER_MODALITIES.search(found["prefix"] or "") else found


def rotating_rows(config: Any, rotary_dim: int) -> RotatingRows:
    """What rotates in a checkpoint of this config.

    Args:
        config: a Hugging Face config, of a text model or with a text config in it.
        rotary_dim: rotated dims per head.

    Raises:
        UnsupportedModelError: a family that the table says nothing of.
        CheckpointError: a config that does not say the sizes of its heads.
    """
    text = config.get_text_config()
    known = _family(text)
    if not known.rotates:
        raise UnsupportedModelError(
            f"which tensors of {text.model_type!r} rotate is not in the family table (patches/families.toml); "
            "add them there"
        )
    heads = int(_number(text, "num_attention_heads"))
    keys = int(_number(text, "num_key_value_heads", heads))
    head_dim = _head_dim(text)
    pieces = {
        "q": Piece(heads, head_dim, rotary_dim, side="q"),
        "q+gate": Piece(heads, 2 * head_dim, rotary_dim, side="q"),
        "k": Piece(keys, head_dim, rotary_dim, side="k"),
        "v": Piece(keys, head_dim),
        "head": Piece(1, head_dim, rotary_dim),
    }
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        plain, turned = text.qk_nope_head_dim, text.qk_rope_head_dim
        pieces |= {
            "nope+rope": Piece(heads, plain + turned, turned, plain, side="q"),
            "latent": Piece(1, latent),
            "rope": Piece(1, turned, turned, side="k"),
        }
    index = getattr(text, "index_head_dim", None)
    if index:
        pieces |= {
            "index_q": Piece(text.index_n_heads, index, rotary_dim, side="index_q"),
            "index_k": Piece(1, index, rotary_dim, side="index_k"),
        }
    layouts = {
        module: _layout(choose(choices, text).split(), pieces, keys, module)
        for module, choices in known.rotates.items()
    }
    return RotatingRows(text.model_type, layouts, known.stays, _rows_of_a_block(config))


def layer_modules(config: Any, rows: RotatingRows) -> frozenset[str]:
    """The modules that rotate in every layer, as `rows.place` names them, of a family with code of its own."""
    text = config.get_text_config()
    attention = family(text.model_type).own_code
    assert attention is not None  # others have a model that can be asked
    layers = int(_number(text, "num_hidden_layers"))
    if layers > MOST_LAYERS:
        raise CheckpointError(f"by the config there are {layers} layers; that cannot be")
    return frozenset(f"{attention.format(layer)}.{module}" for layer in range(layers) for module in rows.layouts)


def _rows_of_a_block(config: Any) -> int | None:
    """How many rows share a scale, where the config says that the weights are quantised in blocks."""
    said = getattr(config, "quantization_config", None)
    said = said if isinstance(said, dict) else getattr(said, "to_dict", dict)()
    groups = said.get("config_groups") or {}
    sizes = [said.get("weight_block_size")] + [  # DeepSeek's way, and that of compressed-tensors
        (group.get("weights") or {}).get("block_structure") for group in groups.values() if isinstance(group, dict)
    ]
    rows = [size[0] for size in sizes if isinstance(size, (list, tuple)) and size]
    return next((size for size in rows if type(size) is int and size > 0), None)


def _layout(words: Sequence[str], pieces: dict[str, Piece], keys: int, module: str) -> Layout:
    groups = 1
    if words[0] == "grouped":  # the heads of one key head after another
        groups, words = keys, words[1:]
    elif words[1:2] == ["of"]:
        groups, words = int(words[0]), words[2:]
    within = (pieces[word] for word in words)
    norms = module.rpartition(".")[2][0]  # whose norm it is that all heads share: q_norm, key_layernorm
    return Layout(
        groups,
        tuple(replace(p, count=p.count // groups, side=p.side or (norms if p.rotary else "")) for p in within),
    )
