"""One number per method and length: its interval, what it is told from, and how alike two measures rank methods."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import bootstrap, kendalltau

from rope_ext_hf.runs.measures import Evidence, Measure, kendall_tau
from rope_ext_hf.runs.verdicts import Findings

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
        found = measure.estimate(name, 8)
        expected = bootstrap((row,), np.mean, n_resamples=5000, method="BCa", rng=0).confidence_interval
        assert (found.low, found.high) == pytest.approx(expected, abs=0.02)


def test_a_change_is_paired_by_item() -> None:
    change = losses().change(("d", 8), ("a", 8))
    assert change is not None
    assert change[:3] == pytest.approx((0.01, 0.01, 0.01))  # unpaired, the interval would be 0.2 wide


def test_there_is_no_change_where_items_differ_or_one_is_missing() -> None:
    items = {"a": {8: [(1.0, 1.0)] * 4, 16: [(1.0, 2.0)] * 4}, "b": {8: [(1.0, 1.0)] * 3}}
    measure = Measure("loss", "nats per token", Evidence.LOSS, False, items)
    assert measure.change(("a", 8), ("b", 8)) is None
    assert measure.change(("a", 8), ("b", 16)) is None
    assert measure.change(("a", 8), ("a", 16)) is None  # other tokens are scored


def test_a_loss_that_is_not_finite_is_infinitely_worse() -> None:
    for bad in (float("nan"), float("inf")):
        items = {"bad": {8: [(bad, 1.0)]}, "good": {8: [(5.0, 1.0)]}}
        measure = Measure("loss", "nats per token", Evidence.LOSS, False, items)
        assert measure.change(("bad", 8), ("good", 8)) == (math.inf, None, None, 1)
        assert measure.change(("good", 8), ("bad", 8)) == (-math.inf, None, None, 1)


def test_luck_is_no_information() -> None:
    lucky = [1.0] * 3 + [0.0] * 17
    nothing = shares({str(n): {8: lucky} for n in range(10)}, chance=0.05)
    assert nothing.flaw == "is better than luck (5.0%) with no method"
    assert shares({"as loaded": {8: [0.0] * 20}, "a": {8: [1.0] * 19 + [0.0]}}, chance=0.05).flaw == ""
    assert shares({"a": {8: [0.0] * 20}}).flaw == "is better than luck with no method"
    assert losses().flaw == ""


def test_two_documents_decide_nothing() -> None:
    def of(count: int) -> Measure:
        return replace(losses(), items={name: {8: row[8][:count]} for name, row in losses().items.items()})

    assert of(3).flaw == ""
    assert of(2).flaw == "rests on 2 documents (at least 3 are needed)"


def test_ranks_are_compared_as_scipy_does() -> None:
    one = torch.tensor([[3.0, 1.0, 2.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    other = torch.tensor([[1.0, 1.0, 5.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
    expected = [kendalltau(a, b).statistic for a, b in zip(one, other, strict=True)]
    assert kendall_tau(one, other).tolist() == pytest.approx(expected)
    assert kendall_tau(one[0], torch.ones(4)).isnan()


def test_shares_change_by_points() -> None:
    measure = shares({"a": {8: [1.0] * 4}, "b": {8: [0.5] * 4}})
    assert (measure.signed(-0.5), losses().signed(0.5)) == ("-50.0", "+0.500")
    assert measure.text(measure.value("b", 8)) == "50.0%"
    for each, unit in ((measure, "points"), (losses(), "nats per token")):
        findings = Findings({"a": "a", "b": "b"}, "a", 8, [each])
        assert str(findings.change(each, ("a", 8), ("b", 8))).endswith(f"] {unit}")
