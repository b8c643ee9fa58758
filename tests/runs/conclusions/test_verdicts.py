"""The judgement on one made-up change, and the sentence about it."""

from __future__ import annotations

import math

import pytest

from rope_ext_hf.runs.conclusions.statistics import Estimate
from rope_ext_hf.runs.conclusions.verdicts import Outcome, outcome_of_change, verdict

BETTER, WORSE, NO_DIFFERENCE, NOT_MEASURED = Outcome
FEW = "lower by 3.000 nats per token ({} too few for a confidence interval)"
NOT_SIGNIFICANT = "not significantly different ({} nats per token, 95% confidence interval {} to {})"


@pytest.mark.parametrize(
    ("change", "outcome", "text"),
    [
        (Estimate(-0.2, -0.3, -0.1, 9), BETTER, "lower by 0.200 (0.100 to 0.300) nats per token"),
        (Estimate(0.2, 0.1, 0.3, 9), WORSE, "higher by 0.200 (0.100 to 0.300) nats per token"),
        (Estimate(0.1, -0.1, 0.3, 9), NO_DIFFERENCE, NOT_SIGNIFICANT.format("+0.100", "-0.100", "+0.300")),
        (Estimate(0.0, 0.0, 0.0, 9), NO_DIFFERENCE, NOT_SIGNIFICANT.format("+0.000", "+0.000", "+0.000")),
        (Estimate(-3.0, None, None, 2), NO_DIFFERENCE, FEW.format("2 documents are")),
        (Estimate(-3.0, None, None, 1), NO_DIFFERENCE, FEW.format("1 document is")),
        (None, NOT_MEASURED, "not known: one of the two was not measured"),
        (Estimate(math.inf, None, None, 9), WORSE, "not finite"),
        (Estimate(-math.inf, None, None, 9), BETTER, "finite, and the other one is not"),
        (Estimate(math.nan, None, None, 9), NO_DIFFERENCE, "not finite"),
    ],
)
def test_a_change_is_put_into_words(change: Estimate | None, outcome: Outcome, text: str) -> None:
    judged = verdict(change)
    assert (judged.outcome, str(judged)) == (outcome, text)
    assert verdict(change, higher_is_better=True).outcome is outcome.reversed


def test_points_are_written_with_one_decimal() -> None:
    judged = verdict(Estimate(0.25, 0.1, 0.4, 20), unit="points", higher_is_better=True, scale=100, digits=1)
    assert str(judged) == "higher by 25.0 (10.0 to 40.0) points"


def test_a_perplexity_is_written_in_percent() -> None:
    judged = verdict(Estimate(-0.2, -0.3, -0.1, 9), perplexity=True)
    assert str(judged) == "lower by 18.1 (9.5 to 25.9) percent"


def test_better_and_worse_may_be_counted_from_a_bound() -> None:
    judged = verdict(Estimate(0.03, 0.01, 0.05, 9), than=0.06)
    assert judged.outcome is BETTER
    assert str(judged) == "higher by 0.030 (0.010 to 0.050) nats per token"


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
