"""Dual Chunk Attention, a remapping method whose zones are chunks of the input.

>>> method = DualChunk(chunk=4, window=2, max_distance=6)
>>> method.distance(torch.tensor(9), torch.arange(10)).int().tolist()
[5, 4, 3, 2, 5, 4, 3, 2, 1, 0]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from rope_ext_hf.methods.base import UNBOUNDED
from rope_ext_hf.methods.registry import register_method
from rope_ext_hf.methods.remapping import RemappedPosition, RemappingMethod
from rope_ext_hf.methods.tiles import Tile


@register_method("dca", aliases=["dual-chunk-attention"])
@dataclass(frozen=True, kw_only=True)
class DualChunk(RemappingMethod):
    """Dual Chunk Attention (An et al. 2024, arXiv 2402.17463).

    The input is cut into chunks of s tokens, and a key n stands at n mod s. A query m stands at m mod s for keys of
    its own chunk, at min(m mod s + s, s + w - 1) for those of the chunk before, so that the last w tokens are where
    they are, and at s + w - 1 for all older ones. (The paper's ceiling c is s + w.) `chunk`: default three quarters of
    the limit; `window`: default what is left of the limit, and one larger for the authors' code, which stops queries
    at s + w.
    """

    local_zone_exact = False

    chunk: int | None = None
    window: int | None = None

    def as_stated(self, config: Any, limit: int) -> Self:
        """The sizes of `dual_chunk_attention_config` (Qwen2.5-1M): chunks of chunk_size less local_size tokens."""
        stated = getattr(config, "dual_chunk_attention_config", None)
        size, local = (stated.get(key) if isinstance(stated, Mapping) else None for key in ("chunk_size", "local_size"))
        if self.chunk is not None or self.window is not None or type(size) is not int or type(local) is not int:
            return self
        return replace(self, chunk=size - local, window=local) if 0 < local < size <= limit else self

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        chunk = self.chunk or 3 * limit // 4
        window = self.window or max(1, limit - chunk)
        self.check_reach(limit, "chunk and window together", chunk + window)
        return replace(self, chunk=chunk, window=window)

    @property
    def exact_length(self) -> int:
        return self.farthest + 1  # keys of the chunk before are where they are until the query reaches the ceiling

    @property
    def size(self) -> int:
        assert self.chunk is not None
        return self.chunk

    @property
    def farthest(self) -> int:
        assert self.window is not None
        return self.size + self.window - 1

    def key_position(self, n: Tensor) -> RemappedPosition:
        return RemappedPosition(n % self.size)

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        # In zone 0 the query stands at m mod s, as a key there does: no second rotation of the cache.
        if zone == 1:
            return RemappedPosition((m % self.size + self.size).clamp(max=self.farthest))
        return RemappedPosition(offset=self.farthest)

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        return (m // self.size - n // self.size).clamp(0, 2)

    def zone_distances(self, length: int) -> tuple[tuple[int, int], ...]:
        # A distance alone leaves the zone open: two tokens of neighbouring chunks may be 1 or 2s - 1 apart.
        return (0, self.size), (1, 2 * self.size), (self.size + 1, UNBOUNDED)

    def tiles(self, first: int, last: int) -> Iterator[Tile]:
        for start in range(first - first % self.size, last, self.size):
            queries = max(first, start), min(last, start + self.size)
            yield Tile(0, queries, (start, queries[1]))
            if start:
                yield Tile(1, queries, (start - self.size, start))
            if start > self.size:
                yield Tile(2, queries, (0, start - self.size))
