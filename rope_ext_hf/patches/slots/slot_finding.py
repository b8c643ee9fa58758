"""Find a model's rotary modules by their structure, not by the names of their classes.

A slot is a module that holds `inv_freq` (or `<layer type>_inv_freq`), takes `position_ids`, and belongs to the model's
text config. The arrangement of its angles is what its own forward does with a few made-up frequencies, see
`layout_probe`. A family that keeps a table of angles in its weights instead (RoFormer) is read otherwise; see
`roformer`.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.models.config import ConfigRope, read_rope
from rope_ext_hf.models.decoder_arguments import is_of_transformers
from rope_ext_hf.models.families import family
from rope_ext_hf.models.layer_types import AttentionLayers, Layers, LayerType
from rope_ext_hf.patches.slots.layout_probe import AngleLayout, probe_layout
from rope_ext_hf.patches.slots.patched_slot import (
    PatchedRotaryEmbedding,
    Slot,
    check_filled,
    check_is_model,
)
from rope_ext_hf.patches.slots.slot_refusals import (
    no_config,
    no_rotary_module,
    reads_no_tokens,
    saved_frequencies,
)

__all__ = ["find_slots", "keeps_frequencies_in_weights", "rotary_modules"]

_TABLE_ROWS_COMPARED = 512
"""Positions up to which a table of angles is compared with the config."""


class _RotaryModule(NamedTuple):
    """A rotary module of a model, as it was before any patch: `getattr(parent, attribute)` is `module`."""

    parent: nn.Module
    attribute: str
    module: nn.Module
    config: Any  # the config that the module was built from


def find_slots(model: nn.Module, layers: Layers | None = None) -> list[Slot]:
    """Return every slot (place of a rotary module) in a model's decoder, as it was before any patch.

    `layers`: the layers that a method is for; None: all that attend to everything before them.

    Raises:
        UnsupportedModelError: the model has no rotary module, or one that cannot be replaced.
        MethodError: `layers` names no layers of this model.
    """
    modules = rotary_modules(model)
    if not modules:
        raise no_rotary_module(model)
    try:
        return [_slot(rotary_module, layers, several=len(modules) > 1) for rotary_module in modules]
    except UnsupportedModelError as error:
        if any("input_ids" in inspect.signature(type(module).forward).parameters for module in model.modules()):
            raise
        raise reads_no_tokens(model, modules[0].module) from error


def rotary_modules(model: nn.Module) -> list[_RotaryModule]:
    """Return the rotary modules of a model's decoder, as they were before any patch; none where it has none.

    Raises:
        UnsupportedModelError: `model` is not a model of transformers.
    """
    check_is_model(model)
    root: Any = getattr(model, "config", None)
    if not hasattr(root, "model_type"):
        raise no_config(model)
    text = root.get_text_config() if hasattr(root, "get_text_config") else root
    table_attribute = family(text.model_type).angle_table
    rotary: list[_RotaryModule] = []
    modules = list(model.modules())
    with_frequencies = {id(module) for module in modules for name in module._buffers if name.endswith("inv_freq")}
    for parent in modules:
        if isinstance(parent, PatchedRotaryEmbedding):
            continue
        for attribute, child in parent.named_children():
            module = child.replaced if isinstance(child, PatchedRotaryEmbedding) else child
            # A table of angles is an embedding. This quick look comes first: a large model has thousands of modules.
            if id(module) not in with_frequencies and not isinstance(module, nn.Embedding):
                continue
            config = getattr(module, "config", None) or getattr(parent, "config", None)
            if isinstance(child, PatchedRotaryEmbedding):  # the parent has the patched copy of the config now
                config = next((swap.original for swap in child.state.configs if swap.patched is config), config)
            # Some modules have no config, or one of another part of the model, such as vision. Idefics keeps a dropout
            # rate under this name.
            if getattr(config, "model_type", None) != text.model_type:
                continue
            takes_positions = "position_ids" in inspect.signature(type(module).forward).parameters
            if (takes_positions and frequency_buffers(module)) or attribute == table_attribute:
                rotary.append(_RotaryModule(parent, attribute, module, config))
    return rotary


def frequency_buffers(module: nn.Module) -> dict[LayerType, str]:
    """Return the names of the buffers that hold inverse frequencies, by layer type; the key None is for all layers.

    A class whose frequencies follow the length keeps those it began with as `original_inv_freq`, which is left out.
    """
    names = [name for name, _ in module.named_buffers(recurse=False) if name.endswith("inv_freq")]
    return {
        name.removesuffix("inv_freq").removesuffix("_") or None: name
        for name in names
        if not name.endswith("original_inv_freq")
    }


def keeps_frequencies_in_weights(module: nn.Module) -> bool:
    """Return whether the frequencies of a rotary module are saved and loaded with the weights of its model."""
    return any(name not in module._non_persistent_buffers_set for name in frequency_buffers(module).values())


def _slot(rotary_module: _RotaryModule, chosen_layers: Layers | None, *, several: bool) -> Slot:
    """Return a rotary module's slot: its place in the model, how it arranges its angles, and its layers.

    `chosen_layers`: see `find_slots`; `several`: the model has other rotary modules beside this one.
    """
    parent, attribute, module, config = rotary_module
    if keeps_frequencies_in_weights(module) and is_of_transformers(module):
        raise saved_frequencies(module, config)
    is_table = attribute == family(config.model_type).angle_table
    as_loaded: dict[LayerType, ConfigRope] = {}
    axis_of_pair: dict[LayerType, tuple[int, ...] | None] = {}
    angles, log_multiplier, axes = AngleLayout("bare", True, None), None, 1
    if is_table:
        as_loaded[None], axis_of_pair[None] = _rope_of_table(module, config), None
    for layer_type, name in frequency_buffers(module).items() if not is_table else ():
        # The buffer itself may hold the frequencies of the last input, in a class that follows the length.
        inv_freq = getattr(module, name.removesuffix("inv_freq") + "original_inv_freq", getattr(module, name))
        as_loaded[layer_type] = rope = read_rope(config, 2 * inv_freq.shape[-1], layer_type)
        # A patch computes from the config, so that the config must describe what the model does.
        if inv_freq.device.type != "meta" and not rope.describes(inv_freq):
            check_filled(module)
            raise _another_geometry(config, rope)
        stated = rope.method.frequencies(rope.plain, rope.plain.trained_length).inv_freq
        angles = probe_layout(module, stated.float(), layer_type)
        log_multiplier = _log_multiplier(module, config, inv_freq.shape[-1])
        axis_of_pair[layer_type], axes = angles.axis_of_pair, max(axes, angles.axes)
    layers = AttentionLayers(config)
    theta = as_loaded[None].plain.theta if several and None in as_loaded else None
    by_embedding = layers.layers_by_embedding(list(as_loaded), theta)
    return Slot(
        parent=parent,
        attribute=attribute,
        module=module,
        config=config,
        layers=layers,
        as_loaded=as_loaded,
        layout=angles.layout,
        cast=angles.cast,
        axis_of_pair=axis_of_pair,
        axes=axes,
        is_table=is_table,
        log_multiplier=log_multiplier,
        by_embedding=by_embedding,
        scaled_layers=layers.choose(by_embedding, chosen_layers),
        named={} if chosen_layers is None else layers.named(by_embedding, chosen_layers),
    )


def _log_multiplier(module: nn.Module, config: Any, pairs: int) -> str | None:
    """Return the buffer whose exponential multiplies the frequencies of a module; None: it has none.

    Raises:
        UnsupportedModelError: the module holds other numbers for its frequencies, which a patch would lose; or its own
            numbers are missing.
    """
    known = family(config.model_type).learned_log_multiplier
    tensors = {**dict(module.named_buffers(recurse=False)), **dict(module.named_parameters(recurse=False))}
    learned = [name for name, tensor in tensors.items() if not name.endswith("inv_freq") and tensor.numel() == pairs]
    unknown = [name for name in learned if name != known]
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} holds {unknown[0]!r}, a number for each of its {pairs} frequencies that a "
            "replacement would drop"
        )
    if known not in learned:
        return None
    check_filled(module)
    return known


def _rope_of_table(module: nn.Module, config: Any) -> ConfigRope:
    """Return the rotary embedding of a table whose rows are [sin | cos] of every position, as its config states it.

    Raises:
        UnsupportedModelError: the table holds other angles.
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    rope = read_rope(config, weight.shape[-1])
    if weight.device.type != "meta":
        inv_freq, attention_factor = rope.method.frequencies(rope.plain, rope.plain.trained_length)
        first_rows = weight[:_TABLE_ROWS_COMPARED].detach().double().cpu()
        angles = torch.arange(len(first_rows), dtype=torch.float64)[:, None] * inv_freq
        stated = torch.cat((angles.sin(), angles.cos()), -1) * attention_factor
        if not torch.allclose(first_rows, stated, atol=2e-2):
            check_filled(module)
            raise _another_geometry(config, rope)
    return rope


def _another_geometry(config: Any, rope: ConfigRope) -> UnsupportedModelError:
    rotary = rope.plain
    return UnsupportedModelError(
        f"the inverse frequencies of this {config.model_type!r} model are not what its config describes "
        f"({rope.method.name}, theta {rotary.theta:g}, {rotary.dim} dims); its rotary module cannot be replaced "
        "safely"
    )
