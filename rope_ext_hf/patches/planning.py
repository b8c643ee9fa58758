"""Plan what a patch changes in a model, apply the plan, and take patches off again.

Whatever can fail should fail while a patch is planned, because planning leaves the model as it is; only `apply_plan`
changes it. Nothing of transformers is changed: a patched model gets a copy of its config, and a module of this package
in each of its slots, and both go when the patch is taken off.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from rope_ext_hf.bounds import Length, parse_length
from rope_ext_hf.errors import CheckpointError, MethodError, UnsupportedModelError
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.adapters import stop_recording
from rope_ext_hf.patches.angle_tables import check_method, fill_slot
from rope_ext_hf.patches.attention_function import register
from rope_ext_hf.patches.attention_hooks import RemappingHooks, attach, detach
from rope_ext_hf.patches.attention_interface import ATTENTION_NAME, Layer
from rope_ext_hf.patches.attention_probe import probe_layers
from rope_ext_hf.patches.config_writing import ConfigEncoding, config_encoding, softmax_scale, write_rope
from rope_ext_hf.patches.continuation_probe import (
    TOKENS,
    NotTriedError,
    check_difference,
    check_weights,
    kind_of_patch,
    small_layers,
    small_patch,
    try_continuation,
    was_tried,
)
from rope_ext_hf.patches.continuous_batching import check_batching
from rope_ext_hf.patches.decoder_arguments import check_names
from rope_ext_hf.patches.families import family, rotates_back
from rope_ext_hf.patches.forward_hooks import DecoderHooks, decoder_of, install_forward_hooks
from rope_ext_hf.patches.generation_length import extend_generation
from rope_ext_hf.patches.geometry import BaseRope, base_rope, bind_to, check_pairing, stated_length, undo_saved_patch
from rope_ext_hf.patches.layer_types import Layers
from rope_ext_hf.patches.length_hooks import LengthHooks
from rope_ext_hf.patches.patch_records import PatchSpec
from rope_ext_hf.patches.patch_state import ConfigSwap, PatchState
from rope_ext_hf.patches.recipes import recipe_warning
from rope_ext_hf.patches.reference_models import check_trainers_above
from rope_ext_hf.patches.saving import attach_saving
from rope_ext_hf.patches.slot_finding import find_slots
from rope_ext_hf.patches.slots import PatchedSlot, Slot, check_filled, patch_state, patched_slots, present_specs

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
    """The part of a model that a patch is about, before its method is known."""

    model: nn.Module
    slots: list[Slot]
    configs: list[ConfigSwap]  # copies, to be changed, of every config in the model
    config: Any  # the copy of the text config, without the patches that a folder recorded in it
    base: BaseRope  # the rotary embedding that the method extends


def plan_patch(
    model: nn.Module,
    method: str | RopeMethod,
    *,
    factor: float | None = None,
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
    spec = PatchSpec(resolved, rotary, length, native, layers)
    return _plan(site, spec, live=site.base.live, saved=site.base.saved)


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
    slots[0].layers.check_rotating(layers)
    base = base_rope(model, slots, config, over, context_length)
    return _Site(model, slots, configs, config, base)


def _plan(site: _Site, spec: PatchSpec, *, live: tuple[PatchSpec, ...], saved: tuple[PatchSpec, ...]) -> PatchPlan:
    """Return the plan of a patch.

    Args:
        site: where the patch goes.
        spec: the patch, whose method may still lack parameters that follow from the model.
        live: the live patches that stay underneath, bottom first.
        saved: the patches underneath that the config records; those, or the patches of the folder that was loaded.
    """
    model, slots, config = site.model, site.slots, site.config
    if saved and saved[-1].layers != spec.layers:
        raise MethodError(
            f"over='patched' keeps the layers of the present patch, {saved[-1].layers or 'the default'}; got layers="
            f"{spec.layers}"
        )
    method = bind_to(spec.method, spec.rotary, config, spec.target_length)
    spec = replace(spec, method=method, target_length=spec.target_length or method.extended_length(spec.rotary))
    _check_method(model, slots, spec)
    attention: list[tuple[nn.Module, Layer]] = []
    if isinstance(method, RemappingMethod) and not on_meta_device(model):
        attention = probe_layers(model, slots, method, spec.rotary)
    unlike_published = recipe_warning(config, spec.rotary, method, spec.target_length)
    encoding = _write_configs(site, spec, saved)
    _check_softmax_scale(slots[0], config, encoding)
    sliding, every_layer = slots[0].sliding_note(encoding.extended_length or spec.rotary.context_length)
    notes = [
        sliding,
        slots[0].layers.unrotated_note(method),
        *[slots[0].as_loaded[layer_type].note for layer_type in slots[0].scaled_layers],
        _gguf_note(model),
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


def _write_configs(site: _Site, spec: PatchSpec, below: tuple[PatchSpec, ...]) -> ConfigEncoding:
    """Write a patch over those `below`, bottom first, into the copied configs of a site, and return its encoding."""
    scaled = [layer_type for slot in site.slots for layer_type in slot.scaled_layers]
    layer_types = list(dict.fromkeys(scaled))
    all_scaled = all(slot.scaled_layers or slot.idle for slot in site.slots)
    # Settings for all layers (None) cannot state a method for some of several rotary modules.
    encoding = config_encoding(site.config, spec, layer_types[0], writable=all_scaled or None not in layer_types)
    of_slots = {id(slot.config) for slot in site.slots}  # T5Gemma has a config for each of its halves
    for swap in site.configs:
        if id(swap.original) not in of_slots:
            continue
        if swap.patched is not site.config:
            undo_saved_patch(swap.patched)
        write_rope(swap.patched, encoding, spec, below, layer_types)
    return encoding


def _gguf_note(model: nn.Module) -> str | None:
    """Return a sentence about the scaling that a model loaded from a GGUF file may lack; None for any other model.

    transformers does not record `gguf_file`. All that is left of it is the name of the folder, which then holds GGUF
    files and no config.json. From such a file transformers reads rope.freq_base, but a scaling only for gpt-oss
    (integrations/ggml.py, modeling_gguf_pytorch_utils.py).
    """
    config: Any = getattr(model, "config", None)
    name = getattr(config, "_name_or_path", None)
    folder = Path(name) if name else None
    if folder is None or not folder.is_dir() or (folder / "config.json").exists() or config.model_type == "gpt_oss":
        return None
    files = sorted(file.name for file in folder.glob("*.gguf"))
    if not files:
        return None
    return (
        f"This model was loaded from a GGUF file ({', '.join(files)}), and transformers drops a linear or yarn scaling "
        "of such a file. `rope-ext audit FILE.gguf` shows whether it has one; if so, load the model from a config.json."
    )


def _copied_configs(model: nn.Module, text_config: Any) -> list[ConfigSwap]:
    """Return a copy of every config object in a model, as it was before any patch.

    The copies refer to each other as the originals do. Changes that the user made in the config of a patched model are
    first carried over to the original.
    """
    unpatched: dict[int, Any] = {}
    state = patch_state(model)
    for swap in state.configs if state else ():
        swap.sync_user_changes()
        unpatched[id(swap.patched)] = swap.original
    originals = {id(text_config): text_config}
    for module in model.modules():
        config = module.__dict__.get("config")
        if hasattr(config, "model_type"):
            config = unpatched.get(id(config), config)
            originals[id(config)] = config
    memo: dict[int, Any] = {}  # shared, so that a config inside another one is copied once
    return [ConfigSwap(copy.deepcopy(config, memo), config) for config in originals.values()]


def on_meta_device(model: nn.Module) -> bool:
    """Return whether a model lacks its weights, and has no hook of accelerate that brings them when they are needed.

    One parameter on the meta device is enough: some classes make a few of their parameters on the CPU whatever the
    device is (DiffLlama).
    """
    without_weights = any(parameter.device.type == "meta" for parameter in model.parameters())
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    return without_weights and not offloaded


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_method(model: nn.Module, slots: Sequence[Slot], spec: PatchSpec) -> None:
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


# --- applying ---------------------------------------------------------------------------------------------------------


def replay(model: M, specs: tuple[PatchSpec, ...]) -> M:
    """Patch a model, in place, as it was patched before or in the folder it comes from, and return it.

    `specs` are the patches, bottom first: the last one is put on, over those before it.
    """
    *below, top = specs
    site = _find_site(model, top.layers)
    dim = site.base.rotary.dim
    if dim != top.rotary.dim:
        raise CheckpointError(
            f"the record of a patch is for {top.rotary.dim} rotated dims per head, and this model has {dim}; the "
            "record was made for another model"
        )
    apply_plan(_plan(site, top, live=tuple(below), saved=tuple(below)))
    return model


def apply_plan(plan: PatchPlan) -> None:
    """Change a model as planned; a patch that the model has already gives way.

    A plan is for one use, and for the model as it was when the plan was made. The first patch of its kind on a class of
    decoders that works with the cache is tried on a few tokens with one (rope_ext_hf/patches/continuation_probe.py).

    Raises:
        MethodError: a value of the method is impossible for a model of these sizes.
        UnsupportedModelError: under the patch, the installed release of transformers gives another result where it goes
            on from a cache than where it reads the same tokens in one forward.

    When an exception is raised, the model is as it was before the call.
    """
    model, state, method = plan.model, plan.state, plan.state.spec.method
    hooks = _hooks_for(state.spec)
    if hooks is not None:
        for slot in plan.slots:
            check_names(decoder_of(model, slot.parent))
    modules = [fill_slot(slot, method, state.spec.rotary, state) for slot in plan.slots]  # may still refuse a value
    if hooks is not None:
        _try_with_a_cache(plan, hooks)
    _install(plan, modules, hooks)
    if hooks is not None and issubclass(hooks, LengthHooks):
        check_batching(model, modules)
    attach_saving(model, modules[0])
    extend_generation(model, modules[0])
    modules[0].before_use = check_trainers_above


def needs_hooks(spec: PatchSpec) -> bool:
    """Return whether a patch needs hooks around the decoder; only such a patch may be refused by a model's weights."""
    return _hooks_for(spec) is not None


def _hooks_for(spec: PatchSpec) -> type[DecoderHooks] | None:
    """Return the hooks that a patch needs around each decoder; None for a static method, which needs none."""
    if isinstance(spec.method, RemappingMethod):
        return RemappingHooks
    return LengthHooks if spec.method.depends_on_length(spec.rotary) else None


def _try_with_a_cache(plan: PatchPlan, hooks: type[DecoderHooks]) -> None:
    """Try the first patch of its kind on a class of decoders with a cache.

    Afterwards the model may lack the patch that it had, which the patch that is being applied replaces anyway. Where
    the trial raises UnsupportedModelError, that patch is put on again.
    """
    model, spec = plan.model, plan.state.spec
    slot = next(slot for slot in plan.slots if not slot.idle)
    decoder = decoder_of(model, slot.parent)
    kind = kind_of_patch(decoder, hooks, spec.method)
    if was_tried(kind):
        return
    before = present_specs(model)
    try:
        check_weights(model, decoder)
        method, rotary = small_patch(spec.method, spec.rotary)
        state = replace(plan.state, spec=replace(spec, method=method, rotary=rotary, target_length=TOKENS))
        layers = small_layers(plan.attention, spec.method, method, rotary)
        small = PatchPlan(model, state, plan.slots, layers)
        try:
            _install(small, [fill_slot(slot, method, rotary, state) for slot in plan.slots], hooks)
            difference = try_continuation(model, decoder, kind, spec.method)
        finally:
            take_off(model)
        check_difference(model, decoder, spec.method.name, *difference)
    except NotTriedError as reason:
        plan.state.notes += (f"Generating with a cache was not checked, because {reason}.",)
    except UnsupportedModelError:
        if before:
            replay(model, before)
        raise


def _install(plan: PatchPlan, modules: Sequence[PatchedSlot], hooks: type[DecoderHooks] | None) -> None:
    """Put the modules, configs and hooks of a plan into its model, and take off a patch that the model has."""
    model, state = plan.model, plan.state
    take_off(model)
    _swap_configs(model, {id(swap.original): swap.patched for swap in state.configs})
    if isinstance(state.spec.method, RemappingMethod):
        register()
        attach(plan.attention, plan.slots[0].config)
        # Attention modules look up the function that they run by the name in their config.
        of_attention = {id(plan.slots[0].config)}
        of_attention |= {id(module.config) for module, _ in plan.attention if hasattr(module, "config")}
        for swap in state.configs:
            if id(swap.original) in of_attention or id(swap.patched) in of_attention:
                swap.patched._attn_implementation = ATTENTION_NAME
    for swap in state.configs:
        swap.note_written()
    for slot, module in zip(plan.slots, modules, strict=True):
        module.train(slot.module.training)
        setattr(slot.parent, slot.attribute, module)
        if "config" in slot.module.__dict__:
            slot.module.config = slot.config  # the replaced module keeps the config it was built from
            patched = next(swap.patched for swap in state.configs if swap.original is slot.config)
            module.config = patched if slot.scaled_layers else slot.config
    if hooks is not None:
        install_forward_hooks(model, hooks)


def patch_as_planned(plan: PatchPlan) -> None:
    """Apply a plan, then give its warning, if it has one, at the line that called the caller of this function."""
    apply_plan(plan)
    if plan.state.warning is not None:
        warnings.warn(plan.state.warning, stacklevel=3)


def take_off(model: nn.Module) -> None:
    """Take every patch off a model, in place; a model that is not patched is left alone.

    Raises:
        UnsupportedModelError: the model was patched on the meta device, and its own rotary modules have no numbers.
    """
    state = patch_state(model)
    configs = state.configs if state else []
    for slot in patched_slots(model):
        check_filled(slot.replaced)
    for parent in list(model.modules()):
        for attribute, child in list(parent.named_children()):
            if isinstance(child, PatchedSlot):
                setattr(parent, attribute, child.replaced)
                for hook in child.hooks:
                    hook.remove()
    for swap in configs:
        swap.sync_user_changes()
    _swap_configs(model, {id(swap.patched): swap.original for swap in configs})
    stop_recording(model)
    detach(model)


def _swap_configs(model: nn.Module, other: Mapping[int, Any]) -> None:
    """Give every module that holds one of some configs, `other` by the id of the held one, the other config instead."""
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in other:
            module.config = other[id(config)]
