"""A remapping method whose far keys stay as they are cached, and are seen by queries that are turned back.

    >>> method = Stairs(window=4, start=2, chunk=3, max_distance=8)
    >>> method.distance(torch.tensor(9), torch.arange(10)).int().tolist()
    [4, 3, 2, 4, 3, 2, 3, 2, 1, 0]

A zone of far keys is a band of distances. In it every query is turned by one angle, whatever its position: keys are
rotated once, to their own positions, as every engine has them in its cache, and are never rotated again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.registry import register_method
from rope_ext_hf.methods.remapping import AttentionRule, RemappedPosition, RemappingMethod
from rope_ext_hf.methods.tiles import Tile


@register_method("stairs")
@dataclass(frozen=True, kw_only=True)
class Stairs(RemappingMethod):
    """Beyond the window distances climb from `start` again and again: W + ((d - S) mod B).

    The zones of dual chunk attention, counted from each query: no boundary moves through the input, and no key is
    stored twice. `window`: S, default three quarters of the limit; `start`: W, default a quarter of it; `chunk`: B,
    default half of it. S and W as in STRING (An et al. 2024, arXiv 2410.18745), of which this is the form without an
    end. Keys at distances below S are seen where they are.
    """

    # keys are cached at their own positions, which is where they stand in the nearest zone
    local_zone_exact = False

    window: int | None = None
    start: int | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(1, "start")
        if self.start is not None and self.window is not None and self.start > self.window:
            raise MethodError(f"{self.name}: start must be at most window = {self.window}, got {self.start}")

    @property
    def edges(self) -> tuple[int, int]:
        """`window` and `start`, which `bind` has filled in."""
        assert self.window is not None
        assert self.start is not None
        return self.window, self.start

    @property
    def band(self) -> int:
        """Return how many distances each zone of far keys spans."""
        assert self.chunk is not None
        return self.chunk

    @property
    def exact_length(self) -> int:
        window, start = self.edges
        return window + self.band if start == window else window

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        window, start = self.edges
        return RemappedPosition(m, offset=start - window - (zone - 1) * self.band if zone > 1 else start - window)

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        window, _ = self.edges
        return ((m - n - window) // self.band + 1).clamp(min=0)

    def zone_distances(self, length: int) -> tuple[tuple[int, int], ...]:
        window, _ = self.edges
        far = range(window, max(window + 1, length), self.band)  # the far zones an input of this length has
        return (0, window), *((smallest, smallest + self.band) for smallest in far)

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        window = self.window or max(3 * limit // 4, self.start or 0)
        start = self.start or min(window, limit // 4)
        chunk = self.chunk or max(1, min(limit // 2, limit - start))
        self.check_reach(limit, "window", window)
        self.check_reach(limit, "start and chunk together", start + chunk)
        return replace(self, window=window, start=start, chunk=chunk)

    def for_queries(self, first: int, count: int) -> tuple[AttentionRule, int, int]:
        if count < self.band:  # they are rotated faster than the keys
            return super().for_queries(first, count)
        names = ("window", "start", "chunk", "max_distance", "temperature")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        grid = max(first, self.edges[0])  # queries before see no far key
        return _StairsInBands(first=grid, **values), grid, self.band


@dataclass(frozen=True, kw_only=True)
class _StairsInBands(Stairs):
    """`Stairs` for many queries from position `first` on: keys are rotated once, to n mod B, and queries to m mod B.

    A band of B keys, counted from `first`, meets B queries in two zones, the same in all bands: 1 on and below
    the diagonal of their square, at W + ((d - S) mod B), and 2 above it, B further.
    """

    by_length = True
    first: int = 0

    def key_position(self, n: Tensor) -> RemappedPosition:
        window, _ = self.edges
        return RemappedPosition((n - self.first + window) % self.band)

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        _, start = self.edges
        return RemappedPosition((m - self.first) % self.band, offset=start + (zone - 1) * self.band)

    def tiles(self, first: int, last: int) -> Iterator[Tile]:
        window, _ = self.edges
        yield Tile.band(0, 0, window, first, last)
        for begin in range(first - (first - self.first) % self.band, last, self.band):
            start, stop = max(first, begin), min(begin + self.band, last)
            for key in range(begin - window, -self.band, -self.band):
                yield Tile(1, (start, stop), (max(0, key), key + stop - begin), begin - key)
                if key < begin - window:
                    above = begin - key - self.band  # keys above the diagonal of the square, all that are there
                    yield Tile(2, (start, stop), (max(0, key), key + self.band), above, self.band)
