from __future__ import annotations

import importlib
import inspect
import json
import math
import random
import re
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import CorpusError, MethodError
from rope_ext_hf.eval import measure
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.reading.text.load import HELD_OUT
from rope_ext_hf.runs.comparison import findings_of_runs
from rope_ext_hf.runs.run import Run
from rope_ext_hf.tools.suites import Gain
from rope_ext_hf.tools.suites.gain_rows import docstring_rows
from rope_ext_hf.tools.suites.gain_runs import AnswerLoss, GainRuns, GainSetting
from tests.support.models import build
from tests.support.oracles import token_losses

Row = dict[str, str]
FRUITS = ("apple", "pear", "plum", "quince", "cherry", "medlar")


def fruit_rows(count: int = 6) -> list[Row]:
    """Return rows whose contexts have text before and after the evidence."""
    return [
        {
            "context": f"On day {day} it rained. The {fruit} costs {7 * day + 13} cents. Nobody came. ",
            "evidence": f"The {fruit} costs {7 * day + 13} cents.",
            "question": f"\nThe {fruit} costs",
            "answer": f" {7 * day + 13} cents.",
        }
        for day, fruit in enumerate(FRUITS[:count])
    ]


def both_prompts(rows: Sequence[Row], index: int, length: int, distance: int) -> tuple[str, str]:
    """Return the texts that a row's two prompts must be, answer included; a token is a byte."""
    row = rows[index]
    before, after = row["context"].split(row["evidence"])
    contexts = [each["context"] for each in rows]
    others = contexts[index + 1 :] + contexts[:index]
    endless = "".join(islice(cycle(others), 50))
    following = (after + endless)[: distance - len(row["question"])]
    room = length - len(row["evidence"]) - distance - len(row["answer"])
    preceding = (endless + before)[len(endless + before) - room :]
    neutral = "".join(others[len(others) // 2 :] + others * 9)[: len(row["evidence"])]
    end = following + row["question"] + row["answer"]
    return preceding + row["evidence"] + end, preceding + neutral + end


@pytest.fixture(scope="module")
def noise() -> Any:
    """An untrained model that reads bytes, as the bundled one does."""
    return build("llama", vocab_size=259, max_position_embeddings=128)


def measured(model: Any, **options: Any) -> Run[Any]:
    how = {name: options.pop(name) for name in ("methods", "factors", "out", "progress") if name in options}
    given: dict[str, Any] = {"data": fruit_rows(), "lengths": [128, 256]} | options
    question = Gain(**given)
    return measure(model, question, tokenizer=load_tokenizer("reference"), **how)


@pytest.mark.slow
def test_losses_are_those_of_ordinary_forwards_over_the_texts(noise: Any) -> None:
    """Each row's two prompts are made here as text: of equal length, with the evidence at its distance."""
    rows = fruit_rows()
    run = measured(noise, distances=[60, 80], methods=["yarn"], factors=[4.0])
    assert [(r.length, r.distance) for r in run.results] == 2 * [(128, 60), (128, 80), (256, 60), (256, 80)]
    patched = rope.patch(build("llama", vocab_size=259, max_position_embeddings=128), "yarn", factor=4.0)
    tokenizer = load_tokenizer("reference")
    for result in run.results:
        model = noise if result.method is None else patched
        assert len(result.answers) == len(rows)
        for index, answer in enumerate(result.answers):
            for text, nats in zip(both_prompts(rows, index, result.length, result.distance), answer, strict=False):
                assert len(text) == result.length
                ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
                expected = token_losses(model, ids)[-len(rows[index]["answer"]) :].sum().item()
                assert nats == pytest.approx(expected, abs=2e-3)
            assert answer.tokens == len(rows[index]["answer"])
            given, missing = both_prompts(rows, index, result.length, result.distance)
            evidence = rows[index]["evidence"]
            assert result.length - given.index(evidence) - len(evidence) - answer.tokens == result.distance
            assert evidence not in missing[: -len(evidence)]  # the question and the answer say it again


def losses(gains: Sequence[float], tokens: int = 4) -> list[AnswerLoss]:
    return [AnswerLoss(10.0, 10.0 + tokens * gain, tokens) for gain in gains]


@pytest.mark.parametrize(
    ("gains", "outcome"),
    [
        ([0.5, 0.6, 0.4, 0.7, 0.5], "better"),
        ([-0.5, -0.6, -0.4, -0.7, -0.5], "worse"),
        ([0.5, -0.6, 0.4, -0.7, 0.5], "no significant difference"),
        ([0.5, 0.6], "no significant difference"),  # two rows give no interval
        ([math.inf, 0.6, 0.5], "better"),  # without the evidence it is not finite
        ([math.nan, 0.6, 0.5], "no significant difference"),
    ],
)
def test_the_outcome_follows_from_the_interval(gains: list[float], outcome: str) -> None:
    result = GainRuns().result(None, GainSetting(len(gains), 0), (512, 256), losses(gains), [])
    assert (result.length, result.distance, result.outcome) == (512, 256, outcome)
    if math.isfinite(sum(gains)):
        assert result.gain == pytest.approx(sum(gains) / len(gains))
        assert result.without_evidence - result.with_evidence == pytest.approx(result.gain)
    if outcome == "better" and math.isfinite(sum(gains)):
        assert 0 < (result.low or 0) < result.gain < (result.high or 0)


def test_a_long_answer_counts_for_its_tokens() -> None:
    answers = losses([1.0, 1.0, 1.0], tokens=9) + losses([0.0], tokens=3)
    assert GainRuns().result(None, GainSetting(4, 0), (8, 4), answers, []).gain == pytest.approx(0.9)


def made_up(gains: dict[str | None, dict[tuple[int, int], list[float]]]) -> Run[Any]:
    """Return a run with invented gains, by method and (length, distance)."""
    kind, setting = GainRuns(), GainSetting(8, 0)
    results = [
        kind.result(None if name is None else {"method": name}, setting, cell, losses(values), [])
        for name, row in gains.items()
        for cell, values in row.items()
    ]
    settings: dict[str, Any] = {
        "kind": "gain",
        "loaded": None,
        "context_length": 256,
        "over": "own",
        "basis": {},
        "model": "m",
    }
    return Run(None, settings | {"data": "d", "setting": {"rows": 8, "too_long": 0}}, results, kind)


def around(value: float, spread: float = 0.1) -> list[float]:
    return [value + spread * (index - 3.5) / 3.5 for index in range(8)]


def test_a_conclusion_from_known_gains() -> None:
    """At the longest length one method gains and the other does not; the distances of a length are judged together."""
    run = made_up(
        {
            None: {(256, 128): around(1.0), (1024, 128): around(0.0), (1024, 512): around(0.0)},
            "default": {(256, 128): around(1.0), (1024, 128): around(0.9), (1024, 512): around(0.5)},
        }
    )
    assert str(run.conclusion) == (
        "Best at 1,024 tokens (4x): default, gain from evidence 0.700 nats per token (unpatched 0.000). "
        "Short inputs (256 tokens): gain from evidence is unchanged (1.000)."
    )
    (measure_,) = run.findings.measures
    assert measure_.value("null", 1024) == pytest.approx(0.0)
    assert run.chart is not None
    assert "Gain from evidence, nats per token (higher is better)" in run.chart.svg()


def test_gains_that_are_nowhere_surely_above_0_are_no_measure() -> None:
    nothing = made_up({None: {(256, 128): around(0.0)}, "default": {(256, 128): around(-0.5)}})
    assert str(nothing.conclusion) == "Gain from evidence: no method is significantly above chance."
    assert nothing.conclusion.best is None
    one_alone = made_up({None: {(256, 128): around(0.0)}, "default": {(256, 128): around(0.5)}})
    assert one_alone.conclusion.best == '{"method": "default"}'


def test_what_is_surely_above_0_by_itself_is_luck_among_many() -> None:
    """Among sixty methods without any gain, an interval of 95% lies above 0; the measure still decides nothing."""
    draw = random.Random(1)
    run = made_up({f"m{n}": {(256, 128): [draw.gauss(0, 1) for _ in range(8)]} for n in range(60)})
    assert any(result.outcome == "better" for result in run.results)
    assert run.conclusion.best is None


@pytest.mark.slow
def test_an_untrained_model_gains_nothing(noise: Any, tmp_path: Path) -> None:
    run = measured(noise, data="docstrings", samples=12, methods="ntk", factors=2.0, out=tmp_path)
    assert "no method is significantly above chance" in str(run.conclusion)
    assert run.conclusion.best is None
    unsure = sum(result.outcome == "no significant difference" for result in run.results)
    assert len(re.findall(r"[+-]\d\.\d\d\?", str(run))) == unsure > 0
    read: list[int] = []
    again = measured(noise, data="docstrings", samples=12, methods="ntk", factors=2.0, out=tmp_path,
                  progress=lambda _, tokens: read.append(tokens))  # fmt: skip
    assert again == run
    assert not read


@pytest.mark.thorough
def test_the_bundled_model_uses_evidence_within_its_context_and_beyond_it_with_a_method() -> None:
    run = measure("reference", Gain(lengths=[256, 1024], samples=10), methods=["rerope"])
    results = {(r.method is None, r.length, r.distance): r for r in run.results}
    assert results[True, 256, 128].outcome == "better"
    assert results[False, 1024, 512].outcome == "better"
    assert results[True, 1024, 512].gain < 0.1 < results[False, 1024, 512].gain
    assert "rerope" in (run.conclusion.best or "")


@pytest.mark.slow
def test_runs_at_other_distances_count_together(noise: Any) -> None:
    few, more = (measured(noise, lengths=[128], distances=distances) for distances in ([60], [60, 80]))
    (measure_,) = findings_of_runs([few, more]).measures
    assert measure_.items["null"][128] == more.kind.measures(more)[0].items["null"][128]


@pytest.mark.slow
def test_rows_of_docstrings_are_those_of_the_held_out_modules() -> None:
    rows = docstring_rows()
    assert docstring_rows() == rows
    assert len(rows) > 300
    assert len({row["answer"] for row in rows}) == len(rows)
    documented = {row["evidence"].partition(":")[0]: row for row in rows}
    checked = 0
    for module in map(importlib.import_module, [*HELD_OUT[:4], "tarfile"]):  # turtle needs tkinter
        for name, value in inspect.getmembers(module, inspect.isclass):
            if value.__module__ == module.__name__ and name in documented and value.__doc__:
                assert documented[name]["context"] == f"{name}: {inspect.cleandoc(value.__doc__)}\n\n"
                checked += 1
    assert checked > 20
    for row in rows:
        assert row["context"].startswith(row["evidence"])
        assert row["evidence"] == row["question"].strip() + row["answer"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distances": [256]}, "distance 256 is not below the longest length, 256"),
        ({"lengths": [40]}, "no row fits: these lengths and distances leave 20 tokens for evidence and answer, where"),
        ({"data": fruit_rows(1)}, "row:1: no other row has a context without its evidence; give text with --haystack"),
        ({"data": [{"context": "a"}]}, "no column 'evidence'"),
        ({"data": [row | {"evidence": "o"} for row in fruit_rows()]}, "row:1: the evidence 'o' stands 3 times"),
        ({"data": [row | {"evidence": "snow"} for row in fruit_rows()]}, "row:1: the evidence 'snow' does not stand"),
        ({"data": [*fruit_rows(2), fruit_rows()[2] | {"answer": ""}]}, "row:3: the column 'answer' has no text"),
        ({"data": [row | {"answer": [1, 2]} for row in fruit_rows()]}, "row:1: the column 'answer' has no text"),
        ({"data": "no such file.jsonl"}, "no such text file"),
        ({"samples": 0}, "samples must be a whole number"),
    ],
)
def test_what_cannot_be_measured_is_said(noise: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((CorpusError, MethodError), match=re.escape(message)):
        measured(noise, **options)


@pytest.mark.slow
def test_a_file_of_rows_and_text_around_them(noise: Any, tmp_path: Path) -> None:
    """JSON lines give the results of a list of rows; rows that do not fit are counted; a given text fills prompts."""
    file = tmp_path / "rows.jsonl"
    long = fruit_rows(1)[0] | {"answer": " a very long answer" * 20}
    file.write_text("".join(f"{json.dumps(row)}\n" for row in [*fruit_rows(), long]), encoding="utf-8")
    by_file = measured(noise, data=str(file), lengths=[128])
    assert by_file.settings["setting"] == {"rows": 6, "too_long": 1}
    assert by_file.settings["items"][0] == "rows.jsonl:1"
    assert "6 rows, 1 too long and left out" in re.sub(r"\s+", " ", str(by_file))
    assert by_file.results[0].answers == measured(noise, lengths=[128], data=[*fruit_rows(), long]).results[0].answers
    around_it = measured(noise, data=fruit_rows(1), lengths=[128], haystack=["Waves broke on the shore all day. " * 4])
    assert len(around_it.results[0].answers) == 1
    assert around_it.results[0].low is None
    command = ["gain", "reference", "--data", str(file), "--lengths", "128", "--out", str(tmp_path / "runs")]
    shown = CliRunner().invoke(app, [*command, "--json"])
    assert shown.exit_code == 0, shown.output
    (result,) = json.loads(shown.stdout)["results"]
    assert (result["length"], result["distance"], len(result["answers"])) == (128, 64, 6)
    (folder,) = (tmp_path / "runs").glob("reference-gain-*")
    assert "Gain from evidence" in (folder / "report.html").read_text(encoding="utf-8")
