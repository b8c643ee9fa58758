"""The judgement on one change of a value: better, worse, or not significantly different. `verdicts` words it."""

from __future__ import annotations

import math
from enum import StrEnum

from rope_ext_hf.runs.statistics import Estimate


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
