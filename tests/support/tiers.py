"""The tests that `make test` and `make test-slow` leave to `make test-thorough`: families have much in common.

- Tests marked `thorough`.
- Of the cases of a test marked `sampled(n)`, all but every n-th. A number that divides no parameter's number of values
  lets every value of every parameter run.
- Of tests over families, three quarters of the tests of families outside one of each kind.

Of a cross product of families and methods, `spread` takes every case on a family of each structural kind, and every
eighth case in turn on the others, so that every family meets some methods and every method several families.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from importlib.metadata import version

import pytest

QUICK_FAMILIES = frozenset({"llama", "gemma3"})
"""The families of `make test`, whose other tests over families are slow ones."""

KINDS_OF_FAMILIES = frozenset({"llama", "gemma3", "phi3", "gpt_neox", "deepseek_v3"})
"""One each: the common case, settings per layer type, longrope alone, part of the head rotated, interleaved latent."""

OLDER = tuple(map(int, version("transformers").split(".")[:2])) < (5, 24)
"""Whether transformers is older than the pinned one, and lacks some of the families."""


def needs_family(model_type: str) -> None:
    """Skip a test of a family that an older transformers lacks."""
    if not OLDER:
        return
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")


def spread(families: Iterable[str], cases: Callable[[str], Iterable[str]]) -> list[tuple[str, str]]:
    """(family, case) for every case of the families in KINDS_OF_FAMILIES, and for every eighth case of the others."""
    return [
        (name, case)
        for index, name in enumerate(families)
        for number, case in enumerate(cases(name))
        if name in KINDS_OF_FAMILIES or (number + index) % 8 == 0
    ]


def in_turn(test: str) -> bool:
    """Return whether a test of a family outside KINDS_OF_FAMILIES is in the fixed quarter that is not thorough."""
    return zlib.crc32(test.encode()) % 4 == 0
