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
from rope_ext_hf.methods.registry import class_of, resolve_method, stated_length
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.models.config_keys import PATCH_KEY
from rope_ext_hf.models.families import family, rotates_back
from rope_ext_hf.models.layer_types import Layers, layers_text
from rope_ext_hf.models.patch_records import Patch, replaced_note, undo_saved_patch
from rope_ext_hf.models.patched_config import ConfigEncoding, config_encoding, softmax_scale, write_rope
from rope_ext_hf.models.recipes import recipe_warning
from rope_ext_hf.models.weights_at_hand import on_meta_device
from rope_ext_hf.patches.chosen_layers import check_attention_factors, does_not_rotate, drop_layer_by_layer
from rope_ext_hf.patches.forward.attention_interface import Layer
from rope_ext_hf.patches.forward.attention_probe import probe_layers
from rope_ext_hf.patches.model_rope import ModelRope, check_pairing
from rope_ext_hf.patches.slots.patch_state import ConfigSwap, PatchState, copied_configs, stating_rope
from rope_ext_hf.patches.slots.patched_slot import Slot, patch_state
from rope_ext_hf.patches.slots.roformer import check_table_method
from rope_ext_hf.patches.slots.unrotated_layers import DroppedRotation
from rope_ext_hf.patches.traps import theta_traps, traps

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class PatchPlan:
    """Everything that a patch changes in one model, worked out by `plan_patch`; `apply_plan` makes the changes.

    Attributes:
        rope: the rope of the model as it was before any patch.
        state: what the patched model will remember. `state.patch` is the patch with every parameter filled in, and
            `state.configs` are copies of the model's configs, in which the method and the extended length are written.
        attention: every attention module, and how it is to attend; empty for a frequency method.
        unrotated: the modules whose cos and sin a hook replaces, with the hooks, where the rotation of some layers is
            dropped and their rotary module serves others as well.
    """

    rope: ModelRope
    state: PatchState
    attention: tuple[tuple[nn.Module, Layer], ...] = ()
    unrotated: tuple[tuple[nn.Module, DroppedRotation], ...] = ()

    @property
    def model(self) -> nn.Module:
        """The model that the plan is for."""
        assert self.rope.model is not None
        return self.rope.model

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The places of the rotary modules that are replaced."""
        return self.rope.slots


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
    drops_rotation = layers is not None and class_of(method).drops_rotation
    rope = _read_rope(model, layers, drops_rotation=drops_rotation).extending(over, context_length)
    resolved = resolve_method(method, rope.rotary, factor=factor, target_length=target_length, **params)
    length = target_length or stated_length(resolved, rope.rotary, factor)
    if drops_rotation:
        check_attention_factors(rope, resolved)
    patch = Patch(resolved, rope.rotary, length, native, layers)
    plan = _plan(rope, patch, rope.below, live=rope.is_patched)
    if rope.patches and not rope.is_patched and over != "patched":  # those that the folder of the model records
        replaced = replaced_note(rope.patches, plan.state.patch)
        if replaced is not None:
            state = plan.state
            warning = replaced if state.warning is None else f"{replaced}. {capital(state.warning)}"
            plan = replace(plan, state=replace(state, notes=(*state.notes, capital(replaced)), warning=warning))
    return plan


def plan_replay(model: nn.Module, patches: Sequence[Patch]) -> PatchPlan:
    """Return the plan that patches a model as it was patched before, or as the folder it comes from records.

    Args:
        model: the model.
        patches: the patches, bottom first; the plan puts the last one on, over those before it.

    Raises:
        CheckpointError: the last patch is for another number of rotated dims.
        MethodError, UnsupportedModelError: as `plan_patch` raises them.
    """
    *below, top = patches
    rope = _read_rope(model, top.layers, drops_rotation=top.layers is not None and top.method.drops_rotation)
    if rope.rotary.dim != top.rotary.dim:
        raise CheckpointError(
            f"the record of a patch is for {top.rotary.dim} rotated dims per head, and this model has "
            f"{rope.rotary.dim}; the record was made for another model"
        )
    return _plan(rope, top, tuple(below), live=True)


def _read_rope(model: nn.Module, layers: tuple[str | int, ...] | None, *, drops_rotation: bool) -> ModelRope:
    """Return what a model says of its rope; raise an error where a method for `layers` has nothing to extend.

    `drops_rotation`: the method makes every angle 0 in the named layers, which may have several rotary embeddings then;
    the patch is recorded with the first one.
    """
    check_pairing(model)
    state = patch_state(model)
    for swap in state.configs if state else ():
        swap.sync_user_changes()  # changes that the user made in the config of the patched model stay
    rope = ModelRope.of_model(model, layers)
    if not rope.layer_types:
        raise rope.layers.nothing_to_extend() if layers is None else does_not_rotate(rope, layers)
    return replace(rope, stated=rope.stated[:1]) if drops_rotation else rope


def _plan(rope: ModelRope, patch: Patch, below: tuple[Patch, ...], *, live: bool) -> PatchPlan:
    """Return the plan of a patch.

    Args:
        rope: what the model says of its rope.
        patch: the patch, whose method may still lack parameters that follow from the model.
        below: the patches underneath, bottom first.
        live: whether these are in the model, and come back when this one is taken off.
    """
    model, slots, layers = rope.model, rope.slots, rope.slots[0].layers
    assert model is not None
    if below and below[-1].layers != patch.layers:
        raise MethodError(
            f"over='patched' keeps the layers of the present patch, {below[-1].layers or 'the default'}; got "
            f"layers={patch.layers}"
        )
    layers.check_method(patch.method, patch.layers)
    method = rope.bind(patch.method, patch.target_length, patch.rotary)
    patch = replace(patch, method=method, target_length=patch.target_length or method.extended_length(patch.rotary))
    _check_method(rope, patch)
    unrotated: tuple[tuple[nn.Module, DroppedRotation], ...] = ()
    unrotated_note = None
    if patch.layers is not None:
        unrotated = drop_layer_by_layer(rope, patch)
    if unrotated:  # the rotary modules stay as they are, and with them the length that the model is for
        rope = replace(rope, slots=tuple([replace(slot, scaled_layers=()) for slot in slots]))
        patch = replace(patch, target_length=patch.target_length or patch.rotary.context_length)
        dropped = layers_text({hook.layer for _, hook in unrotated})
        unrotated_note = f"The rotation of {dropped} is dropped, as the wavelengths say; other layers rotate as before."
    attention: list[tuple[nn.Module, Layer]] = []
    if isinstance(method, RemappingMethod) and not on_meta_device(model):
        attention = probe_layers(model, slots, method, patch.rotary)
    configs = _copied_configs(model, slots[0].config)
    encoding = _write_configs(rope, configs, patch, below)
    length = encoding.extended_length or patch.rotary.context_length
    sliding, every_layer = None, False
    if layers.window and not unrotated:
        sliding, every_layer = slots[0].sliding_note(length, named=patch.layers is not None)
    theta = theta_traps(rope)
    notes = [
        sliding,
        unrotated_note,
        layers.unrotated_note(method, patch.rotary),
        *[slots[0].as_loaded[layer_type].note for layer_type in slots[0].scaled_layers],
        loading_note(model),
        *theta,
        *traps(rope, method, patch.rotary, patched=True),
    ]
    unlike_published = recipe_warning(rope.config, patch.rotary, method, patch.target_length)
    warning = sliding if every_layer else next(iter(theta), unlike_published)
    if method.warning is not None:
        warning = method.warning if warning is None else f"{method.warning}. {capital(warning)}"
    state = PatchState(
        patch,
        encoding,
        rope.rule,
        notes=tuple([note for note in notes if note]),
        warning=warning,
        configs=configs,
        below=below if live else (),
    )
    return PatchPlan(rope, state, tuple(attention), unrotated)


def _copied_configs(model: nn.Module, text_config: Any) -> list[ConfigSwap]:
    """Return a copy of every config object in a model, as it was before any patch."""
    state = patch_state(model)
    unpatched = {id(swap.patched): swap.original for swap in state.configs} if state else {}
    return copied_configs(model, unpatched, [text_config])


def _write_configs(
    rope: ModelRope, configs: Sequence[ConfigSwap], patch: Patch, below: tuple[Patch, ...]
) -> ConfigEncoding:
    """Write a patch over those `below`, bottom first, into copied configs, and return how they state it."""
    scaled = [bool(slot.scaled_layers) for slot in rope.slots if not slot.idle]
    # Settings for all layers (None) cannot state a method for some of several rotary modules, and no settings state one
    # that is put into layers while their rotary modules stay as they are.
    writable = all(scaled) or (any(scaled) and None not in rope.layer_types)
    encoding = config_encoding(rope.config, patch, rope.layer_types[0], writable=writable)
    for swap in stating_rope(configs, [slot.config.model_type for slot in rope.slots]):
        if PATCH_KEY in vars(swap.patched):  # the folder that the model was loaded from records a patch
            undo_saved_patch(swap.patched)
        write_rope(swap.patched, encoding, patch, below, list(rope.layer_types))
    if family(rope.config.model_type).softmax_mscale and encoding.loads_plainly:
        written = next(swap.patched for swap in configs if swap.original is rope.slots[0].config)
        _check_softmax_scale(rope.slots[0].config, written)
    return encoding


# --- checks ---------------------------------------------------------------------------------------------------------


def _check_method(rope: ModelRope, patch: Patch) -> None:
    """Raise an error if a model cannot run a method with its parameters."""
    method, slots = patch.method, rope.slots
    if any(slot.is_table for slot in slots):  # RoFormer has no module that computes angles, but a table of them
        check_table_method(slots, method, patch.rotary)
    sets = sum(len(slot.scaled_layers) for slot in slots)
    if method.trainable and sets > 1:
        raise UnsupportedModelError(
            f"{method.name} trains one set of frequencies, and {type(rope.model).__name__} has {sets}, for different "
            "layers; choose another method, or one set with layers=..."
        )
    # Attention that rotates its values and rotates its output back would multiply the output by the attention factor.
    if rotates_back(rope.config.model_type):
        factor, own = method.frequencies(patch.rotary).attention_factor, patch.rotary.attention_factor
        if not math.isclose(factor, own):
            raise MethodError(
                f"the attention of {rope.config.model_type!r} rotates values, too, so an attention factor of "
                f"{factor:.4f} would change their size; give attention_factor={own:g}"
            )


def _check_softmax_scale(config: Any, written: Any) -> None:
    """Raise MethodError if attention would get another softmax scale from the config that a patch writes.

    The attention of DeepSeek and its kin takes its softmax scale from the rope settings when it is built, so that a
    patch of the live model does not change it, and a saved folder must not either.
    """
    known = family(config.model_type)
    live, loaded = softmax_scale(known, config.rope_parameters), softmax_scale(known, written.rope_parameters)
    if not math.isclose(live, loaded):
        raise MethodError(
            f"{config.model_type} builds its attention with a softmax scale from YaRN's mscale_all_dim: "
            f"x{live:.4f} in this model, x{loaded:.4f} in a model loaded with the new settings; "
            "give a factor and mscale_all_dim that keep it"
        )
