"""The results of runs of any kind as one form: a number per method and context length, and the items it is a mean over.

At one length, every method reads the same documents or prompts, so methods are compared item by item.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from rope_ext_hf.runs.statistics import FEWEST, LEVEL, Estimate, estimate, estimate_share, estimate_share_change

_LARGEST = 709.0  # nats; a float holds the exponential of this, and of little more


class EffectiveLength(NamedTuple):
    """The length in tokens up to which a model reads well, with its 95% interval over prompts; 0 at no length."""

    length: int
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.length:,} ({self.low:,} to {self.high:,})"

    def in_words(self, longest: int) -> str:
        """Return the length and its interval, as a sentence has them; `longest` is the longest length measured."""
        last = ", the longest measured" if self.length == longest else ""
        if self.low == self.high:
            return f"{self.length:,} tokens{last}"
        interval = f"{self.low:,} or more" if self.high == longest else f"{self.low:,} to {self.high:,}"
        return f"{self.length:,} tokens{last} (95% confidence interval: {interval})"


class Evidence(IntEnum):
    """How close a measure is to what a model is used for; the closest one decides first."""

    ANSWERS = 1
    RETRIEVAL = 2
    KEY_TOKENS = 3
    LOSS = 4
    GAIN = 5  # a difference of losses: a model that reads worse without the evidence gains, too


@dataclass(frozen=True)
class Measure:
    """One number per method and context length."""

    name: str  # what people call the number, such as "perplexity"
    unit: str  # of the number, such as "nats per token"; "%" for shares, whose values are from 0 to 1; empty: none
    evidence: Evidence
    higher_is_better: bool  # false for losses and perplexities
    # a sum and what it is divided by, per document or prompt, by method key and length
    items: Mapping[str, Mapping[int, Sequence[tuple[float, float]]]]
    kind_of_item: str = "document"  # in the singular
    # effective lengths by method key, where the kind of run has them
    reaches: Mapping[str, EffectiveLength] = field(default_factory=dict)
    threshold: float | None = None  # the value that effective lengths are defined by
    chance: float = 0.0  # the value by luck, of shares and gains
    # Items hold nats and the number is their exponential, as a perplexity is; means and tests are of the nats.
    exponential: bool = False
    # the share by which a perplexity may be higher than unpatched at the context length and still count as reading well
    tolerance: float | None = None
    # Values are of positions in inputs of the longest length, so that they say nothing of inputs of a shorter length.
    of_positions: bool = False

    @property
    def shares(self) -> bool:
        """Whether values are from 0 to 1."""
        return self.unit == "%"

    @property
    def _fewest(self) -> int:
        """The number of items of the method and length that has the fewest."""
        return min([len(items) for row in self.items.values() for items in row.values()])

    @property
    def too_few(self) -> bool:
        """True if a method has too few items at some length for a confidence interval."""
        return self._fewest < FEWEST

    @cached_property
    def flaw(self) -> str:
        """The reason why no method can be compared by this measure, as a clause; empty where methods can be compared.

        There are too few items, or no method does better than chance. Whether one method at one length does is tested
        at 2.5%, one-sided and divided by the number of cells (Bonferroni), because one of many is lucky.
        """
        if self.too_few:
            are = "is" if self._fewest == 1 else "are"
            return f"{_counted(self._fewest, self.kind_of_item)} {are} too few to compare methods"
        cells = [(key, length) for key, row in self.items.items() for length in row]
        lucky = self.chance or not self.shares
        if not lucky and any(value for row in self.items.values() for some in row.values() for value, _ in some):
            return ""
        level = 1 - (1 - LEVEL) / len(cells)
        if not self.higher_is_better or any((self.mean(*cell, level=level).low or 0) > self.chance for cell in cells):
            return ""
        return f"no method is significantly above chance{f' ({self.chance:.1%})' if self.chance else ''}"

    def lengths(self, key: str) -> list[int]:
        return sorted(self.items.get(key, {}))

    @property
    def longest(self) -> int:
        """The longest length at which any method was measured."""
        return max([length for row in self.items.values() for length in row])

    def measured(self, length: int) -> list[str]:
        return [key for key, row in self.items.items() if length in row]

    def mean(self, key: str, length: int, *, level: float = LEVEL) -> Estimate:
        """The mean over the items of one method at one length; in nats where the number is their exponential."""
        sums, weights = zip(*self.items[key][length], strict=True)
        if self.shares:
            return estimate_share([a / b for a, b in zip(sums, weights, strict=True)], level=level)
        return estimate(sums, weights, level=level)

    def estimate(self, key: str, length: int) -> Estimate:
        """The number of one method at one length with its interval, as people read it."""
        mean = self.mean(key, length)
        if not self.exponential:
            return mean
        low, high = (None if end is None else exponential(end) for end in (mean.low, mean.high))
        return Estimate(exponential(mean.value), low, high, mean.items)

    def value(self, key: str, length: int) -> float:
        """The number of one method at one length, without its interval."""
        return self.estimate(key, length).value

    def identical(self, one: tuple[str, int], other: tuple[str, int]) -> bool:
        """Return whether two methods have the same value for each item; one method's key and length each."""
        mine, theirs = [self.items.get(key, {}).get(length) for key, length in (one, other)]
        return mine is not None and theirs is not None and list(mine) == list(theirs)

    @cached_property
    def _changes(self) -> dict[tuple[tuple[str, int], tuple[str, int]], Estimate | None]:
        return {}

    def change(self, one: tuple[str, int], other: tuple[str, int]) -> Estimate | None:
        """How much higher the mean of one method's key and length is than that of another, paired by item.

        None where either was not measured, or where their items do not weigh the same. Infinite where only one of two
        losses is finite. In nats where the number is their exponential. Each pair is computed once, in either order.
        """
        if (other, one) in self._changes:
            turned = self._changes[other, one]
            return None if turned is None else turned.negated()
        if (one, other) not in self._changes:
            self._changes[one, other] = self._change(one, other)
        return self._changes[one, other]

    def _change(self, one: tuple[str, int], other: tuple[str, int]) -> Estimate | None:
        mine, theirs = [self.items.get(key, {}).get(length) for key, length in (one, other)]
        if mine is None or theirs is None or [weight for _, weight in mine] != [weight for _, weight in theirs]:
            return None
        if self.shares:
            return estimate_share_change(*([total / weight for total, weight in side] for side in (mine, theirs)))
        gaps = [a - b for (a, _), (b, _) in zip(mine, theirs, strict=True)]
        if not all(map(math.isfinite, gaps)):
            bad = [not all(math.isfinite(value) for value, _ in side) for side in (mine, theirs)]
            return Estimate(math.inf * (bad[0] - bad[1]) if bad[0] != bad[1] else math.nan, None, None, len(mine))
        return estimate(gaps, [weight for _, weight in mine])

    def text(self, value: float) -> str:
        """A number of this measure with as many digits as mean something."""
        if not math.isfinite(value):
            return "not finite"
        if self.shares:
            return f"{value:.1%}"
        return perplexity_text(value) if self.exponential else f"{value:.3f}"

    def change_text(self, change: Estimate) -> str:
        """A mean of paired differences with its sign: percentage points, percent of a perplexity, or the unit."""
        if self.shares:
            return f"{100 * change.value:+.1f} points"
        if self.exponential:
            return f"{100 * math.expm1(min(change.value, _LARGEST)):+,.0f}%"
        return f"{change.value:+.3f} {self.unit}"


def exponential(nats: float) -> float:
    """exp(nats), which is infinite where a float cannot hold it."""
    return math.inf if nats > _LARGEST else math.exp(nats)


def perplexity_text(value: float) -> str:
    """Return a perplexity with as many digits as mean something."""
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value < 1e5 else f"{value:.1e}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
