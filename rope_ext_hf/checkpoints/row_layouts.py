"""Which rows of a checkpoint's tensors rotate, by the family table.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(hidden_size=1024, num_attention_heads=16, num_key_value_heads=4)
    >>> tensors = RotaryTensors(config, rotary_dim=64)
    >>> tensors.find("model.layers.0.self_attn.k_proj.weight", (256, 1024))
    RowLayout(repeat=1, blocks=(HeadBlock(count=4, size=64, rotary=64, start=0, ...),), ...)
    >>> tensors.find("model.layers.0.mlp.up_proj.weight", (4096, 1024)) is None
    True

A tensor of an attention module that the table does not list is an error, never a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from rope_ext_hf.errors import CheckpointError, UnsupportedModelError
from rope_ext_hf.patches.families import KV_HEADS, ModuleRows, choose, family, rotates_back, rows_rotate
from rope_ext_hf.patches.family_settings import LayerConfig, config_number, head_dim, supported_family
from rope_ext_hf.rotary.pairing import to_pairing

T = TypeVar("T")


@dataclass(frozen=True)
class HeadBlock:
    """Consecutive heads in the rows of a tensor."""

    count: int  # heads
    size: int  # rows per head
    rotary: int = 0  # rows per head that rotate
    start: int = 0  # the first of them
    # The scores that the rotated rows take part in: "q" with "k", "index_q" with "index_k". Rows of either move alike.
    side: str = field(default="", compare=False)


@dataclass(frozen=True)
class RowLayout:
    """The rows of a tensor: `repeat` times the same head blocks, in the order in which they are stored."""

    repeat: int
    blocks: tuple[HeadBlock, ...]
    pairing: str | None = None  # that of rows which stay as they are in a conversion

    @property
    def rows(self) -> int:
        return self.repeat * sum(block.count * block.size for block in self.blocks)

    @property
    def vector_shapes(self) -> set[tuple[int, ...]]:
        """Other shapes of a vector with one element per row: DoRA's magnitudes, Cohere's norms."""
        return {(1, self.rows)} | {(block.count, block.size) for block in self.blocks if len(self.blocks) == 1}

    def to_pairing(self, tensor: Tensor, to: str) -> Tensor:
        """Reorder rows (rows, ...), or a vector in one of `vector_shapes`, from the other pairing to this one."""
        flat = tensor if tensor.shape[:1] == (self.rows,) else tensor.reshape(self.rows)
        parts = [
            to_pairing(part, to, heads=block.count, rotary_dim=block.rotary, start=block.start, dim=1)
            if block.rotary
            else part
            for block, part in self._parts(flat)
        ]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return out.reshape(tensor.shape)

    def _parts(self, tensor: Tensor) -> Iterator[tuple[HeadBlock, Tensor]]:
        """Yield each block of a tensor (rows, ...) with its rows in every repeat: (repeat, count * size, ...)."""
        repeats = tensor.reshape(self.repeat, self.rows // self.repeat, *tensor.shape[1:])  # -1 fails for empty tensors
        sizes = [block.count * block.size for block in self.blocks]
        yield from zip(self.blocks, torch.split(repeats, sizes, dim=1), strict=True)

    def heads(self, tensor: Tensor) -> Iterator[tuple[HeadBlock, Tensor]]:
        """Yield each block of a tensor (rows, ...) with its heads in every repeat: (repeat * count, size, ...)."""
        for block, part in self._parts(tensor):
            yield block, part.reshape(self.repeat * block.count, block.size, *tensor.shape[1:])


@dataclass(frozen=True)
class ScaleBlocks:
    """The scales of a tensor quantised in blocks of rows; a ValueError where a conversion would part a block's rows."""

    layout: RowLayout  # the layout of the quantised tensor
    size: int  # rows per block

    def __post_init__(self) -> None:
        self._order("half")  # the other direction is the inverse of this one, so it is exact if this one is

    def to_pairing(self, tensor: Tensor, to: str) -> Tensor:
        """Reorder scales (blocks, ...) from the other pairing to this one."""
        return tensor[self._order(to)]

    def _order(self, to: str) -> Tensor:
        origins = self.layout.to_pairing(torch.arange(self.layout.rows), to) // self.size
        blocks = torch.split(origins, self.size)
        if any(bool((block != block[0]).any()) for block in blocks):
            raise ValueError(f"rows of one block of {self.size} go to several blocks, each with a scale of its own")
        return torch.stack([block[0] for block in blocks])


# What follows the name of a module. In these the first dimension is the module's output, however it is quantised.
_ROW_PARAMETERS = re.compile(
    r"(base_layer\.)?(weight|bias)|lora_B(\.\w+)?(\.(weight|bias))?|lora_magnitude_vector(\.\w+)?(\.weight)?"
    r"|weight_scale(_inv)?|weight_zero_point|weight_packed|SCB"
)
_SCALES = re.compile(r"weight_scale(_inv)?")  # one for all rows, one per row, or one per block of rows
_UNROTATED_PARAMETERS = re.compile(
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
_MULTI_TOKEN_PREDICTION = re.compile(r"(^|\.)(mtp|nextn)")  # further layers, which rotate like the others


class RotaryTensors:
    """The row layouts of the tensors of one checkpoint, by its config, which may hold a text config."""

    def __init__(self, config: Any, rotary_dim: int) -> None:  # rotated dims per head
        text = config.get_text_config()
        known = supported_family(text)
        if rotates_back(text.model_type):
            raise UnsupportedModelError(
                f"the values of {text.model_type!r} are its keys; which columns of the weights after them move with "
                "its rotated rows is not in the family table"
            )
        if not known.rotated:
            raise UnsupportedModelError(
                f"which tensors of {text.model_type!r} rotate is not in the family table; add it to "
                "patches/families.toml"
            )
        self.model_type = text.model_type
        layers = range(int(config_number(text, "num_hidden_layers")))
        # of each layer by the names of modules inside its attention module; none without RoPE
        self.layers = tuple(_layouts(text.model_type, LayerConfig(text, layer), rotary_dim) for layer in layers)
        self.unrotated = tuple(known.unrotated)  # names of the modules there whose rows do not rotate
        self.renamed = known.renamed  # published names of modules, and those of the class
        self.scale_rows = _scale_rows(config)  # that share a scale, for weights that are quantised in blocks

    @cached_property
    def modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(module for layouts in self.layers for module in layouts))

    def layouts_in(self, attention: str) -> Mapping[str, RowLayout]:
        """Return the layouts of one attention module, `model.layers.0.self_attn`, by the modules inside it."""
        match = _match_attention(f"{attention}.weight")
        return {} if match is None else self._of_layer(match, None)

    def stored_names(self, module: str) -> tuple[str, ...]:
        """Return the names that a module can have in a checkpoint."""
        return (module, *(name for name, target in self.renamed.items() if target == module))

    def find(self, name: str, shape: Sequence[int]) -> RowLayout | ScaleBlocks | None:
        """The row layout of a tensor, None for one without rotated rows; a CheckpointError where it is unknown."""
        match = _match_attention(name)
        if match is None:
            return None
        rest = match["rest"]
        if any(f"{rest}.".startswith(f"{module}.") for module in self.unrotated):
            return None
        if _UNROTATED_PARAMETERS.fullmatch(rest):
            return None
        stored = self._stored_module(rest)
        if stored is None:
            raise CheckpointError(
                f"{name!r} belongs to an attention module of {self.model_type!r}, and the family table does not list "
                f"whether it rotates; listed: {', '.join([*self.modules, *self.unrotated])}. Add it to "
                "patches/families.toml"
            )
        parameter = re.sub(r"norms\.\d+\.", "", rest.removeprefix(f"{stored}."))
        if _UNROTATED_PARAMETERS.fullmatch(parameter):
            return None
        layout = self._of_layer(match, shape).get(self.renamed.get(stored, stored))
        if layout is None or layout.pairing:
            return None
        size = math.prod(shape)
        if _PACKED.fullmatch(parameter) or (parameter == "weight" and shape[1:] == (1,) and size > layout.rows):
            raise CheckpointError(
                f"{name!r} packs several rows into one number (GPTQ, AWQ, bitsandbytes): moving rows would not be "
                "exact; convert the weights before they are quantised"
            )
        if not _ROW_PARAMETERS.fullmatch(parameter):
            raise CheckpointError(
                f"{name!r}: {parameter!r} is not a known kind of parameter, so its rows cannot be reordered"
            )
        if size == 1 and parameter.startswith("weight_"):
            return None  # one for all rows
        shape = tuple(shape)
        if shape[:1] == (layout.rows,) or shape in layout.vector_shapes:
            return layout
        if _SCALES.fullmatch(parameter) and self.scale_rows and shape[:1] == (-(-layout.rows // self.scale_rows),):
            try:
                return ScaleBlocks(layout, self.scale_rows)
            except ValueError as error:
                raise CheckpointError(f"{name!r} cannot be converted exactly: {error}") from error
        raise CheckpointError(
            f"{name!r} has shape {shape}, but by the config {layout.rows} rows"
            + (f" in blocks of {self.scale_rows}" if self.scale_rows else "")
            + "; config and weights disagree"
        )

    def locate(self, name: str) -> tuple[str, str] | None:
        """Return the prefix and the module of a rotated tensor, `model` and `layers.0.self_attn.q_proj`, say.

        Both are named as in the transformers class; None for all other tensors, and for those of layers that predict
        further tokens, which no config counts.
        """
        parts = self.split_name(name)
        if parts is None:
            return None
        prefix, attention, module = parts
        layer, _, last = attention.rpartition(".")
        return prefix, ".".join(filter(None, (layer, self.renamed.get(last, last), module)))

    def split_name(self, name: str, *, further: bool = False) -> tuple[str, str, str] | None:
        """As `locate`, with attention and module apart: `model`, `layers.0.self_attn` and `q_proj`.

        The attention module is named as in the checkpoint. `further`: only those of layers that predict further tokens.
        """
        match = _match_attention(name)
        stored = None if match is None else self._stored_module(match["rest"])
        if match is None or stored is None or self._is_further(match) != further:
            return None
        module = self.renamed.get(stored, stored)
        layout = self._of_layer(match, None).get(module)
        if layout is None or layout.pairing:
            return None
        return match["prefix"] or "", ".".join(filter(None, (match["layer"], match["attention"]))), module

    def _stored_module(self, rest: str) -> str | None:
        names = (name for module in self.modules for name in self.stored_names(module))
        return next((n for n in names if re.fullmatch(f"{re.escape(n)}(\\.norms\\.\\d+)?\\..+", rest)), None)

    def _is_further(self, match: re.Match[str]) -> bool:
        """Whether a name is of a layer that predicts further tokens: named so, or with a number beyond the last."""
        number = _layer_number(match)
        named_so = _MULTI_TOKEN_PREDICTION.search(f"{match['prefix'] or ''}.{match['layer'] or ''}")
        return named_so is not None or (number is not None and number >= len(self.layers))

    def _of_layer(self, match: re.Match[str], shape: Sequence[int] | None) -> Mapping[str, RowLayout]:
        """The layouts of the layer that a name belongs to.

        The config does not count layers that predict further tokens: each of those is like a layer that it counts, and
        where those differ, like the ones with as many rows.
        """
        number = _layer_number(match)
        if number is not None and not self._is_further(match):
            return self.layers[number]
        stored = self._stored_module(match["rest"])
        module = None if stored is None else self.renamed.get(stored, stored)
        if module is None:
            return next(filter(None, self.layers), {})
        alike = [layouts for layouts in self.layers if module in layouts]
        if shape is not None:
            alike = [layouts for layouts in alike if layouts[module].rows == next(iter(shape), None)] or alike
        if len({layouts[module] for layouts in alike}) > 1:
            raise CheckpointError(
                f"{match.string!r} belongs to a layer that the config does not count, and the layers of "
                f"{self.model_type!r} rotate in different ways; remove the weights of further layers before converting"
            )
        return alike[0]


def _layer_number(match: re.Match[str]) -> int | None:
    number = re.search(r"\.(\d+)", match["layer"] or "")
    return None if number is None else int(number[1])


def _match_attention(name: str) -> re.Match[str] | None:
    match = _ATTENTION.fullmatch(name)
    return None if match is None or _OTHER_MODALITIES.search(match["prefix"] or "") else match


def _layouts(model_type: str, layer: LayerConfig, rotary_dim: int) -> dict[str, RowLayout]:
    if not rows_rotate(model_type, layer):
        return {}
    rotary_dim = layer.rotary_dim(rotary_dim)
    heads = int(config_number(layer, "num_attention_heads"))
    keys = int(config_number(layer, KV_HEADS, heads))
    size = head_dim(layer)
    blocks = {
        "q": HeadBlock(heads, size, rotary_dim, side="q"),
        "q_gated": HeadBlock(heads, 2 * size, rotary_dim, side="q"),
        "k": HeadBlock(keys, size, rotary_dim, side="k"),
        "v": HeadBlock(keys, size),
        "norm": HeadBlock(1, size, rotary_dim),
    }
    latent = getattr(layer, "kv_lora_rank", None)
    if latent:
        plain, rotated = layer.qk_nope_head_dim, layer.qk_rope_head_dim
        blocks |= {
            "latent_q": HeadBlock(heads, plain + rotated, rotated, plain, side="q"),
            "latent_kv": HeadBlock(1, latent),
            "latent_k": HeadBlock(1, rotated, rotated, side="k"),
        }
    index = int(config_number(layer, "index_head_dim", 0))
    if index:
        blocks |= {
            "index_q": HeadBlock(int(config_number(layer, "index_n_heads")), index, rotary_dim, side="index_q"),
            "index_k": HeadBlock(1, index, rotary_dim, side="index_k"),
            "index_norm": HeadBlock(1, index, rotary_dim),
        }
    return {
        module: _row_layout(choose(alternatives, layer), blocks, keys, module)
        for module, alternatives in family(model_type).rotated.items()
    }


def evenly_spaced(items: Sequence[T], most: int) -> list[T]:
    """At most so many of the items, evenly spaced, the first and the last among them."""
    steps = torch.linspace(0, len(items) - 1, min(most, len(items)))
    return [items[i] for i in steps.round().int().tolist()]


def _scale_rows(config: Any) -> int | None:
    """Return how many rows share a scale, where the config describes weights that are quantised in blocks."""
    quantization = getattr(config, "quantization_config", None)
    settings = quantization if isinstance(quantization, dict) else getattr(quantization, "to_dict", dict)()
    groups = settings.get("config_groups") or {}
    sizes = [settings.get("weight_block_size")] + [  # in DeepSeek's form, and in that of compressed-tensors
        (group.get("weights") or {}).get("block_structure") for group in groups.values() if isinstance(group, dict)
    ]
    rows = [size[0] for size in sizes if isinstance(size, (list, tuple)) and size]
    return next((size for size in rows if type(size) is int and size > 0), None)


def _row_layout(rows: ModuleRows, blocks: dict[str, HeadBlock], keys: int, module: str) -> RowLayout:
    repeat = keys if rows.repeat == KV_HEADS else int(rows.repeat)
    norm_side = module.rpartition(".")[2][0]  # a norm that all heads share is named q_norm, key_layernorm, ...
    if "index_norm" in rows.blocks:
        norm_side = f"index_{norm_side}"
    own = (blocks[name] for name in rows.blocks)
    sided = tuple(replace(b, count=b.count // repeat, side=b.side or (norm_side if b.rotary else "")) for b in own)
    return RowLayout(repeat, sided, rows.pairing)
