"""Which cases of a cross product are tested: families have much in common, and every pair with a method costs time.

`make test` runs every case on a family of each structural kind, and every third case in turn on the others, so that
every family meets several methods and every method most families. `make test-all` runs all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

FAST_FAMILIES = frozenset({"llama", "gemma3", "phi3", "gpt_neox", "deepseek_v3"})
"""One each: the common case, settings per layer type, longrope alone, part of the head rotated, interleaved latent."""

ALL = os.environ.get("ROPE_EXT_TESTS") == "all"


def spread(families: Iterable[str], cases: Callable[[str], Iterable[str]]) -> list[tuple[str, str]]:
    """(family, case) for every case of the families in FAST_FAMILIES, and for every third case of the others."""
    return [
        (name, case)
        for index, name in enumerate(families)
        for number, case in enumerate(cases(name))
        if ALL or name in FAST_FAMILIES or (number + index) % 3 == 0
    ]
