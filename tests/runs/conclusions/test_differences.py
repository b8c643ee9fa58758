"""The paired differences that stars rest on: against scipy, in every kind of unit, in the files and on the page."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from rope_ext_hf.eval import passkey, sweep
from rope_ext_hf.runs.conclusions.differences import differences
from rope_ext_hf.runs.conclusions.findings import collect_findings
from rope_ext_hf.runs.conclusions.labels import labels, short_labels
from rope_ext_hf.runs.conclusions.measures import Evidence, Measure
from rope_ext_hf.runs.conclusions.verdicts import Outcome
from rope_ext_hf.runs.tables import differences_tables
from rope_ext_hf.terminal import table_text

METHODS: list[dict[str, Any] | None] = [None, {"method": "yarn", "factor": 4.0}, {"method": "ntk", "factor": 4.0}]
UNPATCHED, YARN, NTK = (json.dumps(method) for method in METHODS)
LOSSES = {
    UNPATCHED: {64: [(20.0, 10.0), (22.0, 10.0), (27.0, 10.0)]},
    YARN: {64: [(10.0, 10.0), (13.0, 10.0), (15.0, 10.0)]},
    NTK: {64: [(10.1, 10.0), (12.9, 10.0), (15.3, 10.0)]},
}


def found(measure: Measure) -> Any:
    return collect_findings(
        [(measure, "text")], methods=METHODS, loaded=None, context_length=64, extended=dict.fromkeys(LOSSES)
    )


@pytest.mark.parametrize("exponential", [False, True])
def test_losses_are_paired_by_document_in_the_unit_of_their_column(exponential: bool) -> None:
    name, unit = ("perplexity", "") if exponential else ("loss", "nats per token")
    measure = Measure(name, unit, Evidence.LOSS, False, LOSSES, exponential=exponential)
    rows = {(row.label, row.compared_with): row for row in differences(found(measure))}
    assert rows.keys() == {
        *(("yarn x4", "unpatched"), ("ntk x4", "unpatched")),  # against the unpatched model
        *(("unpatched", "yarn x4"), ("ntk x4", "yarn x4")),  # against the best
    }
    by_document = [a / 10 - b / 10 for (a, _), (b, _) in zip(LOSSES[YARN][64], LOSSES[UNPATCHED][64], strict=True)]
    test = stats.ttest_1samp(by_document, 0.0)
    interval = test.confidence_interval(0.95)
    expected = [sum(by_document) / 3, interval.low, interval.high]
    row = rows["yarn x4", "unpatched"]
    shown = [row.difference, row.low, row.high]
    assert shown == pytest.approx([math.exp(value) for value in expected] if exponential else expected)
    assert (row.unit, row.items) == ("ratio" if exponential else "nats per token", 3)
    assert row.outcome is Outcome.BETTER
    assert rows["unpatched", "yarn x4"].outcome is Outcome.WORSE
    assert rows["ntk x4", "yarn x4"].outcome is Outcome.NO_DIFFERENCE


def test_shares_are_differences_of_shares() -> None:
    answers = {
        UNPATCHED: {64: [(0.0, 1.0)] * 12},
        YARN: {64: [(1.0, 1.0)] * 9 + [(0.0, 1.0)] * 3},
        NTK: {64: [(1.0, 1.0)] * 12},
    }
    rows = differences(found(Measure("answers", "%", Evidence.ANSWERS, True, answers)))
    values = {(row.label, row.compared_with): (row.difference, row.unit, row.outcome) for row in rows}
    assert values["ntk x4", "unpatched"] == (1.0, "share", Outcome.BETTER)
    assert values["yarn x4", "ntk x4"][:2] == (-0.25, "share")
    assert all(-1 <= (row.low or 0) <= row.difference <= (row.high or 0) <= 1 for row in rows)


def test_few_documents_and_losses_that_are_not_finite() -> None:
    losses = {
        UNPATCHED: {64: [(1.0, 1.0), (2.0, 1.0)]},
        YARN: {64: [(math.inf, 1.0), (2.0, 1.0)]},
        NTK: {64: [(1.0, 2.0), (2.0, 1.0)]},
    }
    (unpatched,) = differences(found(Measure("loss", "nats", Evidence.LOSS, False, {**losses, NTK: {}})))
    assert (unpatched.difference, unpatched.low, unpatched.outcome) == (math.inf, None, Outcome.WORSE)
    other_tokens = {UNPATCHED: losses[UNPATCHED], NTK: losses[NTK]}
    assert differences(found(Measure("loss", "nats", Evidence.LOSS, False, other_tokens))) == []


def test_a_table_shows_what_the_stars_rest_on() -> None:
    (table,) = differences_tables(found(Measure("perplexity", "", Evidence.LOSS, False, LOSSES, exponential=True)))
    text = table_text(table)
    assert "Perplexity divided by that of the best method of each length" in text
    assert "best*" in text
    assert f"{math.exp(69 / 30 - 38 / 30):.3f}" in text  # unpatched, without a star
    assert f"{math.exp(38.3 / 30 - 38 / 30):.3f}*" in text
    alike = dict.fromkeys(LOSSES, LOSSES[YARN])
    assert differences_tables(found(Measure("loss", "nats", Evidence.LOSS, False, alike))) == []


def test_labels_are_short_where_they_stay_unique() -> None:
    long = "dca llama4 chunk=192 window=64"
    assert short_labels(["unpatched", long, "yarn x4"]) == ["unpatched", "dca", "yarn x4"]
    two = [{"method": "yarn", "factor": 4.0}, {"method": "yarn", "factor": 4.0, "beta_fast": 16.0}]
    full = list(labels(two).values())
    assert short_labels([*full, long]) == [*full, "dca"]


@pytest.mark.slow
def test_the_files_of_runs_have_them(tmp_path: Path) -> None:
    options: dict[str, Any] = {"methods": ["yarn", "dca"], "factors": 4, "out": tmp_path}
    runs = [
        sweep("reference", "stdlib", lengths=[256, 512], max_spans=6, **options),
        passkey("reference", lengths=[256, 512], task="key-value", trials=3, depths=[0.5], **options).run,
    ]
    for run in runs:
        with (run.folder / "differences.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        content = json.loads((run.folder / "results.json").read_text(encoding="utf-8"))
        assert [row["difference"] for row in rows] == [str(row["difference"]) for row in content["differences"]]
        assert {row["label"] for row in rows} == {"unpatched", "yarn x4", "dca"}
        assert {row["label"] for row in content["results"]} == {"unpatched", "yarn x4", "dca"}
        with (run.folder / "results.csv").open(encoding="utf-8", newline="") as file:
            assert {row["label"] for row in csv.DictReader(file)} == {"unpatched", "yarn x4", "dca"}
    page = (runs[0].folder / "report.html").read_text(encoding="utf-8")
    assert "The differences that the stars rest on" in page
    with (runs[0].folder / "results.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for end in ("low", "high"):
                assert float(row[f"perplexity_{end}"]) == pytest.approx(math.exp(float(row[f"{end}_nats"])))
