"""The exceptions of this package, and small functions that put values into messages.

For every `RopeExtError` the command line prints the message on one line and exits with status 2.
"""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import TypeVar

__all__ = [
    "CheckpointError",
    "CorpusError",
    "FileError",
    "FingerprintError",
    "LengthError",
    "MethodError",
    "RopeExtError",
    "ServingError",
    "UnknownMethodError",
    "UnsupportedModelError",
    "did_you_mean",
    "duration",
    "entry",
    "listed",
    "one_line",
    "printable",
    "short",
    "size_text",
    "warn_caller",
]

T = TypeVar("T")


class RopeExtError(Exception):
    """Base of all errors of this package; a message states what was given, what is allowed and what to do."""


class MethodError(RopeExtError, ValueError):
    """An unknown method, or a parameter that a method cannot work with."""


class UnknownMethodError(MethodError):
    """A name that no method is registered under."""


class UnsupportedModelError(RopeExtError):
    """A model whose rotary embedding is absent or cannot be replaced."""


class LengthError(RopeExtError, ValueError):
    """A length that a method needs and cannot determine: that of a row, or of the input that filled a cache."""


class CheckpointError(RopeExtError, ValueError):
    """A model folder that is missing, or contradicts itself."""


class FingerprintError(RopeExtError):
    """A model whose rotations are not the expected ones; the message says how they differ."""


class CorpusError(RopeExtError, ValueError):
    """A corpus that is missing, empty or too short for the lengths asked for."""


class ServingError(RopeExtError, ValueError):
    """A serving engine that cannot compute what was measured, or that refuses a config."""


class FileError(RopeExtError):
    """A file or folder that is missing, damaged, outside its folder, in use, or that the disk refuses to write."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'nearest'?" for the nearest known name, or an empty text where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f" Did you mean {close[0]!r}?" if close else ""


def entry(kind: str, name: str, known: Mapping[str, T], error: type[RopeExtError] = MethodError) -> T:
    """Return the entry that a table of known names has for `name`.

    Args:
        kind: a word for what the entries are, such as "method", for the message.
        name: the name to look up.
        known: the entries by their names.
        error: the class of the error for an unknown name; its message lists the known names, the nearest one first.
    """
    if name not in known:
        names = f"{did_you_mean(name, known)} Known {kind}s: {', '.join(known)}"
        raise error(f"unknown {kind} {short(name)!r}.{names}")
    return known[name]


def one_line(error: BaseException, most: int = 300) -> str:
    """Return an exception's message on one line of at most `most` characters, or else the words of its class's name."""
    name = re.sub("(?<=[a-z])(?=[A-Z])", " ", type(error).__name__.strip("_"))
    return short(" ".join(str(error).split()), most) or name.lower()


def short(text: str, most: int = 80) -> str:
    """Return a text cut to at most `most` characters, with "..." at the end where it was cut."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def bounded(text: str, most: int = 1000, longest_word: int = 120) -> str:
    """Return a message with long words cut, and with its middle left out if it is still longer than `most`."""
    words = " ".join(short(word, longest_word) for word in text.split())
    return words if len(words) <= most else f"{words[: most * 2 // 3]} ... {words[-(most // 3) :]}"


def printable(text: str) -> str:
    r"""Return a text that is safe to print on a terminal: control characters become escapes such as \x1b.

    Newlines and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


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


def duration(seconds: float) -> str:
    """Return a duration in words: "12 s", "5 minutes", "3 hours"."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} s"


def count_text(count: int) -> str:
    """Return a number as people say it: "950", "213k", "1.2 million"."""
    if count < 10_000:
        return f"{count:,}"
    if count < 999_500:
        return f"{count / 1000:.0f}k"
    return f"{count / 1e6:,.3g} million"


def size_text(count: int) -> str:
    """Return a number of bytes in the largest unit that fits: "512 bytes", "8.2 kB", "16.1 GB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 1000)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"


def multiple_text(length: int, context_length: int) -> str:
    """Return a length as a multiple of the context length: "8x", "1.5x", "under 0.01x"."""
    ratio = length / context_length
    if ratio < 0.01:
        return "under 0.01x"
    return f"{ratio:.3g}x" if ratio < 1000 else f"{ratio:,.0f}x"


def warn_caller(message: str) -> None:
    """Issue a warning that points to the line of user code, outside this package, from which the call came."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(f"{__package__}."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level + 1)
