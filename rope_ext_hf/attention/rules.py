"""The inputs of blockwise attention other than queries, keys and values: rule, rotation, positions, modifiers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.methods.base import constant
from rope_ext_hf.methods.remapping import AttentionRule, RemappedPosition, RemappingMethod, ScoreBias
from rope_ext_hf.rotary.exported import CosSin, is_exporting, rotation_at, rotation_by
from rope_ext_hf.rotary.key_rotation import KeyLayout, KeyRotation
from rope_ext_hf.rotary.phase import fixed_point_number, phase_to_radians
from rope_ext_hf.rotary.tiled_rotation import TiledRotation

__all__ = ["LocalAttention", "ScoreModifiers", "TokenPositions"]


@dataclass(frozen=True)
class LocalAttention(AttentionRule):
    """The rule for a layer whose keys no remapping method moves: causal attention at true relative positions."""

    window_size: int | None = None  # the number of keys that a query sees, itself included; None: all before it
    method: RemappingMethod | None = None
    """The method whose rotary module the layer shares, so that keys arrive rotated to its `stored_position`.

    None: they arrive at their own position, or unrotated.
    """
    temperature: RemappingMethod | None = None  # the method whose temperature the layer has

    def key_position(self, n: Tensor) -> RemappedPosition:
        return RemappedPosition(n) if self.method is None else self.method.stored_position(n)

    def query_scale(self, m: Tensor) -> Tensor | None:
        return None if self.temperature is None else self.temperature.query_scale(m)


class RotationTable:
    """Computes the angles by which queries and keys at given positions are rotated, in fixed point (`rotary.phase`).

    Args:
        inv_freq: (pairs,) float64, radians per token.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        # Python numbers, because a tensor kept here could be one that was made while tracing.
        self.inv_freq: tuple[float, ...] = tuple(inv_freq.tolist())
        self._phases: dict[float, tuple[int, ...]] = {}

    def phase_at(self, position: RemappedPosition, device: torch.device) -> Tensor:
        """Return the rotation angle of each pair of dims at each position, in fixed point.

        For positions of shape (...), the result is (..., pairs) int64.
        """
        phase = torch.zeros((), dtype=torch.int64, device=device)
        if position.positions is not None:
            phase = position.positions.to(device)[..., None] * self.phase_of_distance(1 / position.divisor, device)
        if position.offset:
            phase = phase + self.phase_of_distance(position.offset, device)
        return phase

    def between(
        self, before: RemappedPosition, after: RemappedPosition, device: torch.device, *more: RemappedPosition
    ) -> KeyRotation:
        """Return the rotation that moves queries or keys from one position to another.

        With `more`, the result has a row for each of `after` and `more`. Each position is a `RemappedPosition`, whose
        `positions` are (rows or 1, tokens).
        """
        if is_exporting():
            turns = [self._turn(before, place, device) for place in (after, *more)]
            cos, sin = (torch.cat(parts)[:, None] for parts in zip(*turns, strict=True))
            return KeyRotation(cos, sin)
        phases = []
        for place in (after, *more):
            if before.positions is place.positions and before.divisor == place.divisor:  # one angle for all tokens
                phases.append(self.phase_of_distance(place.offset - before.offset, device)[None, None])
            else:
                phases.append(self.phase_at(place, device) - self.phase_at(before, device))
        # One angle for all tokens may stand beside angles by token.
        phase = torch.cat(torch.broadcast_tensors(*phases)) if len(phases) > 1 else phases[0]  # type: ignore[no-untyped-call]
        angle = phase_to_radians(phase)[:, None]
        return KeyRotation(angle.cos(), angle.sin())

    def phase_of_distance(self, tokens: float, device: torch.device) -> Tensor:
        """Return the angle by which each pair turns over a distance in tokens: fixed point, (pairs,) int64."""
        return constant(self._phase_numbers(tokens), device, torch.int64)

    def _phase_numbers(self, tokens: float) -> tuple[int, ...]:
        if tokens not in self._phases:
            self._phases[tokens] = tuple(fixed_point_number(f * tokens) for f in self.inv_freq)
        return self._phases[tokens]

    def _turn(self, before: RemappedPosition, after: RemappedPosition, device: torch.device) -> CosSin:
        """Return the rotation from one position to another, (rows or 1, tokens or 1, pairs), for an exported graph."""
        offset = rotation_by(self._phase_numbers(after.offset - before.offset), device)
        turn = CosSin(offset.cos[None, None], offset.sin[None, None])
        if before.positions is after.positions and before.divisor == after.divisor:
            return turn
        for place, inverse in ((after, False), (before, True)):
            if place.positions is not None:
                own = rotation_at(place.positions.to(device)[..., None], self._phase_numbers(1 / place.divisor))
                turn = turn.then(own.inverse() if inverse else own)
        return turn


@dataclass(frozen=True)
class TokenPositions:
    """The positions and the padding of the tokens that one forward reads or finds in the cache."""

    query_positions: Tensor  # (rows or 1, tokens) int64, of the new tokens
    key_positions: Tensor  # (rows or 1, past + tokens) int64, of all tokens
    left_padding: tuple[int, ...] | None
    """The number of padded tokens that each row begins with, before position 0; all others follow in order.

    None: the positions of a row are in another order.
    """
    key_mask: Tensor | None  # (rows, past + tokens) bool, False where a key is padding; None: no key is padding
    counted: tuple[int, ...] | None = None
    """The number of tokens of each row without padding; None: not known without a wait for the device."""
    rotations: dict[Hashable, KeyRotation | None] = field(default_factory=dict)
    """Rotations that one layer has computed for the next ones."""
    tiled: dict[Hashable, TiledRotation] = field(default_factory=dict)
    """The same for rotations tile by tile."""
    query_scales: dict[Hashable, Tensor | None] = field(default_factory=dict)
    """Temperatures that one layer has computed for the next ones."""

    @cached_property
    def total(self) -> int:
        """The number of tokens in a row, those in the cache included."""
        return int(self.key_positions.shape[-1])

    @cached_property
    def is_counted(self) -> bool:
        """True if positions are known to count the tokens of each row, after padding at its beginning alone."""
        if self.left_padding is None or self.counted is None:
            return False
        counts = self.counted * (len(self.left_padding) if len(self.counted) == 1 else 1)
        return all(padding + count == self.total for padding, count in zip(self.left_padding, counts, strict=True))

    @cached_property
    def max_joined(self) -> int:
        """The most queries in one kernel call that covers several tiles (blocks of keys) of the same queries.

        Each query counts once for each tile. The limit bounds the memory: it is half the number of keys, or a quarter
        where most keys are new. It is 0 where there are several rows, whose tiles would have to be copied.
        """
        share = 2 if 2 * self.query_positions.shape[-1] <= self.total else 4
        return self.total // share if len(self.left_padding or ()) == 1 else 0

    @cached_property
    def reach(self) -> int:
        """One more than the largest position, for positions that are not in order; the host waits for the device."""
        return int(self.key_positions.max()) + 1

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The length of each row, its largest position + 1; a single number may stand for all rows.

        The host waits for the device if `counted` is None.
        """
        if self.counted is not None:
            return self.counted
        real = self.key_positions if self.key_mask is None else self.key_positions.where(self.key_mask, -1)
        return tuple((real.amax(-1) + 1).tolist())

    def query_scale(
        self, rule: AttentionRule, m: Callable[[], Tensor], device: torch.device, dtype: torch.dtype, name: Hashable
    ) -> Tensor | None:
        """Return the factors of a rule for queries, computed by the first layer that asks and kept for the next ones.

        Args:
            rule: the rule.
            m: a function that gives the positions of the queries, (rows or 1, tokens).
            device, dtype: those of the queries.
            name: says which queries of the forward they are.

        Returns:
            (rows or 1, 1, tokens, 1). None: the queries stay as they are.
        """
        entry = (rule, device, dtype, name)
        if entry not in self.query_scales:
            scale = rule.query_scale(m())
            self.query_scales[entry] = None if scale is None else scale[:, None, :, None].to(dtype)
        return self.query_scales[entry]

    def forget(self) -> None:
        """Free the rotations and temperatures that one layer has computed for the next ones."""
        self.rotations.clear()
        self.tiled.clear()
        self.query_scales.clear()

    def of_rows(self, rows: tuple[int, ...]) -> TokenPositions:
        """Return the positions of these rows alone, without the cached results that other layers have computed."""
        query_positions, key_positions = (pick_rows(x, rows) for x in (self.query_positions, self.key_positions))
        left_padding = self.left_padding and tuple(self.left_padding[row] for row in rows)
        key_mask = None if self.key_mask is None else pick_rows(self.key_mask, rows)
        return TokenPositions(query_positions, key_positions, left_padding, key_mask)


def pick_rows(x: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Return the rows of a tensor that have these indices.

    A tensor with one row, which stands for all rows, stays as it is. Slices do it without a copy of indices to the
    device.
    """
    return x if x.shape[0] == 1 else torch.cat([x[row : row + 1] for row in rows])


class RowGroup(NamedTuple):
    """Rows of one forward that attend by the same rule, and their positions."""

    rows: tuple[int, ...] | None  # their indices; None: all rows
    method: RemappingMethod | None  # the remapping method at their length; None: the model's own attention
    positions: TokenPositions


class Rotation(NamedTuple):
    """The frequencies and the dims by which a layer's queries and keys are rotated."""

    table: RotationTable
    layout: KeyLayout


_QueryKeyProduct = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""(query, key, m, n, scale) -> scores, (rows, heads, queries, keys) float32, of queries at m and keys at n."""


class ScoreModifiers(NamedTuple):
    """Changes to attention scores that some model families, and some methods with a score bias, make."""

    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # (heads,) scores of a key without a value
    mask: Tensor | None = None
    """(rows or 1, 1, tokens, keys), bool (True: visible) or numbers to add, in place of causality, padding, window."""
    dropout: float = 0.0  # probability of dropping an attention weight
    bias: ScoreBias | None = None  # an addition to scores, after the softcap
    product: _QueryKeyProduct | None = None
    """A replacement for the product of queries and keys (xPos); only rules with a single zone use it."""

    @property
    def plain(self) -> bool:
        """True if the fused kernels of torch can compute the attention.

        Then nothing changes the scores; there may be sinks.
        """
        return self.softcap is None and self.zoned

    @property
    def zoned(self) -> bool:
        """True if zones alone decide which keys a query sees and how: there may be sinks and a soft cap."""
        return self.mask is None and not self.dropout and self.bias is None and self.product is None
