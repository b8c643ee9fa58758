"""One number per method and length: its interval, and how it compares with another one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from rope_ext_hf.runs.conclusions.measures import Evidence, Measure
from tests.runs.made_up import answers, perplexities

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
        made = measure.estimate(name, 8)
        assert (made.low, made.high) == pytest.approx(stats.t.interval(0.95, 39, row.mean(), stats.sem(row)))


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


def test_luck_compares_nothing() -> None:
    lucky = [1.0] * 3 + [0.0] * 17
    nothing = shares({str(n): {8: lucky} for n in range(10)}, chance=0.05)
    assert nothing.flaw == "no method is significantly above chance (5.0%)"
    assert shares({"unpatched": {8: [0.0] * 20}, "a": {8: [1.0] * 19 + [0.0]}}, chance=0.05).flaw == ""
    assert shares({"a": {8: [0.0] * 20}}).flaw == "no method is significantly above chance"
    assert losses().flaw == ""


def test_two_documents_compare_nothing() -> None:
    def of(count: int) -> Measure:
        return replace(losses(), items={name: {8: row[8][:count]} for name, row in losses().items.items()})

    assert of(3).flaw == ""
    assert of(2).flaw == "2 documents are too few to compare methods"


def test_a_perplexity_is_the_exponential_of_its_items() -> None:
    measure = replace(losses(), name="perplexity", unit="", exponential=True)
    mean, shown = measure.mean("a", 8), measure.estimate("a", 8)
    assert mean.value == pytest.approx(LOSSES["a"].mean())
    assert shown[:3] == pytest.approx([math.exp(end) for end in mean[:3]])  # type: ignore[arg-type]
    change = measure.change(("d", 8), ("a", 8))
    assert change is not None
    assert change.value == pytest.approx(0.01)
    assert measure.change_text(change) == "+1%"
    assert [measure.text(value) for value in (1.9134, 233.4, 1e7, math.inf, math.nan)] == [
        "1.91", "233", "1.0e+07", "not finite", "not finite",
    ]  # fmt: skip


def test_changes_are_written_in_the_unit_of_the_measure() -> None:
    measure = shares({"a": {8: [1.0, 1.0, 1.0, 0.5]}, "b": {8: [0.5] * 4}})
    change = measure.change(("b", 8), ("a", 8))
    assert change is not None
    assert measure.change_text(change) == "-37.5 points"
    assert measure.text(measure.value("b", 8)) == "50.0%"
    change = losses().change(("d", 8), ("a", 8))
    assert change is not None
    assert losses().change_text(change) == "+0.010 nats per token"


def test_a_pair_of_methods_is_computed_once_in_either_order() -> None:
    draw = np.random.default_rng(5)
    rows = {f"m{i}": {256: [float(v) for v in draw.normal(1 + i / 9, 0.3, 9)]} for i in range(4)}
    for measure in (perplexities(rows), answers({f"m{i}": {256: 9 * i + 2} for i in range(4)})):
        for one, other in itertools.combinations(rows, 2):
            forward, backward = measure.change((one, 256), (other, 256)), measure.change((other, 256), (one, 256))
            fresh = Measure(measure.name, measure.unit, measure.evidence, measure.higher_is_better, measure.items)
            alone = fresh.change((other, 256), (one, 256))
            assert forward is measure.change((one, 256), (other, 256))
            assert backward is not None
            assert alone is not None
            assert list(backward) == pytest.approx(list(alone), rel=0, abs=1e-12)
