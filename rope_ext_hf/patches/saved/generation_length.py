"""Lengths that are stated beside the config, and that a patch raises as it raises max_position_embeddings.

Some models state their context length as `max_length` in generation_config.json (Llama 2: 4096). `generate` then
refuses longer prompts, whatever the model can read. Models of sentence-transformers cut their texts to a
`max_seq_length` in the same way.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from rope_ext_hf.files.whole import read_json, write_json
from rope_ext_hf.patches.slots.patch_state import ConfigSwap, PatchState
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding

GENERATION_CONFIG = "generation_config.json"
EMBEDDING_CONFIG = "sentence_bert_config.json"
"""The file in which sentence-transformers keeps the settings of a transformers model, of any family."""
_KEY = "generation_max_length"
"""The key in the record of a patch that holds `max_length` as it was before, and as the patch wrote it."""


def _extended(stated: Any, state: PatchState) -> int | None:
    """Return the length that a patch puts in the place of a stated one; None where the stated one stays.

    It stays where it is shorter than the context length, because then somebody chose it, and where the method has no
    extended length.
    """
    context_length = min(state.record["before"]["max_position_embeddings"], state.patch.rotary.context_length)
    extended = state.encoding.extended_length
    if type(stated) is not int or extended is None:
        return None
    return extended if context_length <= stated < extended else None


class _GenerationLength:
    """A generation config for the extended length, in place of a model's own; `remove` puts its own back."""

    def __init__(self, model: Any, length: int) -> None:
        self.model = model
        original = model.generation_config
        self.swap = ConfigSwap(copy.deepcopy(original), original)
        self.swap.patched.max_length = length
        self.swap.note_written()
        model.generation_config = self.swap.patched

    def remove(self) -> None:
        self.swap.sync_user_changes()
        if self.model.generation_config is self.swap.patched:
            self.model.generation_config = self.swap.original


class _EmbeddedLength:
    """The length to which a model of sentence-transformers cuts its texts, raised; `remove` puts its own back."""

    def __init__(self, model: Any, length: int) -> None:
        self.model = model
        self.before = model.max_seq_length
        self.written = length
        model.max_seq_length = length

    def remove(self) -> None:
        if self.model.max_seq_length == self.written:  # else its user has set another one since
            self.model.max_seq_length = self.before


def extend_generation(model: nn.Module, slot: PatchedRotaryEmbedding) -> None:
    """Raise the lengths that a model, and every model inside it, states beside its config to the extended length.

    The patched rotary module `slot` keeps the objects that undo this among its hooks.
    """
    for module in model.modules():
        stated = getattr(module.__dict__.get("generation_config"), "max_length", None)
        length = _extended(stated, slot.state)
        if length is not None:
            slot.hooks.append(_GenerationLength(module, length))
            slot.state.record[_KEY] = {"before": stated, "written": length}
        if isinstance(getattr(type(module), "max_seq_length", None), property):
            length = _extended(module.max_seq_length, slot.state)
            if length is not None:
                slot.hooks.append(_EmbeddedLength(module, length))


def restore_generation_length(model: Any, record: Mapping[str, Any]) -> None:
    """Undo in a model that was loaded from a patched folder what the patch wrote into its generation config.

    `record`: the record of the patch in the folder's config. A length that was edited in the folder since stays.
    """
    lengths = record.get(_KEY)
    if not isinstance(lengths, dict):
        return
    config = model.__dict__.get("generation_config")
    before = lengths.get("before")
    if type(before) is int and getattr(config, "max_length", None) == lengths.get("written"):
        config.max_length = before


def extend_length_files(folder: Path, state: PatchState) -> dict[str, Any]:
    """Write the extended length into the files of a folder that state a length beside its config.

    Those are the settings of `generate` and of sentence-transformers. Return what to add to the record of the patch.
    """
    _extend_length(folder / EMBEDDING_CONFIG, "max_seq_length", state)
    lengths = _extend_length(folder / GENERATION_CONFIG, "max_length", state)
    return {} if lengths is None else {_KEY: lengths}


def _extend_length(file: Path, key: str, state: PatchState) -> dict[str, int] | None:
    """Raise the length under a key of a JSON file, and return it before and after; None where it stays as it is."""
    settings = read_json(file) if file.is_file() else {}
    stated: Any = settings.get(key)
    length = _extended(stated, state)
    if length is None:
        return None
    write_json(file, settings | {key: length})
    return {"before": stated, "written": length}
