"""Extend the patch of a part to the whole model that it stands in, whose config must state the patch when it is saved.

    rope.patch(model.model, "yarn", factor=4)
    model.save_pretrained("longer")  # states yarn, as if `model` had been patched

A patched decoder runs in any model that it stands in or is put into later, and does not know that model. Before a model
is saved in any way, it collects its weights or is put into a mode (`train`, `eval`). Either calls a method of the part
while a method of the whole is on the call stack. Weights from elsewhere that are saved without either
(`save_pretrained(state_dict=...)`) do not reach it, and its patch is missing then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import nn

from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.models.patch_records import undo_saved_patch
from rope_ext_hf.models.patched_config import write_rope
from rope_ext_hf.patches.saved.adapters import record_patch
from rope_ext_hf.patches.saved.generation_length import extend_generation
from rope_ext_hf.patches.saved.saving import attach_saving, finish_saving, saves_patch
from rope_ext_hf.patches.slots.patch_state import copied_configs, stating_rope, swap_configs
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding, patched_slots
from rope_ext_hf.patches.slots.slot_finding import rotary_modules

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cover_models_above(slot: nn.Module, *_: Any) -> None:
    """Extend a patch to the model of transformers around its rotary module that is being saved, or put into a mode.

    If it is being saved right now, the config that it has just written is completed. The class of a user may save the
    model inside it as its own way of saving, so that the innermost model that is being saved counts. Of models that are
    put into a mode, the outermost one whose config can state the patch counts.

    Args:
        slot: the patched rotary module.

    Raises:
        CheckpointError: the model is being saved, and its config cannot state the patch.
    """
    around = [
        (frame, model)
        for frame, model in _frames_of_models(sys._getframe(1))
        if any(module is slot for module in model.modules())
    ]
    saving = next((each for each in around if _saves(each[0])), None)
    if saving is None:
        for model in dict.fromkeys(model for _, model in reversed(around)):
            if saves_patch(model) or not _cover(model):
                return
        return
    frame, whole = saving
    if saves_patch(whole):
        return
    reason = _cover(whole)
    if reason:
        raise CheckpointError(
            f"{type(whole).__name__} is being saved, and only a part of it is patched, which its config cannot state: "
            f"{reason}. Save the part by itself, unpatch it (rope_ext_hf.unpatch), or patch the whole model"
        )
    folder, is_main_process = frame.f_locals["save_directory"], frame.f_locals.get("is_main_process", True)
    finish_saving(whole, Path(folder), is_main_process=is_main_process)


def _saves(frame: FrameType) -> bool:
    """Return whether a frame is that of transformers' own way of saving a model."""
    return frame.f_code.co_name == "save_pretrained" and frame.f_globals["__name__"].partition(".")[0] == "transformers"


def _frames_of_models(frame: FrameType | None) -> Iterator[tuple[FrameType, PreTrainedModel]]:
    """Yield the frames of methods of transformers' models that are being called, with the model, innermost first."""
    from transformers import PreTrainedModel

    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            if isinstance(owner, PreTrainedModel):
                yield frame, owner
        frame = frame.f_back


def _cover(whole: PreTrainedModel) -> str:
    """Write the patch of a part into copies of the configs of the whole model, and make the whole save it.

    Returns:
        Why the configs cannot state the patch; empty: they do now.
    """
    slots = patched_slots(whole)
    state = slots[0].state
    places = rotary_modules(whole)
    if any(slot.state is not state for slot in slots):
        return "its parts were patched one by one"
    if not places:
        return "it describes none of the layers, which have a config of their own"
    if not all(isinstance(getattr(place.parent, place.attribute), PatchedRotaryEmbedding) for place in places):
        return "it describes other layers, which are not patched"
    for swap in state.configs:
        swap.sync_changes_of_original()
    before = {id(swap.patched): swap.original for swap in state.configs}
    swaps = copied_configs(whole, before, memo={id(swap.original): swap.patched for swap in state.configs})
    patched = next(swap.patched for swap in state.configs if swap.original is places[0].config)
    for swap in stating_rope(swaps, [place.config.model_type for place in places]):
        undo_saved_patch(swap.patched)
        write_rope(swap.patched, state.encoding, state.patch, state.below, state.record["layer_types"])
        swap.patched._attn_implementation = patched._attn_implementation
    for swap in swaps:
        swap.note_written()
    state.configs += swaps
    swap_configs(whole, {id(swap.original): swap.patched for swap in state.configs})
    attach_saving(whole, slots[0])
    extend_generation(whole, slots[0])
    record_patch(whole)
    return ""
