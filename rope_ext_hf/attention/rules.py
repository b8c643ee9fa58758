"""What blockwise attention must know of a layer and of a forward."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rope_ext_hf.methods.remapping import Place, RemappingMethod
from rope_ext_hf.methods.tiles import Piece, newest
from rope_ext_hf.rotary.kv_cache import KeyLayout, Turn
from rope_ext_hf.rotary.phase import fixed_point

__all__ = ["Call", "Rotation", "RotationTable", "Rule", "ScoreModifiers", "Window"]


class Rule(Protocol):
    """What `RemappingMethod` says about places and zones; the docstrings are there."""

    @property
    def band(self) -> bool: ...
    @property
    def sees(self) -> int | None: ...
    @property
    def span(self) -> int: ...
    @property
    def zones(self) -> int: ...
    def stored(self, n: Tensor) -> Place: ...
    def far(self, m: Tensor) -> tuple[Place, ...]: ...
    def weight(self, m: Tensor) -> Tensor | None: ...
    def zone(self, m: Tensor, n: Tensor) -> Tensor: ...
    def pieces(self, first: int, last: int) -> Iterator[Piece]: ...


@dataclass(frozen=True)
class Window:
    """The rule of a layer without a method: all keys, or those of a sliding window, where they are.

    `method`: whose rotation the keys come with; None: their own, or none.
    """

    sees: int | None = None
    method: RemappingMethod | None = None

    @property
    def band(self) -> bool:
        return True

    @property
    def span(self) -> int:
        return self.sees or 2**40

    @property
    def zones(self) -> int:
        return 1

    def stored(self, n: Tensor) -> Place:
        return Place(n) if self.method is None else self.method.stored(n)

    def far(self, m: Tensor) -> tuple[Place, ...]:
        return ()

    def weight(self, m: Tensor) -> Tensor | None:
        return None

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        return torch.zeros_like(m - n)

    def pieces(self, first: int, last: int) -> Iterator[Piece]:
        if self.sees is not None:
            yield from newest(self.sees, first, last)
        else:
            yield Piece(0, (first, last), (0, last))


class RotationTable:
    """Angles of places, in fixed point: int64 units of 2^-64 turns (see `rotary.py`).

    Args:
        inv_freq: (pairs,) float64, radians per token.
    """

    def __init__(self, inv_freq: Tensor) -> None:
        self.inv_freq = inv_freq
        self._known: dict[tuple[float, torch.device], Tensor] = {}

    def at(self, place: Place, device: torch.device) -> Tensor:
        """(..., pairs) int64 for positions (...)."""
        phase = torch.zeros((), dtype=torch.int64, device=device)
        if place.positions is not None:
            phase = place.positions.to(device)[..., None] * self._of(1 / place.divisor, device)
        return phase + self._of(place.plus, device) if place.plus else phase

    def turn(self, before: Place, after: Place, device: torch.device) -> Turn:
        """What brings queries or keys from one place to another; positions (rows or 1, tokens)."""
        return Turn.by(self.at(after, device) - self.at(before, device))

    def _of(self, tokens: float, device: torch.device) -> Tensor:
        """The phase of so many tokens, (pairs,); copied to a device once."""
        key = tokens, device
        if key not in self._known:
            self._known[key] = fixed_point(self.inv_freq * tokens).to(device)
        return self._known[key]


@dataclass(frozen=True)
class Call:
    """One forward of the decoder, as far as attention must know.

    Attributes:
        queries: (rows or 1, tokens) int64, positions of the new tokens.
        keys: (rows or 1, past + tokens) int64, positions of all of them.
        offsets: per row, how many padded tokens come before position 0, all others following in order; None: the
            positions are not like that.
        real: (rows, past + tokens) bool, False where a key is padding; None: nowhere.
        turns: what has been worked out for one layer and serves the next.
    """

    queries: Tensor
    keys: Tensor
    offsets: tuple[int, ...] | None
    real: Tensor | None
    turns: dict[Hashable, Turn] = field(default_factory=dict)


class Rotation(NamedTuple):
    """How a layer turns its queries and keys."""

    phases: RotationTable
    layout: KeyLayout


class ScoreModifiers(NamedTuple):
    """What some families do to scores.

    Attributes:
        cap: scores become cap tanh(score / cap).
        sinks: (heads,) scores of a key without a value.
        mask: (rows or 1, 1, tokens, keys), bool or to be added; it then says all about what is visible.
        dropout: of attention weights.
    """

    cap: float | None = None
    sinks: Tensor | None = None
    mask: Tensor | None = None
    dropout: float = 0.0
