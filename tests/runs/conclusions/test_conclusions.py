"""Conclusions from made-up numbers whose answer is known."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest

from rope_ext_hf.runs.conclusions.conclusions import Conclusion, conclude
from rope_ext_hf.runs.conclusions.findings import Findings
from rope_ext_hf.runs.conclusions.measures import EffectiveLength, Measure
from tests.runs.made_up import Row, answers, perplexities


def concluded(*measures: Measure, **more: Any) -> Conclusion:
    keys = dict.fromkeys(["loaded", *(key for measure in measures for key in measure.items)])
    given: dict[str, Any] = {"names": {key: key for key in keys}, "loaded": "loaded", "context_length": 64}
    return conclude(Findings(measures=measures, **given | more))


LOADED = {64: 1.0, 256: 5.0}


def test_the_best_method_what_short_inputs_lose_and_its_reach() -> None:
    made = concluded(
        perplexities({"loaded": LOADED, "yarn": {64: 1.2, 128: 1.01, 256: 1.5}, "linear": {64: 3.0, 256: 3.0}})
    )
    assert (made.best, made.equal) == ("yarn", ("yarn",))
    assert str(made) == (
        "Best at 256 tokens (4x): yarn, perplexity 4.48 (unpatched 148). "
        "Short inputs (64 tokens): perplexity gets worse (2.72 to 3.32). "
        "At 128 tokens (2x), perplexity under yarn is within 5% of that of the unpatched model at 64 tokens; at 256 "
        "tokens (4x) it is 65% above that (4.48 against 2.72)."
    )


def test_methods_without_a_significant_difference_from_the_best_are_named() -> None:
    rows: dict[str, Row] = {
        "loaded": LOADED,
        "a": {64: 1.0, 256: [1.5, 1.4, 1.6, 1.5, 1.5]},
        "b": {256: [1.51, 1.39, 1.62, 1.49, 1.5]},
    }
    made = concluded(perplexities(rows))
    assert set(made.equal) == {"a", "b"}
    assert str(made).startswith(
        "Best at 256 tokens (4x): a, perplexity 4.48 (unpatched 148). No significant difference: b (4.49). "
        "Short inputs (64 tokens): perplexity is unchanged (2.72). "
    )


def test_of_a_reach_it_is_said_what_the_table_shows_and_what_is_significant() -> None:
    noisy, noisier = [0.9, 1.3, 0.8, 1.2, 1.15], [0.9, 1.3, 0.8, 1.0, 1.0]

    def reach(**row: Any) -> str:
        values = {int(length.removeprefix("at_")): value for length, value in row.items()}
        made = concluded(perplexities({"loaded": {64: 1.0, 128: 5.0, 256: 5.0, 512: 5.0}, "yarn": {64: 1.2} | values}))
        return made.text.partition("3.32). ")[2]

    assert reach(at_128=noisy) == (
        "At 128 tokens (2x), perplexity under yarn is 7% above that of the unpatched model at 64 tokens (2.92 against "
        "2.72), not significantly more than 5%."
    )
    of_yarn = "perplexity under yarn is within 5% of that of the unpatched model at 64 tokens"
    assert reach(at_128=noisier) == f"At 128 tokens (2x), {of_yarn}, but not significantly."
    assert reach(at_128=1.0, at_256=noisier) == (
        f"From 128 to 256 tokens (2x to 4x), {of_yarn}, significantly up to 128."
    )
    assert reach(at_128=1.0, at_256=noisier, at_512=noisy) == (
        f"From 128 to 256 tokens (2x to 4x), {of_yarn}, significantly up to 128; at 512 tokens (8x) it is 7% above "
        "that (2.92 against 2.72), not significantly more than 5%."
    )
    made = concluded(perplexities({"loaded": {64: 1.0, 128: 5.0}, "yarn": {64: 1.2, 128: 2.0}}))
    assert made.text.endswith(
        "At 128 tokens (2x), perplexity under yarn is 2.7 times that of the unpatched model at 64 tokens (7.39 against "
        "2.72)."
    )


def test_methods_that_are_all_alike() -> None:
    same = [1.5, 1.4, 1.6, 1.5]
    made = concluded(perplexities({"a": {256: [v - 0.001 for v in same[::-1]]}, "loaded": {256: same}}))
    assert set(made.equal) == {"a", "loaded"}
    assert made.best == "loaded"
    assert made.text == (
        "At 256 tokens (4x), no method is significantly better than the unpatched model (perplexity 4.48)."
    )
    rows = {"a": {256: same}, "b": {256: [v + 0.0001 for v in same[::-1]]}}
    others = concluded(perplexities(rows))
    assert others.text == "At 256 tokens (4x), no significant difference between a and b (perplexity 4.48 and 4.48)."


def test_of_methods_that_are_alike_the_one_that_costs_short_inputs_nothing_comes_first() -> None:
    rows: dict[str, Row] = {
        "loaded": LOADED,
        "a": {64: 1.2, 256: [1.49, 1.4, 1.6, 1.5, 1.5]},
        "b": {64: 1.0, 256: [1.51, 1.39, 1.62, 1.49, 1.5]},
    }
    made = concluded(perplexities(rows))
    assert made.equal == ("b", "a")
    assert str(made).startswith(
        "Best at 256 tokens (4x): b, perplexity 4.49 (unpatched 148). No significant difference: a (4.47; short "
        "inputs get worse). Short inputs (64 tokens): perplexity is unchanged (2.72)."
    )


def test_a_length_beyond_the_one_a_method_is_set_for_and_methods_that_were_not_measured_there() -> None:
    rows: dict[str, Row] = {"loaded": LOADED, "a": {64: 1.0, 256: 1.5}, "b": {64: 1.0, 128: 1.5}}
    text = concluded(perplexities(rows), extended={"a": 128}).text
    assert "The extended length of a is 128 tokens; 256 is beyond it. " in text
    assert "No significant difference" not in text
    assert concluded(perplexities(rows)).text.endswith(" Not measured at 256 tokens: b.")


def test_the_unpatched_model_may_be_best() -> None:
    made = concluded(perplexities({"loaded": {64: 1.0, 256: 1.0}, "a": {64: 1.5, 256: 1.5}}))
    assert made.best == "loaded"
    assert made.text == (
        "Best at 256 tokens (4x): the unpatched model, perplexity 2.72. "
        "At 256 tokens (4x), the unpatched model's perplexity is within 5% of that at 64 tokens."
    )


@pytest.mark.parametrize("documents", [1, 2])
def test_one_document_or_two_compare_nothing(documents: int) -> None:
    made = concluded(perplexities({"loaded": {256: [5.0] * documents}, "a": {256: [1.0] * documents}}))
    assert made.best is None
    few = "1 document is" if documents == 1 else "2 documents are"
    assert made.text == f"At 256 tokens (4x), a has perplexity 2.72, the lowest; {few} too few to compare methods."


def test_a_method_alone_is_compared_with_nothing() -> None:
    assert concluded(perplexities({"loaded": {256: 1.5}})).text == (
        "At 256 tokens (4x), the unpatched model has perplexity 4.48."
    )
    few = concluded(perplexities({"a": {256: [1.5]}}))
    assert few.text == "At 256 tokens (4x), a has perplexity 4.48 (1 document is too few to compare methods)."


def test_answers_decide_before_perplexity_and_perplexity_where_they_do_not() -> None:
    read = perplexities({"loaded": LOADED, "a": {64: 1.1, 256: 1.5}, "b": {64: 1.1, 256: 1.4}})
    made = concluded(read, answers({"loaded": {256: 0}, "a": {256: 38}, "b": {256: 12}}))
    assert made.best == "a"
    assert "Best at 256 tokens (4x): a, exact match 95.0% and perplexity 4.48 (unpatched 0.0% and 148)." in made.text
    assert "By perplexity alone, b would be best (4.06)." in made.text
    made = concluded(read, answers({"loaded": {256: 0}, "a": {256: 31}, "b": {256: 30}}))
    assert made.best == "b"
    assert "By exact match alone, no significant difference: a (77.5%)." in made.text


def test_runs_that_share_no_text_are_not_compared() -> None:
    one = perplexities({"loaded": LOADED, "linear": {256: 2.8}}, "perplexity, one text")
    other = perplexities({"loaded": LOADED, "rerope": {256: 1.6}}, "perplexity, other text")
    for ordered in itertools.permutations((one, other)):
        made = concluded(*ordered)
        assert made.best is None
        assert made.text == (
            "Linear and rerope cannot be compared: at no length were they measured on the same text or prompts."
        )


def test_the_order_of_measures_and_methods_never_matters() -> None:
    rows = {"loaded": LOADED, "a": {64: 1.1, 256: 1.5}, "b": {64: 1.3, 256: 1.5}, "c": {64: 1.0, 256: 9.0}}
    shares = {"loaded": {256: 0}, "a": {256: 30}, "b": {256: 28}}
    texts = set()
    for keys in itertools.permutations(rows):
        read = perplexities({key: rows[key] for key in keys})
        score = answers({key: shares[key] for key in keys if key in shares})
        texts |= {concluded(read, score).text, concluded(score, read).text}
    assert len(texts) == 1


def test_losses_that_are_not_finite_come_last() -> None:
    made = concluded(perplexities({"loaded": {256: [math.nan, 1.0, 1.0]}, "a": {256: [9.0, 9.1, 9.2]}}))
    assert made.best == "a"
    assert "(unpatched not finite)" in made.text
    nothing = concluded(perplexities({"loaded": {256: [math.nan, 1.0, 1.0]}, "a": {256: [math.inf, 9.1, 9.2]}}))
    assert nothing.text == "At 256 tokens (4x), perplexity is not finite for the unpatched model and a."


def test_a_measure_at_luck_compares_nothing_and_is_named() -> None:
    read = perplexities({"loaded": LOADED, "a": {256: 1.5}})
    made = concluded(read, answers({"loaded": {256: 2}, "a": {256: 3}}, chance=0.05))
    assert made.best == "a"
    assert made.text.endswith("Exact match: no method is significantly above chance (5.0%).")
    alone = concluded(answers({"loaded": {256: 2}, "a": {256: 3}}, chance=0.05))
    assert alone.text == "Exact match: no method is significantly above chance (5.0%)."


def test_effective_lengths_of_the_best_method_and_of_the_unpatched_model() -> None:
    reaches = {"loaded": EffectiveLength(64, 64, 64), "a": EffectiveLength(256, 64, 256)}
    made = concluded(answers({"loaded": {64: 40, 256: 0}, "a": {64: 40, 256: 38}}, reaches=reaches))
    assert made.text.endswith(
        "Short inputs (64 tokens): exact match is unchanged (100.0%). "
        "Effective length by exact match: 256 tokens, the longest measured (95% confidence interval: 64 or more); "
        "unpatched 64 tokens."
    )


def test_equal_figures_of_other_answers_are_no_significant_difference() -> None:
    """39 of 40 right under both, and not the same ones: nothing stays as it was."""
    right = {"loaded": {64: 39, 256: 0}, "a": {64: 39, 256: 38}}
    assert "exact match is unchanged (97.5%)" in str(concluded(answers(right)))
    other = answers(right)
    other.items["a"][64].reverse()  # type: ignore[attr-defined]
    assert "no significant difference in exact match (97.5%, unpatched 97.5%)" in str(concluded(other))


def test_positions_in_longer_inputs_say_nothing_of_short_inputs() -> None:
    rows = {"loaded": LOADED, "yarn": {64: 1.2, 128: 1.01, 256: 1.5}}
    assert concluded(perplexities(rows, of_positions=True)).text == (
        "Best at 256 tokens (4x): yarn, perplexity 4.48 (unpatched 148)."
    )


def test_positions_in_longer_inputs_name_no_method_that_costs_short_inputs() -> None:
    rows: dict[str, Row] = {
        "loaded": LOADED,
        "a": {64: 1.2, 256: [1.49, 1.4, 1.6, 1.5, 1.5]},
        "b": {64: 1.0, 256: [1.51, 1.39, 1.62, 1.49, 1.5]},
    }
    made = concluded(perplexities(rows, of_positions=True))
    assert made.equal == ("a", "b")  # by their values alone
    assert "hort inputs" not in made.text


def test_measures_up_to_different_lengths_are_each_given_at_their_own() -> None:
    """Answers up to 128 tokens, perplexity up to 256: what is said of answers is of 128 tokens."""
    right = {"loaded": {64: 40, 128: 0}, "a": {64: 40, 128: 38}, "b": {64: 40, 128: 37}}
    same = [1.5, 1.4, 1.6, 1.5, 1.5]
    rows: dict[str, Row] = {"loaded": LOADED, "a": {64: 1.0, 256: same}, "b": {64: 1.0, 256: same[::-1]}}
    made = concluded(answers(right), perplexities(rows))
    assert str(made).startswith(
        "Best at 256 tokens (4x): a, exact match 95.0% at 128 and perplexity 4.48 (unpatched 0.0% at 128 and 148). No "
        "significant difference: b (92.5% at 128). Short inputs"
    )
    alike = concluded(answers(dict.fromkeys(("a", "b"), right["a"])), perplexities({key: {256: same} for key in "ab"}))
    assert alike.text == (
        "At 256 tokens (4x), no significant difference between a and b (exact match 95.0% and 95.0% at 128)."
    )


def test_a_model_that_was_not_measured_at_the_longest_length_is_not_compared_there() -> None:
    rows: dict[str, Row] = {"loaded": {64: 1.0}, "a": {64: 1.0, 256: 1.5}, "b": {64: 1.0, 256: 3.0}}
    made = concluded(perplexities(rows))
    assert made.best == "a"
    assert made.text.startswith("Best at 256 tokens (4x): a, perplexity 4.48.")
    assert made.text.endswith("Not measured at 256 tokens: the unpatched model.")


FORMS = (
    r"Best at 256 tokens \(4x\): ((the unpatched model|m\d), perplexity [\d.,]+( \(unpatched [\d.,]+\))?)",
    r"No significant difference: .+ \([\d.,]+(; short inputs get worse)?\)",
    r"At 256 tokens \(4x\), no significant difference between .+ \(perplexity .+\)",
    r"At 256 tokens \(4x\), no method is significantly better than the unpatched model \(perplexity [\d.]+.*\)",
    r"Short inputs \(64 tokens\): (perplexity (gets worse|gets better) \(.+ to .+\)|perplexity is unchanged \(.+\)|"
    r"no significant difference in perplexity \(.+, unpatched .+\))",
    r"(At|From 128 to) (128|256) tokens \(.+x\), .*perplexity.* is within 5% of that .*at 64 tokens"
    r"(, but not significantly|, significantly up to 128)?(; at 256 .+)?",
    r"At 128 tokens \(2x\), .*perplexity.* is .+ (above|times) that .*at 64 tokens \(.+ against .+\)"
    r"(, not significantly more than 5%)?",
    r"The extended length of m0 is 128 tokens; 256 is beyond it",
    r"Not measured at 256 tokens: m1",
)


@pytest.mark.parametrize("kind", ["winner", "tie", "alike", "missing", "beyond"])
@pytest.mark.parametrize("documents", [3, 5, 40])
@pytest.mark.parametrize("methods", [2, 6, 10])
def test_what_is_said_is_right_and_in_one_of_the_forms(methods: int, documents: int, kind: str) -> None:
    draw = np.random.default_rng(methods * documents)
    of_text, noise = draw.normal(0, 0.3, documents), 0.002
    level = {"winner": [1.0], "tie": [1.0, 1.0], "alike": [3.0] * methods, "missing": [1.0], "beyond": [1.0]}[kind]
    levels = [*level, *(2.0 + 0.2 * i for i in range(methods))][: methods - 1]

    def row(level: float) -> list[float]:
        return [float(level + text + draw.normal(0, noise)) for text in of_text]

    rows: dict[str, dict[int, list[float]]] = {"loaded": {64: row(1.0), 128: row(3.0), 256: row(3.0)}}
    rows |= {f"m{i}": {64: row(1.0 + 0.1 * i), 128: row(level), 256: row(level)} for i, level in enumerate(levels)}
    if kind == "missing" and methods > 2:
        del rows["m1"][256]
    extended = {"m0": 128} if kind == "beyond" else {}
    made = concluded(perplexities(rows), extended=extended)
    winners = {"tie": {"m0", "m1"}, "alike": set(rows)}.get(kind, {"m0"}) & set(rows)
    if kind == "alike" and "loaded" in made.equal:
        assert made.best == "loaded"
    if kind == "missing" and methods > 2:
        assert "Not measured at 256 tokens: m1." in made.text
    if kind == "beyond":
        assert "The extended length of m0 is 128 tokens; 256 is beyond it." in made.text
    if documents == 40:  # so many show a difference, and hardly ever one that is not there
        assert made.best in winners
        assert set(made.equal) <= winners
    assert winners & set(made.equal)
    sentences = [each.strip() for each in re.split(r" ?\.(?= [A-Z]|$)", made.text) if each.strip()]
    assert 1 <= len(sentences) <= 4
    for sentence in sentences:
        assert any(re.fullmatch(form, sentence) for form in FORMS), sentence


def test_nothing_measured_says_nothing() -> None:
    assert concluded().text == ""
