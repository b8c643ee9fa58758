"""Every exception this package raises on purpose.

The command line prints the message on one line and exits with status 2.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class RopeExtError(Exception):
    """Base of all errors of this package; its message states what was given, what is allowed and what to do."""


class MethodError(RopeExtError, ValueError):
    """An unknown method, or a parameter no method can work with."""


class UnknownMethodError(MethodError):
    """A method name that nothing is registered under."""


class UnsupportedModelError(RopeExtError):
    """A model whose rotary embedding is absent or cannot be replaced."""


class LengthError(RopeExtError, ValueError):
    """A length-dependent method cannot determine how long each row is, or at which length a cache was filled."""


class CheckpointError(RopeExtError, ValueError):
    """A model folder that is missing, or contradicts itself."""


class FingerprintError(RopeExtError):
    """A model that rotates otherwise than expected; the message names how."""


class CorpusError(RopeExtError, ValueError):
    """A corpus that is missing, empty or too short for the lengths asked for."""


class ServingError(RopeExtError, ValueError):
    """A serving engine that cannot compute what was measured, or that refuses a config."""


class FileError(RopeExtError):
    """A file or folder that is missing, damaged, outside its folder, in use, or that the disk refuses to write."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'nearest'?`, or an empty string where no known name is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)
    return f" Did you mean {close[0]!r}?" if close else ""


def entry(kind: str, name: str, known: Mapping[str, T], error: type[RopeExtError] = MethodError) -> T:
    """The entry of a name; an error with the nearest name and all others where there is none."""
    if name not in known:
        names = f"{did_you_mean(name, known)} Known {kind}s: {', '.join(known)}"
        raise error(f"unknown {kind} {short(name)!r}.{names}")
    return known[name]


def one_line(error: BaseException, most: int = 300) -> str:
    """An exception's message on one line, at most `most` characters of it; its class name where it has no message."""
    return short(" ".join(str(error).split()), most) or type(error).__name__


def short(text: str, most: int = 80) -> str:
    """At most so many characters of a text, with "..." where something was left out."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def bounded(text: str, most: int = 1000, longest_word: int = 120) -> str:
    """A message without its excess: words cut to their beginning, and the middle left out of what is still too long."""
    words = " ".join(word if len(word) <= longest_word else short(word, longest_word) for word in text.split())
    return words if len(words) <= most else f"{words[: most * 2 // 3]} ... {words[-(most // 3) :]}"


def printable(text: str) -> str:
    r"""A text that is safe to print on a terminal: control characters other than newlines and tabs stand as \x1b."""
    if text.isprintable():
        return text
    shown = [c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text]
    return "".join(shown)


def duration(seconds: float) -> str:
    """In words: seconds, minutes or hours."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} s"


def count_text(count: int) -> str:
    """Return a number as people say it: "950", "213k", "1.2 million"."""
    if count < 10_000:
        return f"{count:,}"
    return f"{count / 1000:.0f}k" if count < 999_500 else f"{count / 1e6:,.3g} million"


def size_text(count: int) -> str:
    """A number of bytes in the largest unit of which there is at least one: "512 bytes", "8.2 kB", "16.1 GB"."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 1000)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"


def multiple_text(length: int, context_length: int) -> str:
    """A length as a multiple of another: "8x", "1.5x", "under 0.01x"."""
    ratio = length / context_length
    return "under 0.01x" if ratio < 0.01 else f"{ratio:.3g}x" if ratio < 1000 else f"{ratio:,.0f}x"


def warn_caller(message: str) -> None:
    """Warn with the line of code outside this package that called it."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith(f"{__package__}."):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level + 1)
