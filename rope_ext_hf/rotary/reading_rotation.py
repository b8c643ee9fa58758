"""The rotation with which the keys in a cache are read, once their rows have grown to other lengths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.rotary.key_rotation import KeyRotation
from rope_ext_hf.rotary.phase import angles
from rope_ext_hf.rotary.tiled_rotation import TILE_TOKENS, TiledRotation


@dataclass(frozen=True)
class ReadingRotation:
    """The rotation of keys from the frequencies at the lengths `stored` to those at the lengths `present`.

    Attributes:
        table: the rotary module whose frequencies are meant.
        stored, present: (rows or 1,) integers, lengths in tokens.
        positions: (rows or 1, tokens) integers, the position of every key, the new ones last.
        scaled: whether keys carry the attention factor.
    """

    table: RotaryEmbedding
    stored: Tensor
    present: Tensor
    positions: Tensor
    scaled: bool = True

    def of_all(self, device: torch.device) -> KeyRotation:
        """Return the rotation of all keys."""
        return self._of_all.to(device)

    def inverse_of_last(self, new: int) -> KeyRotation:
        """Return the inverse for the last `new` keys, with which keys of the present frequencies are stored."""
        # The ratio of the attention factors is not part of the rotation, and is divided out separately.
        if "_of_all_positions" in self.__dict__:
            back = self._of_all_positions.last(new)
        else:
            back = self._at(self.positions[:, self.positions.shape[1] - new :])
        if self._ratio is None:
            return KeyRotation(back.cos, -back.sin)
        return KeyRotation(back.cos / self._ratio, -back.sin / self._ratio)

    def in_tiles(self, device: torch.device, count: int) -> TiledRotation:
        """Return the rotation of the last `count` keys tile by tile; their positions must be consecutive."""
        if (device, count) not in self._tiled:
            end, tiles = self.positions[:, -1:] + 1, -(-count // TILE_TOKENS)
            starts = end - count + TILE_TOKENS * torch.arange(tiles, device=end.device)
            of_tiles = _scaled(self._at(starts), self._ratio).to(device)
            inside = self._at(torch.arange(TILE_TOKENS, device=end.device)[None]).to(device)
            self._tiled[device, count] = TiledRotation(of_tiles, inside)
        return self._tiled[device, count]

    @cached_property
    def _tiled(self) -> dict[tuple[torch.device, int], TiledRotation]:
        """The results of `in_tiles`, which the layers of a model share."""
        return {}

    @cached_property
    def _of_all(self) -> KeyRotation:
        return _scaled(self._of_all_positions, self._ratio)

    @cached_property
    def _of_all_positions(self) -> KeyRotation:
        """The rotation of all keys, without the ratio of the attention factors."""
        return self._at(self.positions)

    @cached_property
    def _turn(self) -> tuple[Tensor, Tensor | None]:
        """The phase per position, (rows, 1, pairs) fixed point, and the ratio of the attention factors; None: it is 1.

        The difference is taken in fixed point, because p (g - f) grows with the position, and float32 numbers around
        2^20 are an eighth of a radian apart. The overflow of int64 drops whole cycles.
        """
        rows = max(self.stored.shape[0], self.present.shape[0])
        # Both lengths in one call, which halves the launches.
        lengths = torch.stack((self.stored.expand(rows), self.present.expand(rows)), dim=-1)
        phase, factor = self.table.phase_per_position(lengths)
        ratio = (factor[:, 1:] / factor[:, :1])[:, None] if self.scaled and isinstance(factor, Tensor) else None
        return phase[:, 1:] - phase[:, :1], ratio

    @property
    def _ratio(self) -> Tensor | None:
        return self._turn[1]

    def _at(self, positions: Tensor) -> KeyRotation:
        """Return the rotation of keys at positions (rows or 1, tokens), without the ratio of the attention factors."""
        angle = angles(positions, self._turn[0])[:, None]  # (rows, 1, tokens, pairs)
        return KeyRotation(angle.cos(), angle.sin())


def _scaled(rotation: KeyRotation, ratio: Tensor | None) -> KeyRotation:
    return rotation if ratio is None else KeyRotation(rotation.cos * ratio, rotation.sin * ratio)
