"""Slots: the places of a model's rotary modules, and the module that stands there while the model is patched.

A *slot* is an attribute of a module that holds a rotary module, such as `model.model.rotary_emb` of Llama. `Slot`
describes one as `slot_finding` found it; `PatchedRotaryEmbedding` is the module that a patch puts there. Some models
have several slots, and some slots serve several types of layers (Gemma 3 rotates its sliding-window layers by another
base).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.methods.base import UNBOUNDED, RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.models.config import ConfigRope
from rope_ext_hf.models.layer_types import SLIDING, AttentionLayers, LayersByEmbedding, LayerType
from rope_ext_hf.models.patch_records import Patch
from rope_ext_hf.patches.slots.class_angles import built_anew
from rope_ext_hf.patches.slots.patch_state import PatchState
from rope_ext_hf.patches.slots.slot_rotary import MultipliedRotaryEmbedding, RemappedRotaryEmbedding
from rope_ext_hf.rotary.embedding import Layout, RotaryEmbedding

__all__ = ["active_patches", "patch_state"]


@dataclass(frozen=True)
class Slot:
    """The place of a rotary module in a model: `getattr(parent, attribute)` is `module`.

    Attributes:
        parent: the module around it.
        attribute: its name there.
        module: the rotary module that the model was loaded with.
        config: the config that this module was built from.
        layers: the attention type of each layer by that config.
        as_loaded: the rotary embedding that the config states, by layer type; the key None stands for all layers.
        layout: how cos and sin of the module are arranged, see `RotaryEmbedding`.
        cast: whether the module gives them in the dtype of the model, see `RotaryEmbedding`.
        axis_of_pair: by layer type, which axis of multimodal positions rotates each pair, see `RotaryEmbedding`.
        axes: the number of axes that a position has: 1 for text, 3 for the time, height and width of Qwen2-VL.
        is_table: the module keeps cos and sin of every position as its weight, instead of computing them (RoFormer).
        log_multiplier: the buffer of the module whose exponential multiplies its frequencies; None: it has none.
        by_embedding: the indices of the layers that use each embedding.
        scaled_layers: the keys of `as_loaded` that a method applies to.
        named: the layers that the user of a patch named, by embedding; none if no layers were named.
    """

    parent: nn.Module
    attribute: str
    module: nn.Module
    config: Any
    layers: AttentionLayers
    as_loaded: dict[LayerType, ConfigRope]
    layout: Layout
    cast: bool
    axis_of_pair: dict[LayerType, tuple[int, ...] | None]
    axes: int
    is_table: bool
    log_multiplier: str | None
    by_embedding: LayersByEmbedding
    scaled_layers: tuple[LayerType, ...]
    named: LayersByEmbedding

    @property
    def idle(self) -> bool:
        """True if no layer uses the module (Granite SWA keeps one beside those of `layer_rope_theta`)."""
        return not any(self.by_embedding.values())

    def rotates(self, layer: int) -> bool:
        """Return whether the layer with this index rotates its queries and keys."""
        return layer in self.layers.rotating_layers

    @property
    def changed_layers(self) -> list[int]:
        """The indices of the layers that a method is for: those that were named, else those of `scaled_layers`."""
        changed = self.named or {key: self.by_embedding[key] for key in self.scaled_layers}
        return [index for indices in changed.values() for index in indices]

    @property
    def not_named(self) -> list[int]:
        """The layers that rotate and were not named, and use an embedding of which others were."""
        of_embeddings = [(index, named) for key, named in self.named.items() for index in self.by_embedding[key]]
        return [index for index, named in of_embeddings if index not in named and self.rotates(index)]

    def rotates_as_loaded(self, method: RopeMethod, rotary: Rotary) -> bool:
        """Return whether a method gives the shortest inputs the frequencies that the model was loaded with.

        It does not where a patch extends something else: the model without its own scaling, or another patch. Nor does
        a method that changes inputs of every length.
        """
        return all(self.as_loaded[layer_type].is_kept(method, rotary) for layer_type in self.scaled_layers)

    @property
    def is_accurate(self) -> bool:
        """True if the module still has its frequencies in the accuracy of float32; a cast of the model rounds them.

        Numbers on the meta device count as accurate, as they are computed when the model gets its weights.
        """
        for layer_type, rope in self.as_loaded.items():
            name = _frequency_name(layer_type)
            # The buffer itself may hold the frequencies of the last input, in a class that follows the length.
            name = name.removesuffix("inv_freq") + "original_inv_freq" if rope.follows_length else name
            inv_freq = getattr(self.module, name, None)
            if inv_freq is None or inv_freq.device.type == "meta":
                continue
            stated = rope.method.frequencies(rope.plain, 1).inv_freq
            if not torch.allclose(inv_freq.double().cpu(), stated, rtol=_FLOAT32_ERROR, atol=0):
                return False
        return True

    def sliding_note(self, extended_length: int, *, named: bool = False) -> tuple[str | None, bool]:
        """Return a sentence on what a patch does to sliding-window layers, and whether every layer is one.

        The sentence is None where there is nothing to say.

        Args:
            extended_length: the length in tokens that the patched model is for.
            named: whether the user of the patch named the layers that it is for.
        """
        changed = next((name for name in self.scaled_layers if named and name in SLIDING), None)
        apart = next((rope for name, rope in self.as_loaded.items() if name in SLIDING), None)
        return self.layers.sliding_note(apart, extended_length, changed)


_FLOAT32_ERROR = 1e-4
"""A relative error of frequencies that float32 stays below, and that a cast to bfloat16 or float16 exceeds."""


def _frequency_name(layer_type: LayerType) -> str:
    """Return the name of the buffer with the frequencies of a layer type in transformers' rotary modules."""
    return "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"


_ROTATION_ATTRIBUTES = ("original_inv_freq", "inv_freq", "attention_scaling")
"""Attributes of transformers' rotary modules that state their rotation.

"original_inv_freq" comes before "inv_freq", because names are compared with these by their ends.
"""
_MOST_SHOWN = 4  # values of a parameter that `print(model)` shows
_LENGTH_ATTRIBUTES = ("max_seq_len_cached", "original_max_seq_len")
"""Attributes of transformers' rotary modules that repeat the config's max_position_embeddings."""


def _shown(value: Any) -> str:
    """Return the value of a parameter for `print(model)`; long sequences only by their length."""
    if isinstance(value, (tuple, list)) and len(value) > _MOST_SHOWN:
        return f"[{len(value)} values]"
    return f"{value:g}" if isinstance(value, float) else repr(value)


class PatchedRotaryEmbedding(nn.Module):
    """The module that stands in a slot while a model is patched.

    It is called as the module that it replaces is called, and gives cos and sin of the method for the layers that the
    method applies to, and those of the config for all others. To code that reads attributes of the rotary module it
    shows the numbers of the patch.

    Args:
        slot: its place. The module there is kept as a child, `replaced`, so that `.to` and `.half` reach it too, and
            unpatching gives what a model that was never patched would have.
        method: the method of the layers that the patch is for.
        rotary: the rotary embedding that the method extends.
        state: the memory of the patch, which all patched modules of a model share; None while a model is probed.

    Attributes:
        tables: a `RotaryEmbedding` for each layer type, or one under the key "all".
        hooks: everything else that the patch has put into the model; each has a `remove`.
        before_use: a function that `train` and `eval` of the model call with this module; None: nothing is called.
    """

    def __init__(self, slot: Slot, method: RopeMethod, rotary: Rotary, state: PatchState | None) -> None:
        super().__init__()
        self.tables = nn.ModuleDict()
        for layer_type, rope in slot.as_loaded.items():
            scaled = layer_type in slot.scaled_layers
            applied = (method, rotary) if scaled else (rope.method, rope.plain)
            settings: dict[str, Any] = {"layout": slot.layout, "cast": slot.cast}
            settings["axis_of_pair"] = slot.axis_of_pair[layer_type]
            if slot.log_multiplier is not None:  # the model multiplies its frequencies by learned numbers
                source, buffer = slot.module, slot.log_multiplier
                table: RotaryEmbedding = MultipliedRotaryEmbedding(*applied, source=source, buffer=buffer, **settings)
            elif isinstance(applied[0], RemappingMethod):  # an attention function does the rest of the rotation
                table = RemappedRotaryEmbedding(*applied, **settings)
            else:
                table = RotaryEmbedding(*applied, **settings)
            self.tables[layer_type or "all"] = table
        self.axes = slot.axes
        self._as_loaded = slot.as_loaded
        self._kept_length: int | None = None  # the longest row that the module as loaded still rotates itself
        keeps_bits = isinstance(method, RemappingMethod) and method.keeps_bits
        keeps_bits = keeps_bits and not any(rope.follows_length for rope in slot.as_loaded.values())
        # Elsewhere a row that grows longer would mix keys that the two modules have rotated differently.
        if keeps_bits and slot.rotates_as_loaded(method, rotary) and slot.is_accurate:
            assert isinstance(method, RemappingMethod)
            self._kept_length = UNBOUNDED if method.scales_queries_only else method.max_distance
        self.replaced = slot.module
        self._state = state
        self.hooks: list[Any] = []
        self.before_use: Callable[[PatchedRotaryEmbedding], object] | None = None
        if not slot.is_table and slot.module.state_dict():  # a learned multiplier; frequencies, in older classes
            self._register_state_dict_hook(_without_replaced)  # type: ignore[no-untyped-call]
            self._register_load_state_dict_pre_hook(_with_replaced)  # type: ignore[no-untyped-call]
        device = next(chain(slot.module.buffers(), slot.module.parameters())).device
        if device.type != "meta":  # without weights yet, the few integers of a table stay on the CPU
            self.tables.to(device)

    def __repr__(self) -> str:
        """Return the method and those of its parameters that are not its defaults, for `print(model)`."""
        if self._state is None:
            return super().__repr__()
        patch = self._state.patch
        values = {each.name: (getattr(patch.method, each.name), each.default) for each in fields(patch.method)}
        stated = {name: value for name, (value, default) in values.items() if value != default}
        if patch.layers is not None:
            stated["layers"] = patch.layers
        shown = [patch.method.name, *(f"{name}={_shown(value)}" for name, value in stated.items())]
        return f"PatchedRotaryEmbedding({', '.join(shown)})"

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that the replaced module has; numbers of its rotation are those of the patch.

        Code outside reads such numbers, to move keys in a cache or to check a scaling.

        Raises:
            AttributeError: the replaced module has no such attribute; or no single value of it is right, because the
                method has other frequencies for other lengths, or changes positions in attention as well.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            # `replaced` is not there yet while a copy is made: looking it up below would never end. Private attributes
            # are notes that libraries leave on one module, such as accelerate's hooks.
            if name == "replaced" or name.startswith("_"):
                raise
        as_loaded = getattr(self.replaced, name)
        if name in _LENGTH_ATTRIBUTES:
            return self.__dict__["config"].max_position_embeddings if "config" in self.__dict__ else as_loaded
        if name == "rope_type":
            return self._rope_type(as_loaded)
        table, attribute = self._table_of(name)
        if table is None:
            return as_loaded
        _check_constant(table, name)
        frequencies = table.frequencies()
        if attribute == "attention_scaling":
            return frequencies.attention_factor
        return frequencies.inv_freq.to(table.frequency.device, torch.float32)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._table_of(name)[0] is not None:
            raise AttributeError(
                f"{name!r} cannot be set in a patched model, whose rotation follows from its patch: use "
                "rope_ext_hf.patch, or unpatch the model first"
            )
        super().__setattr__(name, value)

    def _table_of(self, name: str) -> tuple[RotaryEmbedding | None, str]:
        """Return the table whose rotation an attribute states, and the attribute's name without the layer type.

        transformers calls such an attribute `inv_freq`, or `full_attention_inv_freq` in a module for several types of
        layers. The table is None for every other attribute.
        """
        attribute = next((end for end in _ROTATION_ATTRIBUTES if name == end or name.endswith("_" + end)), "")
        if not attribute:
            return None, attribute
        layer_type = name.removesuffix(attribute).removesuffix("_")
        if not layer_type and len(self.tables) == 1:
            return next(iter(tables_of([self]))), attribute
        return (self.table(layer_type) if layer_type in self.tables else None), attribute

    def _rope_type(self, as_loaded: Any) -> Any:
        """Return the rope_type of the patched config; a dict by layer type where the replaced module has one."""
        config = self.__dict__.get("config")
        settings = getattr(config, "rope_parameters", None) or {}
        if isinstance(as_loaded, dict):
            return {name: settings.get(name, {}).get("rope_type", before) for name, before in as_loaded.items()}
        if "rope_type" not in settings and len(self.tables) == 1:
            settings = settings.get(next(iter(self.tables)), {})
        return settings.get("rope_type", as_loaded)

    @property
    def state(self) -> PatchState:
        """The memory of the patch that this module belongs to."""
        assert self._state is not None, "this module stands in a slot for a probe only"
        return self._state

    @property
    def present_patch(self) -> Patch:
        """The patch, with the values that its trainable parameter has now."""
        patch = self.state.patch
        if not patch.method.trainable:
            return patch
        for table in tables_of([self]):
            if table.method == patch.method:
                return replace(patch, method=table.present_method)
        return patch

    def table(self, name: str) -> RotaryEmbedding:
        """Return the rotary embedding of a layer type, or of "all" layers."""
        table = self.tables[name]
        assert isinstance(table, RotaryEmbedding)
        return table

    def train(self, mode: bool = True) -> Self:
        """Set the mode as any module does, and call `before_use`.

        `model.train()` and `model.eval()` call this method.
        """
        super().train(mode)
        if self.before_use is not None and not torch.compiler.is_compiling():
            self.before_use(self)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the module; compute the buffers of the replaced module anew if it leaves the meta device.

        A model may be built without weights, patched, and filled afterwards (`to_empty`, then a state_dict). The
        frequencies of a rotary module are in no state_dict, so its class computes them anew here. A buffer that
        the class cannot compute is filled with NaN, which `check_filled` refuses before it is used.
        """
        on_meta = {name for name, tensor in _tensors(self.replaced).items() if tensor.device.type == "meta"}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if any(getattr(self.replaced, name).dtype != torch.float32 for name in self._frequency_names()):
            self._kept_length = None  # a cast has rounded the frequencies of that module, and none of `tables`
        tensors = {name: tensor for name, tensor in _tensors(self.replaced).items() if name in on_meta}
        if all(tensor.device.type == "meta" for tensor in tensors.values()):
            return self
        computed = self._tensors_built_anew()
        buffers = dict(self.replaced.named_buffers())
        for name, tensor in tensors.items():
            if name in computed and computed[name].shape == tensor.shape:
                tensor.data.copy_(computed[name])
            elif name in buffers and tensor.is_floating_point():
                tensor.data.fill_(torch.nan)
        return self

    def _frequency_names(self) -> list[str]:
        """Return the names of the buffers that hold the frequencies of the replaced module."""
        return [name for name in map(_frequency_name, self._as_loaded) if hasattr(self.replaced, name)]

    def _tensors_built_anew(self) -> dict[str, Tensor]:
        """Return the tensors of a new module of the replaced one's class, by name; none where they cannot be trusted.

        They are compared with the frequencies of the config, by which the patch was made: a class may keep another base
        than the one that its attributes state.
        """
        module = built_anew(self.replaced)
        tensors = {} if module is None else _tensors(module)
        for layer_type, rope in self._as_loaded.items():
            inv_freq = tensors.get(_frequency_name(layer_type))
            if inv_freq is not None and not rope.describes(inv_freq):
                return {}
        return tensors

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """Return cos and sin as the replaced module arranges them, see `RotaryEmbedding.forward`.

        `layer_type`: the type of the layers that they are for, in a model with several rotary embeddings.
        """
        if self._kept_length is None:
            return self.tables[layer_type or "all"](x, position_ids)
        # The method changes nothing in a row of at most this length. The model's own module rotates there, so that such
        # a row gives the numbers of the unpatched model bit for bit.
        unpatched = self.replaced(x, position_ids, *([layer_type] if layer_type else []))
        if self._kept_length == UNBOUNDED:
            return unpatched
        angles = self.tables[layer_type or "all"](x, position_ids)
        positions = position_ids if position_ids.ndim == 2 else position_ids[-1]
        is_kept = (positions < self._kept_length)[..., None]
        if isinstance(unpatched, Tensor):
            return torch.where(is_kept, unpatched, angles)
        return tuple(torch.where(is_kept, before, after) for before, after in zip(unpatched, angles, strict=True))


def _check_constant(table: RotaryEmbedding, attribute: str) -> None:
    """Check that one value of an attribute describes the rotation of a table; else AttributeError, with the reason."""
    method = table.method
    if isinstance(method, RemappingMethod):
        reason = f"{method.name} changes the positions of queries and keys in attention, beside the rotation"
    elif table.length_dependent:
        reason = (
            f"{method.name} has other frequencies for every length of input; hold one length with "
            "rope_ext_hf.fixed_length(model, length), or ask rope_ext_hf.frequencies for those of a length"
        )
    else:
        return
    raise AttributeError(f"no one value of {attribute!r} describes this patched model: {reason}")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(chain(module.named_buffers(), module.named_parameters()))


def check_filled(module: nn.Module) -> None:
    """Check that a rotary module has its numbers.

    Raises:
        UnsupportedModelError: it lost them, because its model was patched on the meta device and its class does not
            tell how it is built (see `PatchedRotaryEmbedding._apply`).
    """
    if any(buffer.device.type != "meta" and bool(buffer.isnan().any()) for buffer in module.buffers()):
        raise UnsupportedModelError(
            f"{type(module).__name__} lost its frequencies: the model was patched on the meta device, and weights that "
            "are loaded later do not hold them. Load the model anew with its weights, and patch it then"
        )


# --- state_dict: the patched model has the keys of the unpatched one --------------------------------------------------


_REPLACED = "replaced."


def _without_replaced(slot: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Name the tensors of the replaced module in a state_dict as they are named in the unpatched model."""
    for key in [key for key in state if key.startswith(prefix + _REPLACED)]:
        state[prefix + key.removeprefix(prefix + _REPLACED)] = state.pop(key)


def _with_replaced(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Undo `_without_replaced` in a state_dict that is loaded into a patched model."""
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(prefix + "tables.")]:
        if not key.startswith(prefix + _REPLACED):
            state[prefix + _REPLACED + key.removeprefix(prefix)] = state.pop(key)


# --- the slots of a live model ----------------------------------------------------------------------------------------


def check_is_model(model: Any) -> None:
    """Check that an argument is a torch model; else raise UnsupportedModelError, which says what to give instead."""
    if isinstance(model, nn.Module):
        return
    name = type(model).__name__
    if isinstance(model, type):
        expected = f"{model.__name__} is a class: load a model with it and give that"
    elif isinstance(getattr(model, "model", None), nn.Module):  # a pipeline, a Trainer
        expected = f"{name} holds a model: give its .model"
    elif hasattr(model, "model_type"):
        expected = f"{name} is the config of a model: load the model and give that"
    else:
        expected = f"expected a loaded transformers model, got {name}"
    raise UnsupportedModelError(expected)


def patched_slots(model: nn.Module) -> list[PatchedRotaryEmbedding]:
    """Return the modules that a patch has put into a model; none for an unpatched model.

    Raises:
        UnsupportedModelError: `model` is not a torch model.
    """
    check_is_model(model)
    return [module for module in model.modules() if isinstance(module, PatchedRotaryEmbedding)]


def tables_of(slots: Iterable[PatchedRotaryEmbedding]) -> list[RotaryEmbedding]:
    """Return the `RotaryEmbedding` modules inside these modules, one for each layer type of each of them."""
    return [slot.table(name) for slot in slots for name in slot.tables]


def patch_state(model: nn.Module) -> PatchState | None:
    """Return the memory of a model's patch, which all its patched rotary modules share; None for an unpatched model."""
    slots = patched_slots(model)
    return slots[0].state if slots else None


def active_patches(model: nn.Module) -> tuple[Patch, ...]:
    """Return the patches of a live model, the one that was put on first first; none for an unpatched model.

    The last one has the values that its trainable parameter has now.
    """
    slots = patched_slots(model)
    return (*slots[0].state.below, slots[0].present_patch) if slots else ()
