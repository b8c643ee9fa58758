"""What `unpatch` and `describe` need to know of a patch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.patches.config import RECORD, SAVED_KEYS

__all__ = ["ConfigSwap", "Record"]


@dataclass
class Record:
    """What unpatching and describing need; held by every patched slot of a model."""

    method: RopeMethod
    target_length: int | None
    native: bool
    rotary: Rotary
    rope_type: str
    extended_length: int | None
    notes: tuple[str, ...]
    configs: list[ConfigSwap]


@dataclass
class ConfigSwap:
    """A config object of a patched model.

    Attributes:
        now: the copy the model runs with.
        before: the one it had, which other models may share.
        written: `now` as the patch left it, to tell what its user changed since.
    """

    now: Any
    before: Any
    written: dict[str, Any] = field(default_factory=dict)

    def sync_user_changes(self) -> None:
        """Carry what the user changed in `now` over to `before`, as if the model had had that all the time."""
        for key, value in vars(self.now).items():
            if key in (RECORD, *SAVED_KEYS) or hasattr(value, "model_type"):
                continue
            if key not in self.written or self.written[key] != value:
                self.before.__dict__[key] = value
