"""The judgement of one made-up change."""

from __future__ import annotations

import math

import pytest

from rope_ext_hf.runs.outcomes import Outcome, outcome_of_change
from rope_ext_hf.runs.statistics import Estimate

BETTER, WORSE, NO_DIFFERENCE, NOT_MEASURED = Outcome


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (Estimate(-0.2, -0.3, -0.1, 9), BETTER),
        (Estimate(0.2, 0.1, 0.3, 9), WORSE),
        (Estimate(0.1, -0.1, 0.3, 9), NO_DIFFERENCE),
        (Estimate(0.0, 0.0, 0.0, 9), NO_DIFFERENCE),
        (Estimate(-3.0, None, None, 2), NO_DIFFERENCE),  # too few for an interval
        (Estimate(math.inf, None, None, 9), WORSE),
        (Estimate(-math.inf, None, None, 9), BETTER),
        (Estimate(math.nan, None, None, 9), NO_DIFFERENCE),
        (None, NOT_MEASURED),
    ],
)
def test_a_change_is_judged_by_its_interval(change: Estimate | None, outcome: Outcome) -> None:
    assert outcome_of_change(change) is outcome
    assert outcome_of_change(change, higher_is_better=True) is outcome.reversed


def test_a_change_may_be_compared_with_a_bound() -> None:
    rise = Estimate(0.03, 0.01, 0.05, 9)
    assert outcome_of_change(rise) is WORSE
    assert outcome_of_change(rise, than=0.02) is NO_DIFFERENCE
    assert outcome_of_change(rise, than=0.06) is BETTER
    assert outcome_of_change(rise, than=0.005) is WORSE


def test_the_reversed_outcome() -> None:
    reversed_ = [outcome.reversed for outcome in Outcome]
    assert reversed_ == [WORSE, BETTER, NO_DIFFERENCE, NOT_MEASURED]
