"""What stands in the place of a model's rotary modules while it is patched, and what a patched model remembers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.methods.base import Frequencies, RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.class_angles import built_anew, same_frequencies
from rope_ext_hf.patches.config import ConfigRope
from rope_ext_hf.patches.config_writing import ConfigEncoding
from rope_ext_hf.patches.engine_keys import EngineAgreement
from rope_ext_hf.patches.layer_types import SLIDING, AttentionLayers, LayerType
from rope_ext_hf.patches.patch_records import PATCH_KEY, SAVED_KEYS, PatchSpec
from rope_ext_hf.rotary.embedding import Layout, RotaryEmbedding
from rope_ext_hf.rotary.phase import fixed_point


@dataclass(frozen=True)
class Slot:
    """A rotary module in a model: `getattr(parent, attribute)` is `module`."""

    parent: nn.Module
    attribute: str
    module: nn.Module
    config: Any  # it was built from
    layers: AttentionLayers  # of that config
    as_loaded: dict[LayerType, ConfigRope]  # what its config describes
    layout: Layout  # how its angles come out; for this and `cast` see `RotaryEmbedding`
    cast: bool
    axis_of_pair: dict[LayerType, tuple[int, ...] | None]  # see `RotaryEmbedding`
    is_table: bool  # it is a table of angles instead of computing them
    log_multiplier: str | None  # the buffer of `module` whose exponential multiplies its frequencies
    scaled_layers: tuple[LayerType, ...]  # those that a method applies to
    idle: bool  # it serves no layer (Granite SWA keeps one beside those of `layer_rope_theta`)

    @property
    def axes(self) -> int:
        return max([1 if axes is None else 1 + max(axes) for axes in self.axis_of_pair.values()])

    def sliding_note(self, extended_length: int) -> tuple[str | None, bool]:
        """What a patch does to sliding-window layers, as a sentence, and whether every layer is one."""
        changed = next((name for name in self.scaled_layers if name in SLIDING), None)
        apart = next((rope for name, rope in self.as_loaded.items() if name in SLIDING), None)
        return self.layers.sliding_note(apart, extended_length, changed)


def first_scaled(slots: Sequence[Slot]) -> Slot:
    """The first slot with layers that a method applies to, else the first one."""
    return next((each for each in slots if each.scaled_layers), slots[0])


@dataclass
class ConfigSwap:
    """A config object of a patched model."""

    patched: Any  # the copy that the model runs with
    original: Any  # the one it had before, which other models may share
    written: dict[str, Any] = field(default_factory=dict)  # `patched` as the patch left it

    def note_written(self) -> None:
        """Remember how `patched` is now, to recognise what its user changes."""
        plain = {key: value for key, value in vars(self.patched).items() if not hasattr(value, "model_type")}
        self.written = copy.deepcopy(plain)

    def sync_user_changes(self) -> None:
        """Carry what the user changed in `patched` over to `original`."""
        for key, value in vars(self.patched).items():
            if key in (PATCH_KEY, *SAVED_KEYS) or hasattr(value, "model_type"):
                continue
            if key not in self.written or self.written[key] != value:
                self.original.__dict__[key] = value


@dataclass
class PatchState:
    """One patch of a live model; every patched slot of the model holds it."""

    spec: PatchSpec
    encoding: ConfigEncoding  # how a config states it
    rule: str  # which reading of the config gave the context length of the model under the patch
    notes: tuple[str, ...]  # what `describe` prints of the model's class and config
    warning: str | None  # the note that `patch` warns of
    configs: list[ConfigSwap]
    below: tuple[PatchSpec, ...] = ()  # live patches underneath, bottom first; `unpatch` goes back to the last
    engines: EngineAgreement | None = None  # what they make of the saved config; None: not worked out yet (saving.py)

    @property
    def record(self) -> dict[str, Any]:
        """What a saved config, and the folder of an adapter, keep of the patch."""
        record: dict[str, Any] = next(
            vars(swap.patched)[PATCH_KEY] for swap in self.configs if PATCH_KEY in vars(swap.patched)
        )
        return record


class _RemappedRotaryEmbedding(RotaryEmbedding):
    """The rotary module of an attention-level method: it turns queries and keys to where keys are stored."""

    beside_attention = True
    method: RemappingMethod

    @property
    def length_dependent(self) -> bool:
        return False  # the rule may follow the length of a row, which the attention looks at; frequencies do not

    def _at(self, length: int | None) -> Frequencies:
        inv_freq, attention_factor = super()._at(length)
        divisor = self.method.stored_position(torch.zeros((), dtype=torch.int64)).divisor
        return Frequencies(inv_freq / divisor, attention_factor)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        positions = self.method.stored_position(position_ids).positions
        assert positions is not None
        return super().forward(x, positions)


class _MultipliedRotaryEmbedding(RotaryEmbedding):
    """The rotary module of a model that multiplies its frequencies by a learned buffer of `source`, exponentiated."""

    beside_attention = True  # while a model is probed for remapping methods

    def __init__(self, *args: Any, source: nn.Module, buffer: str, **kwargs: Any) -> None:
        self.__dict__["_learned"] = (source, buffer)  # no submodule: the slot holds it
        super().__init__(*args, **kwargs)

    def _multiplied(self, inv_freq: Tensor) -> Tensor:
        source, buffer = self.__dict__["_learned"]
        learned: Tensor = getattr(source, buffer)
        return inv_freq * learned.to(inv_freq.device, torch.float64).exp()

    def _frequency_of_call(self, position_ids: Tensor, device: torch.device) -> tuple[Tensor, Tensor | float]:
        if self.length_dependent:
            return super()._frequency_of_call(position_ids, device)
        inv_freq, attention_factor = self._at(self.fixed_length)
        return fixed_point(self._multiplied(inv_freq)).to(device), attention_factor


def _table(slot: Slot, axis_of_pair: tuple[int, ...] | None, method: RopeMethod, rotary: Rotary) -> RotaryEmbedding:
    arguments: dict[str, Any] = {"layout": slot.layout, "cast": slot.cast, "axis_of_pair": axis_of_pair}
    if slot.log_multiplier is not None:
        return _MultipliedRotaryEmbedding(method, rotary, source=slot.module, buffer=slot.log_multiplier, **arguments)
    remapped = isinstance(method, RemappingMethod)
    return (_RemappedRotaryEmbedding if remapped else RotaryEmbedding)(method, rotary, **arguments)


_NUMBERS_SHOWN = ("original_inv_freq", "inv_freq", "attention_scaling")
"""Attributes of transformers' rotary modules that state their rotation, the longer of two names with one end first."""
_LENGTHS_SHOWN = ("max_seq_len_cached", "original_max_seq_len")
"""Attributes of transformers' rotary modules that repeat the config's max_position_embeddings."""


class PatchedSlot(nn.Module):
    """What stands in a slot while a model is patched.

    Args:
        slot: its module is kept as a child, so that `.to` reaches it and unpatching is exact.
        method: what the scaled layers get; the others keep what their config states.
        rotary: the geometry the method works on.
        state: shared by all slots of a model; None while a model is probed.
    """

    def __init__(self, slot: Slot, method: RopeMethod, rotary: Rotary, state: PatchState | None) -> None:
        super().__init__()
        scaled = slot.scaled_layers
        self.tables = nn.ModuleDict()
        for layer_type, rope in slot.as_loaded.items():
            chosen = (method, rotary) if layer_type in scaled else (rope.method, rope.plain)
            self.tables[layer_type or "all"] = _table(slot, slot.axis_of_pair[layer_type], *chosen)
        self.axes = slot.axes
        self._as_loaded = slot.as_loaded
        self._kept_length = method.max_distance if isinstance(method, RemappingMethod) and method.by_length else None
        # A child, so that `.to` and `.half` reach it and unpatching gives what a model without a patch would have.
        self.replaced = slot.module
        self._state = state
        self.hooks: list[Any] = []  # what the patch has put elsewhere in the model; `remove` takes each away again
        self.before_use: Callable[[PatchedSlot], object] | None = None  # called by `train` and `eval` of the model
        if not slot.is_table and slot.module.state_dict():  # a learned multiplier; frequencies, in older classes
            self._register_state_dict_hook(_without_replaced)  # type: ignore[no-untyped-call]
            self._register_load_state_dict_pre_hook(_with_replaced)  # type: ignore[no-untyped-call]
        device = next(chain(slot.module.buffers(), slot.module.parameters())).device
        if device.type != "meta":  # a table of a few numbers needs no offloading
            self.tables.to(device)

    def __getattr__(self, name: str) -> Any:
        """Return what the module in this slot has as an attribute; numbers of its rotation are those of the patch.

        Raises:
            AttributeError: the module in this slot has no such attribute; or no single value of it is right, because
                the method has other frequencies for other lengths, or changes positions beside them.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "replaced":
                raise
        replaced = getattr(self.replaced, name)
        if name in _LENGTHS_SHOWN:
            return self.__dict__["config"].max_position_embeddings if "config" in self.__dict__ else replaced
        if name == "rope_type":
            return self._rope_type(replaced)
        table, number = self._number(name)
        if table is None:
            return replaced
        reason = None
        if isinstance(table.method, RemappingMethod):
            reason = f"{table.method.name} changes the positions of queries and keys in attention, beside the rotation"
        elif table.length_dependent:
            reason = (
                f"{table.method.name} has other frequencies for every length of input; hold one length with "
                "rope_ext_hf.fixed_length(model, length), or ask rope_ext_hf.frequencies for those of a length"
            )
        if reason is not None:
            raise AttributeError(f"no one value of {name!r} describes this patched model: {reason}")
        frequencies = table.frequencies()
        if number == "attention_scaling":
            return frequencies.attention_factor
        return frequencies.inv_freq.to(table.frequency.device, torch.float32)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._number(name)[0] is not None:
            raise AttributeError(
                f"{name!r} cannot be set in a patched model, whose rotation follows from its patch: use "
                "rope_ext_hf.patch, or unpatch the model first"
            )
        super().__setattr__(name, value)

    def _number(self, name: str) -> tuple[RotaryEmbedding | None, str]:
        """Return the table whose number an attribute of a rotary module states, and which number; None: of no table.

        transformers calls them `inv_freq` and the like, or `full_attention_inv_freq` in a module for several types of
        layers.
        """
        number = next((each for each in _NUMBERS_SHOWN if name == each or name.endswith("_" + each)), "")
        layer_type = name.removesuffix(number).removesuffix("_")
        if not number:
            return None, number
        if not layer_type and len(self.tables) == 1:
            return next(iter(tables_of([self]))), number
        return (self.table(layer_type) if layer_type in self.tables else None), number

    def _rope_type(self, replaced: Any) -> Any:
        """Return what the patched config states; a dict by layer type where the replaced module has one."""
        config = self.__dict__.get("config")
        settings = getattr(config, "rope_parameters", None) or {}
        if isinstance(replaced, dict):
            return {name: settings.get(name, {}).get("rope_type", before) for name, before in replaced.items()}
        if "rope_type" not in settings and len(self.tables) == 1:
            settings = settings.get(next(iter(self.tables)), {})
        return settings.get("rope_type", replaced)

    @property
    def state(self) -> PatchState:
        """What the patched model remembers of its patch."""
        assert self._state is not None, "this module stands in a slot for a probe"
        return self._state

    @property
    def present_spec(self) -> PatchSpec:
        """The patch, with the values that a trainable parameter has now."""
        spec = self.state.spec
        trained = tables_of([self]) if spec.method.trainable else []
        table = next((each for each in trained if each.method == spec.method), None)
        return spec if table is None else replace(spec, method=table.present_method)

    def table(self, name: str) -> RotaryEmbedding:
        """The table of a layer type, or of "all" layers."""
        table = self.tables[name]
        assert isinstance(table, RotaryEmbedding)
        return table

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        if self.before_use is not None and not torch.compiler.is_compiling():
            self.before_use(self)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the module; fill the replaced one anew where it comes off the meta device, as `to_empty` does not.

        A buffer whose numbers its class does not say is filled with NaN, which `check_filled` refuses.
        """
        empty = {name for name, tensor in _tensors(self.replaced).items() if tensor.device.type == "meta"}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        tensors = {name: tensor for name, tensor in _tensors(self.replaced).items() if name in empty}
        if all(tensor.device.type == "meta" for tensor in tensors.values()):
            return self
        anew = self._anew()
        buffers = dict(self.replaced.named_buffers())
        for name, tensor in tensors.items():
            if name in anew and anew[name].shape == tensor.shape:
                tensor.data.copy_(anew[name])
            elif name in buffers and tensor.is_floating_point():
                tensor.data.fill_(torch.nan)
        return self

    def _anew(self) -> dict[str, Tensor]:
        """Return the tensors of a newly built module of the replaced one's class; none where they cannot be known.

        Frequencies that are not those of the config, by which the patch was made, are not known: a class may keep
        another base than the one it states.
        """
        built = built_anew(self.replaced)
        tensors = {} if built is None else _tensors(built)
        for layer_type, rope in self._as_loaded.items():
            stated = rope.method.frequencies(rope.plain, rope.plain.trained_length).inv_freq
            inv_freq = tensors.get("inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
            if inv_freq is not None and not same_frequencies(inv_freq, stated):
                return {}
        return tensors

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        angles = self.tables[layer_type or "all"](x, position_ids)
        if self._kept_length is None:
            return angles
        # Rows up to this length are read as loaded, bit for bit, so that the model's own module rotates there.
        own = self.replaced(x, position_ids, *([layer_type] if layer_type else []))
        kept = ((position_ids if position_ids.ndim == 2 else position_ids[-1]) < self._kept_length)[..., None]
        if isinstance(own, Tensor):
            return torch.where(kept, own, angles)
        return tuple(torch.where(kept, as_loaded, ours) for as_loaded, ours in zip(own, angles, strict=True))


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(chain(module.named_buffers(), module.named_parameters()))


def check_filled(module: nn.Module) -> None:
    """Check that a rotary module has its numbers; else UnsupportedModelError.

    It lacks them where its model was patched on the meta device and its class does not say how it is built, see
    `PatchedSlot._apply`.
    """
    if any(each.device.type != "meta" and bool(each.isnan().any()) for each in module.buffers()):
        raise UnsupportedModelError(
            f"{type(module).__name__} lost its frequencies: the model was patched on the meta device, and weights that "
            "are loaded later do not hold them; load the model anew with its weights, and patch it then"
        )


_REPLACED = "replaced."


def _without_replaced(slot: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give what the replaced module holds the keys that it has without a patch."""
    for key in [key for key in state if key.startswith(prefix + _REPLACED)]:
        state[prefix + key.removeprefix(prefix + _REPLACED)] = state.pop(key)


def _with_replaced(state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Undo `_without_replaced` in weights that are loaded into a patched model."""
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(prefix + "tables.")]:
        if not key.startswith(prefix + _REPLACED):
            state[prefix + _REPLACED + key.removeprefix(prefix)] = state.pop(key)


def check_is_model(model: Any) -> None:
    """Check that something given as a model is one of torch; else UnsupportedModelError, which says what to give."""
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


def patched_slots(model: nn.Module) -> list[PatchedSlot]:
    """Return the slots of a model that hold one of our modules; raise UnsupportedModelError for other objects."""
    check_is_model(model)
    return [module for module in model.modules() if isinstance(module, PatchedSlot)]


def tables_of(slots: Iterable[PatchedSlot]) -> list[RotaryEmbedding]:
    """Every rotary module in these slots, one for each layer type."""
    return [slot.table(name) for slot in slots for name in slot.tables]


def patch_state(model: nn.Module) -> PatchState | None:
    """What a patched model remembers, which all its slots share; None for a model that runs as loaded."""
    slots = patched_slots(model)
    return slots[0].state if slots else None


def present_specs(model: nn.Module) -> tuple[PatchSpec, ...]:
    """The patches of a live model, bottom first; none for a model that runs as loaded."""
    slots = patched_slots(model)
    return (*slots[0].state.below, slots[0].present_spec) if slots else ()
