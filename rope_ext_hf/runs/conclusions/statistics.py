"""Means with 95% confidence intervals, by textbook methods that scipy computes.

    >>> estimate([1.0, 1.2, 0.9, 1.1, 1.4])
    Estimate(value=1.1..., low=0.8..., high=1.3..., items=5)

An item is what was drawn independently: a document, a prompt or a row of questions. The tokens of one document are not
independent of each other, so they are not items. docs/evaluation.md has a table of how often these intervals cover the
true mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

__all__ = ["FEWEST", "Estimate", "estimate", "estimate_share", "estimate_share_change"]

FEWEST = 3  # items that an interval needs; Student's interval of two items is 13 times as wide as they are apart
LEVEL = 0.95  # confidence level of every interval that is shown


class Estimate(NamedTuple):
    """A mean over items, or a mean difference, with its confidence interval.

    Attributes:
        value: the mean; it is not finite if the value of any item is not.
        low, high: the ends of the interval; None with fewer than `FEWEST` items, and where the value is not finite.
        items: the number of items.
    """

    value: float
    low: float | None
    high: float | None
    items: int

    def text(self, number: Callable[[float], str]) -> str:
        """Return the value, formatted by `number`, with its interval in parentheses where there is one."""
        if self.low is None or self.high is None:
            return number(self.value)
        return f"{number(self.value)} ({number(self.low)} to {number(self.high)})"

    def negated(self) -> Estimate:
        """Return the estimate for the difference in the opposite direction, with its sign changed."""
        low, high = [None if end is None else -end for end in (self.high, self.low)]
        return Estimate(-self.value, low, high, self.items)

    def line_below(self, number: Callable[[float], str]) -> str:
        """Return a line break and the interval in parentheses, formatted by `number`; empty without an interval."""
        if self.low is None or self.high is None:
            return ""
        return f"\n({number(self.low)} to {number(self.high)})"


def estimate(
    sums: Sequence[float],
    weights: Sequence[float] | None = None,
    *,
    level: float = LEVEL,
    ends: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate:
    """Estimate the mean over items, or over paired differences, with Student's t interval.

    The mean is a ratio of two totals, `sum(sums) / sum(weights)`: nats per token, for example. Its standard error is
    the usual one for a ratio estimate; with equal weights, it is the standard error of the mean.

    Source: Cochran, Sampling Techniques (3rd edition, 1977), section 2.11.

    Args:
        sums: the total for each item, such as its loss in nats.
        weights: what each total is divided by, such as the item's tokens; default: 1 each. Items of weight 0 are
            ignored.
        level: confidence level of the interval.
        ends: the least and the largest possible value, at which the interval is cut off.
    """
    pairs = list(zip(sums, [1.0] * len(sums) if weights is None else weights, strict=True))
    value = math.fsum(total for total, _ in pairs) / math.fsum(weight for _, weight in pairs)
    counted = [(total, weight) for total, weight in pairs if weight > 0]
    items = len(counted)
    if items < FEWEST or not math.isfinite(value):
        return Estimate(value, None, None, items)
    mean_weight = math.fsum(weight for _, weight in counted) / items
    residuals = [(total - value * weight) / mean_weight for total, weight in counted]
    error = math.sqrt(math.fsum(residual * residual for residual in residuals) / (items - 1) / items)
    return _students(value, error, items, level, ends)


def estimate_share(shares: Sequence[float], *, level: float = LEVEL) -> Estimate:
    """Estimate the mean of values from 0 to 1.

    The interval is Wilson's where every value is 0 or 1, and Student's where there are values between.

    Source: Wilson, Probable inference, the law of succession, and statistical inference (1927).
    """
    items, value = len(shares), math.fsum(shares) / len(shares)
    if items < FEWEST or not math.isfinite(value):
        return Estimate(value, None, None, items)
    if set(shares) <= {0, 1}:
        return Estimate(value, *_wilson(round(sum(shares)), items, level), items)
    return _students(value, _standard_error(shares), items, level, (0.0, 1.0))


@cache
def _wilson(right: int, items: int, level: float) -> tuple[float, float]:
    """Return both ends of Wilson's interval for a share: `right` right answers among `items`."""
    from scipy.stats import binomtest  # imported here because scipy takes a second to load

    ends = binomtest(right, items).proportion_ci(level, method="wilson")
    return float(ends.low), float(ends.high)


def estimate_share_change(ones: Sequence[float], others: Sequence[float]) -> Estimate:
    """Estimate by how much the mean of `ones` is higher than that of `others`; values are from 0 to 1.

    The interval is Newcombe's where every value is 0 or 1: Wilson's intervals of the two shares, joined by the
    correlation of the answers. Where there are values between, it is Student's interval of the differences.

    Source: Newcombe, Improved confidence intervals for the difference between binomial proportions based on paired data
    (1998), method 10.

    Args:
        ones, others: the values of the same items, in the same order.
    """
    changes = [one - other for one, other in zip(ones, others, strict=True)]
    items, value = len(changes), math.fsum(changes) / len(changes)
    if items < FEWEST or not math.isfinite(value):
        return Estimate(value, None, None, items)
    if not {*ones, *others} <= {0, 1}:
        return _students(value, _standard_error(changes), items, ends=(-1.0, 1.0))
    first, second = estimate_share(ones), estimate_share(others)
    assert first.low is not None
    assert first.high is not None
    assert second.low is not None
    assert second.high is not None
    both = sum(one * other for one, other in zip(ones, others, strict=True))
    correlation = _correlation(both, sum(ones) - both, sum(others) - both, items)

    def joined(one: float, other: float) -> float:
        """Return the distance from the difference of two shares to one end of its confidence interval (Newcombe's).

        `one` and `other` are the distances from each share to that end of its own interval which bounds the difference
        on this side.
        """
        return math.sqrt(max(0.0, one * one - 2 * correlation * one * other + other * other))

    below = joined(first.value - first.low, second.high - second.value)
    above = joined(second.value - second.low, first.high - first.value)
    return Estimate(value, max(-1.0, value - below), min(1.0, value + above), items)


def _correlation(both: float, first: float, second: float, items: int) -> float:
    """Return the correlation of paired right and wrong answers, with Newcombe's correction for continuity.

    Args:
        both: number of items that are right for both.
        first, second: number of items that are right for the first alone, and for the second alone.
        items: number of all items.
    """
    neither = items - both - first - second
    product = (both + first) * (second + neither) * (both + second) * (first + neither)
    excess = both * neither - first * second
    if excess > 0:
        excess = max(0.0, excess - items / 2)
    return excess / math.sqrt(product) if product else 0.0


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of some values."""
    from scipy.stats import sem

    return float(sem(values))


def _students(
    value: float,
    error: float,
    items: int,
    level: float = LEVEL,
    ends: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate:
    """Return an estimate with Student's t interval, cut off at `ends`, the least and the largest possible value."""
    from scipy.special import stdtrit  # the quantile of scipy.stats.t, whose module takes half a second to load

    low, high = (value + error * float(stdtrit(items - 1, (1 + sign * level) / 2)) for sign in (-1, 1))
    return Estimate(value, max(ends[0], low), min(ends[1], high), items)
