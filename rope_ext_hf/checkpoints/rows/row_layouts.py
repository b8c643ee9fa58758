"""The rows of a checkpoint's tensors that rotate, by the family table, or by a probe of its class.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(hidden_size=1024, num_attention_heads=16, num_key_value_heads=4)
    >>> tensors = RotaryTensors(config, rotary_dim=64)
    >>> tensors.find("model.layers.0.self_attn.k_proj.weight", (256, 1024))
    RowLayout(repeat=1, blocks=(HeadBlock(count=4, size=64, rotary=64, start=0, ...),), ...)
    >>> tensors.find("model.layers.0.mlp.up_proj.weight", (4096, 1024)) is None
    True

A tensor of an attention module that the class does not have, and the table does not list, is an error, never a guess.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rope_ext_hf.checkpoints.files.tensor_names import TensorName, is_scale, parameter_kind
from rope_ext_hf.checkpoints.rows.head_blocks import HeadBlock, RowLayout, ScaleBlocks
from rope_ext_hf.errors import CheckpointError, UnsupportedModelError
from rope_ext_hf.models.families import KV_HEADS, ModuleRows, choose, family, rows_rotate
from rope_ext_hf.models.family_settings import (
    LayerConfig,
    class_pairing,
    config_number,
    head_dim,
    supported_family,
)

if TYPE_CHECKING:
    from rope_ext_hf.methods.base import Rotary
    from rope_ext_hf.patches.rows.row_heads import ClassRows, LayerRows
    from rope_ext_hf.patches.rows.row_heads import ModuleRows as ProbedRows

_IN_LAYER = re.compile(r"\w+\.(?P<layer>\d+)\.(?P<inside>.+)")
"""The place of a module: the number of its layer, and its name inside the layer."""


class RotaryTensors:
    """The layouts of rows in the tensors of one checkpoint: which rows rotate, and in what order they are stored.

    Args:
        config: the config, which may hold a text config.
        rotary_dim: rotated dims per head.
        model_class: the class of the model with the text config; None: the one that transformers loads for it.

    Attributes:
        model_type: the family.
        layers: for each layer the row layouts in its attention module, by the modules inside it; empty without RoPE.
        pairing: the pairing that the class runs, "half" or "interleaved"; None: the family table does not know it.
        unrotated: the modules and parameters inside an attention module whose rows do not rotate.
        renamed: names of modules in published checkpoints, and the names that the transformers class gives them.
        scale_rows: rows that share a scale, if the weights are quantised in blocks.

    Raises:
        UnsupportedModelError: it is not known which tensors rotate.
    """

    def __init__(self, config: Any, rotary_dim: int, model_class: type[Any] | None = None) -> None:
        text = config.get_text_config()
        known = supported_family(text)
        self.model_type = text.model_type
        self.renamed = known.renamed
        self.scale_rows = _scale_rows(config)
        self._attentions: tuple[str, ...] = ()
        self._parts: Mapping[str, tuple[str, ...]] = {}
        self._stack: str | None = None
        if known.rotated:
            layers = range(int(config_number(text, "num_hidden_layers")))
            self.layers = tuple(_layouts(text.model_type, LayerConfig(text, layer), rotary_dim) for layer in layers)
            self.pairing, self.unrotated = class_pairing(config), tuple(known.unrotated)
            return
        from rope_ext_hf.patches.rows.row_probe import probe_rows  # imports torch

        rows = probe_rows(text, model_class)
        probed = ProbedLayouts(rows)
        self.layers, self.pairing, self._attentions = probed.layers, rows.pairing, probed.attentions
        self.unrotated, self._parts = (*probed.unrotated, *known.unrotated), probed.parts
        self._stack = rows.stack.rpartition(".")[2]

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The names of modules, inside attention modules of any layer, that have rotated rows."""
        return tuple(dict.fromkeys(module for layouts in self.layers for module in layouts))

    def head_count(self, side: str) -> int | None:
        """Return the number of heads that rotate in a layer, on the side "q" or "k" of scores; None: layers differ."""
        counts = set()
        for layouts in self.layers:
            in_modules = [layout.head_count(side) for layout in layouts.values()]
            if any(in_modules):
                counts.add(max(in_modules))
        return counts.pop() if len(counts) == 1 else None

    def layouts_in(self, attention: str) -> Mapping[str, RowLayout]:
        """Return the row layouts in one attention module, by the names of the modules inside it.

        `attention`: the name of the attention module, such as `model.layers.0.self_attn`.
        """
        name = self._parse(f"{attention}.weight")
        return {} if name is None else self._of_layer(name, None)

    def stored_names(self, module: str) -> tuple[str, ...]:
        """Return the names that a module can have in a checkpoint."""
        return (module, *(published for published, own in self.renamed.items() if own == module))

    def find(self, tensor: str, shape: Sequence[int]) -> RowLayout | ScaleBlocks | None:
        """Return the row layout of a tensor, None for one whose rows stay where they are in a conversion.

        Raises:
            CheckpointError: the table does not list the tensor, its shape contradicts the config, or its rows cannot be
                moved exactly.
        """
        name = self._parse(tensor)
        if name is None or any(map(name.is_in, self.unrotated)) or parameter_kind(name.rest) == "unrotated":
            return None
        module = self._stored_module(name)
        if module is None:
            raise CheckpointError(
                f"{tensor!r} belongs to an attention module of {self.model_type!r}, and neither its class nor the "
                "family table has such a tensor, so that it is unknown whether its rows rotate; known: "
                f"{', '.join([*self.modules, *self.unrotated])}. "
                "Install the version of transformers that the checkpoint is for"
            )
        parameter = name.parameter_of(module)
        kind = parameter_kind(parameter)
        if kind == "unrotated":
            return None
        layout = self._of_layer(name, shape).get(self.renamed.get(module, module))
        if layout is None or layout.pairing:
            return None
        size = math.prod(shape)
        is_bitsandbytes = parameter == "weight" and shape[1:] == (1,) and size > layout.rows
        if kind == "packed" or is_bitsandbytes:
            raise CheckpointError(
                f"{tensor!r} packs several rows into one number (GPTQ, AWQ, bitsandbytes): moving rows would not be "
                "exact; convert the weights before they are quantised"
            )
        if kind == "unknown":
            raise CheckpointError(
                f"{tensor!r}: {parameter!r} is not a known kind of parameter, so its rows cannot be reordered"
            )
        if size == 1 and parameter.startswith("weight_"):  # one number for all rows
            return None
        return self._matching(tensor, parameter, layout, tuple(shape))

    def _matching(
        self, tensor: str, parameter: str, layout: RowLayout, shape: tuple[int, ...]
    ) -> RowLayout | ScaleBlocks:
        """Return the layout for a tensor of this shape: that of its rows, or of the scales of its blocks of rows."""
        if shape[:1] == (layout.rows,) or shape in layout.vector_shapes:
            return layout
        if is_scale(parameter) and self.scale_rows:
            blocks = -(-layout.rows // self.scale_rows)
            if shape[:1] == (blocks,):
                try:
                    return ScaleBlocks(layout, self.scale_rows)
                except ValueError as error:
                    raise CheckpointError(f"{tensor!r} cannot be converted exactly: {error}") from error
        in_blocks = f" in blocks of {self.scale_rows}" if self.scale_rows else ""
        raise CheckpointError(
            f"{tensor!r} has shape {shape}, but by the config {layout.rows} rows{in_blocks}; config and weights "
            "disagree"
        )

    def locate(self, tensor: str) -> tuple[str, str] | None:
        """Return the prefix and the module of a rotated tensor, for example `model` and `layers.0.self_attn.q_proj`.

        Both are named as in the transformers class. The result is None for all other tensors, and for those in layers
        that predict further tokens, which no config counts.
        """
        parts = self.split_name(tensor)
        if parts is None:
            return None
        prefix, attention, module = parts
        layer, _, last = attention.rpartition(".")
        return prefix, ".".join(filter(None, (layer, self.renamed.get(last, last), module)))

    def held(self, tensor: str) -> tuple[str, set[str]] | None:
        """Return the prefix and the modules of a rotated tensor, as `locate` does; several modules where it joins them.

        The layer has the name that it has in the class, too.
        """
        location = self.locate(tensor)
        if location is None:
            return None
        prefix, path = location
        match = _IN_LAYER.fullmatch(path)
        if match is None or self._stack is None:
            return prefix, {path}
        inside = match["inside"]
        return prefix, {f"{self._stack}.{match['layer']}.{part}" for part in self._parts.get(inside, (inside,))}

    def split_name(self, tensor: str, *, further: bool = False) -> tuple[str, str, str] | None:
        """Return prefix, attention and module of a rotated tensor: `model`, `layers.0.self_attn` and `q_proj`.

        The attention module is named as in the checkpoint. With `further`, only tensors in layers that predict further
        tokens have a result; without it, only all others.
        """
        name = self._parse(tensor)
        if name is None or self._is_further(name) != further:
            return None
        stored = self._stored_module(name)
        if stored is None:
            return None
        module = self.renamed.get(stored, stored)
        layout = self._of_layer(name, None).get(module)
        if layout is None or layout.pairing:
            return None
        return name.prefix, name.attention_path, module

    def _parse(self, tensor: str) -> TensorName | None:
        return TensorName.parse(tensor, self._attentions)

    def _stored_module(self, name: TensorName) -> str | None:
        """Return the name, in the checkpoint, of the module with rotated rows that a tensor belongs to.

        None: it belongs to no such module.
        """
        for module in self.modules:
            for stored in self.stored_names(module):
                if name.is_in(stored):
                    return stored
        return None

    def _is_further(self, name: TensorName) -> bool:
        """Return whether a layer predicts further tokens (MTP): by its name, or by a number beyond the last layer."""
        number = name.layer_number
        return name.is_named_further or (number is not None and number >= len(self.layers))

    def _of_layer(self, name: TensorName, shape: Sequence[int] | None) -> Mapping[str, RowLayout]:
        """Return the row layouts in the layer that a tensor belongs to, by the modules inside its attention.

        The config does not count layers that predict further tokens: such a layer is like a layer that it counts. If
        those differ from each other, it is like the ones whose tensor has as many rows.
        """
        number = name.layer_number
        if number is not None and not self._is_further(name):
            return self.layers[number]
        stored = self._stored_module(name)
        if stored is None:
            return next(filter(None, self.layers), {})
        module = self.renamed.get(stored, stored)
        alike = [layouts for layouts in self.layers if module in layouts]
        if shape is not None:
            rows = next(iter(shape), None)
            alike = [layouts for layouts in alike if layouts[module].rows == rows] or alike
        if len({layouts[module] for layouts in alike}) > 1:
            raise CheckpointError(
                f"{name.full!r} belongs to a layer that the config does not count, and the layers of "
                f"{self.model_type!r} rotate in different ways; remove the weights of further layers before converting"
            )
        return alike[0]


def rotary_tensors(model: Any, rotary: Rotary) -> RotaryTensors:
    """Return the layouts of rows in the tensors of a model, loaded or without weights.

    `rotary`: the parameters of its rotary embedding.
    """
    from rope_ext_hf.models.model_classes import class_of_part

    return RotaryTensors(model.config, rotary.dim, class_of_part(model, model.config.get_text_config()))


def _layouts(model_type: str, layer: LayerConfig, rotary_dim: int) -> dict[str, RowLayout]:
    """Return the row layouts in one layer's attention module, by the names of the modules inside it.

    `rotary_dim`: the rotated dims per head that the model as a whole states.
    """
    if not rows_rotate(model_type, layer):
        return {}
    blocks = _blocks(layer, layer.rotary_dim(rotary_dim))
    key_heads = blocks["k"].count
    return {
        module: _row_layout(choose(alternatives, layer), blocks, key_heads, module)
        for module, alternatives in family(model_type).rotated.items()
    }


def _blocks(layer: LayerConfig, rotary_dim: int) -> dict[str, HeadBlock]:
    """Return the blocks of rows that families.toml names, such as "q" and "k", with their sizes in one layer."""
    heads = int(config_number(layer, "num_attention_heads"))
    key_heads = int(config_number(layer, KV_HEADS, heads))
    size = head_dim(layer)
    blocks = {
        "q": HeadBlock(heads, size, rotary_dim, side="q"),
        "q_gated": HeadBlock(heads, 2 * size, rotary_dim, side="q"),
        "k": HeadBlock(key_heads, size, rotary_dim, side="k"),
        "v": HeadBlock(key_heads, size),
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
    return blocks


def _row_layout(rows: ModuleRows, blocks: dict[str, HeadBlock], key_heads: int, module: str) -> RowLayout:
    """Return the row layout of one module from its entry in the family table."""
    repeat = key_heads if rows.repeat == KV_HEADS else int(rows.repeat)
    # A norm that all heads share is named q_norm, key_layernorm and so on: its first letter states its side.
    norm_side = module.rpartition(".")[2][0]
    if "index_norm" in rows.blocks:
        norm_side = f"index_{norm_side}"
    shares = []
    for block_name in rows.blocks:
        block = blocks[block_name]
        side = block.side or (norm_side if block.rotary else "")
        shares.append(replace(block, count=block.count // repeat, side=side))
    return RowLayout(repeat, tuple(shares), rows.pairing)


def _scale_rows(config: Any) -> int | None:
    """Return how many rows share a scale, if the weights are quantised in blocks.

    None: the config describes no such quantisation.
    """
    quantization = getattr(config, "quantization_config", None)
    settings = quantization if isinstance(quantization, dict) else getattr(quantization, "to_dict", dict)()
    sizes = [settings.get("weight_block_size")]  # as DeepSeek writes it
    for group in (settings.get("config_groups") or {}).values():  # as compressed-tensors writes it
        if isinstance(group, dict):
            sizes.append((group.get("weights") or {}).get("block_structure"))
    for size in sizes:
        if isinstance(size, (list, tuple)) and size and type(size[0]) is int and size[0] > 0:
            return size[0]
    return None


# --- layouts that are found out by a probe ------------------------------------------------------------------------


class ProbedLayouts:
    """The layouts in a class, by the names that tensors have inside attention modules.

    Attributes:
        attentions: the names of its attention modules, if they are not usual ones.
        layers: for each layer the row layouts in its attention module, by the modules inside it; empty without RoPE.
        unrotated: the modules and parameters inside an attention module whose rows do not rotate in any layer.
        parts: for tensors that transformers saves under other names than the class has, the modules that they hold:
            both by the names that they have inside a layer.

    Raises:
        UnsupportedModelError: queries and keys are not computed in a module apart.
    """

    def __init__(self, rows: ClassRows) -> None:
        self.attentions = tuple(dict.fromkeys(name for layer in rows.layers for name in _unusual_names(layer)))
        self.layers = tuple(self._layouts(layer, rows.pairing) for layer in rows.layers)
        self.parts = {name: parts for layer in rows.layers for name, parts in layer.parts.items()}
        rotated = {module for layouts in self.layers for module in layouts}
        names = dict.fromkeys(self._inside(name) for layer in rows.layers for name in layer.names)
        modules = dict.fromkeys(name.rpartition(".")[0] or name for name in names if name)
        self.unrotated = tuple(module for module in modules if module not in rotated)

    def _layouts(self, layer: LayerRows, pairing: str) -> dict[str, RowLayout]:
        layouts: dict[str, RowLayout] = {}
        for name, rows in (layer.rotated | layer.saved).items():
            inside = self._inside(f"{name}.weight").removesuffix(".weight")
            layout = _probed_row_layout(rows, pairing)
            if layouts.setdefault(inside, layout) != layout:
                raise UnsupportedModelError(f"{inside!r} rotates in another way in another attention module of a layer")
        return layouts

    def _inside(self, name: str) -> str:
        """Return the name that a tensor of a layer has inside its attention module; "": it is in none."""
        parts = TensorName.parse(f"layers.0.{name}", self.attentions)
        return "" if parts is None else parts.rest


def _unusual_names(layer: LayerRows) -> list[str]:
    """Return the names of the attention module of a layer, in the class and as it is saved, unless they are usual."""
    from rope_ext_hf.patches.rows.row_probe import common_path

    names = []
    for modules in (layer.rotated, layer.saved):
        if all(TensorName.parse(f"layers.0.{name}.weight") for name in modules):
            continue
        path = common_path(list(modules))
        if not path:
            raise UnsupportedModelError(
                f"{next(iter(modules))!r} rotates, and stands in the layer itself: only rows inside a module for the "
                "attention are known by their names"
            )
        names.append(".".join(path))
    return names


def _probed_row_layout(rows: ProbedRows, pairing: str) -> RowLayout:
    """Return the row layout of a module: its heads, with those that follow each other several times written once.

    `pairing`: that of the attention. A module in the other one keeps it, whatever a conversion does to the attention.
    """
    heads = rows.heads
    period = next(n for n in range(1, len(heads) + 1) if len(heads) % n == 0 and heads == heads[:n] * (len(heads) // n))
    once = heads if period == 1 else heads[:period]
    blocks = []
    for head, group in groupby(once):
        block = HeadBlock(1, head.size, head.rotary, head.start, side=head.side)
        blocks.append(replace(block, count=len(list(group))))
    own = rows.pairing if rows.pairing not in (None, pairing) else None
    return RowLayout(1 if period == 1 else len(heads) // period, tuple(blocks), own)
