"""Intervals: how often they cover the mean, what they are without weights, and where there is none."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from rope_ext_hf.runs.statistics import (
    Estimate,
    estimate,
    estimate_share,
    estimate_share_change,
    t_quantile,
)

DRAWS = 3000


def covered(values: np.ndarray, mean: float, weights: np.ndarray | None = None) -> float:
    """The share of rows, (draws, items), whose interval holds the mean, in percent."""
    weights = np.ones_like(values) if weights is None else weights
    found = [estimate((row * of).tolist(), of.tolist()) for row, of in zip(values, weights, strict=True)]
    return float(100 * np.mean([e.low <= mean <= e.high for e in found if e.low is not None and e.high is not None]))


@pytest.mark.parametrize("items", [3, 5, 8, 16])
def test_intervals_of_normal_losses_hold_95_percent(items: int) -> None:
    values = np.random.default_rng(items).normal(2.0, 0.3, (DRAWS, items))
    assert covered(values, 2.0) == pytest.approx(95, abs=2)
    if items <= 8:  # a percentile bootstrap, as it was before, covers 75 to 89
        bounds = [
            np.quantile(row[np.random.default_rng(0).integers(items, size=(500, items))].mean(1), [0.025, 0.975])
            for row in values[:500]
        ]
        assert np.mean([low <= 2.0 <= high for low, high in bounds]) < 0.91


@pytest.mark.parametrize(("items", "least"), [(3, 86), (5, 86), (8, 87.5), (16, 90)])
def test_intervals_of_skewed_losses_hold_more_than_students(items: int, least: float) -> None:
    values = np.random.default_rng(items).lognormal(0, 1, (DRAWS, items))
    mean = math.exp(0.5)
    ours = covered(values, mean)
    low, high = stats.t.interval(0.95, items - 1, values.mean(1), stats.sem(values, axis=1))
    assert ours >= least
    assert ours > 100 * np.mean((low <= mean) & (mean <= high)) + 3


@pytest.mark.parametrize("items", [3, 8])
def test_intervals_of_documents_of_unequal_length_hold_at_least_95_percent(items: int) -> None:
    draw = np.random.default_rng(items)
    assert covered(draw.normal(2.0, 0.3, (DRAWS, items)), 2.0, draw.lognormal(0, 1, (DRAWS, items))) >= 93
    heavy = np.ones((DRAWS, items))
    heavy[:, 0] = 5 * items
    assert covered(draw.normal(2.0, 0.3, (DRAWS, items)), 2.0, heavy) >= 93


@pytest.mark.parametrize("items", [5, 10, 40])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_intervals_of_shares_hold_at_least_92_percent(items: int, share: float) -> None:
    draw = np.random.default_rng(items)
    rows = (draw.random((1000, items)) < share).astype(float)
    found = [estimate_share(row.tolist()) for row in rows]
    assert 100 * np.mean([e.low <= share <= e.high for e in found]) >= 92  # type: ignore[operator]
    other = np.where(draw.random(rows.shape) < 0.5, rows, draw.random(rows.shape) < 0.5)
    truth = 0.5 * share - 0.25
    changes = [estimate_share_change((a - b).tolist()) for a, b in zip(rows, other, strict=True)]
    assert 100 * np.mean([e.low <= truth <= e.high for e in changes]) >= 90  # type: ignore[operator]


def test_without_skewness_the_interval_is_students() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0]
    low, high = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert estimate(values) == pytest.approx((3.0, low, high, 5))


def test_quantiles_are_those_of_scipy() -> None:
    for freedom in (1, 2, 2.5, 4, 17, 300, 5000):
        for level in (0.9, 0.975, 0.9995):
            assert t_quantile(level, freedom) == pytest.approx(stats.t.ppf(level, freedom), rel=1e-4)


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.1], [2.0, math.nan, 2.1], [2.0, math.inf, 2.1]])
def test_there_is_no_interval_of_few_items_or_of_values_that_are_not_finite(values: list[float]) -> None:
    found = estimate(values)
    assert (found.low, found.high, found.items) == (None, None, len(values))
    assert estimate_share([1.0, 1.0]).low is None


def test_a_share_of_one_is_not_certain() -> None:
    found = estimate_share([1.0] * 3)
    assert found.high == 1.0
    assert found.low is not None
    assert found.low < 0.3
    assert estimate_share_change([0.0] * 3)[1:3] == pytest.approx((-0.86, 0.86), abs=0.01)


def test_a_mean_weighs_every_token_alike() -> None:
    found = estimate([10.0, 40.0, 30.0], [10.0, 20.0, 30.0])
    assert found.value == pytest.approx(80 / 60)


def test_an_item_without_weight_changes_nothing_but_the_count() -> None:
    some = estimate([1.0, 2.0, 4.0, 0.0], [1.0, 1.0, 1.0, 0.0])
    assert some.value == pytest.approx(7 / 3)


def test_a_difference_of_two_means_is_as_wide_as_both() -> None:
    one, other = Estimate(3.0, 2.0, 4.0, 9), Estimate(1.0, 0.25, 1.75, 5)
    assert one.minus(other) == pytest.approx((2.0, 2 - 1.25, 2 + 1.25, 5))
    assert one.minus(Estimate(1.0, None, None, 1)) == (2.0, None, None, 1)
    draw = np.random.default_rng(0)
    hit = 0
    for _ in range(1000):
        a, b = estimate(draw.normal(1, 1, 8).tolist()), estimate(draw.normal(0, 3, 6).tolist())
        low, high = a.minus(b, 0.5)[1:3]
        hit += low <= 1 <= high  # type: ignore[operator]
    assert hit / 1000 == pytest.approx(0.95, abs=0.025)
