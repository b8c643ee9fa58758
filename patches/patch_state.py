"""The state of a patched model: what `unpatch` and `describe` need."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from rope_ext_hf.patches.config import PATCH_KEY, SAVED_KEYS, ConfigEncoding
from rope_ext_hf.patches.engine_keys import EngineAgreement
from rope_ext_hf.patches.patch_spec import PatchSpec


@dataclass
class ConfigSwap:
    """A config object of a patched model.

    Attributes:
        patched: the copy that the model runs with.
        original: the one it had before, which other models may share.
        written: `patched` as the patch left it, to recognise what its user changed since.
    """

    patched: Any
    original: Any
    written: dict[str, Any] = field(default_factory=dict)

    def note_written(self) -> None:
        """Remember how `patched` is now."""
        plain = {key: value for key, value in vars(self.patched).items() if not hasattr(value, "model_type")}
        self.written = copy.deepcopy(plain)

    def sync_user_changes(self) -> None:
        """Carry what the user changed in `patched` over to `original`."""
        for key, value in vars(self.patched).items():
            if key in (PATCH_KEY, *SAVED_KEYS) or hasattr(value, "model_type"):
                continue
            if key not in self.written or self.written[key] != value:
                self.original.__dict__[key] = value


@dataclass
class PatchState:
    """One patch of a live model; every patched slot of the model holds it.

    Attributes:
        spec: the patch.
        encoding: how a config states it.
        rule: which reading of the config gave the context length of the model under the patch.
        notes: what `describe` prints of the model's class and config.
        warning: the note that `patch` warns of; None: none.
        configs: the model's config objects.
        below: the live patches underneath, bottom first; `unpatch` goes back to the last of them.
        engines: what serving engines make of the saved config; None: not worked out yet (saving.py).
    """

    spec: PatchSpec
    encoding: ConfigEncoding
    rule: str
    notes: tuple[str, ...]
    warning: str | None
    configs: list[ConfigSwap]
    below: tuple[PatchSpec, ...] = ()
    engines: EngineAgreement | None = None

    @property
    def record(self) -> dict[str, Any]:
        """What a saved config, and the folder of an adapter, keep of the patch."""
        record: dict[str, Any] = next(
            vars(swap.patched)[PATCH_KEY] for swap in self.configs if PATCH_KEY in vars(swap.patched)
        )
        return record
