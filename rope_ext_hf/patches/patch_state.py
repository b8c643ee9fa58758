"""The memory of a patched model: which patch it has, and which config objects were exchanged for it.

A patched model runs with copies of its config objects, because other models may share the originals. The copies hold
the method and the extended length; the originals stay as they were, so that `unpatch` can put them back.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from rope_ext_hf.patches.engine_keys import EngineAgreement
from rope_ext_hf.patches.patch_records import PATCH_KEY, SAVED_KEYS, PatchSpec
from rope_ext_hf.patches.patched_config import ConfigEncoding


@dataclass
class ConfigSwap:
    """A config object of a patched model, and the object that it stands in for."""

    patched: Any  # the copy that the model runs with
    original: Any  # the object that the model had before, which other models may share
    written: dict[str, Any] = field(default_factory=dict)  # the values of `patched` when the patch was done

    def note_written(self) -> None:
        """Remember the present values of `patched`, so that later changes by the user can be recognised.

        Configs inside this config are left out: each of them has a swap of its own.
        """
        plain = {key: value for key, value in vars(self.patched).items() if not hasattr(value, "model_type")}
        self.written = copy.deepcopy(plain)

    def sync_user_changes(self) -> None:
        """Copy to `original` every value that the user has changed in `patched`, so that unpatching keeps it."""
        for key, value in vars(self.patched).items():
            if key in (PATCH_KEY, *SAVED_KEYS) or hasattr(value, "model_type"):
                continue
            if key not in self.written or self.written[key] != value:
                self.original.__dict__[key] = value


@dataclass
class PatchState:
    """Everything that a live model keeps about its patch. All slots of the model hold the same object."""

    spec: PatchSpec  # the method, the geometry it works on, and the layers it is for
    encoding: ConfigEncoding  # the settings that state the method in a config
    rule: str  # the reading of the config that gave the context length of the model under the patch
    notes: tuple[str, ...]  # sentences about the model's class and config, which `describe` prints
    warning: str | None  # the note that `patch` also warns of
    configs: list[ConfigSwap]
    below: tuple[PatchSpec, ...] = ()  # the patches that this one was put on, oldest first; `unpatch` restores the last
    engines: EngineAgreement | None = None
    """What serving engines make of the saved config; None until saving.py has worked it out."""

    @property
    def record(self) -> dict[str, Any]:
        """The record of the patch that is kept in a saved config and in the folder of an adapter."""
        for swap in self.configs:
            if PATCH_KEY in vars(swap.patched):
                record: dict[str, Any] = vars(swap.patched)[PATCH_KEY]
                return record
        raise LookupError(
            f"no config of this patched model holds {PATCH_KEY!r}; something has removed it: patch the model again"
        )
