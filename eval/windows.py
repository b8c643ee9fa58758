"""Which tokens are read and which of them are scored: protocols as pure generators, tested against literal values.

>>> list(matched(10, lengths=[4, 8], targets=2))
[Window(length=4, start=4, stop=8, score_from=6), Window(length=8, start=0, stop=8, score_from=6)]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["Window", "check_lengths", "matched"]


class Window(NamedTuple):
    """Tokens start..stop of a document are read in one context of `length` tokens; score_from..stop are scored."""

    length: int
    start: int
    stop: int
    score_from: int


def check_lengths(lengths: Sequence[int], targets: int | None) -> tuple[list[int], int]:
    """Sorted lengths and the number of target tokens, by default half the shortest length.

    Raises:
        ValueError: no lengths, one below 2, or more targets than the shortest length can hold with a token before them.
    """
    ordered = sorted(set(lengths))
    if not ordered or ordered[0] < 2:
        raise ValueError(f"lengths must be one or more numbers of at least 2 tokens, got {list(lengths)}")
    scored = ordered[0] // 2 if targets is None else targets
    if not 1 <= scored < ordered[0]:
        raise ValueError(f"targets must be between 1 and {ordered[0] - 1} (below the shortest length), got {scored}")
    return ordered, scored


def matched(tokens: int, lengths: Sequence[int], targets: int) -> Iterator[Window]:
    """The same targets at every length: the last `targets` tokens of each longest-length stretch of a document.

    At length N they are read after N - targets tokens of context, so that lengths differ by the context alone.
    Stretches do not overlap; what is left at the end of the document is not used, and a document shorter than the
    longest length yields nothing.
    """
    longest = max(lengths)
    for stop in range(longest, tokens + 1, longest):
        for length in lengths:
            yield Window(length, stop - length, stop, stop - targets)
