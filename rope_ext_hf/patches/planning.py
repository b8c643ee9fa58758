"""Plan everything that a patch changes in a model, without changing the model.

Whatever can fail should fail here, because a model whose patch is refused must stay as it is; `applying` makes the
changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn

from rope_ext_hf.bounds import Length, parse_length
from rope_ext_hf.errors import CheckpointError, MethodError, UnsupportedModelError, capital
from rope_ext_hf.files.model_files import loading_note
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.models.families import family, rotates_back
from rope_ext_hf.models.layer_types import Layers
from rope_ext_hf.models.patch_records import Patch, recorded_specs, replaced_note, undo_saved_patch
from rope_ext_hf.models.patched_config import ConfigEncoding, config_encoding, softmax_scale, write_rope
from rope_ext_hf.models.recipes import recipe_warning
from rope_ext_hf.models.weights_at_hand import on_meta_device
from rope_ext_hf.patches.base_rope import BaseRope, base_rope, check_pairing, fill_parameters, stated_length
from rope_ext_hf.patches.forward.attention_interface import Layer
from rope_ext_hf.patches.forward.attention_probe import probe_layers
from rope_ext_hf.patches.slots.patch_state import ConfigSwap, PatchState, copied_configs, stating_rope
from rope_ext_hf.patches.slots.patched_slot import Slot, patch_state
from rope_ext_hf.patches.slots.roformer import check_method
from rope_ext_hf.patches.slots.slot_finding import find_slots

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class PatchPlan:
    """Everything that a patch changes in one model, worked out by `plan_patch`; `apply_plan` makes the changes.

    Attributes:
        model: the model that the plan is for.
        state: what the patched model will remember. `state.spec` is the patch with every parameter filled in, and
            `state.configs` are copies of the model's configs, in which the method and the extended length are written.
        slots: the places of the rotary modules that are replaced.
        attention: every attention module, and how it is to attend; empty for a frequency method.
    """

    model: nn.Module
    state: PatchState
    slots: tuple[Slot, ...]
    attention: tuple[tuple[nn.Module, Layer], ...] = ()


@dataclass(frozen=True)
class _Site:
    """The parts of a model that a patch is planned on: its slots, copied configs, and the rotary embedding."""

    model: nn.Module
    slots: list[Slot]
    configs: list[ConfigSwap]  # copies, to be changed, of every config in the model
    config: Any  # the copy of the text config, without the patches that a folder recorded in it
    base: BaseRope  # the rotary embedding that the method extends


def plan_patch(
    model: nn.Module,
    method: str | RopeMethod | Mapping[str, Any],
    factor: float | None = None,
    *,
    target_length: Length | None = None,
    over: str = "own",
    context_length: Length | None = None,
    layers: Layers | None = None,
    native: bool = False,
    **params: Any,
) -> PatchPlan:
    """Work out what `patch` would change, and leave the model as it is.

        plan = rope.plan_patch(model, "yarn", factor=4)
        print(rope.describe(plan))
        rope.apply_plan(plan)

    A remapping method runs four tokens through the model, to see how each of its layers attends.

    Args:
        model: a model in memory; `patch` takes names as well.
        method, factor, target_length, over, context_length, layers, native, **params: as `patch` takes them.

    Returns:
        The plan, which `describe` shows and `apply_plan` carries out.

    Raises:
        MethodError, UnsupportedModelError, CheckpointError: as `patch` raises them.
    """
    target_length = parse_length(target_length)
    if layers is not None:
        layers = (layers,) if isinstance(layers, (str, int)) else tuple(layers)
    site = _find_site(model, layers, over, parse_length(context_length))
    rotary = site.base.rotary
    resolved = resolve_method(method, rotary, factor=factor, target_length=target_length, **params)
    length = target_length or stated_length(resolved, rotary, factor)
    spec = Patch(resolved, rotary, length, native, layers)
    plan = _plan(site, spec, live=site.base.live, saved=site.base.saved)
    recorded = recorded_specs(site.slots[0].config) if patch_state(model) is None else []
    replaced = replaced_note(recorded, plan.state.spec)
    if replaced is not None and over != "patched":
        state = plan.state
        warning = replaced if state.warning is None else f"{replaced}. {capital(state.warning)}"
        plan = replace(plan, state=replace(state, notes=(*state.notes, capital(replaced)), warning=warning))
    return plan


def plan_replay(model: nn.Module, specs: Sequence[Patch]) -> PatchPlan:
    """Return the plan that patches a model as it was patched before, or as the folder it comes from records.

    Args:
        model: the model.
        specs: the patches, bottom first; the plan puts the last one on, over those before it.

    Raises:
        CheckpointError: the last patch is for another number of rotated dims.
        MethodError, UnsupportedModelError: as `plan_patch` raises them.
    """
    *below, top = specs
    site = _find_site(model, top.layers)
    dim = site.base.rotary.dim
    if dim != top.rotary.dim:
        raise CheckpointError(
            f"the record of a patch is for {top.rotary.dim} rotated dims per head, and this model has {dim}; the "
            "record was made for another model"
        )
    return _plan(site, top, live=tuple(below), saved=tuple(below))


def _find_site(
    model: nn.Module, layers: tuple[str | int, ...] | None, over: str = "own", context_length: int | None = None
) -> _Site:
    """Return the slots of a model, copies of its configs, and the rotary embedding that a patch of `layers` extends."""
    check_pairing(model)
    slots = find_slots(model, layers)
    if not any(slot.scaled_layers for slot in slots):
        raise slots[0].layers.nothing_to_extend()
    configs = _copied_configs(model, slots[0].config)
    config = next(swap.patched for swap in configs if swap.original is slots[0].config)
    undo_saved_patch(config)
    base = base_rope(model, slots, config, over, context_length)
    return _Site(model, slots, configs, config, base)


def _plan(site: _Site, spec: Patch, *, live: tuple[Patch, ...], saved: tuple[Patch, ...]) -> PatchPlan:
    """Return the plan of a patch.

    Args:
        site: where the patch goes.
        spec: the patch, whose method may still lack parameters that follow from the model.
        live: the live patches that stay underneath, bottom first.
        saved: the patches underneath that the config records: the live ones, or those of the folder that was loaded.
    """
    model, slots, config = site.model, site.slots, site.config
    if saved and saved[-1].layers != spec.layers:
        raise MethodError(
            f"over='patched' keeps the layers of the present patch, {saved[-1].layers or 'the default'}; got layers="
            f"{spec.layers}"
        )
    slots[0].layers.check_method(spec.method, spec.layers)
    method = fill_parameters(spec.method, spec.rotary, config, spec.target_length)
    spec = replace(spec, method=method, target_length=spec.target_length or method.extended_length(spec.rotary))
    _check_method(model, slots, spec)
    attention: list[tuple[nn.Module, Layer]] = []
    if isinstance(method, RemappingMethod) and not on_meta_device(model):
        attention = probe_layers(model, slots, method, spec.rotary)
    unlike_published = recipe_warning(config, spec.rotary, method, spec.target_length)
    encoding = _write_configs(site, spec, saved)
    _check_softmax_scale(slots[0], config, encoding)
    length = encoding.extended_length or spec.rotary.context_length
    sliding, every_layer = slots[0].sliding_note(length, named=spec.layers is not None)
    notes = [
        sliding,
        slots[0].layers.unrotated_note(method),
        *[slots[0].as_loaded[layer_type].note for layer_type in slots[0].scaled_layers],
        loading_note(model),
    ]
    state = PatchState(
        spec,
        encoding,
        site.base.rule,
        notes=tuple([note for note in notes if note]),
        warning=sliding if every_layer else unlike_published,
        configs=site.configs,
        below=live,
    )
    return PatchPlan(model, state, tuple(slots), tuple(attention))


def _write_configs(site: _Site, spec: Patch, below: tuple[Patch, ...]) -> ConfigEncoding:
    """Write a patch over those `below`, bottom first, into the copied configs of a site, and return its encoding."""
    scaled = [layer_type for slot in site.slots for layer_type in slot.scaled_layers]
    layer_types = list(dict.fromkeys(scaled))
    all_scaled = all(slot.scaled_layers or slot.idle for slot in site.slots)
    # Settings for all layers (None) cannot state a method for some of several rotary modules.
    encoding = config_encoding(site.config, spec, layer_types[0], writable=all_scaled or None not in layer_types)
    for swap in stating_rope(site.configs, [slot.config.model_type for slot in site.slots]):
        if swap.patched is not site.config:
            undo_saved_patch(swap.patched)
        write_rope(swap.patched, encoding, spec, below, layer_types)
    return encoding


def _copied_configs(model: nn.Module, text_config: Any) -> list[ConfigSwap]:
    """Return a copy of every config object in a model, as it was before any patch.

    Changes that the user made in the config of a patched model are first carried over to the original.
    """
    state = patch_state(model)
    swaps = state.configs if state else []
    for swap in swaps:
        swap.sync_user_changes()
    return copied_configs(model, {id(swap.patched): swap.original for swap in swaps}, [text_config])


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_method(model: nn.Module, slots: Sequence[Slot], spec: Patch) -> None:
    """Raise an error if the slots of a model cannot run a method with its parameters."""
    method, model_type = spec.method, slots[0].config.model_type
    check_method(slots, method, spec.rotary)
    sets = sum(len(slot.scaled_layers) for slot in slots)
    if method.trainable and sets > 1:
        raise UnsupportedModelError(
            f"{method.name} trains one set of frequencies, and {type(model).__name__} has {sets}, for different "
            "layers; choose another method, or one set with layers=..."
        )
    # Attention that rotates its values and rotates its output back would multiply the output by the attention factor.
    if rotates_back(model_type):
        factor, own = method.frequencies(spec.rotary).attention_factor, spec.rotary.attention_factor
        if not math.isclose(factor, own):
            raise MethodError(
                f"the attention of {model_type!r} rotates values, too, so an attention factor of {factor:.4f} would "
                f"change their size; give attention_factor={own:g}"
            )


def _check_softmax_scale(slot: Slot, config: Any, encoding: ConfigEncoding) -> None:
    """Raise MethodError if plain loading of the written settings would give attention another softmax scale.

    The attention of DeepSeek and its kin takes its softmax scale from the rope settings when it is built, so that a
    patch of the live model does not change it, and a saved folder must not either.
    """
    known = family(slot.config.model_type)
    if not known.softmax_mscale or not encoding.loads_plainly:
        return
    live = softmax_scale(known, slot.config.rope_parameters)
    loaded = softmax_scale(known, config.rope_parameters)
    if not math.isclose(live, loaded):
        raise MethodError(
            f"{slot.config.model_type} builds its attention with a softmax scale from YaRN's mscale_all_dim: "
            f"x{live:.4f} in this model, x{loaded:.4f} in a model loaded with the new settings; "
            "give a factor and mscale_all_dim that keep it"
        )
