"""Put a method into a live model, and take it out again.

    model = patch(model, "yarn", factor=8)
    unpatch(model)

Nothing of transformers is changed: a patched model gets its own copy of its config and our module in its slots, and
both go when it is unpatched. Everything that can fail is worked out before the model is touched.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.adapters import attach_recording, detach_recording
from rope_ext_hf.patches.angle_tables import check_method, fill_slot
from rope_ext_hf.patches.attention_hooks import RemappingHooks, attach, detach, register
from rope_ext_hf.patches.attention_interface import ATTENTION_NAME
from rope_ext_hf.patches.attention_probe import probe_layers
from rope_ext_hf.patches.config import NativeForm, native_form, softmax_scale, write_rope
from rope_ext_hf.patches.describing import sliding_notes
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.forward_hooks import install_forward_hooks
from rope_ext_hf.patches.geometry import (
    Underneath,
    bind_to,
    check_pairing,
    stated_length,
    undo_saved_patch,
    what_is_underneath,
)
from rope_ext_hf.patches.layer_types import Layers, rotating_layers
from rope_ext_hf.patches.length_hooks import LengthHooks
from rope_ext_hf.patches.patch_record import ConfigSwap, Record
from rope_ext_hf.patches.patch_step import PatchStep
from rope_ext_hf.patches.saving import RewritingSave
from rope_ext_hf.patches.slots import PatchedSlot, Slot, find_slots, patched_slots, present_steps
from rope_ext_hf.rotary.embedding import RotaryEmbedding

__all__ = ["fixed_length", "patch", "patched", "patched_method", "replay", "reset", "unpatch"]

M = TypeVar("M", bound=nn.Module)


def patch(
    model: M,
    method: str | RopeMethod,
    *,
    factor: float | None = None,
    target_length: int | None = None,
    over: str = "own",
    context_length: int | None = None,
    layers: Layers | None = None,
    native: bool = False,
    **params: Any,
) -> M:
    """Change the RoPE method of a loaded model, in place; a patched model gets the new method instead of the old.

    Args:
        model: a transformers model with rotary embeddings, bare or inside PEFT, DDP and the like; the whole model,
            because a decoder taken out of it has no hold on the config that is saved.
        method: a name of `rope_ext_hf.list_methods()`, or a method object.
        factor: how many times its context length the model is to reach. Where the method has no factor, it states the
            extended length, and parameters that follow from that are fitted.
        target_length: the same in tokens.
        over: what is extended. "own": the model as loaded, with the scaling it was trained under. "original": the model
            without that scaling, counted from its original length. "patched": the present patch, live or recorded in
            the folder the model was loaded from, for a model that was trained under it.
        context_length: the length in tokens that the model as loaded is for, where its config misleads.
        layers: the layers to change, by layer type or by index, in a model that has several rotary embeddings; layers
            that share one change together. None: the layers that attend to everything before them.
        native: save in a native form of transformers even where that is known to behave otherwise ("dynamic").
        **params: further parameters of the method.

    Returns:
        The model. Its config now carries the method and the extended length, so that `generate`, `save_pretrained` and
        serving engines agree; other models that shared its config keep theirs.

    Raises:
        MethodError: unknown method or parameter, a value it cannot work with, or layers that do not exist.
        UnsupportedModelError: a model without rotary embeddings, or with some that cannot be replaced; layers that
            share theirs with others.

    The model is unchanged when an exception is raised.
    """

    def resolve(rotary: Rotary) -> RopeMethod:
        return resolve_method(method, rotary, factor=factor, target_length=target_length, **params)

    def step(under: Underneath) -> PatchStep:
        resolved = resolve(under.rotary)
        length = target_length or stated_length(resolved, under.rotary, factor)
        return PatchStep(resolved, under.rotary, length, native, chosen)

    chosen = None if layers is None else (layers,) if isinstance(layers, (str, int)) else tuple(layers)
    record = _install(model, step, over=over, context_length=context_length, layers=chosen)
    if record.warning is not None:
        warnings.warn(record.warning, stacklevel=2)
    return model


def replay(model: M, steps: tuple[PatchStep, ...]) -> M:
    """Patch a model as saved or earlier steps say, bottom first; the last one is on top.

    Raises:
        MethodError, UnsupportedModelError: as `patch` does.
    """
    top, below = steps[-1], steps[:-1]
    _install(model, lambda under: top, below=below, layers=top.layers)
    return model


def _install(
    model: nn.Module,
    make_step: Callable[[Underneath], PatchStep],
    *,
    over: str = "own",
    context_length: int | None = None,
    below: tuple[PatchStep, ...] = (),
    layers: tuple[str | int, ...] | None = None,
) -> Record:
    """`patch`, for a step that is known once it is known what lies underneath."""
    check_pairing(model)
    slots = find_slots(model, layers)
    first = slots[0]
    configs = _copied_configs(model, first.config)
    config = next(swap.patched for swap in configs if swap.original is first.config)
    undo_saved_patch(config)
    rotating, full = rotating_layers(config)
    if full and not rotating and layers is None:
        raise UnsupportedModelError(
            f"none of the {full} full-attention layers of this {config.model_type!r} model rotates its queries and "
            "keys; a RoPE method would change its sliding-window layers only, which see no further for it"
        )
    under = what_is_underneath(model, slots, config, over, context_length)
    step, live, saved = make_step(under), below or under.live, below or under.saved
    if saved and saved[-1].layers != step.layers:
        raise MethodError(
            f"over='patched' keeps the layers of the present patch, {saved[-1].layers or 'the default'}; got layers="
            f"{step.layers}"
        )
    bound = bind_to(step.method, step.rotary, first.config.model_type, step.target_length)
    target_length = step.target_length or bound.extended_length(step.rotary)
    step = replace(step, method=bound, target_length=target_length)
    method, rotary = step.method, step.rotary

    check_method(slots, method, rotary)
    if method.trainable and (sets := sum(len(slot.scaled_layers) for slot in slots)) > 1:
        raise UnsupportedModelError(
            f"{method.name} trains one set of frequencies, and {type(model).__name__} has {sets}, for different layers"
        )
    attending: list[Any] = []
    if isinstance(method, RemappingMethod) and not _on_meta_device(model):
        attending = probe_layers(model, slots, method, rotary)
    _check_values(first.config.model_type, step)
    labels = list(dict.fromkeys(label for slot in slots for label in slot.scaled_layers))
    one_for_all = None in labels and not all(slot.scaled_layers or slot.idle for slot in slots)
    form = native_form(config, step, labels[0], writable=not one_for_all)
    write_rope(config, form, step, saved, labels)
    for other in _other_configs(slots, configs):
        undo_saved_patch(other)
        write_rope(other, form, step, saved, labels)
    _check_softmax_scale(first, config, form)
    note, every_layer = sliding_notes(first, form.extended_length or rotary.context_length)
    notes = tuple(
        text for text in (note, *(slot.native[name].note for slot in slots[:1] for name in slot.scaled_layers)) if text
    )
    record = Record(step, form, under.rule, notes, note if every_layer else None, configs, live)
    fillings = [fill_slot(slot, method, rotary, record) for slot in slots]

    _strip(model)
    _swap_configs(model, {id(swap.original): swap.patched for swap in configs})
    if isinstance(method, RemappingMethod):
        register()
        attach(attending)
        text = {id(first.config), *(id(module.config) for module, _ in attending if hasattr(module, "config"))}
        for swap in configs:
            if id(swap.original) in text or id(swap.patched) in text:
                swap.patched._attn_implementation = ATTENTION_NAME
    for swap in configs:
        values = {k: v for k, v in vars(swap.patched).items() if not hasattr(v, "model_type")}
        swap.written = copy.deepcopy(values)
    for slot, filling in zip(slots, fillings, strict=True):
        filling.train(slot.module.training)
        setattr(slot.parent, slot.attribute, filling)
        if "config" in slot.module.__dict__:
            slot.module.config = slot.config  # the replaced module keeps the config it was built from
    if isinstance(method, RemappingMethod):
        install_forward_hooks(model, RemappingHooks)
    elif method.depends_on_length(rotary):
        install_forward_hooks(model, LengthHooks)
    RewritingSave.attach(model)
    attach_recording(model, fillings[0])
    return record


def unpatch(model: M) -> M:
    """Take the last patch off: modules, configs, hooks. A model that is not patched is left alone.

    Logits, config and state_dict keys are bit for bit those of a model that was never patched and went through the
    same `.to` calls. A patch that was put over another one (over="patched") gives way to that one.
    """
    below = present_steps(model)[:-1]
    _strip(model)
    return replay(model, below) if below else model


def _strip(model: nn.Module) -> None:
    """Take every patch off."""
    for parent in list(model.modules()):
        for attribute, child in list(parent.named_children()):
            if isinstance(child, PatchedSlot):
                setattr(parent, attribute, child.replaced)
                for config in child.record.configs:
                    config.sync_user_changes()
                _swap_configs(model, {id(config.patched): config.original for config in child.record.configs})
                for hook in child.hooks:
                    hook.remove()
    RewritingSave.detach(model)
    detach_recording(model)
    detach(model)


@contextmanager
def patched(model: M, method: str | RopeMethod, **kwargs: Any) -> Iterator[M]:
    """`patch` for the length of a `with` block; what the model had before comes back, also after an exception."""
    before = present_steps(model)
    patch(model, method, **kwargs)
    try:
        yield model
    finally:
        _strip(model)
        if before:
            replay(model, before)


@contextmanager
def fixed_length(model: M, length: int) -> Iterator[M]:
    """Inside, length-dependent methods use the frequencies of an input of `length` tokens for every forward.

        with fixed_length(model, prompt_length + max_new_tokens):
            model.generate(...)

    Static methods are not affected.

    Raises:
        MethodError: a length below 1.
        UnsupportedModelError: an unpatched model whose own config is length-dependent; patch it first.
    """
    if not isinstance(length, int) or length < 1:
        raise MethodError(f"length must be a whole number of at least 1 token, got {length!r}")
    slots = patched_slots(model)
    own = (
        {}
        if slots
        else {
            rope.method.name
            for slot in find_slots(model)
            for rope in slot.native.values()
            if rope.method.depends_on_length(rope.plain)
        }
    )
    if own:
        raise UnsupportedModelError(
            f"this model's own {min(own)} follows the input inside transformers and cannot be held from here; "
            "patch it first: rope_ext_hf.patch(model, ...)"
        )
    with ExitStack() as stack:
        for table in _tables(model):
            if table.method.depends_on_length(table.rotary):
                stack.enter_context(table.at_length(length))
        yield model


def reset(model: M) -> M:
    """Forget the longest input a sticky method has met."""
    for table in _tables(model):
        table.reset()
    return model


def _on_meta_device(model: nn.Module) -> bool:
    """Whether a model's weights are not there, and no hook brings them when they are needed."""
    return all(p.device.type == "meta" for p in model.parameters()) and not any(
        hasattr(module, "_hf_hook") for module in model.modules()
    )


def _tables(model: nn.Module) -> list[RotaryEmbedding]:
    return [
        module
        for slot in patched_slots(model)
        for module in slot.tables.values()
        if isinstance(module, RotaryEmbedding)
    ]


def _copied_configs(model: nn.Module, text_config: Any) -> list[ConfigSwap]:
    """A copy of every config object in a model, linked to each other as the originals are."""
    for slot in patched_slots(model):
        for config in slot.record.configs:
            config.sync_user_changes()
    unpatched = {id(config.patched): config.original for slot in patched_slots(model) for config in slot.record.configs}
    originals = {id(text_config): text_config}
    for module in model.modules():
        config = module.__dict__.get("config")
        if hasattr(config, "model_type"):
            config = unpatched.get(id(config), config)
            originals[id(config)] = config
    memo: dict[int, Any] = {}
    return [ConfigSwap(copy.deepcopy(config, memo), config) for config in originals.values()]


def _swap_configs(model: nn.Module, other: Mapping[int, Any]) -> None:
    """Give every module that holds one of these configs (by id) the other one."""
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in other:
            module.config = other[id(config)]


def patched_method(model: nn.Module) -> RopeMethod | None:
    """The method `patch` put into a model, None if it runs as loaded."""
    return next((step.method for step in reversed(present_steps(model))), None)


def _other_configs(slots: Sequence[Slot], configs: Sequence[ConfigSwap]) -> list[Any]:
    """The copies of further text configs that slots were built from (T5Gemma has one for each of its two halves)."""
    every = {id(slot.config) for slot in slots} - {id(slots[0].config)}
    return [swap.patched for swap in configs if id(swap.original) in every]


def _check_values(model_type: str, step: PatchStep) -> None:
    """An attention factor would multiply the output of attention that rotates its values and rotates them back."""
    if not family(model_type).rotates_back:
        return
    factor, own = step.method.frequencies(step.rotary).attention_factor, step.rotary.attention_factor
    if not math.isclose(factor, own):
        raise MethodError(
            f"the attention of {model_type!r} rotates values, too, so an attention factor of {factor:.4f} would change "
            f"their size; give attention_factor={own:g}"
        )


def _check_softmax_scale(slot: Slot, config: Any, form: NativeForm) -> None:
    """A native form must rebuild, on loading, the softmax scale that the live attention modules have."""
    known = family(slot.config.model_type)
    if not known.softmax_mscale or not form.loads_plainly:
        return
    live, loaded = (softmax_scale(known, each.rope_parameters) for each in (slot.config, config))
    if not math.isclose(live, loaded):
        raise MethodError(
            f"{slot.config.model_type} builds its attention with a softmax scale from YaRN's mscale_all_dim: "
            f"x{live:.4f} in this model, x{loaded:.4f} in a model loaded with the new settings; "
            "give a factor and mscale_all_dim that keep it"
        )
