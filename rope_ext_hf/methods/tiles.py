"""Tiles: blocks of queries and keys, all in one zone (a range of keys with one rule of relative positions)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rope_ext_hf.methods.base import UNBOUNDED

Mask = str | int
"""The keys of a rectangle that its queries see.

- "full": every query sees all keys.
- "causal": there are as many keys as queries, and query i sees the keys 0 ... i.
- "anticausal": there are as many keys as queries, and query i sees the keys from i on.
- A number w: the last query sees the last w keys, the query before it the w keys that end one key earlier, and so on.
"""


class _Rectangle(NamedTuple):
    """A range of queries and a range of keys, as positions, and the mask that says which keys each query sees."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: Mask


class Tile(NamedTuple):
    """A range of queries and a range of keys, as positions, all in one zone of a remapping method.

    A query at m sees those of the keys n with m - `diagonal` - `width` < n <= m - `diagonal`.
    """

    zone: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    diagonal: int = 0
    width: int = UNBOUNDED

    @classmethod
    def band(cls, zone: int, near: int, far: int, first: int, last: int) -> Tile:
        """Return the tile for the queries first ... last - 1 and the keys at distances near ... far - 1 from them."""
        return cls(zone, (first, last), (max(0, first - far + 1), last - near), near, far - near)

    def rectangles(self, low: int, windows: bool = False) -> Iterator[_Rectangle]:
        """Yield rectangles that together cover all pairs of a query and a key visible to it, each pair once.

        Args:
            low: keys below this position are left out.
            windows: whether a mask may be a number (see `Mask`), with which most tiles are a single rectangle.
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
            # Queries see different keys: a triangle is cut off at the near edge of the band, and one at the far edge.
            middle = q0 - near  # the last key that the first query sees
            below = q0 + max(0, k1 - middle)  # queries before this one see some of the keys from `middle` on
            end = min(k1, middle)
            above = min(q1, k0 + far - 1)  # queries from this one on do not see the first of the keys before `end`
            size = min(q1 - above, end - k0)
            parts = (
                _Rectangle((q0, below), (middle, k1), "causal"),
                _Rectangle((below, q1), (middle, k1), "full"),
                _Rectangle((q0, above), (k0, end), "full"),
                _Rectangle((above, above + size), (k0, k0 + size), "anticausal"),
                _Rectangle((above, above + size), (k0 + size, end), "full"),
            )
            for part in parts:
                if part.queries[0] < part.queries[1] and part.keys[0] < part.keys[1]:
                    yield part


class ZoneEdges(NamedTuple):
    """Edges between the zones of a query at m, as offsets from its anchor, m // step * step.

    Zone z, counted from 0, holds the keys below edge z and from edge z + 1 on. Edge 0 is m + 1. Edge 1 is the anchor +
    `first`, and each later edge lies `band` keys before the previous one. The last edge is the anchor + `last`.
    """

    zones: int
    first: int
    band: int = 0
    last: int = -(2**30)
    step: int = 1

    @classmethod
    def from_distances(cls, distances: tuple[tuple[int, int], ...]) -> ZoneEdges | None:
        """Return the edges of zones at these distances from a query, see `AttentionRule.zone_distances`.

        None: the distances overlap, or their zones differ in size.
        """
        ends = [end for _, end in distances]
        sizes = {end - start for start, end in distances[1:-1]}
        if any(start != end for end, (start, _) in zip(ends, distances[1:], strict=False)) or len(sizes) > 1:
            return None
        last = max(1 - ends[-1], cls._field_defaults["last"])
        first = last if len(distances) == 1 else 1 - ends[0]
        return cls(len(distances), first, sizes.pop() if sizes else 0, last)
