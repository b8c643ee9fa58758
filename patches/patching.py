"""Put a method into a live model, take it out again, and say what is there.

    model = patch(model, "yarn", factor=8)
    print(describe(model))
    unpatch(model)

Nothing of transformers is changed: a patched model gets its own copy of its config and our module in its slots, and
both go when it is unpatched. Everything that can fail is worked out before the model is touched.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from torch import nn

from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.attention_hooks import RemappingHooks, attach, detach, register
from rope_ext_hf.patches.attention_interface import ATTENTION_NAME
from rope_ext_hf.patches.attention_probe import probe_layers
from rope_ext_hf.patches.config import PLUGIN_PREFIX, RECORD, write_rope
from rope_ext_hf.patches.describing import EVERY_LAYER, notes_of
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.forward_hooks import install_forward_hooks
from rope_ext_hf.patches.geometry import check_pairing, own_method, shared_geometry, undo_saved_patch
from rope_ext_hf.patches.length_hooks import LengthHooks
from rope_ext_hf.patches.patch_record import ConfigSwap, Record
from rope_ext_hf.patches.saving import PluginSave
from rope_ext_hf.patches.slots import PatchedSlot, Slot, find_slots, patched_slots
from rope_ext_hf.rotary.embedding import RotaryEmbedding

__all__ = ["fixed_length", "install", "patch", "patched", "patched_method", "reset", "unpatch"]

M = TypeVar("M", bound=nn.Module)


def patch(
    model: M,
    method: str | RopeMethod,
    *,
    factor: float | None = None,
    target_length: int | None = None,
    native: bool = False,
    **params: Any,
) -> M:
    """Change the RoPE method of a loaded model, in place; a patched model gets the new method instead of the old.

    Args:
        model: a transformers model with rotary embeddings, bare or inside PEFT, DDP and the like; the whole model,
            because a decoder taken out of it has no hold on the config that is saved.
        method: a name of `rope_ext_hf.list_methods()`, or a method object.
        factor: how many times the trained length the model is to reach.
        target_length: the same in tokens. For methods without a factor it states the extended length.
        native: save in a native form of transformers even where that is known to behave otherwise ("dynamic").
        **params: further parameters of the method.

    Returns:
        The model. Its config now says the method and the extended length, so that `generate`, `save_pretrained` and
        serving engines agree; other models that shared its config keep theirs.

    Raises:
        MethodError: unknown method or parameter, or a value it cannot work with.
        UnsupportedModelError: a model without rotary embeddings, or with some that cannot be replaced.

    The model is unchanged when an exception is raised.
    """

    def resolve(rotary: Rotary) -> RopeMethod:
        return resolve_method(method, rotary, factor=factor, target_length=target_length, **params)

    record = install(model, resolve, target_length, native)
    if any(note.startswith(EVERY_LAYER) for note in record.notes):
        warnings.warn(next(note for note in record.notes if note.startswith(EVERY_LAYER)), stacklevel=2)
    return model


def install(
    model: nn.Module, resolve: Callable[[Rotary], RopeMethod], target_length: int | None, native: bool
) -> Record:
    """`patch`, for a method that is known once the geometry is."""
    check_pairing(model)
    slots = find_slots(model)
    first = slots[0]
    known = family(first.config.model_type)
    configs = _copied_configs(model, first.config)
    own = next(config.now for config in configs if config.before is first.config)
    undo_saved_patch(own)

    rotary = shared_geometry(slots, own)
    method = resolve(rotary)
    layers: list[Any] = []
    if isinstance(method, RemappingMethod):
        method = method.bind(rotary, *own_method(first), target_length)
        layers = [] if _on_meta_device(model) else probe_layers(model, slots, method, rotary)
    rope_type = write_rope(own, rotary, method, known, first.scaled_layers, target_length, native)
    if known.softmax_mscale:
        _check_softmax_scale(first, own, rope_type)
    extended_length = getattr(own, RECORD)["target_length"]
    notes = notes_of(first, extended_length or rotary.trained_length)
    record = Record(method, target_length, native, rotary, rope_type, extended_length, notes, configs)
    fillings = [PatchedSlot(slot, method, rotary, record) for slot in slots]

    unpatch(model)
    _swap_configs(model, {id(config.before): config.now for config in configs})
    if isinstance(method, RemappingMethod):
        register()
        attach(layers)
        for config in configs:
            config.now._attn_implementation = ATTENTION_NAME
    for config in configs:
        config.written = copy.deepcopy({k: v for k, v in vars(config.now).items() if not hasattr(v, "model_type")})
    for slot, filling in zip(slots, fillings, strict=True):
        filling.train(slot.module.training)
        setattr(slot.parent, slot.attribute, filling)
        if "config" in slot.module.__dict__:
            slot.module.config = slot.config  # what was replaced keeps what it was built from
    if isinstance(method, RemappingMethod):
        install_forward_hooks(model, RemappingHooks)
    elif method.length_dependent:
        install_forward_hooks(model, LengthHooks)
    if rope_type.startswith(PLUGIN_PREFIX) and known.rope_types is not None:
        PluginSave.attach(model)
    return record


def unpatch(model: M) -> M:
    """Put everything back: modules, configs, hooks. A model that is not patched is left alone.

    Logits, config and state_dict keys are bit for bit those of a model that was never patched and went through the
    same `.to` calls.
    """
    for parent in list(model.modules()):
        for attribute, child in list(parent.named_children()):
            if isinstance(child, PatchedSlot):
                setattr(parent, attribute, child.replaced)
                for config in child.record.configs:
                    config.sync_user_changes()
                _swap_configs(model, {id(config.now): config.before for config in child.record.configs})
                for hook in child.hooks:
                    hook.remove()
    PluginSave.detach(model)
    detach(model)
    return model


@contextmanager
def patched(model: M, method: str | RopeMethod, **kwargs: Any) -> Iterator[M]:
    """`patch` for the length of a `with` block; what the model had before comes back, also after an exception."""
    before: Record | None = next((slot.record for slot in patched_slots(model)), None)
    patch(model, method, **kwargs)
    try:
        yield model
    finally:
        unpatch(model)
        if before is not None:
            install(model, lambda rotary: before.method, before.target_length, before.native)


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
            method.name for slot in find_slots(model) for _, method in slot.native.values() if method.length_dependent
        }
    )
    if own:
        raise UnsupportedModelError(
            f"this model's own {min(own)} follows the input inside transformers and cannot be held from here; "
            "patch it first: rope_ext_hf.patch(model, ...)"
        )
    with ExitStack() as stack:
        for table in _tables(model):
            if table.method.length_dependent:
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
    unpatched = {id(config.now): config.before for slot in patched_slots(model) for config in slot.record.configs}
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
    return next((slot.record.method for slot in patched_slots(model)), None)


def _softmax_scale(settings: Mapping[str, Any]) -> float:
    """What DeepSeek's attention multiplies the softmax scale by when it is built."""
    all_dim = settings.get("mscale_all_dim")
    if settings.get("rope_type") == "default" or not all_dim:
        return 1.0
    return (0.1 * float(all_dim) * math.log(settings["factor"]) + 1) ** 2


def _check_softmax_scale(slot: Slot, config: Any, rope_type: str) -> None:
    """A native form must rebuild, on loading, the softmax scale the live attention modules have."""
    if rope_type.startswith(PLUGIN_PREFIX):
        return
    live, loaded = _softmax_scale(slot.config.rope_parameters), _softmax_scale(config.rope_parameters)
    if not math.isclose(live, loaded):
        raise MethodError(
            f"{slot.config.model_type} builds its attention with a softmax scale from YaRN's mscale_all_dim: "
            f"x{live:.4f} in this model, x{loaded:.4f} in a model loaded with the new settings; "
            "give a factor and mscale_all_dim that keep it"
        )
