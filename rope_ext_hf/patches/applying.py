"""Apply the plan of a patch to a model, and take patches off again.

Nothing of transformers is changed: a patched model gets a copy of its config, and a module of this package in each of
its slots, and both go when the patch is taken off.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from torch import nn

from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.models.decoder_arguments import check_names
from rope_ext_hf.models.patch_records import Patch
from rope_ext_hf.models.weights_at_hand import missing_weights
from rope_ext_hf.patches.forward.attention_function import register
from rope_ext_hf.patches.forward.attention_interface import ATTENTION_NAME
from rope_ext_hf.patches.forward.decoders import decoder_of, install_forwards
from rope_ext_hf.patches.forward.length_forward import LengthForward
from rope_ext_hf.patches.forward.patched_forward import DecoderForward
from rope_ext_hf.patches.forward.remapping_forward import RemappingForward, attach, detach
from rope_ext_hf.patches.held_lengths import hold_again
from rope_ext_hf.patches.planning import PatchPlan, plan_replay
from rope_ext_hf.patches.saved.adapters import stop_recording
from rope_ext_hf.patches.saved.generation_length import extend_generation
from rope_ext_hf.patches.saved.saving import attach_saving
from rope_ext_hf.patches.slots.patch_state import PatchState, swap_configs
from rope_ext_hf.patches.slots.patched_slot import (
    PatchedRotaryEmbedding,
    Slot,
    active_patches,
    check_filled,
    patch_state,
    patched_slots,
)
from rope_ext_hf.patches.slots.roformer import PatchedTable
from rope_ext_hf.patches.trials.continuation_probe import (
    TOKENS,
    NotTriedError,
    check_difference,
    kind_of_patch,
    small_layers,
    small_patch,
    try_continuation,
    was_tried,
)
from rope_ext_hf.patches.trials.refusals import check_batching, check_trainers_above
from rope_ext_hf.patches.whole_models import cover_models_above

M = TypeVar("M", bound=nn.Module)


def reapply(model: M, patches: Sequence[Patch], earlier: Sequence[PatchedRotaryEmbedding] = ()) -> M:
    """Patch a model, in place, as it was patched before or as the folder it comes from records, and return it.

    Args:
        model, patches: as `plan_replay` takes them.
        earlier: the modules that stood in the slots under this patch. The new modules take over their memory and their
            trained values.

    Raises:
        CheckpointError, MethodError, UnsupportedModelError: as `plan_replay` raises them.
    """
    apply_plan(plan_replay(model, patches))
    earlier_by_place = {slot.replaced: slot for slot in earlier}
    for slot in patched_slots(model):
        if slot.replaced in earlier_by_place:
            for name in slot.tables:
                slot.table(name).continue_from(earlier_by_place[slot.replaced].table(name))
    return model


def apply_plan(plan: PatchPlan) -> None:
    """Change a model as planned; a patch that the model already has is taken off first.

    A plan is for one use, and for the model as it was when the plan was made. The first patch of its kind on a class of
    decoders that works with the cache is tried on a few tokens with one (patches/trials/continuation_probe.py).

    Raises:
        MethodError: a value of the method is impossible for a model of these sizes.
        UnsupportedModelError: under the patch, the installed release of transformers gives another result where it goes
            on from a cache than where it reads the same tokens in one forward.

    When an exception is raised, the model is as it was before the call.
    """
    model, state, method = plan.model, plan.state, plan.state.patch.method
    forward = _forward_for(state.patch)
    if forward is not None:
        for slot in plan.slots:
            check_names(decoder_of(model, slot.parent))
    modules = [
        _make_replacement(slot, method, state.patch.rotary, state) for slot in plan.slots
    ]  # may still raise MethodError
    before, slots = active_patches(model), patched_slots(model)
    try:
        if forward is not None:
            _try_with_a_cache(plan, forward)
        _install(plan, modules, forward)
        if forward is not None and issubclass(forward, LengthForward):
            check_batching(model, modules)
        hold_again(modules)
        attach_saving(model, modules[0])
        extend_generation(model, modules[0])
    except BaseException:
        remove_patch(model)
        if before:
            reapply(model, before, slots)
        raise
    modules[0].before_use = _before_use
    modules[0].hooks.append(modules[0].register_state_dict_pre_hook(cover_models_above))  # type: ignore[no-untyped-call]


def _make_replacement(slot: Slot, method: RopeMethod, rotary: Rotary, state: PatchState) -> PatchedRotaryEmbedding:
    """Return the module that a patch will put in a slot, the place of a rotary module; do not change the model yet."""
    kind = PatchedTable if slot.is_table else PatchedRotaryEmbedding  # RoFormer has a table in its weights there
    return kind(slot, method, rotary, state)


def _before_use(slot: PatchedRotaryEmbedding) -> None:
    """Check the trainers of a patched model, and extend the patch of a part to the whole model."""
    check_trainers_above(slot)
    cover_models_above(slot)


def changes_forward(patch: Patch) -> bool:
    """Return whether a patch changes the decoder's forward; only then does `patch` try it by running tokens."""
    return _forward_for(patch) is not None


def _forward_for(patch: Patch) -> type[DecoderForward] | None:
    """Return the class of the forward that a patch puts on each decoder; None for a static method."""
    if isinstance(patch.method, RemappingMethod):
        return RemappingForward
    return LengthForward if patch.method.depends_on_length(patch.rotary) else None


def _try_with_a_cache(plan: PatchPlan, forward: type[DecoderForward]) -> None:
    """Test whether the first patch of its kind on a class of decoders computes the same with a cache as without.

    Afterwards the model may lack the patch that it had, which the patch that is being applied replaces anyway.
    """
    model, patch = plan.model, plan.state.patch
    slot = next(slot for slot in plan.slots if not slot.idle)
    decoder = decoder_of(model, slot.parent)
    kind = kind_of_patch(decoder, forward, patch.method)
    if was_tried(kind):
        return
    try:
        missing = missing_weights(model)
        if missing:
            raise NotTriedError(missing)
        method, rotary = small_patch(patch.method, patch.rotary)
        state = replace(plan.state, patch=replace(patch, method=method, rotary=rotary, target_length=TOKENS))
        layers = small_layers(plan.attention, patch.method, method, rotary)
        small = PatchPlan(plan.rope, state, layers)
        try:
            _install(small, [_make_replacement(slot, method, rotary, state) for slot in plan.slots], forward)
            difference = try_continuation(model, decoder, kind, patch.method)
        finally:
            remove_patch(model)
        check_difference(model, decoder, patch.method.name, *difference)
    except NotTriedError as reason:
        plan.state.notes += (f"Generating with a cache was not checked, because {reason}.",)


def _install(plan: PatchPlan, modules: Sequence[PatchedRotaryEmbedding], forward: type[DecoderForward] | None) -> None:
    """Put the modules, configs and forwards of a plan into its model, and take off a patch that the model has."""
    model, state = plan.model, plan.state
    if patch_state(model) is not None:
        remove_patch(model)
    swap_configs(model, {id(swap.original): swap.patched for swap in state.configs})
    if isinstance(state.patch.method, RemappingMethod):
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
    for layer, hook in plan.unrotated:
        modules[0].hooks.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    if forward is not None:
        install_forwards(model, forward)


def patch_as_planned(plan: PatchPlan) -> None:
    """Apply a plan, then issue its warning, if any, for the line two calls up (the line of the user's call)."""
    apply_plan(plan)
    if plan.state.warning is not None:
        warnings.warn(plan.state.warning, stacklevel=3)


def remove_patch(model: nn.Module) -> None:
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
            if isinstance(child, PatchedRotaryEmbedding):
                setattr(parent, attribute, child.replaced)
                for hook in child.hooks:
                    hook.remove()
    for swap in configs:
        swap.sync_user_changes()
    swap_configs(model, {id(swap.patched): swap.original for swap in configs})
    stop_recording(model)
    detach(model)
