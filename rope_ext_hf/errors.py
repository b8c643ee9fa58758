"""Every exception this package raises on purpose.

    RopeExtError
    ├── MethodError (ValueError)       unknown method, impossible parameter
    ├── UnsupportedModelError          no rotary embedding, or one that cannot be replaced
    ├── LengthError (ValueError)       a length-dependent method met a call whose row lengths it cannot know
    ├── CheckpointError (ValueError)   a folder that is not there, or not what it says
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
    """A length-dependent method was called in a way that hides how long each row is."""


class CheckpointError(RopeExtError, ValueError):
    """A model folder that is missing, or contradicts itself."""


class CorpusError(RopeExtError, ValueError):
    """A corpus that is missing, empty or too short for the lengths asked for."""
