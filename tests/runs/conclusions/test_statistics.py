"""Intervals: equal to the textbook's, possible values only, and how often they cover the true mean."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from rope_ext_hf.runs.conclusions.statistics import FEWEST, estimate, estimate_share, estimate_share_change

DRAWS = 2000


def covered(values: np.ndarray, mean: float, weights: np.ndarray | None = None) -> float:
    """Return the share of rows, (draws, items), whose interval covers the mean, in percent."""
    weights = np.ones_like(values) if weights is None else weights
    made = [estimate((row * of).tolist(), of.tolist()) for row, of in zip(values, weights, strict=True)]
    return float(100 * np.mean([e.low <= mean <= e.high for e in made if e.low is not None and e.high is not None]))


def test_means_have_students_interval() -> None:
    values = [1.14, 2.44, 2.24, 2.22]  # from a report: another method gave -1.17 to 2.65
    low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
    assert estimate(values) == pytest.approx((np.mean(values), low, high, 4))
    assert (round(low, 2), round(high, 2)) == (1.07, 2.95)


def test_a_significant_difference_is_that_of_students_paired_test() -> None:
    draw = np.random.default_rng(0)
    significant = 0
    for _ in range(300):
        one, other = draw.normal(0.6, 1, 6), draw.normal(0, 0.5, 6)
        change = estimate((one - other).tolist())
        assert change.low is not None
        assert change.high is not None
        excluded = not change.low <= 0 <= change.high
        assert excluded == (stats.ttest_rel(one, other).pvalue < 0.05)
        significant += excluded
    assert 20 < significant < 280


@pytest.mark.parametrize("items", [3, 5, 8, 16])
def test_intervals_of_normal_losses_cover_95_percent(items: int) -> None:
    assert covered(np.random.default_rng(items).normal(2.0, 0.3, (DRAWS, items)), 2.0) == pytest.approx(95, abs=2)


@pytest.mark.parametrize("items", [8, 32])
def test_intervals_of_documents_of_unequal_length(items: int) -> None:
    draw = np.random.default_rng(items)
    weights = draw.lognormal(0, 0.5, (DRAWS, items))
    assert covered(draw.normal(2.0, 0.3, (DRAWS, items)), 2.0, weights) >= 91
    # by the definition in Cochran's book, written out
    sums, of = (draw.normal(2.0, 0.3, items) * weights[0]), weights[0]
    ratio = sums.sum() / of.sum()
    error = math.sqrt(((sums - ratio * of) ** 2).sum() / (items - 1) / items) / of.mean()
    low, high = stats.t.interval(0.95, items - 1, ratio, error)
    assert estimate(sums.tolist(), of.tolist()) == pytest.approx((ratio, low, high, items))


def test_shares_have_wilsons_interval() -> None:
    for right, of in ((0, 3), (3, 3), (7, 40), (40, 40)):
        z, share = stats.norm.ppf(0.975), right / of
        middle = (share + z * z / (2 * of)) / (1 + z * z / of)
        half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
        made = estimate_share([1.0] * right + [0.0] * (of - right))
        assert made == pytest.approx((share, max(0, middle - half), min(1, middle + half), of), abs=1e-12)
        assert made.high > made.low  # type: ignore[operator]


def test_shares_with_parts_have_students_interval_within_0_and_1() -> None:
    made = estimate_share([1.0, 0.5, 1.0, 0.9])
    low, _ = stats.t.interval(0.95, 3, 0.85, stats.sem([1.0, 0.5, 1.0, 0.9]))
    assert made == pytest.approx((0.85, low, 1.0, 4))


def test_paired_shares_have_newcombes_interval() -> None:
    """Examples of table II of the paper, method 10: pairs right for both, for the first, for the second, for none."""
    for counts, expected in (
        ((36, 12, 2, 0), (0.0569, 0.3404)),
        ((36, 14, 0, 0), (0.1528, 0.4167)),
    ):
        both, first, second, none = counts
        ones = [1.0] * (both + first) + [0.0] * (second + none)
        others = [1.0] * both + [0.0] * first + [1.0] * second + [0.0] * none
        made = estimate_share_change(ones, others)
        assert made.value == pytest.approx((first - second) / sum(counts))
        assert made[1:3] == pytest.approx(expected, abs=1e-4)


@given(st.lists(st.floats(0, 10), min_size=FEWEST, max_size=12))
def test_an_interval_holds_its_value_and_no_impossible_one(values: list[float]) -> None:
    made = estimate(values)
    assert made.low is not None
    assert made.high is not None
    assert made.low <= made.value + 1e-9
    assert made.value <= made.high + 1e-9
    shares = estimate_share([value / 10 for value in values])
    assert 0 <= shares.low <= shares.high <= 1  # type: ignore[operator]
    changes = estimate_share_change([value / 10 for value in values], [1 - value / 10 for value in values])
    assert -1 <= changes.low <= changes.high <= 1  # type: ignore[operator]


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.1], [2.0, math.nan, 2.1], [2.0, math.inf, 2.1]])
def test_there_is_no_interval_of_few_items_or_of_values_that_are_not_finite(values: list[float]) -> None:
    made = estimate(values)
    assert (made.low, made.high, made.items) == (None, None, len(values))
    assert estimate_share([1.0, 1.0]).low is None
    assert estimate_share_change([1.0, 1.0], [0.0, 1.0]).low is None


def test_a_mean_weighs_every_token_alike() -> None:
    assert estimate([10.0, 40.0, 30.0], [10.0, 20.0, 30.0]).value == pytest.approx(80 / 60)


def test_an_item_without_weight_changes_nothing() -> None:
    assert estimate([1.0, 2.0, 4.0, 0.0], [1.0, 1.0, 1.0, 0.0]) == estimate([1.0, 2.0, 4.0])
