"""What blockwise attention must know of a layer and of a forward."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rope_ext_hf.methods.remapping import RemappedPosition, RemappingMethod
from rope_ext_hf.methods.tiles import Tile, local_window_tiles
from rope_ext_hf.rotary.kv_cache import KeyLayout, KeyRotation
from rope_ext_hf.rotary.phase import fixed_point

__all__ = ["AttentionRule", "ForwardContext", "LocalAttention", "Rotation", "RotationTable", "ScoreModifiers"]


class AttentionRule(Protocol):
    """What `RemappingMethod` says about places and zones; the docstrings are there."""

    @property
    def local_zone_exact(self) -> bool: ...
    @property
    def window_size(self) -> int | None: ...
    @property
    def last_zone_start(self) -> int: ...
    @property
    def zones(self) -> int: ...
    def key_position(self, n: Tensor) -> RemappedPosition: ...
    def query_positions(self, m: Tensor) -> tuple[RemappedPosition, ...]: ...
    def query_scale(self, m: Tensor) -> Tensor | None: ...
    def zone(self, m: Tensor, n: Tensor) -> Tensor: ...
    def tiles(self, first: int, last: int) -> Iterator[Tile]: ...


@dataclass(frozen=True)
class LocalAttention:
    """The rule of a layer without a method: all keys, or those of a sliding window, where they are.

    `method`: whose rotation the keys come with; None: their own, or none.
    """

    window_size: int | None = None
    method: RemappingMethod | None = None

    @property
    def local_zone_exact(self) -> bool:
        return True

    @property
    def last_zone_start(self) -> int:
        return self.window_size or 2**40

    @property
    def zones(self) -> int:
        return 1

    def key_position(self, n: Tensor) -> RemappedPosition:
        return RemappedPosition(n) if self.method is None else self.method.key_position(n)

    def query_positions(self, m: Tensor) -> tuple[RemappedPosition, ...]:
        return ()

    def query_scale(self, m: Tensor) -> Tensor | None:
        return None

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        return torch.zeros_like(m - n)

    def tiles(self, first: int, last: int) -> Iterator[Tile]:
        if self.window_size is not None:
            yield from local_window_tiles(self.window_size, first, last)
        else:
            yield Tile(0, (first, last), (0, last))


class RotationTable:
    """Angles of places, in fixed point: int64 units of 2^-64 turns (see `rotary.py`).

    Args:
        inv_freq: (pairs,) float64, radians per token.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        self.inv_freq = inv_freq
        self._known: dict[tuple[float, torch.device], Tensor] = {}

    def phase_at(self, position: RemappedPosition, device: torch.device) -> Tensor:
        """(..., pairs) int64 for positions (...)."""
        phase = torch.zeros((), dtype=torch.int64, device=device)
        if position.positions is not None:
            phase = position.positions.to(device)[..., None] * self.phase_of_distance(1 / position.divisor, device)
        return phase + self.phase_of_distance(position.offset, device) if position.offset else phase

    def between(self, before: RemappedPosition, after: RemappedPosition, device: torch.device) -> KeyRotation:
        """What brings queries or keys from one place to another; positions (rows or 1, tokens)."""
        return KeyRotation.from_phase(self.phase_at(after, device) - self.phase_at(before, device))

    def phase_of_distance(self, tokens: float, device: torch.device) -> Tensor:
        """The phase of so many tokens, (pairs,); copied to a device once."""
        key = tokens, device
        if key not in self._known:
            self._known[key] = fixed_point(self.inv_freq * tokens).to(device)
        return self._known[key]


@dataclass(frozen=True)
class ForwardContext:
    """One forward of the decoder, as far as attention must know.

    Attributes:
        query_positions: (rows or 1, tokens) int64, positions of the new tokens.
        key_positions: (rows or 1, past + tokens) int64, positions of all of them.
        left_padding: per row, how many padded tokens come before position 0, all others following in order; None: the
            positions are not like that.
        key_mask: (rows, past + tokens) bool, False where a key is padding; None: nowhere.
        rotations: what has been worked out for one layer and serves the next.
    """

    query_positions: Tensor
    key_positions: Tensor
    left_padding: tuple[int, ...] | None
    key_mask: Tensor | None
    rotations: dict[Hashable, KeyRotation] = field(default_factory=dict)


class Rotation(NamedTuple):
    """How a layer turns its queries and keys."""

    table: RotationTable
    layout: KeyLayout


class ScoreModifiers(NamedTuple):
    """What some families do to scores.

    Attributes:
        softcap: scores become softcap tanh(score / softcap).
        sinks: (heads,) scores of a key without a value.
        mask: (rows or 1, 1, tokens, keys), bool or to be added; it then says all about what is visible.
        dropout: of attention weights.
    """

    softcap: float | None = None
    sinks: Tensor | None = None
    mask: Tensor | None = None
    dropout: float = 0.0
