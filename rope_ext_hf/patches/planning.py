"""Plan what a patch changes in a model, apply the plan, and take patches off again.

All that can fail fails while a patch is planned, and the model stays as it is; `apply_plan` changes it. Nothing of
transformers is changed: a patched model gets its own copy of its config and our module in its slots, and both go when
the patch is taken off.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
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
from rope_ext_hf.patches.config import ConfigEncoding, PatchSpec, config_encoding, softmax_scale, write_rope
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
from rope_ext_hf.patches.patch_state import ConfigSwap, PatchState
from rope_ext_hf.patches.recipes import recipe_warning
from rope_ext_hf.patches.reference_models import check_trainers_above
from rope_ext_hf.patches.saving import attach_saving
from rope_ext_hf.patches.slot_finding import find_slots
from rope_ext_hf.patches.slots import PatchedSlot, Slot, check_filled, patch_state, patched_slots, present_specs

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class PatchPlan:
    """Everything that a patch changes in one model; `apply_plan` does it.

    Attributes:
        model: the model that the plan is for.
        state: what the patched model will remember; `state.spec` is the patch, every parameter filled in, and
            `state.configs` are copies of the model's configs with the method and the extended length written.
        slots: the rotary modules that are replaced.
        attention: every attention module and how it is to attend; empty for a frequency method.
    """

    model: nn.Module
    state: PatchState
    slots: tuple[Slot, ...]
    attention: tuple[tuple[nn.Module, Layer], ...] = ()


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
    """Work out what `patch` with the same arguments would change; the model stays as it is.

    A remapping method runs four tokens through the model, to see how each of its layers attends.

    Raises:
        MethodError, UnsupportedModelError: as `patch` does.
    """
    target_length = parse_length(target_length)
    chosen = None if layers is None else (layers,) if isinstance(layers, (str, int)) else tuple(layers)

    def make_spec(base: BaseRope) -> PatchSpec:
        resolved = resolve_method(method, base.rotary, factor=factor, target_length=target_length, **params)
        length = target_length or stated_length(resolved, base.rotary, factor)
        return PatchSpec(resolved, base.rotary, length, native, chosen)

    return _plan(model, chosen, make_spec, over=over, context_length=parse_length(context_length))


def _plan(
    model: nn.Module,
    layers: tuple[str | int, ...] | None,
    make_spec: Callable[[BaseRope], PatchSpec],
    *,
    over: str = "own",
    context_length: int | None = None,
    below: tuple[PatchSpec, ...] = (),
) -> PatchPlan:
    """A plan for a patch whose parameters follow from the rotary embedding it extends."""
    # 1. where, and on top of what
    check_pairing(model)
    slots = find_slots(model, layers)
    if not any(slot.scaled_layers for slot in slots):
        raise slots[0].layers.nothing_to_extend()
    configs = _copied_configs(model, slots[0].config)
    config = next(swap.patched for swap in configs if swap.original is slots[0].config)
    undo_saved_patch(config)
    slots[0].layers.check_rotating(layers)
    base = base_rope(model, slots, config, over, context_length)
    # 2. the method, with every parameter filled in
    spec, live, saved = make_spec(base), below or base.live, below or base.saved
    if saved and saved[-1].layers != spec.layers:
        raise MethodError(
            f"over='patched' keeps the layers of the present patch, {saved[-1].layers or 'the default'}; got layers="
            f"{spec.layers}"
        )
    bound = bind_to(spec.method, spec.rotary, config, spec.target_length)
    spec = replace(spec, method=bound, target_length=spec.target_length or bound.extended_length(spec.rotary))
    _check_method(model, slots, spec)
    attention: list[tuple[nn.Module, Layer]] = []
    if isinstance(spec.method, RemappingMethod) and not on_meta_device(model):
        attention = probe_layers(model, slots, spec.method, spec.rotary)
    unlike_published = recipe_warning(config, spec.rotary, spec.method, spec.target_length)
    # 3. how the configs state it; these are copies
    layer_types = list(dict.fromkeys([layer_type for slot in slots for layer_type in slot.scaled_layers]))
    one_for_all = None in layer_types and not all(slot.scaled_layers or slot.idle for slot in slots)
    encoding = config_encoding(config, spec, layer_types[0], writable=not one_for_all)
    of_slots = {id(slot.config) for slot in slots}  # T5Gemma has a config for each of its halves
    for each in (swap.patched for swap in configs if id(swap.original) in of_slots):
        if each is not config:
            undo_saved_patch(each)
        write_rope(each, encoding, spec, saved, layer_types)
    _check_softmax_scale(slots[0], config, encoding)
    sliding, every_layer = slots[0].sliding_note(encoding.extended_length or spec.rotary.context_length)
    notes = [
        sliding,
        slots[0].layers.unrotated_note(spec.method),
        *[slots[0].as_loaded[layer_type].note for layer_type in slots[0].scaled_layers],
        _gguf_note(model),
    ]
    state = PatchState(
        spec,
        encoding,
        base.rule,
        notes=tuple([note for note in notes if note]),
        warning=sliding if every_layer else unlike_published,
        configs=configs,
        below=live,
    )
    return PatchPlan(model, state, tuple(slots), tuple(attention))


def _gguf_note(model: nn.Module) -> str | None:
    """Return a sentence on the scaling that a model loaded from a GGUF file may lack; None for any other model.

    transformers keeps no trace of `gguf_file`, but in the name of the folder, which then holds no config.json. It reads
    rope.freq_base, and a scaling for gpt-oss alone (integrations/ggml.py, modeling_gguf_pytorch_utils.py).
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
        f"This model was loaded from a GGUF file ({', '.join(files)}), of which transformers drops a linear or yarn "
        "scaling: `rope-ext audit FILE.gguf` shows what it states. With one, load the model from its config.json."
    )


def _copied_configs(model: nn.Module, text_config: Any) -> list[ConfigSwap]:
    """A copy of every config object in a model as it was before any patch, linked to each other as the originals are.

    What the user changed in the config of a patched model is carried over to the original first.
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
    """Return whether a model lacks its weights, and no hook brings them when they are needed.

    Some classes make a few of them with numbers on the CPU, whatever the device (DiffLlama).
    """
    return any(p.device.type == "meta" for p in model.parameters()) and not any(
        hasattr(module, "_hf_hook") for module in model.modules()
    )


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_method(model: nn.Module, slots: Sequence[Slot], spec: PatchSpec) -> None:
    """Whether these slots can run the method, with these values."""
    method, model_type = spec.method, slots[0].config.model_type
    check_method(slots, method, spec.rotary)
    if method.trainable and (sets := sum(len(slot.scaled_layers) for slot in slots)) > 1:
        raise UnsupportedModelError(
            f"{method.name} trains one set of frequencies, and {type(model).__name__} has {sets}, for different layers"
        )
    # An attention factor would multiply the output of attention that rotates its values and rotates them back.
    if rotates_back(model_type):
        factor, own = method.frequencies(spec.rotary).attention_factor, spec.rotary.attention_factor
        if not math.isclose(factor, own):
            raise MethodError(
                f"the attention of {model_type!r} rotates values, too, so an attention factor of {factor:.4f} would "
                f"change their size; give attention_factor={own:g}"
            )


def _check_softmax_scale(slot: Slot, config: Any, encoding: ConfigEncoding) -> None:
    """The saved settings must give, on plain loading, the softmax scale that the live attention modules have."""
    known = family(slot.config.model_type)
    if not known.softmax_mscale or not encoding.loads_plainly:
        return
    live, loaded = (softmax_scale(known, each.rope_parameters) for each in (slot.config, config))
    if not math.isclose(live, loaded):
        raise MethodError(
            f"{slot.config.model_type} builds its attention with a softmax scale from YaRN's mscale_all_dim: "
            f"x{live:.4f} in this model, x{loaded:.4f} in a model loaded with the new settings; "
            "give a factor and mscale_all_dim that keep it"
        )


# --- applying ---------------------------------------------------------------------------------------------------------


def replay(model: M, specs: tuple[PatchSpec, ...]) -> M:
    """Patch a model as saved or earlier specs ask, bottom first; the last one is on top."""
    *below, top = specs

    def make_spec(base: BaseRope) -> PatchSpec:
        if base.rotary.dim != top.rotary.dim:
            raise CheckpointError(
                f"the record of a patch is for {top.rotary.dim} rotated dims per head, this model has "
                f"{base.rotary.dim}; it was made for another model"
            )
        return top

    apply_plan(_plan(model, top.layers, make_spec, below=tuple(below)))
    return model


def apply_plan(plan: PatchPlan) -> None:
    """Change a model as planned: the only place where a patch changes anything.

    A patch that the model has gives way. A plan is for one use, and for the model as it was when the plan was made. The
    first patch that works with the cache on a class of decoders is tried with one, see continuation_probe.py.

    Raises:
        UnsupportedModelError: under the patch, this release of transformers goes on from a cache otherwise than it
            reads the same tokens in one forward; the model is as it was.
    """
    model, state, method = plan.model, plan.state, plan.state.spec.method
    hooks = _hooks_for(state.spec)
    for slot in plan.slots if hooks else ():
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
    """Return whether a method needs hooks, so that a model with its weights may refuse it."""
    return _hooks_for(spec) is not None


def _hooks_for(spec: PatchSpec) -> type[DecoderHooks] | None:
    """The hooks around a decoder that a method needs; None: a static method needs none."""
    if isinstance(spec.method, RemappingMethod):
        return RemappingHooks
    return LengthHooks if spec.method.depends_on_length(spec.rotary) else None


def _try_with_a_cache(plan: PatchPlan, hooks: type[DecoderHooks]) -> None:
    """Try the first patch of its kind on a class of decoders with a cache; the model is as it was afterwards."""
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
            apart = try_continuation(model, decoder, kind, spec.method)
        finally:
            take_off(model)
        check_difference(model, decoder, spec.method.name, *apart)
    except NotTriedError as reason:
        plan.state.notes += (f"Generating with a cache was not checked, because {reason}.",)
    except UnsupportedModelError:
        if before:
            replay(model, before)
        raise


def _install(plan: PatchPlan, modules: Sequence[PatchedSlot], hooks: type[DecoderHooks] | None) -> None:
    """Put the modules of a plan, its configs and its hooks into the model, in place of the patch that it has."""
    model, state = plan.model, plan.state
    take_off(model)
    _swap_configs(model, {id(swap.original): swap.patched for swap in state.configs})
    if isinstance(state.spec.method, RemappingMethod):
        # The attention modules run our function, by its name in their configs.
        register()
        attach(plan.attention, plan.slots[0].config)
        text = {id(plan.slots[0].config)}
        text |= {id(module.config) for module, _ in plan.attention if hasattr(module, "config")}
        for swap in state.configs:
            if id(swap.original) in text or id(swap.patched) in text:
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
    """`apply_plan`, with the warning of the plan, if it has one, at the line that asked for the patch."""
    apply_plan(plan)
    if plan.state.warning is not None:
        warnings.warn(plan.state.warning, stacklevel=3)


def take_off(model: nn.Module) -> None:
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
    """Give every module that holds one of these configs (by id) the other one."""
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in other:
            module.config = other[id(config)]
