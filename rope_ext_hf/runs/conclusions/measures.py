"""Measures: the results of a run of any kind as one number per method and context length, such as a perplexity.

Each number is a mean over items: documents, or prompts. At one length all methods read the same items, so methods are
compared item by item.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from rope_ext_hf.errors import counted
from rope_ext_hf.runs.conclusions.statistics import (
    FEWEST,
    LEVEL,
    Estimate,
    estimate,
    estimate_share,
    estimate_share_change,
)

__all__ = ["EffectiveLength", "Evidence", "Measure", "exponential", "perplexity_text"]

_LARGEST = 709.0  # nats; the exponential of 710 is too large for a float
_FLOOR = 0.1
"""The share of right answers up to which methods are compared by the loss of the right answer, where it is known."""


class EffectiveLength(NamedTuple):
    """The length up to which a model reads well, with its 95% confidence interval over prompts.

    Attributes:
        length: in tokens; 0: the model reads well at no length that was measured.
        low, high: the ends of the interval, in tokens.
    """

    length: int
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.length:,} ({self.low:,} to {self.high:,})"

    def in_words(self, longest: int) -> str:
        """Return the length and its interval as words in a sentence.

        `longest` is the longest length that was measured, in tokens.
        """
        last = ", the longest measured" if self.length == longest else ""
        if self.low == self.high:
            return f"{self.length:,} tokens{last}"
        interval = f"{self.low:,} or more" if self.high == longest else f"{self.low:,} to {self.high:,}"
        return f"{self.length:,} tokens{last} (95% confidence interval: {interval})"


class Evidence(IntEnum):
    """Closeness of a measure to the practical use of a model, from exact answers to losses.

    The measure with the smallest number, the closest one, decides first which method is best.
    """

    ANSWERS = 1
    RETRIEVAL = 2
    ANSWER_LOSS = 3
    KEY_TOKENS = 4
    LOSS = 5
    DIVERGENCE = 6  # from another model, which need not be the better one
    GAIN = 7  # a difference of losses, which also grows where the model reads worse without the evidence


RECENT = "recent"
"""In place of a method's key: the model as loaded, which reads only the last tokens of an input; no key is like it."""


@dataclass(frozen=True)
class Measure:
    """A measure, such as perplexity: one number for each method at each context length, with the items behind it.

    A method is named by its key (`labels.method_key`).

    Attributes:
        name: what people call the number, such as "perplexity".
        unit: the unit of the number, such as "nats per token"; "%" for shares, whose values are from 0 to 1; empty if
            it has no unit.
        evidence: how close the measure is to the use of a model.
        higher_is_better: false for losses and perplexities.
        items: by method and length, a pair for each document or prompt: a sum (of losses, say) and a weight (the number
            of tokens). The number is the sum of all sums divided by the sum of all weights.
        kind_of_item: the noun for an item, in the singular, such as "document".
        reaches: effective lengths by method, if this kind of run measures them.
        threshold: the value that a length must reach to count as effective; None: there are no effective lengths.
        chance: the value that guessing has, for shares and gains.
        exponential: true for a perplexity: sums are in nats, and the number is the exponential of their mean. Means and
            tests are of the nats.
        tolerance: the share, such as 0.05, by which a perplexity may be higher than the unpatched model's at the
            context length and still count as reading well; None: any significant difference counts.
        of_positions: true if the values of all lengths are from positions in inputs of the longest length. Such values
            say nothing about shorter inputs.
        recent: by length, the items of the model as loaded when it reads only the last tokens of an input, as many as
            its context length has room for. `RECENT` stands for it in place of a method's key.
        instead_of: the share of exact answers whose place this measure takes in comparisons where that share is at the
            floor (see `at_floor`); elsewhere this measure is shown and decides nothing. None: it decides everywhere.
        digits: the format of a number that is neither a share nor a perplexity.
    """

    name: str
    unit: str
    evidence: Evidence
    higher_is_better: bool
    items: Mapping[str, Mapping[int, Sequence[tuple[float, float]]]]
    kind_of_item: str = "document"
    reaches: Mapping[str, EffectiveLength] = field(default_factory=dict)
    threshold: float | None = None
    chance: float = 0.0
    exponential: bool = False
    tolerance: float | None = None
    of_positions: bool = False
    recent: Mapping[int, Sequence[tuple[float, float]]] = field(default_factory=dict)
    instead_of: Measure | None = None
    digits: str = ".3f"

    @property
    def shares(self) -> bool:
        """True if values are shares, from 0 to 1."""
        return self.unit == "%"

    @property
    def _fewest(self) -> int:
        """The smallest number of items that any method has at any length."""
        return min(len(items) for row in self.items.values() for items in row.values())

    @property
    def too_few(self) -> bool:
        """True if a method has too few items at some length for a confidence interval."""
        return self._fewest < FEWEST

    @cached_property
    def flaw(self) -> str:
        """The reason why methods cannot be compared by this measure, as a clause; empty if they can.

        There are too few items, or no method does better than guessing. Each method at each length is tested at 2.5%,
        one-sided, divided by the number of these tests (Bonferroni), because one of many tests succeeds by luck. Where
        guessing cannot give a right answer at all, one right answer is enough.
        """
        if self.too_few:
            are = "is" if self._fewest == 1 else "are"
            return f"{counted(self._fewest, self.kind_of_item)} {are} too few to compare methods"
        if not self.higher_is_better:
            return ""
        guessing_cannot_succeed = self.shares and self.chance == 0
        if guessing_cannot_succeed and self._any_above_zero:
            return ""
        cells = [(key, length) for key, row in self.items.items() for length in row]
        level = 1 - (1 - LEVEL) / len(cells)
        for key, length in cells:
            if (self.mean(key, length, level=level).low or 0) > self.chance:
                return ""
        return f"no method is significantly above chance{f' ({self.chance:.1%})' if self.chance else ''}"

    @property
    def _any_above_zero(self) -> bool:
        """True if the value of any item is not zero."""
        return any(value for row in self.items.values() for items in row.values() for value, _ in items)

    def at_floor(self, key: str, length: int) -> bool:
        """Return whether a method has so few right answers at a length that their share says little about it.

        That is a share of at most 10%, or of no more than guessing gives.
        """
        return self.value(key, length) <= max(self.chance, _FLOOR)

    def lengths(self, key: str) -> list[int]:
        """Return the lengths in tokens at which a method was measured, ascending."""
        return sorted(self.items.get(key, {}))

    @property
    def all_lengths(self) -> list[int]:
        """The lengths in tokens at which any method was measured, ascending."""
        return sorted({length for row in self.items.values() for length in row})

    @property
    def longest(self) -> int:
        """The longest length in tokens at which any method was measured."""
        return max(length for row in self.items.values() for length in row)

    def measured(self, length: int) -> list[str]:
        """Return the methods that were measured at a length."""
        return [key for key, row in self.items.items() if length in row]

    def mean(self, key: str, length: int, *, level: float = LEVEL) -> Estimate:
        """Return the mean over a method's items at a length, with its interval; a perplexity's mean is in nats."""
        items = self._items_of((key, length))
        if items is None:
            raise KeyError(f"{key} was not measured at {length}")
        sums, weights = zip(*items, strict=True)
        if self.shares:
            shares = [total / weight for total, weight in zip(sums, weights, strict=True)]
            return estimate_share(shares, level=level)
        return estimate(sums, weights, level=level)

    def estimate(self, key: str, length: int) -> Estimate:
        """Return a method's number at a length, with its interval, in the unit that people read."""
        return self.as_read(self.mean(key, length))

    def as_read(self, estimate: Estimate) -> Estimate:
        """Return a mean or a change in the unit that people read: nats become a perplexity, or a ratio of two."""
        if not self.exponential:
            return estimate
        low, high = (None if end is None else exponential(end) for end in (estimate.low, estimate.high))
        return Estimate(exponential(estimate.value), low, high, estimate.items)

    def value(self, key: str, length: int) -> float:
        """Return a method's number at a length, without its interval."""
        return self.estimate(key, length).value

    def sort_value(self, key: str, length: int) -> float:
        """Return a sort key that puts the best method at a length first; a loss of NaN comes last."""
        value = self.value(key, length)
        if math.isnan(value):
            return math.inf
        return -value if self.higher_is_better else value

    def identical(self, first: tuple[str, int], second: tuple[str, int]) -> bool:
        """Return whether every item has the same value in two cases, each a method at a length."""
        first_items, second_items = self._items_of(first), self._items_of(second)
        return first_items is not None and second_items is not None and list(first_items) == list(second_items)

    def _items_of(self, place: tuple[str, int]) -> Sequence[tuple[float, float]] | None:
        """Return the items (a sum and a weight each) for a method and a length; None if they were not measured."""
        key, length = place
        if key == RECENT:
            return self.recent.get(length)
        return self.items.get(key, {}).get(length)

    @cached_property
    def _changes(self) -> dict[tuple[tuple[str, int], tuple[str, int]], Estimate | None]:
        """A cache of the changes that `change` has computed."""
        return {}

    def change(self, first: tuple[str, int], second: tuple[str, int]) -> Estimate | None:
        """Return how much higher the mean of the first pair of a method and a length is than that of the second pair.

        The difference is taken item by item. For a perplexity it is in nats. Each pair is computed once, in either
        order.

        Args:
            first, second: the key of a method, and a length in tokens.

        Returns:
            The mean difference with its interval. None: one of the two was not measured, or their items have different
            weights. An infinite difference where only one of two losses is finite.
        """
        if (second, first) in self._changes:
            opposite = self._changes[second, first]
            return None if opposite is None else opposite.negated()
        if (first, second) not in self._changes:
            self._changes[first, second] = self._change(first, second)
        return self._changes[first, second]

    def _change(self, first: tuple[str, int], second: tuple[str, int]) -> Estimate | None:
        """Compute the result of `change`, which caches it."""
        first_items, second_items = self._items_of(first), self._items_of(second)
        if first_items is None or second_items is None:
            return None
        weights = [weight for _, weight in first_items]
        if weights != [weight for _, weight in second_items]:
            return None
        if self.shares:
            first_shares, second_shares = (
                [total / weight for total, weight in items] for items in (first_items, second_items)
            )
            return estimate_share_change(first_shares, second_shares)
        differences = [a - b for (a, _), (b, _) in zip(first_items, second_items, strict=True)]
        if all(map(math.isfinite, differences)):
            return estimate(differences, weights)
        first_bad, second_bad = (
            not all(math.isfinite(total) for total, _ in items) for items in (first_items, second_items)
        )
        if first_bad == second_bad:
            return Estimate(math.nan, None, None, len(weights))
        return Estimate(math.inf if first_bad else -math.inf, None, None, len(weights))

    def text(self, value: float) -> str:
        """Return a number in the unit of this measure as text, with as many digits as are meaningful."""
        if not math.isfinite(value):
            return "not finite"
        if self.shares:
            return f"{value:.1%}"
        return perplexity_text(value) if self.exponential else f"{value:{self.digits}}"

    def change_text(self, change: Estimate) -> str:
        """Return a change with its sign: in percentage points, in percent of a perplexity, or in the unit."""
        if self.shares:
            return f"{100 * change.value:+.1f} points"
        if self.exponential:
            return f"{100 * math.expm1(min(change.value, _LARGEST)):+,.0f}%"
        return f"{change.value:+{self.digits}} {self.unit}"


def exponential(nats: float) -> float:
    """Return exp(nats), and infinity where that is too large for a float."""
    return math.inf if nats > _LARGEST else math.exp(nats)


def perplexity_text(value: float) -> str:
    """Return a perplexity with as many digits as are meaningful."""
    if value < 100:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 1e5 else f"{value:.1e}"
