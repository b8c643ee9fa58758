"""What follows from made-up numbers whose answer is known: better, worse, cannot tell, no measure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rope_ext_hf.runs.measures import EffectiveLength, Evidence, Measure
from rope_ext_hf.runs.statistics import Estimate
from rope_ext_hf.runs.verdicts import Conclusion, Findings, Outcome, conclude, verdict

BETTER, WORSE, CANNOT_TELL, NO_MEASURE = Outcome


@pytest.mark.parametrize(
    ("change", "outcome", "text"),
    [
        (Estimate(-0.2, -0.3, -0.1, 9), BETTER, "lower by 0.200 [0.100 to 0.300] nats per token"),
        (Estimate(0.2, 0.1, 0.3, 9), WORSE, "higher by 0.200 [0.100 to 0.300] nats per token"),
        (Estimate(0.1, -0.1, 0.3, 9), CANNOT_TELL, "not told apart: +0.100 [-0.100 to +0.300] nats per token"),
        (Estimate(0.0, 0.0, 0.0, 9), CANNOT_TELL, "not told apart: +0.000 [+0.000 to +0.000] nats per token"),
        (
            Estimate(-3.0, None, None, 2),
            CANNOT_TELL,
            "not told apart: -3.000 nats per token, and 2 documents give no interval",
        ),
        (
            Estimate(-3.0, None, None, 1),
            CANNOT_TELL,
            "not told apart: -3.000 nats per token, and 1 document gives no interval",
        ),
        (None, NO_MEASURE, "not known: no measure has both"),
        (Estimate(math.inf, None, None, 9), WORSE, "not finite"),
        (Estimate(-math.inf, None, None, 9), BETTER, "finite, the other one is not"),
        (Estimate(math.nan, None, None, 9), CANNOT_TELL, "not finite"),
    ],
)
def test_a_change_is_judged_by_its_interval(change: Estimate | None, outcome: Outcome, text: str) -> None:
    found = verdict(change)
    assert (found.outcome, str(found)) == (outcome, text)
    turned = {BETTER: WORSE, WORSE: BETTER}.get(outcome, outcome)
    assert verdict(change, higher_is_better=True).outcome is turned


def test_what_counts_as_none_may_be_another_change_than_0() -> None:
    rise = Estimate(0.03, 0.01, 0.05, 9)
    assert verdict(rise).outcome is WORSE
    assert verdict(rise, than=0.02).outcome is CANNOT_TELL
    assert verdict(rise, than=0.06).outcome is BETTER
    assert verdict(rise, than=0.005).outcome is WORSE


def test_points_are_written_with_one_decimal() -> None:
    found = verdict(Estimate(0.25, 0.1, 0.4, 20), unit="points", higher_is_better=True, scale=100, digits=1)
    assert str(found) == "higher by 25.0 [10.0 to 40.0] points"


# --- conclusions ------------------------------------------------------------------------------------------------------

SPREAD = (-0.05, -0.02, 0.0, 0.01, 0.06)
"""By what the documents of a made-up loss are apart."""
Row = Mapping[int, float | Sequence[float]]


def losses(rows: Mapping[str, Row], name: str = "loss", **more: Any) -> Measure:
    """A loss by method and length over five documents; a list is of the documents themselves."""
    items = {
        key: {
            n: [(10.0 * v, 10.0) for v in (loss if isinstance(loss, Sequence) else [loss + s for s in SPREAD])]
            for n, loss in row.items()
        }
        for key, row in rows.items()
    }
    return Measure(name, "nats per token", Evidence.LOSS, False, items, rise=0.05, **more)


def answers(rows: Mapping[str, Mapping[int, int]], prompts: int = 40, **more: Any) -> Measure:
    """So many of some prompts are answered."""
    items = {
        key: {n: [(float(i < right), 1.0) for i in range(prompts)] for n, right in row.items()}
        for key, row in rows.items()
    }
    return Measure("score", "%", Evidence.ANSWERS, True, items, "prompt", **more)


def concluded(*measures: Measure, **more: Any) -> Conclusion:
    keys = dict.fromkeys(["loaded", *(key for measure in measures for key in measure.items)])
    given: dict[str, Any] = {"names": {key: key for key in keys}, "loaded": "loaded", "context_length": 64}
    return conclude(Findings(measures=measures, **given | more))


LOADED = {64: 1.0, 256: 5.0}


def test_the_best_method_its_reach_and_its_price() -> None:
    found = concluded(losses({"loaded": LOADED, "yarn": {64: 1.2, 128: 1.01, 256: 1.5}, "linear": {64: 3.0, 256: 3.0}}))
    assert (found.best, found.equal) == ("yarn", ("yarn",))
    first, reach, price = found.text.split(". ")
    assert first.startswith("At 256 tokens (4x), yarn reads best: loss 1.500 [1.4")
    assert first.endswith("nats per token (as loaded 5.000)")
    assert reach == "Up to 128 tokens (2x) it is within 5% of the loss as loaded at 64 tokens"
    assert price == (
        "Compared with the model as loaded at 64 tokens (1x), "
        "the loss is higher by 0.200 [0.200 to 0.200] nats per token."
    )


def test_a_reach_that_the_documents_do_not_show_is_not_claimed() -> None:
    noisy = [0.9, 1.3, 0.8, 1.2, 1.05]
    found = concluded(losses({"loaded": {64: 1.0, 128: 5.0}, "yarn": {64: 1.2, 128: noisy}}))
    assert "At 128 tokens (2x), whether it is within 5% of the loss as loaded at 64 tokens cannot be" in found.text
    found = concluded(losses({"loaded": {64: 1.0, 128: 5.0}, "yarn": {64: 1.2, 128: 2.0}}))
    assert "At 128 tokens (2x) it is not within 5% of the loss as loaded at 64 tokens." in found.text


def test_methods_that_are_not_told_apart() -> None:
    found = concluded(losses({"a": {256: [1.5, 1.4, 1.6, 1.5]}, "b": {256: [1.51, 1.39, 1.62, 1.49]}}))
    assert found.text.startswith("At 256 tokens (4x), nothing tells the methods apart.")
    assert set(found.equal) == {"a", "b"}


def test_the_model_as_loaded_comes_first_where_nothing_is_told_from_it() -> None:
    same = [1.5, 1.4, 1.6, 1.5]
    found = concluded(losses({"a": {256: [v - 0.001 for v in same[::-1]]}, "loaded": {256: same}}))
    assert found.best == "loaded"
    assert "nothing tells the methods apart. The model as loaded: loss 1.500" in found.text


@pytest.mark.parametrize("documents", [1, 2])
def test_one_document_or_two_decide_nothing(documents: int) -> None:
    found = concluded(losses({"loaded": {256: [5.0] * documents}, "a": {256: [1.0] * documents}}))
    assert found.best is None
    few = "1 document" if documents == 1 else "2 documents"
    assert found.text == f"Which method reads best cannot be told: the loss rests on {few} (at least 3 are needed)."


def test_a_method_alone_is_compared_with_nothing() -> None:
    found = concluded(losses({"loaded": {256: 1.5}}))
    assert found.text.startswith("The model as loaded alone was measured. At 256 tokens (4x): loss 1.500 [")


def test_answers_decide_before_losses_and_the_loss_where_they_do_not() -> None:
    loss = losses({"loaded": LOADED, "a": {64: 1.1, 256: 1.5}, "b": {64: 1.1, 256: 1.4}})
    found = concluded(loss, answers({"loaded": {256: 0}, "a": {256: 38}, "b": {256: 12}}))
    assert found.best == "a"
    assert "score 95.0% [" in found.text
    assert "By the loss alone it would be b." in found.text
    found = concluded(loss, answers({"loaded": {256: 0}, "a": {256: 31}, "b": {256: 30}}))
    assert found.best == "b"


def test_runs_that_share_no_text_are_not_compared() -> None:
    """A method of one text and a method of another: cannot tell, in every order."""
    one = losses({"loaded": LOADED, "linear": {256: 2.8}}, "loss, one text")
    other = losses({"loaded": LOADED, "rerope": {256: 1.6}}, "loss, other text")
    for given in itertools.permutations((one, other)):
        found = concluded(*given)
        assert found.best is None
        assert found.text.startswith(
            "Which of linear and rerope reads best cannot be told: no measure has both linear and rerope."
        )


def test_a_method_that_no_measure_compares_with_the_best_one_is_named() -> None:
    alone = losses({"x": {256: 0.5}}, "loss, other text")
    found = concluded(losses({"loaded": LOADED, "a": {256: 1.5}}), alone)
    assert found.best is None
    assert "no measure has both a and x" in found.text


def test_the_order_of_measures_and_methods_never_matters() -> None:
    rows = {"loaded": LOADED, "a": {64: 1.1, 256: 1.5}, "b": {64: 1.3, 256: 1.5}, "c": {64: 1.0, 256: 9.0}}
    shares = {"loaded": {256: 0}, "a": {256: 30}, "b": {256: 28}}
    texts = set()
    for keys in itertools.permutations(rows):
        loss, score = losses({key: rows[key] for key in keys}), answers({k: shares[k] for k in keys if k in shares})
        texts |= {concluded(loss, score).text, concluded(score, loss).text}
    assert len(texts) == 1


def test_losses_that_are_not_finite_come_last() -> None:
    found = concluded(losses({"loaded": {256: [math.nan, 1.0, 1.0]}, "a": {256: [9.0, 9.1, 9.2]}}))
    assert found.best == "a"
    nothing = concluded(losses({"loaded": {256: [math.nan, 1.0, 1.0]}, "a": {256: [math.inf, 9.1, 9.2]}}))
    assert "nothing tells the methods apart" in nothing.text


def test_a_measure_at_luck_decides_nothing_and_is_named() -> None:
    found = concluded(
        losses({"loaded": LOADED, "a": {256: 1.5}}), answers({"loaded": {256: 2}, "a": {256: 3}}, chance=0.05)
    )
    assert found.best == "a"
    assert "The score is better than luck (5.0%) with no method, and decides nothing." in found.text


def test_effective_lengths_are_named_of_the_best_method_and_as_loaded() -> None:
    reaches = {"loaded": EffectiveLength(64, 64, 64), "a": EffectiveLength(256, 64, 256)}
    found = concluded(answers({"loaded": {64: 40, 256: 0}, "a": {64: 40, 256: 38}}, reaches=reaches))
    assert "Its effective length by the score is 256 [64 to 256] tokens; as loaded 64 [64 to 64]." in found.text


def test_methods_beyond_their_extended_lengths_are_named() -> None:
    loss = losses({"loaded": {64: 1.0, 512: 5.0}, "a": {512: 1.5}, "b": {512: 2.5}})
    found = concluded(loss, extended={"loaded": 64, "a": 256, "b": 512})
    assert found.text.endswith("Measured beyond the length that it is for: a (256 tokens).")
    assert "beyond" not in concluded(loss, extended={"loaded": 64, "a": 512}).text


def timed(rows: Mapping[str, Sequence[float]]) -> Measure:
    items = {key: {256: [(seconds, 100.0) for seconds in row]} for key, row in rows.items()}
    return Measure("time", "seconds per token", Evidence.LOSS, False, items)


def test_times_are_compared_where_one_run_has_both_and_with_an_interval() -> None:
    loss = losses({"loaded": LOADED, "a": {256: 1.5}})
    slower = timed({"loaded": [1.0, 1.1, 0.9, 1.0], "a": [2.0, 2.2, 1.9, 2.1]})
    text = concluded(loss, times=[slower]).text
    assert "It takes 2.05 [" in text  # the geometric mean of 2, 2, 2.11 and 2.1
    assert "times as long as the model as loaded." in text
    apart = [timed({"loaded": [1.0, 1.1, 0.9]}), timed({"a": [2.0, 2.2, 1.9]})]
    assert "times as long" not in concluded(loss, times=apart).text
    warm_up = timed({"loaded": [9.0, 1.1, 0.9, 1.0], "a": [1.0, 1.2, 0.9, 1.1]})
    assert "Its time per token is not told from that of the model as loaded" in concluded(loss, times=[warm_up]).text
    assert "times as long" not in concluded(loss, times=[timed({"loaded": [1.0], "a": [2.0]})]).text


def test_nothing_measured_says_nothing() -> None:
    assert concluded().text == ""
