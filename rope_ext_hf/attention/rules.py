"""The inputs of blockwise attention beside queries, keys and values: a layer's rule, positions, score modifiers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rope_ext_hf.methods.base import constant
from rope_ext_hf.methods.remapping import AttentionRule, RemappedPosition, RemappingMethod, ScoreBias
from rope_ext_hf.rotary.key_rotation import KeyLayout, KeyRotation
from rope_ext_hf.rotary.phase import fixed_point_number, phase_to_radians


@dataclass(frozen=True)
class LocalAttention(AttentionRule):
    """The rule of a layer whose keys no method moves: causal attention at true relative positions."""

    window_size: int | None = None  # keys a query sees, itself included; None: all before it
    method: RemappingMethod | None = None
    """The one whose rotary module the layer shares, so that keys arrive rotated to its `stored_position`; None: they
    arrive at their own position, or unrotated.
    """
    temperature: RemappingMethod | None = None  # the method whose temperature the layer has

    def key_position(self, n: Tensor) -> RemappedPosition:
        return RemappedPosition(n) if self.method is None else self.method.stored_position(n)

    def query_scale(self, m: Tensor) -> Tensor | None:
        return None if self.temperature is None else self.temperature.query_scale(m)


class RotationTable:
    """Fixed-point angles of positions, int64 as in `rotary.phase`, by (pairs,) float64 radians per token."""

    def __init__(self, inv_freq: Tensor) -> None:
        # Python numbers, because a tensor kept here could be one made while tracing.
        self.inv_freq: tuple[float, ...] = tuple(inv_freq.tolist())
        self._phases: dict[float, tuple[int, ...]] = {}

    def phase_at(self, position: RemappedPosition, device: torch.device) -> Tensor:
        """(..., pairs) int64 for positions (...)."""
        phase = torch.zeros((), dtype=torch.int64, device=device)
        if position.positions is not None:
            phase = position.positions.to(device)[..., None] * self.phase_of_distance(1 / position.divisor, device)
        return phase + self.phase_of_distance(position.offset, device) if position.offset else phase

    def between(
        self, before: RemappedPosition, after: RemappedPosition, device: torch.device, *more: RemappedPosition
    ) -> KeyRotation:
        """The rotation of queries or keys from one position to others, as rows; positions (rows or 1, tokens)."""
        phases = []
        for one in (after, *more):
            if before.positions is one.positions and before.divisor == one.divisor:  # one angle for all tokens
                phases.append(self.phase_of_distance(one.offset - before.offset, device)[None, None])
            else:
                phases.append(self.phase_at(one, device) - self.phase_at(before, device))
        angle = phase_to_radians(torch.cat(phases) if phases[1:] else phases[0])[:, None]
        return KeyRotation(angle.cos(), angle.sin())

    def phase_of_distance(self, tokens: float, device: torch.device) -> Tensor:
        if tokens not in self._phases:
            self._phases[tokens] = tuple(fixed_point_number(f * tokens) for f in self.inv_freq)
        return constant(self._phases[tokens], device, torch.int64)


@dataclass(frozen=True)
class TokenPositions:
    """Positions and padding of the tokens of one forward."""

    query_positions: Tensor  # (rows or 1, tokens) int64, of the new tokens
    key_positions: Tensor  # (rows or 1, past + tokens) int64, of all tokens
    left_padding: tuple[int, ...] | None
    """Per row, the padded tokens before position 0, where all others follow in order; None: a row has another order."""
    key_mask: Tensor | None  # (rows, past + tokens) bool, False where a key is padding; None: no key is
    counted: tuple[int, ...] | None = None
    """Per row, its tokens without padding; None: not known without a wait for the device."""
    rotations: dict[Hashable, KeyRotation | None] = field(default_factory=dict)  # of one layer; the next use them again
    query_scales: dict[Hashable, Tensor | None] = field(default_factory=dict)  # as `rotations`

    @cached_property
    def total(self) -> int:
        """The tokens of a row, those in the cache included."""
        return int(self.key_positions.shape[-1])

    @cached_property
    def max_joined(self) -> int:
        """The most queries, those of all rows, of a call over tiles of the same queries: a half or, beside those of a
        whole input, a quarter of the keys, which bounds the memory. The tiles of several rows would be copied."""
        share = 2 if 2 * self.query_positions.shape[-1] <= self.total else 4
        return self.total // share if len(self.left_padding or ()) == 1 else 0

    @cached_property
    def reach(self) -> int:
        """One more than the largest position, where positions are not in order; the host waits for it."""
        return int(self.key_positions.max()) + 1

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Per row (or one for all) its largest position + 1; the host waits for it where rows are not counted."""
        if self.counted is not None:
            return self.counted
        real = self.key_positions if self.key_mask is None else self.key_positions.where(self.key_mask, -1)
        return tuple((real.amax(-1) + 1).tolist())

    def of_rows(self, rows: tuple[int, ...]) -> TokenPositions:
        """The positions of some rows, without what other layers have computed."""
        query_positions, key_positions = (pick_rows(x, rows) for x in (self.query_positions, self.key_positions))
        left_padding = self.left_padding and tuple(self.left_padding[row] for row in rows)
        key_mask = None if self.key_mask is None else pick_rows(self.key_mask, rows)
        return TokenPositions(query_positions, key_positions, left_padding, key_mask)


def pick_rows(x: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Some rows of a tensor (rows or 1, ...); one row that stands for all stays. Nothing is copied to the device."""
    return x if x.shape[0] == 1 else torch.cat([x[row : row + 1] for row in rows])


class RowGroup(NamedTuple):
    """Rows of a forward that attend by one rule, and their positions."""

    rows: tuple[int, ...] | None  # their indices; None: all rows
    method: RemappingMethod | None  # the remapping method at their length; None: the model attends as loaded
    positions: TokenPositions


class Rotation(NamedTuple):
    """How a layer rotates its queries and keys."""

    table: RotationTable
    layout: KeyLayout


class PairScales(Protocol):
    """Factors of pairs of dims of queries and keys, whose product falls with the distance (xPos)."""

    @property
    def block_size(self) -> int:
        """Keys that share one origin."""

    def scale_pairs(self, x: Tensor, distance: Tensor) -> Tensor:
        """Scale queries or keys (rows, heads, tokens, head_dim) at signed distances (rows or 1, tokens)."""


class ScoreModifiers(NamedTuple):
    """Changes that some families and hybrids make to scores."""

    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # (heads,) scores of a key without a value
    mask: Tensor | None = None
    """(rows or 1, 1, tokens, keys), bool (True: visible) or numbers to add, in place of causality, padding, window."""
    dropout: float = 0.0  # probability of dropping an attention weight
    bias: ScoreBias | None = None  # an addition to scores, after the softcap
    pair_scales: PairScales | None = None  # of queries and keys by their distance, for rules with one zone
