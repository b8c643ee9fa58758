"""The results of runs of any kind, for a method at a context length: one number and the items that it is a mean over.

Items of one length are the same documents or prompts for every method, so methods are compared item by item.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.runs.statistics import FEWEST, Estimate, estimate, estimate_share, estimate_share_change, resample


class EffectiveLength(NamedTuple):
    """Up to which length a model reads well, in tokens, with its 95% interval over prompts; 0: at none."""

    length: int
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.length:,} [{self.low:,} to {self.high:,}]"


class Evidence(IntEnum):
    """How close a measure is to what a model is used for; the closer one decides first."""

    ANSWERS = 1
    RETRIEVAL = 2
    KEY_TOKENS = 3
    LOSS = 4
    GAIN = 5  # a difference: what makes a model worse without the evidence raises it, too


@dataclass(frozen=True)
class Measure:
    """One number per method and context length."""

    name: str  # in words, such as "loss"
    unit: str  # of its values, such as "nats per token"; "%" for shares, whose values are 0 to 1
    evidence: Evidence  # how close it is to use
    higher_is_better: bool  # false for losses
    # a sum and its divisor per document or prompt, by method key and length
    items: Mapping[str, Mapping[int, Sequence[tuple[float, float]]]]
    kind_of_item: str = "document"  # in words, in the singular
    # effective lengths by method key, where the kind of run has them
    reaches: Mapping[str, EffectiveLength] = field(default_factory=dict)
    threshold: float | None = None  # the value that they are measured by
    chance: float = 0.0  # the value by luck, of shares and gains
    # the share by which a loss may be higher than as loaded at the context length and still be near it
    rise: float | None = None
    exponential: str = ""  # what the exponential of a loss is called, such as perplexity; empty: it has no name

    @property
    def shares(self) -> bool:
        """Whether values are from 0 to 1."""
        return self.unit == "%"

    @cached_property
    def flaw(self) -> str:
        """Why it can decide nothing, in words: too few items, or no method better than luck; empty where it can.

        Better than luck is one method at one length, in one-sided tests at 2.5% together: the level of one test is
        divided by their number (Bonferroni), because among many one is lucky. A loss is never luck, nor is an answer
        where luck gives none.
        """
        fewest = min(len(items) for row in self.items.values() for items in row.values())
        if fewest < FEWEST:
            return f"rests on {fewest} {self.kind_of_item}{'s' * (fewest != 1)} (at least {FEWEST} are needed)"
        cells = [(key, length) for key, row in self.items.items() for length in row]
        lucky = self.chance or not self.shares
        if not lucky and any(value for row in self.items.values() for some in row.values() for value, _ in some):
            return ""
        level = 1 - 0.025 / len(cells)
        if not self.higher_is_better or any(
            (self.estimate(*cell, level=level).low or 0) > self.chance for cell in cells
        ):
            return ""
        return f"is better than luck{f' ({self.chance:.1%})' if self.chance else ''} with no method"

    def lengths(self, key: str) -> list[int]:
        return sorted(self.items.get(key, {}))

    @property
    def longest(self) -> int:
        """The longest length at which any method was measured."""
        return max(length for row in self.items.values() for length in row)

    def measured(self, length: int) -> list[str]:
        return [key for key, row in self.items.items() if length in row]

    def estimate(self, key: str, length: int, *, level: float = 0.975) -> Estimate:
        sums, weights = zip(*self.items[key][length], strict=True)
        if self.shares:
            return estimate_share([a / b for a, b in zip(sums, weights, strict=True)], level=level)
        return estimate(sums, weights, level=level)

    def value(self, key: str, length: int) -> float:
        """The value of one method at one length, without its interval."""
        return self.estimate(key, length).value

    def change(self, one: tuple[str, int], other: tuple[str, int]) -> Estimate | None:
        """How much higher the value of one method's key and length is than that of another, paired by item.

        None where either was not measured, or where their items do not weigh the same. Infinite where one of two losses
        is finite.
        """
        mine, theirs = (self.items.get(key, {}).get(length) for key, length in (one, other))
        if mine is None or theirs is None or [weight for _, weight in mine] != [weight for _, weight in theirs]:
            return None
        gaps = [a - b for (a, _), (b, _) in zip(mine, theirs, strict=True)]
        if self.shares:
            return estimate_share_change([gap / weight for gap, (_, weight) in zip(gaps, mine, strict=True)])
        bad = [not all(math.isfinite(value) for value, _ in side) for side in (mine, theirs)]
        if any(bad):
            return Estimate(math.inf * (bad[0] - bad[1]) if bad[0] != bad[1] else math.nan, None, None, len(mine))
        return estimate(gaps, [weight for _, weight in mine])

    def drawn(self, keys: Sequence[str], length: int, draws: int = 2000, seed: int = 0) -> Tensor:
        """(draws, methods): the values when items are drawn anew, with replacement, the same ones for all methods."""
        table = torch.tensor([self.items[key][length] for key in keys], dtype=torch.float64)  # (methods, items, 2)
        sums, weights = resample(table.permute(2, 0, 1).flatten(0, 1), draws, seed).chunk(2)  # (methods, draws) each
        return (sums / weights).T

    def text(self, value: float) -> str:
        """A value with as many digits as mean something."""
        return f"{value:.1%}" if self.shares else f"{value:.3f}"

    def signed(self, change: float) -> str:
        """A change with its sign; of shares in percentage points."""
        return f"{100 * change:+.1f}" if self.shares else f"{change:+.3f}"


def kendall_tau(one: Tensor, other: Tensor) -> Tensor:
    """How alike two measures rank methods: 1 the same order, 0 no relation, -1 the reverse; ties count as tau-b.

    From values (..., methods) of each to (...,); NaN where all values of one measure are equal.
    Source: Kendall, The treatment of ties in ranking problems (1945).
    """
    first, second = (torch.sign(values.unsqueeze(-1) - values.unsqueeze(-2)).flatten(-2) for values in (one, other))
    return (first * second).sum(-1) / (first.square().sum(-1) * second.square().sum(-1)).sqrt()
