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

TILE_TOKENS = 1024


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
            (rows, kv_heads, queries, tokens) float32. Products are taken in float32, so that rotated keys are not
            rounded.
        """
        rows, kv_heads, queries, dim = query.shape
        count, tile = int(keys.shape[-2]), int(self.inside.cos.shape[-2])
        tiles = -(-(self.skipped + count) // tile)
        # The query meets a key rotated by A + B as it meets one rotated by B after a rotation of its own by -A.
        back = KeyRotation(self.of_tiles.cos[:, :, :tiles], -self.of_tiles.sin[:, :, :tiles])
        each = (query.float() * scale).reshape(rows, kv_heads * queries, 1, dim).expand(-1, -1, tiles, -1)
        of_tile = back.apply(each, layout).view(rows, kv_heads, queries, tiles, dim)
        scores = query.new_empty(rows, kv_heads, queries, count, dtype=torch.float32)
        with torch.autocast(query.device.type, enabled=False):  # it would round the products
            for index in range(tiles):
                start, stop = max(0, index * tile - self.skipped), min(count, (index + 1) * tile - self.skipped)
                first = start + self.skipped - index * tile
                part = (..., slice(first, first + stop - start), slice(None))
                inside = KeyRotation(self.inside.cos[part], self.inside.sin[part])
                rotated = inside.apply(keys[:, :, start:stop].float(), layout)
                scores[..., start:stop] = of_tile[:, :, :, index] @ rotated.transpose(-1, -2)
        return scores
