"""Methods that a search tries: fixed ones, then divisors by band and by pair.

Divisors never fall from a pair to the next slower one (LongRoPE, Ding et al. 2024, arXiv 2402.13753, sec. 3.2).
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.dynamic import LongRoPE
from rope_ext_hf.methods.registry import list_methods, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import Factors

_CHANGED = 0.3  # the probability with which LongRoPE's search changes a divisor (evolution/algorithms/dim_mono.py)
_LEAST_FACTOR, _LARGEST_FACTOR = 0.8, 1.6  # attention factors that are tried; published ones lie between 1 and 1.4


def fixed_methods(rotary: Rotary | None = None) -> list[str]:
    """The methods that a search begins with by default and compares its result with; those that fit the rotary."""
    return [name for name, cls in list_methods().items() if cls.begins_search and (not rotary or _fits(name, rotary))]


def _fits(name: str, rotary: Rotary) -> bool:
    try:
        resolve_method(name, rotary, factor=2)
    except MethodError:
        return False
    return True


def is_static(method: RopeMethod) -> bool:
    """Whether a method is one list of frequencies for inputs of every length."""
    return not method.length_dependent and not isinstance(method, RemappingMethod)


def two_lists(method: RopeMethod, rotary: Rotary, target_length: int) -> RopeMethod:
    """A static method for inputs longer than the context length alone; shorter ones keep the model's frequencies."""
    inv_freq, attention_factor = method.frequencies(rotary)
    return LongRoPE(
        short_factor=(1.0,) * (rotary.dim // 2),
        long_factor=tuple(_divisors(rotary, inv_freq).tolist()),
        factor=target_length / rotary.context_length,
        attention_factor=attention_factor / rotary.attention_factor,
    )


def _divisors(rotary: Rotary, inv_freq: Tensor) -> Tensor:
    own = rotary.inv_freq()
    return torch.where(own > 0, own / inv_freq, 1.0)  # pairs that do not rotate


@dataclass(frozen=True)
class DivisorCurve:
    """Divisors of all pairs, by their logarithms to base 2 at some points, between which they are straight.

    The first point is the fastest pair, the last one the slowest that rotates.
    """

    levels: tuple[float, ...]  # at each point, ascending
    attention_factor: float  # the factor of cos and sin, beside the model's own

    @classmethod
    def of_method(cls, method: RopeMethod, rotary: Rotary, points: int) -> DivisorCurve:
        """The curve nearest to a static method's divisors."""
        inv_freq, attention_factor = method.frequencies(rotary)
        pairs = int((rotary.inv_freq() > 0).sum())
        if pairs < 2:
            raise MethodError(f"divisors are searched where at least 2 pairs rotate, and {pairs} does here")
        logs = _divisors(rotary, inv_freq)[:pairs].log2()
        return cls(_ascending(_resample(logs, points).tolist()), attention_factor / rotary.attention_factor)

    def resampled(self, points: int) -> DivisorCurve:
        levels = _resample(torch.tensor(self.levels, dtype=torch.float64), points)
        return dataclasses.replace(self, levels=_ascending(levels.tolist()))

    def method(self, rotary: Rotary) -> RopeMethod:
        """The curve as a method with one list."""
        pairs = int((rotary.inv_freq() > 0).sum())
        logs = _resample(torch.tensor(self.levels, dtype=torch.float64), pairs)
        rest = (1.0,) * (rotary.dim // 2 - pairs)
        return Factors(factors=(*(2**logs).tolist(), *rest), attention_factor=self.attention_factor)

    def changed(self, draws: random.Random, step: float, highest: float) -> DivisorCurve:
        """A neighbour: some levels changed one by one (as in LongRoPE's search), or all from one point on together.

        `step` is the standard deviation of a change; levels stay from 0 to `highest`.
        """
        start = draws.randrange(len(self.levels))
        shift = draws.gauss(0, step) if draws.random() < 0.5 else None
        levels = []
        for index, level in enumerate(self.levels):
            if shift is not None:
                level += shift if index >= start else 0.0
            elif index == start or draws.random() < _CHANGED:
                level += draws.gauss(0, step)
            levels.append(min(max(level, 0.0), highest))
        factor = self.attention_factor
        if draws.random() < _CHANGED:
            factor *= math.exp(draws.gauss(0, step / 10))
        changed = DivisorCurve(_ascending(levels), min(max(factor, _LEAST_FACTOR), _LARGEST_FACTOR))
        return changed if changed != self else self.changed(draws, step, highest)  # a level below the one before it


def _resample(values: Tensor, points: int) -> Tensor:
    """The broken line through some values at other, evenly spaced points, (points,) float64."""
    places = torch.linspace(0, len(values) - 1, points, dtype=torch.float64)
    below = places.floor().long().clamp(max=len(values) - 2)
    share = places - below
    return values[below] * (1 - share) + values[below + 1] * share


def _ascending(levels: Sequence[float]) -> tuple[float, ...]:
    """Each level raised to the highest before it."""
    return tuple(accumulate(levels, max))
