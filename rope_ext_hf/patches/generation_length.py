"""Lengths beside the config, which follow a patch as max_position_embeddings does.

Some models state their context length as `max_length` in generation_config.json (Llama 2: 4096). `generate` then
refuses longer prompts, whatever the model can read.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext_hf.files import read_json, write_json
from rope_ext_hf.patches.slots import ConfigSwap, PatchedSlot, PatchState

GENERATION_CONFIG = "generation_config.json"
_KEY = "generation_max_length"
"""The key in the record of a patch that states `max_length` as it was before, and as the patch left it."""


def _extended(stated: Any, state: PatchState) -> int | None:
    """Return the length that a patch puts in the place of `max_length` in a generation config; None: it stays.

    A length below the context length is somebody's choice, and a method without an extended length gives none.
    """
    context_length = min(state.record["before"]["max_position_embeddings"], state.spec.rotary.context_length)
    extended = state.encoding.extended_length
    lengthened = type(stated) is int and extended is not None and context_length <= stated < extended
    return extended if lengthened else None


class _GenerationLength:
    """The generation config of one patched model, a copy of the one before; `remove` takes it away again."""

    def __init__(self, model: Any, length: int) -> None:
        self.model, original = model, model.generation_config
        self.swap = ConfigSwap(copy.deepcopy(original), original)
        self.swap.patched.max_length = length
        self.swap.note_written()
        model.generation_config = self.swap.patched

    def remove(self) -> None:
        self.swap.sync_user_changes()
        if self.model.generation_config is self.swap.patched:
            self.model.generation_config = self.swap.original


class _EmbeddedLength:
    """The length to which a model of sentence-transformers cuts its texts; `remove` puts the one before back."""

    def __init__(self, model: Any, length: int) -> None:
        self.model, self.before, self.written = model, model.max_seq_length, length
        model.max_seq_length = length

    def remove(self) -> None:
        if self.model.max_seq_length == self.written:  # else its user has chosen another one
            self.model.max_seq_length = self.before


def extend_generation(model: nn.Module, slot: PatchedSlot) -> None:
    """Give a model, and every model inside it, a generation config for the extended length.

    So, too, the `max_seq_length` of a model of sentence-transformers around it. The slot keeps the way back.
    """
    for module in model.modules():
        stated = getattr(module.__dict__.get("generation_config"), "max_length", None)
        if (length := _extended(stated, slot.state)) is not None:
            slot.hooks.append(_GenerationLength(module, length))
            slot.state.record[_KEY] = {"before": stated, "written": length}
        if isinstance(getattr(type(module), "max_seq_length", None), property):
            length = _extended(module.max_seq_length, slot.state)
            if length is not None:
                slot.hooks.append(_EmbeddedLength(module, length))


def restore_generation_length(model: Any, record: Mapping[str, Any]) -> None:
    """Give a model that was loaded from a patched folder the length of its generation config before that patch."""
    lengths, config = record.get(_KEY), model.__dict__.get("generation_config")
    before, written = (lengths.get(key) if isinstance(lengths, dict) else None for key in ("before", "written"))
    if type(before) is int and getattr(config, "max_length", None) == written:
        config.max_length = before


def extend_generation_file(folder: Path, state: PatchState) -> dict[str, Any]:
    """Write the extended length into generation_config.json; return what the record of the patch keeps of it."""
    file = folder / GENERATION_CONFIG
    settings = read_json(file) if file.is_file() else {}
    stated = settings.get("max_length")
    if (length := _extended(stated, state)) is None:
        return {}
    write_json(file, settings | {"max_length": length})
    return {_KEY: {"before": stated, "written": length}}
