"""Tiles: the keys that a block of queries sees under a remapping method, as ranges of positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Piece", "Rectangle", "newest"]


class Rectangle(NamedTuple):
    """Queries and keys as ranges of positions: every query sees every key ("all"), or they are as many and the i-th
    query sees the first i + 1 keys ("causal") or all but the first i ("reversed")."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    seen: str


class Piece(NamedTuple):
    """Queries and keys of one zone, as ranges of positions.

    A query m of them sees the keys n <= m - `lag`; or, where `since` is set, the keys n > m - `lag`.
    """

    zone: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    lag: int = 0
    since: bool = False

    def rectangles(self, low: int) -> Iterator[Rectangle]:
        """What is visible, keys below position `low` left out; a pair of query and key is in one rectangle at most."""
        (q0, q1), (k0, k1) = self.queries, self.keys
        k0 = max(k0, low)
        edge = q0 - self.lag + (1 if self.since else 0)  # the last key that query q0 sees, or the first
        inner = max(0, k0 - edge)  # until then no query sees any, or each sees all
        square = max(0, min(q1 - q0 - inner, k1 - edge - inner))
        begin, end = q0 + inner, q0 + inner + square
        first, last = edge + inner, edge + inner + square
        if self.since:
            parts = [
                Rectangle((q0, min(begin, q1)), (k0, k1), "all"),
                Rectangle((begin, end), (first, last), "reversed"),
                Rectangle((begin, end), (last, k1), "all"),
            ]
        elif q1 - begin == 1:
            parts = [Rectangle((begin, q1), (k0, min(first + 1, k1)), "all")]
        else:
            parts = [
                Rectangle((begin, q1), (k0, min(first, k1)), "all"),
                Rectangle((begin, end), (first, last), "causal"),
                Rectangle((end, q1), (first, k1), "all"),
            ]
        yield from (p for p in parts if p.queries[0] < p.queries[1] and p.keys[0] < p.keys[1])


def newest(window: int, first: int, last: int) -> Iterator[Piece]:
    """The keys at distances below `window` of the queries first..last, in blocks of queries."""
    for start in range(first, last, window):
        stop = min(start + window, last)
        if stop - start == 1:
            yield Piece(0, (start, stop), (max(0, start - window + 1), stop))
            continue
        yield Piece(0, (start, stop), (start, stop))
        if start:
            yield Piece(0, (start, stop), (max(0, start - window + 1), start), window, since=True)
