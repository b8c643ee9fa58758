"""Frequencies and magnitude of a rotation, read off vectors that a program has rotated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def pairs(rotate: Callable[[Any], Any], width: int, length: int | None) -> Any:
    """Return cos + i sin of each pair at position 1, times the magnitude.

    `rotate` takes float32 vectors, (tokens, width), and rotates the first by position 0, the next by 1 and so on;
    `length` is the number of tokens in that call, on which some scalings depend.
    """
    vectors = np.zeros((max(length or 2, 2), width), np.float32)
    vectors[:, 0] = 1
    partner = int(np.abs(rotate(vectors)[1, 1:]).argmax()) + 1  # 1, or half of the width
    first = np.arange(0, width, 2) if partner == 1 else np.arange(partner)
    vectors[:, first] = 1
    turned = rotate(vectors)[1].astype(np.float64)
    return turned[first] + 1j * turned[first + partner]
