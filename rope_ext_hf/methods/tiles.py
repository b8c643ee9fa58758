"""Tiles: the keys that a block of queries sees under a remapping method, as ranges of positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class _Rectangle(NamedTuple):
    """Queries and keys as ranges of positions: every query sees every key ("full"), or they are as many and the i-th
    query sees the first i + 1 keys ("causal") or all but the first i ("anticausal")."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: str


class Tile(NamedTuple):
    """Queries and keys of one zone, as ranges of positions.

    A query m of them sees the keys n <= m - `diagonal`; or, where `above_diagonal` is set, the keys n > m - `diagonal`.
    """

    zone: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    diagonal: int = 0
    above_diagonal: bool = False

    def rectangles(self, low: int) -> Iterator[_Rectangle]:
        """The visible pairs of query and key, each in one rectangle; keys below position `low` are left out."""
        (q0, q1), (k0, k1) = self.queries, self.keys
        k0 = max(k0, low)
        edge = q0 - self.diagonal + (1 if self.above_diagonal else 0)  # the last key that query q0 sees, or the first
        inner = max(0, k0 - edge)  # until then no query sees any, or each sees all
        square = max(0, min(q1 - q0 - inner, k1 - edge - inner))
        begin, end = q0 + inner, q0 + inner + square
        first, last = edge + inner, edge + inner + square
        if self.above_diagonal:
            parts = [
                _Rectangle((q0, min(begin, q1)), (k0, k1), "full"),
                _Rectangle((begin, end), (first, last), "anticausal"),
                _Rectangle((begin, end), (last, k1), "full"),
            ]
        elif q1 - begin == 1:
            parts = [_Rectangle((begin, q1), (k0, min(first + 1, k1)), "full")]
        else:
            parts = [
                _Rectangle((begin, q1), (k0, min(first, k1)), "full"),
                _Rectangle((begin, end), (first, last), "causal"),
                _Rectangle((end, q1), (first, k1), "full"),
            ]
        yield from (p for p in parts if p.queries[0] < p.queries[1] and p.keys[0] < p.keys[1])


def band_tiles(zone: int, near: int, far: int, first: int, last: int) -> Iterator[Tile]:
    """The keys at the distances near..far (exclusive) of the queries first..last, in blocks of queries."""
    for start in range(max(first, near), last, far - near):
        stop = min(start + far - near, last)
        if stop - start == 1:
            yield Tile(zone, (start, stop), (max(0, stop - far), stop - near))
            continue
        yield Tile(zone, (start, stop), (start - near, stop - near), near)
        if start > near:
            yield Tile(zone, (start, stop), (max(0, start - far + 1), start - near), far, above_diagonal=True)
