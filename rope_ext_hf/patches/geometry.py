"""What a patch of a model starts from: its rotary embedding, as its config describes it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rope_ext_hf.bounds import Length, parse_length, whole
from rope_ext_hf.errors import CheckpointError, MethodError, UnsupportedModelError, did_you_mean
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.config import (
    PAIRING_KEY,
    PATCH_KEY,
    ConfigRope,
    PatchSpec,
    original_settings,
    read_rope,
    recorded_specs,
    rope_dict,
    written_keys,
)
from rope_ext_hf.patches.config_keys import rotated_dims, text_settings
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.family_settings import class_pairing, stated_rotary
from rope_ext_hf.patches.layer_types import AttentionLayers, LayerType
from rope_ext_hf.patches.recipes import published_length
from rope_ext_hf.patches.slot_finding import find_slots
from rope_ext_hf.patches.slots import Slot, present_specs
from rope_ext_hf.questions import command_line

_OVER = ("own", "original", "patched")
"""What a patch is applied over: the model as loaded, the model without its own scaling, or the present patch."""


@dataclass(frozen=True)
class BaseRope:
    """What a new patch is applied over."""

    rotary: Rotary  # scalings included
    rule: str  # which reading of the config gave its context length
    config: Any  # the text config without patches
    live: tuple[PatchSpec, ...] = ()  # the live patches that stay underneath, bottom first
    saved: tuple[PatchSpec, ...] = ()  # those, or the patches of a saved folder

    def bind(self, method: RopeMethod, length: int) -> RopeMethod:
        """The method with every parameter that was not given filled in for inputs of this length, as `patch` does."""
        return bind_to(method, self.rotary, self.config, length)


def base_rope(
    model: nn.Module, slots: Sequence[Slot], config: Any, over: str = "own", context_length: int | None = None
) -> BaseRope:
    """What a patch of this model starts from; `config` is its text config as `undo_saved_patch` gives it."""
    if over == "patched":
        return _over_present_patch(model, slots, context_length)
    some_attend, ropes = any(slot.scaled_layers for slot in slots), list[ConfigRope]()
    for slot in slots:
        before = before_patches(slot.config) if PATCH_KEY in vars(slot.config) else None
        for layer_type in slot.scaled_layers if some_attend else slot.as_loaded:
            rope = slot.as_loaded[layer_type]
            ropes.append(rope if before is None else read_rope(before, rope.plain.dim, layer_type))
    return base_rope_of_config(_only_rope(ropes), over, context_length, config)


def base_rope_of_config(described: ConfigRope, over: str, context_length: Length | None, config: Any) -> BaseRope:
    """What a new patch starts from, by the config alone; what a longer length is extended from is decided here.

    `config`: the text config without patches, for what is published of a model without a scaling of its own.
    """
    if over not in _OVER:
        raise MethodError(f"over must be one of {', '.join(_OVER)}; got {over!r}.{did_you_mean(str(over), _OVER)}")
    if over == "patched":
        raise MethodError("over='patched' needs the model itself, not its config alone")
    rotary, rule = described.rotary, described.rule
    if over == "original":
        rotary, rule = described.plain, "the original length of the config"
    if context_length is not None:
        given = whole("context_length", parse_length(context_length))
        rotary, rule = _with_context_length(rotary, given), "context_length, as given"
    elif over == "own" and rotary.own is None and (published := published_length(config, rotary.context_length)):
        rotary, rule = _with_context_length(rotary, published), "as published"
    return BaseRope(rotary, rule, config)


def _over_present_patch(model: nn.Module, slots: Sequence[Slot], context_length: int | None) -> BaseRope:
    live = present_specs(model)
    saved = live or tuple(recorded_specs(slots[0].config))
    if not saved:
        raise MethodError("over='patched' keeps the present patch underneath, and this model has none")
    top = saved[-1]
    if isinstance(top.method, RemappingMethod):
        raise MethodError(f"no method can be applied over {top.method.name}: it changes positions, not frequencies")
    if context_length is not None:
        whole("context_length", context_length)
    length = context_length or top.target_length or top.method.extended_length(top.rotary) or top.rotary.context_length
    rule = "context_length, as given" if context_length else "the extended length of the present patch"
    rotary = top.rotary.scaled(top.method, context_length=length)
    return BaseRope(rotary, rule, slots[0].config, live, saved)


def _with_context_length(rotary: Rotary, context_length: int) -> Rotary:
    if rotary.own is None:
        return replace(rotary, trained_length=context_length)
    return rotary.own.rotary.scaled(rotary.own.method, context_length=context_length)


def _only_rope(described: Iterable[ConfigRope]) -> ConfigRope:
    """The one rotary embedding of all full-attention layers, as a config describes it; without those, of all layers."""
    by_rotary = {rope.rotary: rope for rope in described}
    if len(by_rotary) != 1:
        several = "; ".join(map(str, by_rotary))
        raise UnsupportedModelError(
            f"one method needs one rotary embedding over all full-attention layers; this model has {several}"
        )
    return next(iter(by_rotary.values()))


# What a config alone states is asked of classes that are not here (remote code). The rotated dims then follow from
# sizes in the config, of which a model has the frequencies themselves; all else is read in one way.


def rope_of_config(layers: AttentionLayers, slots: Sequence[Slot] = ()) -> tuple[ConfigRope, list[LayerType]]:
    """The rotary embedding of all full-attention layers, by a config without patches, and the types of these layers.

    `slots`: of a model of this config, for the rotated dims; none: its class is not here.
    """
    parameters = getattr(layers.config, "rope_parameters", None) or {}
    nested = [key for key, value in parameters.items() if isinstance(value, Mapping)]
    chosen = layers.choose(layers.layers_by_embedding(nested or [None]))
    if not chosen:
        raise layers.nothing_to_extend()
    dims = {layer_type: rope.plain.dim for slot in slots for layer_type, rope in slot.as_loaded.items()}
    described = [
        read_rope(layers.config, dims[each], each) if each in dims else rope_of_layers(layers.config, each)
        for each in chosen
    ]
    return _only_rope(described), list(chosen)


def rope_of_layers(config: Any, layer_type: LayerType) -> ConfigRope:
    """The rotary embedding of one layer type, by a text config alone."""
    values = text_settings(config.to_dict())
    settings = rope_dict(config, layer_type)
    proportional = settings.get("rope_type") == "proportional"
    partial = values.get("partial_rotary_factor") or settings.get("partial_rotary_factor")
    geometry = {} if proportional or partial is None else {"partial_rotary_factor": partial}
    return read_rope(config, rotated_dims(values, geometry, layer_type), layer_type)


def before_patches(config: Any) -> Any:
    """A copy of a text config without the patches that are recorded in it."""
    before = copy.deepcopy(config)
    undo_saved_patch(before)
    return before


def bind_to(method: RopeMethod, rotary: Rotary, config: Any, target_length: int | None) -> RopeMethod:
    if not isinstance(method, RemappingMethod):
        return method
    stated = method.as_stated(config, rotary.context_length)
    return stated.bind(rotary, target_length, own_temperature=family(config.model_type).own_temperature)


def stated_length(method: RopeMethod, rotary: Rotary, factor: float | None) -> int | None:
    """The extended length in tokens that a factor states where neither the method nor the one below it took it."""
    if factor is None or any(getattr(method, name, None) is not None for name in ("factor", "frequency")):
        return None
    return round(factor * rotary.context_length)


def undo_saved_patch(config: Any) -> None:
    """Turn the config of a model loaded from a patched folder back into what it was before that patch."""
    before = original_settings(config.to_dict())
    if before is not None:
        for key in written_keys(getattr(config, PATCH_KEY)) - before.keys():  # a class keeps keys that it does not have
            vars(config).pop(key, None)
        for key, value in before.items():
            setattr(config, key, value)


def check_pairing(model: nn.Module) -> None:
    """Raise CheckpointError for a model whose weights are, by its config, in a pairing that its class does not run."""
    config: Any = getattr(model, "config", None)
    stated = getattr(config, PAIRING_KEY, None)
    if stated is None or (run := class_pairing(config)) in (None, stated):
        return
    folder = getattr(config, "_name_or_path", None) or "FOLDER"
    raise CheckpointError(
        f"the config of this model states {PAIRING_KEY} {stated!r}, but the {config.model_type!r} class of "
        f"transformers runs {run!r} weights: the model's output would be meaningless. Convert the folder with "
        f"`{command_line('convert', folder, 'NEW', to=run)}`, or the loaded model with rope.convert(model, to={run!r})"
    )


def patch_geometry(model: nn.Module, *, over: str = "own", context_length: Length | None = None) -> Rotary:
    """The rotary embedding that a patch of this model starts from; the arguments are those of `patch`."""
    return base_rope_of_model(model, over=over, context_length=context_length).rotary


def base_rope_of_model(model: nn.Module, *, over: str = "own", context_length: Length | None = None) -> BaseRope:
    """What a patch of this model starts from; the arguments are those of `patch`."""
    slots = find_slots(model)
    return base_rope(model, slots, before_patches(slots[0].config), over, parse_length(context_length))


def checkpoint_geometry(model: nn.Module) -> Rotary:
    """The rotary embedding of a model's weights, by the family table, else the model's own."""
    config = getattr(model, "config", None)
    stated = stated_rotary(config) if hasattr(config, "get_text_config") else None
    return stated or patch_geometry(model)
