"""Which rows of a checkpoint's tensors rotate: the part of the family table that conversion works by.

    >>> rows = rotating_rows(config, rotary_dim=64)      # of a Hugging Face config
    >>> rows.find("model.layers.0.self_attn.k_proj.weight", (256, 1024))
    Layout(groups=1, pieces=(Piece(count=4, size=64, rotary=64, start=0),))
    >>> rows.find("model.layers.0.mlp.up_proj.weight", (4096, 1024)) is None
    True

A tensor in an attention module that neither rotates nor is known to stay is an error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.errors import CheckpointError, UnsupportedModelError
from rope_ext_hf.pairing import repair
from rope_ext_hf.patches.families import Family, family

__all__ = ["Blocks", "Layout", "Piece", "RotatingRows", "rotating_rows", "runs_pairing"]


@dataclass(frozen=True)
class Piece:
    """So many heads of `size` rows, of which `rotary` rotate, from `start` on; none: they only pass by."""

    count: int
    size: int
    rotary: int = 0
    start: int = 0


@dataclass(frozen=True)
class Layout:
    """How the rows of a tensor are made up: groups, one after the other, each of the same pieces."""

    groups: int
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> int:
        return self.groups * sum(piece.count * piece.size for piece in self.pieces)

    def repaired(self, tensor: Tensor, to: str) -> Tensor:
        """The tensor, (rows, ...) or of as many elements, from the other pairing to this one."""
        flat = tensor if tensor.shape[:1] == (self.rows,) else tensor.reshape(self.rows)
        groups = flat.unflatten(0, (self.groups, -1))
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
    """Of the scales of a tensor that is quantised in blocks of rows: which block each of them comes from."""

    layout: Layout
    count: int

    def repaired(self, tensor: Tensor, to: str) -> Tensor:
        """The scales, (blocks, ...).

        Raises:
            ValueError: rows of one block go to several.
        """
        order = self.layout.repaired(torch.arange(self.layout.rows), to)
        size = -(-self.layout.rows // self.count)
        came_from = torch.stack([part.float().mean() for part in torch.split(order // size, size)])
        spread = [int(part.max() - part.min()) for part in torch.split(order // size, size)]
        if any(spread):
            raise ValueError(f"rows of one block of {size} go to several blocks, whose scales differ")
        return tensor[came_from.long()]


# What stands behind the name of a module. Rows: the first dimension is the module's output, however it is quantised.
_ROWS = re.compile(
    r"(base_layer\.)?(weight|bias)|lora_B(\.\w+)?(\.weight)?|lora_magnitude_vector(\.\w+)?(\.weight)?"
    r"|weight_scale|weight_zero_point|weight_packed|SCB"
)
_BLOCKS = re.compile(r"weight_scale_inv")
_STAYS = re.compile(
    r"lora_A(\.\w+)?(\.weight)?|(input|output)_(scale|zero_point)|weight_(shape|g_idx|format)|[qkv]_scale|rotary_emb\..*"
)
_PACKED = re.compile(r"qweight|qzeros|scales|g_idx|weight\.(absmax|quant_map|nested\w*|quant_state\..*)")
_ATTENTION = re.compile(
    r"(?:(?P<prefix>.*)\.)?(?:layers|h)\.\d+\.(?:self_attn|self_attention|attention|attn)\.(?P<rest>.+)"
)
_OTHER_MODALITIES = re.compile(r"(^|\.)(vision|visual|audio|speech|image|mm_|multi_modal|qformer)")


@dataclass(frozen=True)
class RotatingRows:
    """The layouts of one checkpoint.

    Attributes:
        model_type: of the text config.
        layouts: by the name of a module inside an attention module.
        stays: names of the modules there whose rows do not rotate.
    """

    model_type: str
    layouts: dict[str, Layout]
    stays: tuple[str, ...]

    def find(self, name: str, shape: Sequence[int]) -> Layout | Blocks | None:
        """How a tensor's rows are made up, None where none rotates.

        Raises:
            CheckpointError: a tensor of an attention module that the table does not know, packed numbers that no
                permutation of rows is exact for, or a shape that disagrees with the config.
        """
        found = _ATTENTION.fullmatch(name)
        if found is None or _OTHER_MODALITIES.search(found["prefix"] or ""):
            return None
        rest = found["rest"]
        if any(rest == module or rest.startswith(f"{module}.") for module in self.stays) or _STAYS.fullmatch(rest):
            return None
        module = next((m for m in self.layouts if re.fullmatch(f"{re.escape(m)}(\\.norms\\.\\d+)?\\..+", rest)), None)
        if module is None:
            raise CheckpointError(
                f"{name!r} belongs to an attention of {self.model_type!r}, and whether it rotates is not known; "
                f"known there: {', '.join([*self.layouts, *self.stays])}"
            )
        parameter = re.sub(r"norms\.\d+\.", "", rest.removeprefix(f"{module}."))
        layout = self.layouts[module]
        if _STAYS.fullmatch(parameter):
            return None
        if _PACKED.fullmatch(parameter):
            raise CheckpointError(
                f"{name!r} packs several rows into one number (GPTQ, AWQ, bitsandbytes): moving rows would not be "
                "exact; convert the weights before they are quantised"
            )
        size = 1
        for count in shape:
            size *= count
        if _BLOCKS.fullmatch(parameter) and shape:
            return Blocks(layout, shape[0])
        if not _ROWS.fullmatch(parameter):
            raise CheckpointError(f"{name!r}: what a {parameter!r} holds is not known")
        if size == 1 and parameter.startswith("weight_"):
            return None  # one scale for all rows
        if shape[:1] != (layout.rows,) and size != layout.rows:
            raise CheckpointError(
                f"{name!r} has shape {tuple(shape)}, but by the config {layout.rows} rows; config and weights disagree"
            )
        return layout


def rotating_rows(config: Any, rotary_dim: int) -> RotatingRows:
    """What rotates in a checkpoint of this config.

    Args:
        config: a Hugging Face config, of a text model or with a text config in it.
        rotary_dim: rotated dims per head.

    Raises:
        UnsupportedModelError: a family that the table says nothing of.
    """
    text = config.get_text_config()
    known = family(text.model_type)
    if not known.rotates:
        raise UnsupportedModelError(
            f"which tensors of {text.model_type!r} rotate is not in the family table (patches/families.toml); "
            "add them there"
        )
    heads = text.num_attention_heads
    keys = getattr(text, "num_key_value_heads", None) or heads
    if text.model_type == "falcon":
        keys = text.num_kv_heads if text.new_decoder_architecture else 1 if text.multi_query else heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    pieces = {
        "q": Piece(heads, head_dim, rotary_dim),
        "k": Piece(keys, head_dim, rotary_dim),
        "v": Piece(keys, head_dim),
        "head": Piece(1, head_dim, rotary_dim),
    }
    latent = getattr(text, "kv_lora_rank", None)
    if latent:
        plain, turned = text.qk_nope_head_dim, text.qk_rope_head_dim
        pieces |= {
            "nope+rope": Piece(heads, plain + turned, turned, plain),
            "latent": Piece(1, latent),
            "rope": Piece(1, turned, turned),
        }
    layouts = {module: _layout(spec.split(), pieces, keys) for module, spec in known.rotates.items()}
    return RotatingRows(text.model_type, layouts, known.stays)


def _layout(words: Sequence[str], pieces: dict[str, Piece], keys: int) -> Layout:
    if words[0] != "grouped":
        return Layout(1, tuple(pieces[word] for word in words))
    within = (pieces[word] for word in words[1:])  # the heads of one key head after another
    return Layout(keys, tuple(Piece(p.count // keys, p.size, p.rotary, p.start) for p in within))


def runs_pairing(config: Any) -> str | None:
    """The pairing that the transformers class of this config runs; None where the table does not say."""
    text = config.get_text_config()
    known: Family = family(text.model_type)
    if known.pairing_switch is not None:
        return "interleaved" if getattr(text, known.pairing_switch, True) else "half"
    return known.pairing
