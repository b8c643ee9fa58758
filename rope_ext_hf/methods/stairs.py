"""Stairs, a remapping method that leaves cached keys as every engine has them, and rotates queries back.

    >>> method = Stairs(window=4, start=2, chunk=3, max_distance=8)
    >>> method.distance(torch.tensor(9), torch.arange(10)).int().tolist()
    [4, 3, 2, 4, 3, 2, 3, 2, 1, 0]

A zone of far keys is a band of distances. In a zone every query is rotated back by the same number of tokens, whatever
its position: keys are rotated once, to their own positions, as every engine has them in its cache, and never again.
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
    """Beyond the window, distances climb from `start` again and again.

    A key at a distance d below S is seen where it is, and a farther one at W + ((d - S) mod B). The zones are those of
    dual chunk attention, counted back from each query, so that no boundary moves through the input and no key is stored
    twice. S and W are as in STRING (An et al. 2024, arXiv 2410.18745), whose distances climb once; here they climb
    without end. `window`: S, default three quarters of `max_distance`; `start`: W, default a quarter of it; `chunk`: B,
    default half of it.
    """

    local_zone_exact = False  # keys are cached at their own positions, so the nearest zone needs no rotation

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
        """The distance from which keys are remapped (S), and the distance where the stairs start (W); see the class."""
        assert self.window is not None
        assert self.start is not None
        return self.window, self.start

    @property
    def band(self) -> int:
        """The number of distances in each zone of far keys (B, the field `chunk`); `bind` has filled it in."""
        assert self.chunk is not None
        return self.chunk

    @property
    def exact_length(self) -> int:
        window, start = self.edges
        return window + self.band if start == window else window

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        window, start = self.edges
        return RemappedPosition(m, offset=start - window - (zone - 1) * self.band)

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        window, _ = self.edges
        return ((m - n - window) // self.band + 1).clamp(min=0)

    def zone_distances(self, length: int) -> tuple[tuple[int, int], ...]:
        window, _ = self.edges
        far = range(window, max(window + 1, length), self.band)  # the far zones of an input of this length
        return (0, window), *((smallest, smallest + self.band) for smallest in far)

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        window = self.window or max(3 * limit // 4, self.start or 0)
        start = self.start or min(window, limit // 4)
        chunk = self.chunk or max(1, min(limit // 2, limit - start))
        self.check_reach(limit, "window", window)
        self.check_reach(limit, "start and chunk together", start + chunk)
        return replace(self, window=window, start=start, chunk=chunk)

    def for_queries(self, first: int, count: int) -> tuple[AttentionRule, int, int]:
        if count < self.band:  # so few queries are rotated faster than the keys
            return super().for_queries(first, count)
        names = ("window", "start", "chunk", "max_distance", "temperature")
        values: dict[str, Any] = {name: getattr(self, name) for name in names}
        grid = max(first, self.edges[0])  # earlier queries see no far key
        return _StairsInBands(first=grid, **values), grid, self.band


@dataclass(frozen=True, kw_only=True)
class _StairsInBands(Stairs):
    """`Stairs` for many queries from position `first` on: keys are rotated to n mod B, and queries to m mod B.

    Counted from `first`, B queries and a band of B keys meet in two zones, the same in all bands: zone 1 on and below
    the diagonal of their square, and zone 2 above it, where the distance is B larger.
    """

    depends_on_total_length = True
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
                    above = begin - key - self.band  # all keys above the diagonal of the square
                    yield Tile(2, (start, stop), (max(0, key), key + self.band), above, self.band)
