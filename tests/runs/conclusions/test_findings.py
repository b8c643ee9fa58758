"""Findings from made-up numbers whose answer is known; no sentence is made of them here."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from rope_ext_hf.methods.static import Linear, Yarn
from rope_ext_hf.runs.conclusions.charts import line_chart
from rope_ext_hf.runs.conclusions.findings import Findings, collect_findings
from rope_ext_hf.runs.conclusions.labels import method_key
from rope_ext_hf.runs.conclusions.measures import Measure
from rope_ext_hf.runs.conclusions.verdicts import Outcome
from tests.runs.made_up import Row, answer_losses, answers, perplexities

BETTER, WORSE, NO_DIFFERENCE, NOT_MEASURED = Outcome
UNPATCHED: Row = {64: 1.0, 128: 3.0, 256: 5.0}
CLOSE = [1.5, 1.4, 1.6, 1.5, 1.5]
"""Nats of five documents; in another order, their mean is the same and no document's value is."""


def findings(*measures: Measure, **more: Any) -> Findings:
    keys = dict.fromkeys(["loaded", *(key for measure in measures for key in measure.items)])
    values: dict[str, Any] = {"names": {key: key for key in keys}, "loaded": "loaded", "context_length": 64}
    return Findings(measures=measures, **values | more)


def test_two_methods_are_compared_at_the_longest_length_that_both_have() -> None:
    known = findings(perplexities({"loaded": UNPATCHED, "a": {64: 0.5, 128: 4.0}, "b": {256: 1.0}}))
    assert known.compare("a", "loaded") is WORSE  # at 128, not at 64
    assert known.compare("loaded", "a") is BETTER
    assert known.compare("b", "loaded") is BETTER
    assert known.compare("a", "b") is NOT_MEASURED


def test_the_measure_closest_to_use_decides_first() -> None:
    read = perplexities({"a": {256: 1.5}, "b": {256: 1.4}})
    assert findings(read).compare("a", "b") is WORSE
    assert findings(read, answers({"a": {256: 38}, "b": {256: 12}})).compare("a", "b") is BETTER
    assert findings(read, answers({"a": {256: 31}, "b": {256: 30}})).compare("a", "b") is WORSE


ANSWER_LOSSES = {"loaded": {64: 0.5, 256: 3.2}, "a": {64: 0.6, 256: 0.9}, "b": {64: 0.5, 256: 0.8}}


def test_where_hardly_any_answer_is_right_their_loss_decides() -> None:
    for right in (0, 1, 4):  # up to a tenth of 40
        share = answers({"loaded": {256: 0}, "a": {256: right}, "b": {256: 0}})
        known = findings(share, answer_losses(ANSWER_LOSSES, share))
        assert known.informative[0].name == "loss of the answer"
        assert known.compare("a", "loaded") is BETTER
        assert known.lead == "b"
    assert findings(share).lead == "loaded"  # the share alone shows no difference

    for right in (5, 20, 40):
        share = answers({"loaded": {256: 0}, "a": {256: right}, "b": {256: right}})
        known = findings(share, answer_losses(ANSWER_LOSSES, share))
        assert known.informative == [share]
        assert known.ordered[1].name == "loss of the answer"  # tables and pages show it all the same
        assert known.compare("a", "b") is NO_DIFFERENCE


def test_a_share_that_shows_a_difference_is_not_replaced() -> None:
    """9 of 100 is significantly more than 0 of 100, though both are shares below a tenth."""
    share = answers({"loaded": {256: 0}, "a": {256: 9}}, 100)
    known = findings(share, answer_losses({"loaded": {256: 1.0}, "a": {256: 2.0}}, share, 100))
    assert known.informative == [share]
    assert known.compare("a", "loaded") is BETTER


def test_the_loss_of_answers_says_nothing_of_lengths_at_which_they_are_right() -> None:
    share = answers({"loaded": {64: 38, 256: 0}, "a": {64: 38, 256: 0}, "b": {64: 0, 256: 0}})
    loss = answer_losses(ANSWER_LOSSES, share)
    known = findings(share, loss)
    assert known.compare("a", "loaded") is BETTER
    assert known.outcome_of_short_inputs(loss, "a") is NOT_MEASURED
    assert not known.costs_short_inputs("a")
    assert known.reads_as_well("loaded", 64)
    # and at lengths where hardly any is right
    share = answers({"loaded": {64: 1, 256: 0}, "a": {64: 0, 256: 0}})
    known = findings(share, loss := answer_losses(ANSWER_LOSSES, share))
    assert known.outcome_of_short_inputs(loss, "a") is WORSE
    assert not known.reads_as_well("a", 64)


def test_the_methods_that_no_method_is_better_than() -> None:
    rows: dict[str, Row] = {"loaded": UNPATCHED, "a": {256: CLOSE}, "b": {256: CLOSE[::-1]}, "c": {256: 4.0}}
    known = findings(perplexities(rows))
    assert set(known.unbeaten) == {"a", "b"}
    assert known.lead == known.unbeaten[0]
    assert not known.all_alike
    (measure,) = known.informative
    assert set(known.best(measure, 256)) == set(known.starred(measure, 256)) == {"a", "b"}
    assert known.outcomes["a", "c"] is BETTER
    assert known.outcomes["c", "a"] is WORSE
    assert known.outcomes["a", "b"] is NO_DIFFERENCE


def test_a_method_that_costs_short_inputs_comes_after_one_that_does_not() -> None:
    rows: dict[str, Row] = {"loaded": UNPATCHED, "a": {64: 1.2, 256: CLOSE}, "b": {64: 1.0, 256: CLOSE[::-1]}}
    known = findings(perplexities(rows))
    assert known.costs_short_inputs("a")
    assert not known.costs_short_inputs("b")
    assert known.unbeaten == ["b", "a"]
    of_positions = findings(perplexities(rows, of_positions=True))
    assert of_positions.outcome_of_short_inputs(of_positions.informative[0], "a") is NOT_MEASURED
    assert not of_positions.costs_short_inputs("a")


def test_methods_that_are_all_alike_get_no_mark() -> None:
    known = findings(perplexities({"loaded": {256: CLOSE}, "a": {256: CLOSE[::-1]}}))
    assert known.all_alike
    assert known.lead == "loaded"
    assert known.starred(known.measures[0], 256) == []


def test_too_few_documents_compare_nothing() -> None:
    known = findings(perplexities({"loaded": {256: [5.0, 5.0]}, "a": {256: [1.0, 1.0]}}))
    assert known.informative == []
    assert known.candidates == known.present == known.unbeaten == []
    assert known.lead is None


def test_a_method_that_was_measured_at_shorter_lengths_only_is_not_present() -> None:
    known = findings(perplexities({"loaded": UNPATCHED, "a": {256: 1.5}, "b": {64: 1.0, 128: 1.2}}))
    assert known.candidates == ["loaded", "a", "b"]
    assert known.present == ["loaded", "a"]
    assert known.unbeaten[-1] == "b"


def test_the_reach_ends_at_the_first_length_that_is_not_significantly_within_the_tolerance() -> None:
    noisy = [0.9, 1.3, 0.8, 1.2, 1.05]
    rows: dict[str, Row] = {
        "loaded": UNPATCHED,
        "all": {128: 1.0, 256: 1.01},
        "half": {64: 1.0, 128: 1.01, 256: 1.5},
        "none": {128: 1.2},
        "undecided": {128: noisy, 256: 1.0},
    }
    known = findings(perplexities(rows))
    (measure,) = known.informative
    assert known.reach(measure, "all") == ([128, 256], None)
    assert known.reach(measure, "half") == ([128], 256)
    assert known.reach(measure, "none") == ([], 128)
    assert known.reach(measure, "undecided") == ([], None)
    assert known.reach(measure, "loaded") == ([], 128)


def test_reading_as_well_as_short_inputs_has_no_tolerance() -> None:
    known = findings(perplexities({"loaded": UNPATCHED, "a": {128: 1.03, 256: 0.9}}))
    assert known.outcome_against_short(known.measures[0], "a", 128) is BETTER
    assert not known.reads_as_well("a", 128)
    assert known.reads_as_well("a", 256)


def test_a_length_beyond_the_one_a_method_is_set_for() -> None:
    known = findings(perplexities({"loaded": UNPATCHED}), extended={"loaded": 64})
    assert [known.beyond("loaded", length) for length in (64, 65)] == [False, True]
    assert not known.beyond("a method without an end", 10**9)


def test_findings_name_methods_and_measures_apart() -> None:
    yarn, linear = Yarn(factor=4.0).to_dict(), Linear(factor=4.0).to_dict()
    one = perplexities({method_key(None): {256: 5.0}, method_key(yarn): {256: 1.5}})
    longer = replace(one, items={key: {512: row[256]} for key, row in one.items.items()})
    empty = replace(one, name="LongPPL", items={})
    known = collect_findings(
        [(one, "novels"), (longer, "novels"), (one, "code"), (one, "code"), (empty, "code")],
        methods=[None, yarn, linear],
        loaded=None,
        context_length=64,
        extended={method_key(None): 64, method_key(yarn): 256, method_key(linear): None},
    )
    assert list(known.names.values()) == ["unpatched", "yarn x4", "linear x4"]
    assert known.extended == {method_key(None): 64, method_key(yarn): 256}
    assert [measure.name for measure in known.measures] == [
        "perplexity, novels, to 256 tokens",
        "perplexity, novels, to 512 tokens",
        "perplexity, code, to 256 tokens, 1",
        "perplexity, code, to 256 tokens, 2",
    ]


def test_the_chart_of_a_measure() -> None:
    known = findings(perplexities({"loaded": {64: 1.0, 256: [math.inf] * 5}}), answers({"a": {64: 40, 256: 10}}))
    read, right = known.measures
    chart = line_chart(known, read)
    assert list(chart.points) == ["loaded"]
    assert [length for length, _ in chart.points["loaded"]] == [64]  # what is not finite is left out
    assert chart.axis == "Perplexity (lower is better)"
    assert chart.logarithmic
    chart = line_chart(known, right)
    assert chart.points == {"a": [(64, 100.0), (256, 25.0)]}
    assert chart.axis == "Exact match, percent (higher is better)"
