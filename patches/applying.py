"""Apply plans to live models, and take patches off again.

Nothing of transformers is changed: a patched model gets its own copy of its config and our module in its slots, and
both go when the patch is taken off.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.adapters import stop_recording
from rope_ext_hf.patches.angle_tables import fill_slot
from rope_ext_hf.patches.attention_hooks import RemappingHooks, attach, detach, register
from rope_ext_hf.patches.attention_interface import ATTENTION_NAME
from rope_ext_hf.patches.forward_hooks import install_forward_hooks
from rope_ext_hf.patches.length_hooks import LengthHooks
from rope_ext_hf.patches.length_profiles import ProfileHooks, install_generate
from rope_ext_hf.patches.patch_spec import PatchSpec
from rope_ext_hf.patches.planning import PatchPlan, plan_replay
from rope_ext_hf.patches.saving import attach_saving
from rope_ext_hf.patches.slots import PatchedSlot, patch_state

M = TypeVar("M", bound=nn.Module)


def replay(model: M, specs: tuple[PatchSpec, ...]) -> M:
    """Patch a model as saved or earlier specs ask, bottom first; the last one is on top."""
    apply_plan(plan_replay(model, specs))
    return model


def apply_plan(plan: PatchPlan) -> None:
    """Change a model as planned: the only place where a patch changes anything.

    A patch that the model has gives way. A plan is for one use, and for the model as it was when the plan was made.
    """
    model, state, method = plan.model, plan.state, plan.state.spec.method
    modules = [fill_slot(slot, method, state.spec.rotary, state) for slot in plan.slots]  # may still refuse a value
    take_off(model)
    _swap_configs(model, {id(swap.original): swap.patched for swap in state.configs})
    if isinstance(method, RemappingMethod):
        _attend_by(plan)
    for swap in state.configs:
        swap.note_written()
    for slot, module in zip(plan.slots, modules, strict=True):
        module.train(slot.module.training)
        setattr(slot.parent, slot.attribute, module)
        if "config" in slot.module.__dict__:
            slot.module.config = slot.config  # the replaced module keeps the config it was built from
    if isinstance(method, RemappingMethod):
        install_forward_hooks(model, RemappingHooks)
    elif method.one_per_cache:
        install_forward_hooks(model, ProfileHooks)
        install_generate(model, modules[0])
    elif method.depends_on_length(state.spec.rotary):
        install_forward_hooks(model, LengthHooks)
    attach_saving(model, modules[0])


def patch_as_planned(plan: PatchPlan) -> None:
    """`apply_plan`, with the warning of the plan, if it has one, at the line that asked for the patch."""
    apply_plan(plan)
    if plan.state.warning is not None:
        warnings.warn(plan.state.warning, stacklevel=3)


def _attend_by(plan: PatchPlan) -> None:
    """Have the attention modules of a plan run our attention function, by the name in their configs."""
    register()
    attach(plan.attention, plan.slots[0].config)
    text = {id(plan.slots[0].config)}
    text |= {id(module.config) for module, _ in plan.attention if hasattr(module, "config")}
    for swap in plan.state.configs:
        if id(swap.original) in text or id(swap.patched) in text:
            swap.patched._attn_implementation = ATTENTION_NAME


def take_off(model: nn.Module) -> None:
    state = patch_state(model)
    configs = state.configs if state else []
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
