"""Tiles: the keys that a block of queries sees under a remapping method, as ranges of positions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rope_ext_hf.methods.base import UNBOUNDED

Mask = str | int
"""The keys of a rectangle that its queries see. "full": all. "causal", "anticausal": there are as many keys as queries,
and the i-th query sees the first i + 1, or all but the first i. A number: the last query sees the last so many keys,
and every query before as many, which end one key earlier."""


class _Rectangle(NamedTuple):
    """Queries and keys as ranges of positions."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: Mask


class Tile(NamedTuple):
    """Queries and keys of one zone, as ranges of positions.

    A query m of them sees the keys n with m - `diagonal` - `width` < n <= m - `diagonal`.
    """

    zone: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    diagonal: int = 0
    width: int = UNBOUNDED

    @classmethod
    def band(cls, zone: int, near: int, far: int, first: int, last: int) -> Tile:
        """The keys at the distances near..far (exclusive) of the queries first..last."""
        return cls(zone, (first, last), (max(0, first - far + 1), last - near), near, far - near)

    def rectangles(self, low: int, windows: bool = False) -> Iterator[_Rectangle]:
        """The visible pairs of query and key, each in one rectangle; keys below position `low` are left out.

        `windows`: whether masks may be numbers, which mostly makes one rectangle of a tile.
        """
        near, far = self.diagonal, self.diagonal + self.width
        (q0, q1), (k0, k1) = self.queries, self.keys
        k0 = max(k0, low)
        q0 = max(q0, k0 + near)  # the first query that sees a key
        k0, k1 = max(k0, q0 - far + 1), min(k1, q1 - near)
        if q0 >= q1 or k0 >= k1:
            return
        if k1 <= q0 - near + 1 and q1 <= k0 + far:
            yield _Rectangle((q0, q1), (k0, k1), "full")
        elif windows and k1 == q1 - near:
            yield _Rectangle((q0, q1), (k0, k1), min(self.width, k1 - k0))
        elif q1 - q0 > self.width:
            for start in range(q0, q1, self.width):
                yield from self._replace(queries=(start, min(start + self.width, q1))).rectangles(low)
        else:
            middle = q0 - near  # the last key that the first query sees
            below = q0 + max(0, k1 - middle)  # queries until here see some of the keys from there on
            above, end = min(q1, k0 + far - 1), min(k1, middle)  # queries from here on do not see all keys before
            size = min(q1 - above, end - k0)
            parts = (
                _Rectangle((q0, below), (middle, k1), "causal"),
                _Rectangle((below, q1), (middle, k1), "full"),
                _Rectangle((q0, above), (k0, end), "full"),
                _Rectangle((above, above + size), (k0, k0 + size), "anticausal"),
                _Rectangle((above, above + size), (k0 + size, end), "full"),
            )
            yield from (p for p in parts if p.queries[0] < p.queries[1] and p.keys[0] < p.keys[1])
