"""A few layers in place of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def evenly_spaced(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the items, evenly spaced, with the first and the last among them."""
    steps = torch.linspace(0, len(items) - 1, min(most, len(items)))
    return [items[i] for i in steps.round().int().tolist()]
