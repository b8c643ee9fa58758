"""The rotary geometry of a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from rope_ext_hf.errors import CheckpointError, UnsupportedModelError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.config import PAIRING_KEY, RECORD, original_settings, read_rope
from rope_ext_hf.patches.family_settings import class_pairing, stated_rotary
from rope_ext_hf.patches.slots import Slot, find_slots

__all__ = ["bind", "check_pairing", "geometry", "rotation"]


def bind(model: nn.Module, method: RopeMethod, length: int) -> RopeMethod:
    """The method with what it has not been given worked out for inputs of this length, as `patch` does it."""
    if not isinstance(method, RemappingMethod):
        return method
    return method.bind(geometry(model), *own_method(find_slots(model)[0]), length)


def own_method(slot: Slot) -> tuple[RopeMethod, int]:
    """The method a model came with, and the length it is for in tokens."""
    rotary, method = slot.native[(slot.scaled_layers or list(slot.native))[0]]
    return method, rotary.trained_length if method.name == "default" else slot.config.max_position_embeddings


def undo_saved_patch(config: Any) -> None:
    """Turn the config of a model loaded from a patched folder back into what it was before that patch."""
    before = original_settings(config.to_dict())
    if before is not None:
        for key, value in before.items():
            setattr(config, key, value)
        delattr(config, RECORD)


def check_pairing(model: nn.Module) -> None:
    """Raise CheckpointError for a model whose weights are, by its config, in a pairing that its class does not run."""
    config: Any = getattr(model, "config", None)
    said = getattr(config, PAIRING_KEY, None)
    if said is None or (runs := class_pairing(config)) in (None, said):
        return
    folder = getattr(config, "_name_or_path", None) or "FOLDER"
    raise CheckpointError(
        f"by the {PAIRING_KEY} of its config this model's weights are {said}, and {config.model_type!r} runs {runs} in "
        f"transformers: what it says is noise. Mend the folder with `rope-ext convert {folder} NEW --to {runs}`, or "
        f"the loaded model with rope.convert(model, to={runs!r})"
    )


def geometry(model: nn.Module) -> Rotary:
    """The rotary geometry a patch of this model starts from, whatever patch it carries now.

    Raises:
        UnsupportedModelError: a model without rotary embeddings.
    """
    slots = find_slots(model)
    config = copy.deepcopy(slots[0].config)
    undo_saved_patch(config)
    return shared_geometry(slots, config)


def rotation(model: nn.Module) -> Rotary:
    """What rotates in a model, also where nothing could be patched: as the family table says, else its `geometry`.

    Raises:
        UnsupportedModelError: neither is known.
    """
    config = getattr(model, "config", None)
    stated = stated_rotary(config) if hasattr(config, "get_text_config") else None
    return stated or geometry(model)


def shared_geometry(slots: Sequence[Slot], config: Any) -> Rotary:
    geometries = {
        read_rope(config, slot.native[layer_type][0].dim, layer_type)[0]
        for slot in slots
        for layer_type in slot.scaled_layers
    }
    if len(geometries) != 1:
        found = "; ".join(map(str, geometries)) or "none: every layer has a sliding window"
        raise UnsupportedModelError(
            f"one method needs one rotary geometry over all full-attention layers, found {found}"
        )
    return geometries.pop()
