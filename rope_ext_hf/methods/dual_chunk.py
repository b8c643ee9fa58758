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
from rope_ext_hf.methods.tiles import Tile, ZoneEdges


@register_method("dca", aliases=["dual-chunk-attention"])
@dataclass(frozen=True, kw_only=True)
class DualChunk(RemappingMethod):
    """Dual Chunk Attention (An et al. 2024, arXiv 2402.17463, sec. 3): zones are chunks of the input.

    The input is cut into chunks of s tokens, and a key at n is placed at n mod s. A query at m is placed

    - at m mod s for keys of its own chunk;
    - at min(m mod s + s, s + w - 1) for keys of the previous chunk, so that the last w tokens are seen where they are;
    - at s + w - 1 for all older keys. (The paper's ceiling c is s + w.)

    `chunk`: s, default three quarters of `max_distance`; `window`: w, default the rest of `max_distance`. The authors'
    code stops queries at s + w: give a window one larger for the same numbers.
    """

    local_zone_exact = False

    chunk: int | None = None
    window: int | None = None

    def as_stated(self, config: Any, limit: int) -> Self:
        """Return the method with the sizes in `dual_chunk_attention_config` of the model's config (Qwen2.5-1M).

        The chunk_size that the config states includes its local_size, the window.
        """
        stated = getattr(config, "dual_chunk_attention_config", None)
        if self.chunk is not None or self.window is not None or not isinstance(stated, Mapping):
            return self
        size, local = stated.get("chunk_size"), stated.get("local_size")
        if type(size) is not int or type(local) is not int or not 0 < local < size <= limit:
            return self
        return replace(self, chunk=size - local, window=local)

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        chunk = self.chunk or 3 * limit // 4
        window = self.window or max(1, limit - chunk)
        self.check_reach(limit, "chunk and window together", chunk + window)
        return replace(self, chunk=chunk, window=window)

    @property
    def exact_length(self) -> int:
        return self.farthest + 1  # keys of the previous chunk are where they are until the query reaches the ceiling

    @property
    def size(self) -> int:
        """The number of tokens in a chunk, s in the paper; `bind` has filled it in."""
        assert self.chunk is not None
        return self.chunk

    @property
    def farthest(self) -> int:
        """The position that queries have for keys before the previous chunk: s + w - 1, for chunk s and window w."""
        assert self.window is not None
        return self.size + self.window - 1

    def key_position(self, n: Tensor) -> RemappedPosition:
        return RemappedPosition(n % self.size)

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        # In zone 0 the query is placed at m mod s, as keys are stored: no second rotation of the cache is needed.
        if zone == 1:
            return RemappedPosition((m % self.size + self.size).clamp(max=self.farthest))
        return RemappedPosition(offset=self.farthest)

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        return (m // self.size - n // self.size).clamp(0, 2)

    def zone_distances(self, length: int) -> tuple[tuple[int, int], ...]:
        # They overlap: two tokens of neighbouring chunks may be 1 or 2s - 1 apart.
        return (0, self.size), (1, 2 * self.size), (self.size + 1, UNBOUNDED)

    def zone_edges(self, length: int) -> ZoneEdges:
        return ZoneEdges(zones=3, first=0, band=self.size, step=self.size)

    def tiles(self, first: int, last: int) -> Iterator[Tile]:
        for start in range(first - first % self.size, last, self.size):
            queries = max(first, start), min(last, start + self.size)
            yield Tile(0, queries, (start, queries[1]))
            if start:
                yield Tile(1, queries, (start - self.size, start))
            if start > self.size:
                yield Tile(2, queries, (0, start - self.size))
