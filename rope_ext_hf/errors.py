"""Every exception this package raises on purpose.

    RopeExtError
    ├── MethodError (ValueError)       unknown method, impossible parameter
    ├── UnsupportedModelError          no rotary embedding, or one that cannot be replaced
    ├── LengthError (ValueError)       a length-dependent method met rows, or a cache, of which it cannot know enough
    ├── CheckpointError (ValueError)   a folder that is not there, not what it says, or not to be converted
    ├── CorpusError (ValueError)       no text, or not enough of it
    └── FileError                      a file or folder that is missing, unsafe, damaged or cannot be written

The command line prints the message on one line and exits with status 2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "CorpusError",
    "FileError",
    "LengthError",
    "MethodError",
    "RopeExtError",
    "UnsupportedModelError",
    "did_you_mean",
    "one_line",
]


class RopeExtError(Exception):
    """Base of all errors of this package; its message says what was given, what is allowed and what to do."""


class MethodError(RopeExtError, ValueError):
    """An unknown method, or a parameter no method can work with."""


class UnsupportedModelError(RopeExtError):
    """A model whose rotary embedding is absent or cannot be replaced."""


class LengthError(RopeExtError, ValueError):
    """A length-dependent method cannot know how long each row is, or at which length a cache was filled."""


class CheckpointError(RopeExtError, ValueError):
    """A model folder that is missing, or contradicts itself."""


class CorpusError(RopeExtError, ValueError):
    """A corpus that is missing, empty or too short for the lengths asked for."""


class FileError(RopeExtError):
    """A file or folder that is missing, damaged, outside its folder, in use, or that the disk refuses to write."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'nearest'?`, or an empty string where no known name is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def one_line(error: BaseException, most: int = 300) -> str:
    """An exception's message on one line, at most `most` characters of it; its class name where it has no message."""
    text = " ".join(str(error).split())
    return (text if len(text) <= most else f"{text[: most - 3]}...") or type(error).__name__
