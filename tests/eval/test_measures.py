"""One number per method and length: its interval, what it is told from, and how alike two measures rank methods."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap, kendalltau

from rope_ext_hf.eval.measures import Evidence, Measure, kendall_tau
from rope_ext_hf.eval.results import interval

GENERATOR = np.random.default_rng(0)
LOSSES = {name: GENERATOR.uniform(1, 2, 40) for name in ("a", "b", "c")}
LOSSES["d"] = LOSSES["a"] + 0.01


def losses() -> Measure:
    items = {name: {8: [(10 * nats, 10.0) for nats in row]} for name, row in LOSSES.items()}
    return Measure("loss", "nats per token", Evidence.LOSS, False, items)


def shares(rows: dict[str, dict[int, list[float]]], chance: float = 0.0) -> Measure:
    items = {name: {n: [(share, 1.0) for share in some] for n, some in row.items()} for name, row in rows.items()}
    return Measure("score", "%", Evidence.ANSWERS, True, items, chance=chance)


def test_values_and_intervals_are_those_of_scipy() -> None:
    measure = losses()
    for name, row in LOSSES.items():
        assert measure.value(name, 8) == pytest.approx(row.mean())
        found = interval(measure.drawn([name], 8)[:, 0])
        expected = bootstrap((row,), np.mean, n_resamples=5000, method="percentile", rng=0).confidence_interval
        assert found == pytest.approx(expected, abs=0.02)


def test_a_change_is_paired_by_item() -> None:
    change, low, high = losses().change("d", "a", 8)
    assert (change, low, high) == pytest.approx((0.01, 0.01, 0.01))  # unpaired, the interval would be 0.2 wide


def test_the_best_and_what_is_not_told_from_it() -> None:
    equal = {"a": {8: [1.0] * 9 + [0.0]}, "b": {8: [1.0] * 8 + [0.0, 1.0]}, "worse": {8: [0.0] * 10}}
    best, among = shares(equal).best(8, ["worse", "b", "a"])
    assert (best, among) == ("b", ["b", "a"])
    measure = losses()
    by_hand = min(LOSSES, key=lambda name: LOSSES[name].mean())
    assert measure.best(8, list(LOSSES))[0] == by_hand
    assert measure.best(16, list(LOSSES)) == (None, [])


def test_a_loss_that_is_not_finite_is_never_best() -> None:
    for bad in (float("nan"), float("inf")):
        items = {"bad": {8: [(bad, 1.0)]}, "good": {8: [(5.0, 1.0)]}}
        measure = Measure("loss", "nats per token", Evidence.LOSS, False, items)
        assert measure.best(8, ["bad", "good"]) == ("good", ["good"])


def test_luck_is_no_information() -> None:
    lucky = [1.0] * 3 + [0.0] * 17
    nothing = shares({str(n): {8: lucky} for n in range(10)}, chance=0.05)
    assert nothing.flaw == "is better than luck (5.0%) with no method"
    assert shares({"as loaded": {8: [0.0] * 20}, "a": {8: [1.0] * 19 + [0.0]}}, chance=0.05).flaw == ""
    assert shares({"a": {8: [0.0] * 20}}).flaw == "is better than luck with no method"
    assert losses().flaw == ""


def test_one_document_decides_nothing_where_several_are_needed() -> None:
    assert replace(losses(), least=40).flaw == ""
    assert replace(losses(), least=41).flaw == "rests on 40 documents"


def test_ranks_are_compared_as_scipy_does() -> None:
    one = torch.tensor([[3.0, 1.0, 2.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    other = torch.tensor([[1.0, 1.0, 5.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    expected = [kendalltau(a, b).statistic for a, b in zip(one, other, strict=True)]
    assert kendall_tau(one, other).tolist() == pytest.approx(expected)
    assert kendall_tau(one[0], torch.ones(4)).isnan()


def test_shares_change_by_points() -> None:
    measure = shares({"a": {8: [1.0] * 4}, "b": {8: [0.5] * 4}})
    assert measure.change_text(measure.change("b", "a", 8)) == "-50.0 [-50.0 to -50.0] points"
    assert measure.text(measure.value("b", 8)) == "50.0%"
    assert losses().change_text((0.5, -0.25, 1.0)) == "+0.500 [-0.250 to +1.000] nats per token"
