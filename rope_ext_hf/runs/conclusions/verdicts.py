"""The judgement on one change of a value, and the sentence about it with the 95% confidence interval.

    >>> str(verdict(Estimate(-0.2, -0.25, -0.15, 9), unit="nats per token"))
    'lower by 0.200 (0.150 to 0.250) nats per token'

The module `conclusions` makes the sentences about several methods.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from rope_ext_hf.errors import counted
from rope_ext_hf.runs.conclusions.measures import exponential
from rope_ext_hf.runs.conclusions.statistics import Estimate

__all__ = ["Outcome", "Verdict", "verdict"]


class Outcome(StrEnum):
    """Outcome of a comparison of two values: how the first one compares with the second."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no significant difference"
    NOT_MEASURED = "not measured"

    @property
    def reversed(self) -> Outcome:
        """The outcome for the two values in the other order."""
        if self is Outcome.BETTER:
            return Outcome.WORSE
        if self is Outcome.WORSE:
            return Outcome.BETTER
        return self


def outcome_of_change(change: Estimate | None, *, higher_is_better: bool = False, than: float = 0.0) -> Outcome:
    """Judge, by its 95% confidence interval, whether a change is for the better, for the worse, or not significant.

    Args:
        change: the first value minus the second; None: one of the two was not measured.
        higher_is_better: true for shares of right answers, false for losses.
        than: the change at which better turns into worse. The outcome is `NO_DIFFERENCE` where the interval contains
            this value, and where there is no interval because there are too few items.
    """
    if change is None:
        return Outcome.NOT_MEASURED
    low, high = change.low, change.high
    if low is None or high is None:
        if not math.isinf(change.value):
            return Outcome.NO_DIFFERENCE
        low = high = change.value  # one of the two losses is finite and the other is not
    if low <= than <= high:
        return Outcome.NO_DIFFERENCE
    return Outcome.BETTER if (low > than) is higher_is_better else Outcome.WORSE


@dataclass(frozen=True)
class Verdict:
    """The judgement on a change of a measured value, such as a loss, and its wording.

    Attributes:
        outcome: how the first value compares with the second.
        change: the first value minus the second; None: one of the two was not measured.
        text: words that complete a sentence such as "the loss is ...".
    """

    outcome: Outcome
    change: Estimate | None
    text: str

    def __str__(self) -> str:
        return self.text


def verdict(
    change: Estimate | None,
    *,
    unit: str = "nats per token",
    higher_is_better: bool = False,
    than: float = 0.0,
    item: str = "document",
    scale: float = 1.0,
    perplexity: bool = False,
    digits: int = 3,
) -> Verdict:
    """Judge a change by its 95% confidence interval, and put it into words.

    Args:
        change: the first value minus the second, paired by item where both were measured on the same items.
        unit: the unit of the written change.
        higher_is_better: true for shares of right answers, false for losses.
        than: the change at which better turns into worse.
        item: the noun for one of the items that the interval is over, in the singular.
        scale: the factor that the change is multiplied by before it is written, such as 100 for percentage points.
        perplexity: true if the change is in nats and is to be written in percent of the perplexity, with one digit
            after the point.
        digits: digits after the point.
    """
    outcome = outcome_of_change(change, higher_is_better=higher_is_better, than=than)
    if change is None:
        return Verdict(outcome, None, "not known: one of the two was not measured")
    if perplexity:
        unit, digits = "percent", 1

    def written(number: float) -> float:
        """Return a change as the number that the text shows.

        With `perplexity`, a change in nats becomes one in percent of the perplexity; else it is multiplied by `scale`.
        """
        return 100 * (exponential(number) - 1) if perplexity else scale * number

    value = written(change.value)
    direction = "lower" if change.value < 0 else "higher"
    if change.low is None or change.high is None:
        if math.isfinite(change.value):
            few = f"{counted(change.items, item)} {'is' if change.items == 1 else 'are'} too few"
            text = f"{direction} by {abs(value):,.{digits}f} {unit} ({few} for a confidence interval)"
        elif outcome is Outcome.BETTER:
            text = "finite, and the other one is not"
        else:
            text = "not finite"
        return Verdict(outcome, change, text)

    low, high = written(change.low), written(change.high)
    if low <= 0 <= high:
        interval = f"95% confidence interval {low:+.{digits}f} to {high:+.{digits}f}"
        text = f"not significantly different ({value:+,.{digits}f} {unit}, {interval})"
    else:
        direction = "higher" if low > 0 else "lower"
        nearest, farthest = sorted((abs(low), abs(high)))
        interval = f"{nearest:,.{digits}f} to {farthest:,.{digits}f}"
        text = f"{direction} by {abs(value):,.{digits}f} ({interval}) {unit}"
    return Verdict(outcome, change, text)
