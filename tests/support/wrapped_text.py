"""Text of a terminal, whatever its width."""

from __future__ import annotations


def unwrapped(given: object) -> str:
    """What is printed of it, on one line."""
    return " ".join(str(given).split())
