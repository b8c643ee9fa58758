"""Refuse continuous batching of a model whose frequencies follow the length of the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from rope_ext_hf.errors import LengthError
from rope_ext_hf.patches.forward.forward_call import HOLD_ONE_LENGTH
from rope_ext_hf.patches.slots.patched_slot import PatchedSlot, tables_of


class _CheckedBatching:
    """A model's `init_continuous_batching`, with a check before it.

    The forwards of continuous batching run in a thread of their own, whose errors reach a log and not the caller, so
    that the check must come when batching is set up. Inside `fixed_length` batching works; hence the check at each call
    and not when the model is patched.
    """

    def __init__(self, model: Any, slots: Sequence[PatchedSlot]) -> None:
        self.model = model
        self.slots = slots
        model.__dict__["init_continuous_batching"] = self

    def remove(self) -> None:
        """Give the model the method of its class again."""
        self.model.__dict__.pop("init_continuous_batching", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(table.length_dependent for table in tables_of(self.slots)):
            raise LengthError(
                "continuous batching holds parts of many inputs in one cache, whose keys cannot follow the length of "
                f"each. {HOLD_ONE_LENGTH}"
            )
        return type(self.model).init_continuous_batching(self.model, *args, **kwargs)


def check_batching(model: nn.Module, slots: Sequence[PatchedSlot]) -> None:
    """Put a check before continuous batching of a model and of every model inside it; the first slot can undo it."""
    for module in model.modules():
        if hasattr(type(module), "init_continuous_batching"):
            slots[0].hooks.append(_CheckedBatching(module, slots))
