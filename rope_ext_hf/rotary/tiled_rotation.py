"""Scores of one query against keys that are rotated as they are read, a tile at a time, without a copy of all keys.

The position of a key is that of the first token of its tile plus its place in the tile, and rotations add up. So one
rotation serves the keys of every tile, and the rest of the angle turns the query instead. A tile of rotated keys stays
in the processor's cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rope_ext_hf.rotary.key_rotation import KeyLayout, KeyRotation

TILE_TOKENS = 512
_MAX_AT_ONCE = 2**17
"""Elements of keys that are rotated at once: with four float32 parts of this size, a processor's cache holds them."""


@dataclass(frozen=True)
class TiledRotation:
    """The rotation of the keys of consecutive tokens, as the rotation of each tile and the one inside of all tiles.

    Attributes:
        of_tiles: the rotation of the first token of each tile, (rows or 1, 1, tiles, dim // 2).
        inside: the rotation of the tokens of a tile, less that of its first token: (rows or 1, 1, tile, dim // 2).
        skipped: the tokens of the first tile that stand before the first key.
    """

    of_tiles: KeyRotation
    inside: KeyRotation
    skipped: int = 0

    def scores(self, query: Tensor, keys: Tensor, layout: KeyLayout, scale: float) -> Tensor:
        """Return the scores of queries at one position against rotated keys.

        Args:
            query: (rows, kv_heads, queries, head_dim), the heads that share a key, rotated to their position.
            keys: (rows, kv_heads, tokens, head_dim), before their rotation, in any dtype.
            layout: the dims that rotate.
            scale: the factor of the scores.

        Returns:
            (rows, kv_heads, queries, tokens) float32, without gradients. Products are taken in float32, so that
            rotated keys are not rounded.
        """
        rows, kv_heads, queries, dim = query.shape
        count, tile = int(keys.shape[-2]), int(self.inside.cos.shape[-2])
        tiles = -(-(self.skipped + count) // tile)
        # The query meets a key rotated by A + B as it meets one rotated by B after a rotation of its own by -A.
        back = KeyRotation(self.of_tiles.cos[:, :, :tiles], -self.of_tiles.sin[:, :, :tiles])
        each = (query.float() * scale).reshape(rows, kv_heads * queries, 1, dim).expand(-1, -1, tiles, -1)
        of_tile = back.apply(each, layout).view(rows, kv_heads, queries, tiles, dim)
        scores = query.new_empty(rows, kv_heads, queries, count, dtype=torch.float32)
        inside = self.inside.cos.expand(rows, -1, -1, -1), self.inside.sin.expand(rows, -1, -1, -1)
        at_once = max(1, _MAX_AT_ONCE // (tile * dim))
        with torch.autocast(query.device.type, enabled=False):  # it would round the products
            for row in range(rows):
                cos, sin = (part[row, 0] for part in inside)
                for first in range(0, kv_heads, at_once):
                    some = (row, slice(first, first + at_once))
                    self._write_scores(of_tile[some], keys[some], layout, cos, sin, scores[some])
        return scores

    def _write_scores(
        self, of_tile: Tensor, keys: Tensor, layout: KeyLayout, cos: Tensor, sin: Tensor, scores: Tensor
    ) -> None:
        """Write the scores for some heads of a row.

        Args:
            of_tile: (kv_heads, queries, tiles, head_dim) float32, the queries rotated for each tile.
            keys: (kv_heads, tokens, head_dim), before their rotation.
            layout: the dims that rotate.
            cos, sin: of the rotation inside of a tile, (tile, dim // 2).
            scores: (kv_heads, queries, tokens) float32, which is written to.
        """
        kv_heads, count, width = keys.shape
        tile, pairs = cos.shape
        sizes = [min(tile - self.skipped, count)]
        sizes += [min(tile, count - before) for before in range(sizes[0], count, tile)]
        query_x, query_y = (part.unbind(-2) for part in layout.members(of_tile))
        key_x, key_y = (torch.split(part, sizes, -2) for part in layout.members(keys))
        unrotated = [
            (of_tile[..., dims].unbind(-2), torch.split(keys[..., dims], sizes, -2)) for dims in layout.unrotated(width)
        ]
        out = torch.split(scores, sizes, -1)
        full = cos, sin, *scores.new_empty(4, kv_heads, tile, pairs)
        sign = -1 if layout.negative_angle else 1
        for index, size in enumerate(sizes):
            first = 0 if index else self.skipped
            parts = full if size == tile else [part.narrow(-2, first, size) for part in full]
            cos, sin, turned_x, turned_y, wide_x, wide_y = parts
            x, y = key_x[index], key_y[index]
            if x.dtype != torch.float32:
                x, y = wide_x.copy_(x), wide_y.copy_(y)
            # The members of pairs stand apart: torch is faster on memory without gaps.
            torch.mul(x, cos, out=turned_x).addcmul_(y, sin, value=-sign)
            torch.mul(y, cos, out=turned_y).addcmul_(x, sin, value=sign)
            part = torch.bmm(query_x[index], turned_x.mT).baddbmm_(query_y[index], turned_y.mT)
            for query, key in unrotated:
                part.baddbmm_(query[index], key[index].float().mT)
            out[index].copy_(part)
