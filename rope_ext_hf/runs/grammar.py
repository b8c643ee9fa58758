"""Helpers that form small pieces of English, such as lists and plurals, for texts about runs."""

from __future__ import annotations

from collections.abc import Iterable


def listed(words: Iterable[str]) -> str:
    """Return "a", "a and b", or "a, b and c"; empty for no words."""
    *others, last = list(words) or [""]
    return f"{', '.join(others)} and {last}" if others else last


def capital(text: str) -> str:
    """Return a text with its first letter in upper case; the other letters stay as they are."""
    return text[:1].upper() + text[1:]


def counted(count: int, noun: str) -> str:
    """Return a number with a noun, given in the singular: "1 prompt", "2 prompts"."""
    return f"{count} {noun}{'s' if count != 1 else ''}"
