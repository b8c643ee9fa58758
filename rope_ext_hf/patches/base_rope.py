"""The rotary embedding that a patch of a model extends, as the config describes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from rope_ext_hf.bounds import Length, check_int, parse_length
from rope_ext_hf.errors import CheckpointError, MethodError, UnsupportedModelError, did_you_mean
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.models.config import PAIRING_KEY, ConfigRope, read_rope, rope_dict
from rope_ext_hf.models.config_keys import rotated_dims, text_settings
from rope_ext_hf.models.families import family
from rope_ext_hf.models.family_settings import stated_rotary
from rope_ext_hf.models.layer_types import AttentionLayers, LayerType
from rope_ext_hf.models.patch_records import PATCH_KEY, Patch, before_patches, recorded_specs
from rope_ext_hf.models.recipes import published_length
from rope_ext_hf.options.arguments import command_line
from rope_ext_hf.patches.rows.row_probe import pairing_of
from rope_ext_hf.patches.slots.patched_slot import Slot, active_patches
from rope_ext_hf.patches.slots.slot_finding import find_slots

__all__ = ["BaseRope", "base_rope_of_config", "fill_parameters", "rope_of_config", "rope_of_layers", "stated_length"]

_OVER = ("own", "original", "patched")
"""Values of `over`: a patch extends the model as loaded, the model without its own scaling, or the present patch."""


@dataclass(frozen=True)
class BaseRope:
    """The rotary embedding that a new patch extends.

    Attributes:
        rotary: the rotary embedding, scalings included.
        rule: the reading of the config that gave its context length, in words for `describe`.
        config: the text config without patches.
        live: the live patches that stay underneath, bottom first.
        saved: the patches underneath that a config records, bottom first: the live ones, or those of the folder that
            the model was loaded from.
    """

    rotary: Rotary
    rule: str
    config: Any
    live: tuple[Patch, ...] = ()
    saved: tuple[Patch, ...] = ()

    def bind(self, method: RopeMethod, length: int) -> RopeMethod:
        """Return a method with every missing parameter filled in for inputs of `length` tokens, as `patch` does it."""
        return fill_parameters(method, self.rotary, self.config, length)


def base_rope(
    model: nn.Module, slots: Sequence[Slot], config: Any, over: str = "own", context_length: int | None = None
) -> BaseRope:
    """Return the rotary embedding that a patch of a model extends, and the patches that stay underneath.

    Args:
        model: the model, patched or not.
        slots: the slots of the model that the patch is for.
        config: its text config without patches, see `undo_saved_patch`.
        over, context_length: as `rope_ext_hf.patch` takes them; the length in tokens.

    Raises:
        MethodError: `over` or `context_length` is impossible, or there is no present patch to extend.
        UnsupportedModelError: the layers have several rotary embeddings.
    """
    if over == "patched":
        return _over_present_patch(model, slots, context_length)
    some_scaled = any(slot.scaled_layers for slot in slots)
    ropes = []
    for slot in slots:
        before = before_patches(slot.config) if PATCH_KEY in vars(slot.config) else None
        for layer_type in slot.scaled_layers if some_scaled else slot.as_loaded:
            rope = slot.as_loaded[layer_type]
            ropes.append(rope if before is None else read_rope(before, rope.plain.dim, layer_type))
    return base_rope_of_config(_only_rope(ropes), over, context_length, config)


def base_rope_of_config(described: ConfigRope, over: str, context_length: Length | None, config: Any) -> BaseRope:
    """Return the rotary embedding that a new patch extends, by a config alone. It decides the context length.

    Args:
        described: the rotary embedding that the config describes.
        over: "own" or "original", as `rope_ext_hf.patch` takes it.
        context_length: the context length in tokens that the user gave; None: the published one of a known model
            without a scaling of its own, else the one that the config states.
        config: the text config without patches, by which a published model is recognised.

    Raises:
        MethodError: `over` or `context_length` is impossible.
    """
    if over not in _OVER:
        raise MethodError(f"over must be one of {', '.join(_OVER)}; got {over!r}.{did_you_mean(str(over), _OVER)}")
    if over == "patched":
        raise MethodError("over='patched' needs the model itself, not its config alone")
    rotary, rule = described.rotary, described.rule
    if over == "original":
        rotary, rule = described.plain, "the original length of the config"
    if context_length is not None:
        length = check_int("context_length", parse_length(context_length))
        rotary, rule = _with_context_length(rotary, length), "context_length, as given"
    elif over == "own" and rotary.own is None:
        published = published_length(config, rotary.context_length)
        if published is not None:
            rotary, rule = _with_context_length(rotary, published), "as published"
    return BaseRope(rotary, rule, config)


def _over_present_patch(model: nn.Module, slots: Sequence[Slot], context_length: int | None) -> BaseRope:
    """Return the rotary embedding that a patch with over="patched" extends: the model's own under its present patch.

    The present patch is a live one, or the one that the config of the slots records.
    """
    live = active_patches(model)
    saved = live or tuple(recorded_specs(slots[0].config))
    if not saved:
        raise MethodError(
            "over='patched' keeps the present patch underneath, and this model has none; leave it out to extend the "
            "model as loaded"
        )
    top = saved[-1]
    if isinstance(top.method, RemappingMethod):
        raise MethodError(f"no method can be applied over {top.method.name}: it changes positions, not frequencies")
    if context_length is not None:
        check_int("context_length", context_length)
    length = context_length or top.target_length or top.method.extended_length(top.rotary) or top.rotary.context_length
    rule = "context_length, as given" if context_length else "the extended length of the present patch"
    rotary = top.rotary.scaled(top.method, context_length=length)
    return BaseRope(rotary, rule, slots[0].config, live, saved)


def _with_context_length(rotary: Rotary, context_length: int) -> Rotary:
    """Return a rotary embedding with the same frequencies, whose context length is this number of tokens."""
    if rotary.own is None:
        return replace(rotary, trained_length=context_length)
    return rotary.own.rotary.scaled(rotary.own.method, context_length=context_length)


def _only_rope(described: Iterable[ConfigRope]) -> ConfigRope:
    """Return the rotary embedding that layers have in common; UnsupportedModelError where they have several."""
    by_rotary = {rope.rotary: rope for rope in described}
    if len(by_rotary) != 1:
        several = "; ".join(map(str, by_rotary))
        raise UnsupportedModelError(
            f"one method needs one rotary embedding over all full-attention layers; this model has {several}. Choose "
            "layers that share one: layers=... (--layers)"
        )
    return next(iter(by_rotary.values()))


# If the class of a model comes with its checkpoint and is not run here, only its config is known. The number of
# rotated dims then follows from sizes in the config; in a model it is that of the frequencies. All else is the same.


def rope_of_config(layers: AttentionLayers, slots: Sequence[Slot] = ()) -> tuple[ConfigRope, list[LayerType]]:
    """Return the rotary embedding of all full-attention layers by a config, and the types of these layers.

    Args:
        layers: the layers of a text config without patches.
        slots: the slots of a model of this config, from which the number of rotated dims is taken; none: the class of
            the model is not available, and sizes in the config give the number.

    Raises:
        UnsupportedModelError: no layer attends to everything, or these layers have several rotary embeddings.
    """
    parameters = getattr(layers.config, "rope_parameters", None) or {}
    nested = [key for key, value in parameters.items() if isinstance(value, Mapping)]
    chosen = layers.choose(layers.layers_by_embedding(nested or [None]))
    if not chosen:
        raise layers.nothing_to_extend()
    dims = {layer_type: rope.plain.dim for slot in slots for layer_type, rope in slot.as_loaded.items()}
    described = []
    for layer_type in chosen:
        if layer_type in dims:
            described.append(read_rope(layers.config, dims[layer_type], layer_type))
        else:
            described.append(rope_of_layers(layers.config, layer_type))
    return _only_rope(described), list(chosen)


def rope_of_layers(config: Any, layer_type: LayerType) -> ConfigRope:
    """Return the rotary embedding of one layer type by a text config alone; see `read_rope` for errors."""
    return _rope_of_values(config, text_settings(config.to_dict()), layer_type)


def rotary_of_usual_config(config: Any) -> Rotary:
    """Return the rotary embedding that a patch of a model extends, by a config whose class need not be known.

    The config has one rotary embedding for all layers, and its keys have their usual names; see `read_rope` for errors.
    """
    return base_rope_of_config(_rope_of_values(config, config.to_dict(), None), "own", None, config).rotary


def _rope_of_values(config: Any, values: dict[str, Any], layer_type: LayerType) -> ConfigRope:
    """Return the rotary embedding of one layer type by a text config and its values under their usual keys."""
    settings = rope_dict(config, layer_type)
    proportional = settings.get("rope_type") == "proportional"
    partial = values.get("partial_rotary_factor") or settings.get("partial_rotary_factor")
    geometry = {} if proportional or partial is None else {"partial_rotary_factor": partial}
    return read_rope(config, rotated_dims(values, geometry, layer_type), layer_type)


def fill_parameters(method: RopeMethod, rotary: Rotary, config: Any, target_length: int | None) -> RopeMethod:
    """Return a method with every parameter that was not given filled in; frequency methods are already complete.

    Args:
        method: the method.
        rotary: the rotary embedding that it extends.
        config: the text config without patches, which may state parameters (dual chunk attention).
        target_length: the extended length in tokens; None: the method's own.
    """
    if not isinstance(method, RemappingMethod):
        return method
    stated = method.as_stated(config, rotary.context_length)
    return stated.bind(rotary, target_length, own_temperature=family(config.model_type).own_temperature)


def stated_length(method: RopeMethod, rotary: Rotary, factor: float | None) -> int | None:
    """Return the extended length in tokens that `factor` implies for a method without a factor of its own.

    None if no factor was given, or if the method, or the frequency method inside it, has a parameter for the factor.
    """
    if factor is None or any(getattr(method, name, None) is not None for name in ("factor", "frequency")):
        return None
    return round(factor * rotary.context_length)


def check_pairing(model: nn.Module) -> None:
    """Raise CheckpointError for a model whose weights are, by its config, in a pairing that its class does not run."""
    config: Any = getattr(model, "config", None)
    stated = getattr(config, PAIRING_KEY, None)
    if stated is None:
        return
    run = pairing_of(model)
    if run is None or run == stated:
        return
    folder = getattr(config, "_name_or_path", None) or "FOLDER"
    raise CheckpointError(
        f"the config of this model states {PAIRING_KEY} {stated!r}, but the {config.model_type!r} class of "
        f"transformers runs {run!r} weights: the model's output would be meaningless. Convert the folder with "
        f"`{command_line('convert', folder, 'NEW', to=run)}`, or the loaded model with rope.convert(model, to={run!r})"
    )


def patch_geometry(model: nn.Module, *, over: str = "own", context_length: Length | None = None) -> Rotary:
    """Return the rotary embedding that a patch of this model extends; the arguments are those of `patch`."""
    return base_rope_of_model(model, over=over, context_length=context_length).rotary


def base_rope_of_model(model: nn.Module, *, over: str = "own", context_length: Length | None = None) -> BaseRope:
    """Return the rotary embedding that a patch of this model extends, as `base_rope` does for known slots.

    The arguments are those of `patch`.
    """
    slots = find_slots(model)
    return base_rope(model, slots, before_patches(slots[0].config), over, parse_length(context_length))


def checkpoint_geometry(model: nn.Module) -> Rotary:
    """Return the rotary embedding of a checkpoint: as its family states it, else as a patch of the model extends it."""
    config = getattr(model, "config", None)
    stated = stated_rotary(config) if hasattr(config, "get_text_config") else None
    return stated or patch_geometry(model)
