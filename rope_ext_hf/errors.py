"""Every exception this package raises on purpose.

    RopeExtError
    ├── MethodError (ValueError)       unknown method, impossible parameter
    ├── UnsupportedModelError          no rotary embedding, or one that cannot be replaced
    ├── LengthError (ValueError)       a length-dependent method met rows, or a cache, of which it cannot know enough
    ├── CheckpointError (ValueError)   a folder that is not there, not what it says, or not to be converted
    └── CorpusError (ValueError)       no text, or not enough of it

The command line prints the message on one line and exits with status 2.
"""

from __future__ import annotations

__all__ = ["CheckpointError", "CorpusError", "LengthError", "MethodError", "RopeExtError", "UnsupportedModelError"]


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
