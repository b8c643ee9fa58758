"""Task suites from prompts to results: right answers, continued runs, chat templates, errors."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.hub import load_model, load_tokenizer
from rope_ext_hf.methods.static import Yarn
from rope_ext_hf.options.method_choice import MethodChoice
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.runs.runner import carry_out
from rope_ext_hf.runs.workers import Workers
from rope_ext_hf.tools.suites import base, tasks
from rope_ext_hf.tools.suites.base import PromptSettings, Sample, Suite, count_tokens, suite
from rope_ext_hf.tools.suites.suite_options import Tasks
from tests.support.forks import kill_when, run_command
from tests.support.models import build

JSON_KV: dict[str, Any] = {"suite": "json-kv", "lengths": [768, 1024], "samples": 2, "score": "rank"}


class KeyValue(Suite):
    """The task that the bundled model was trained on, with its training text as the haystack."""

    name = "key-value-for-tests"
    tasks = ("first", "second")

    def make(self, task: str, wanted: PromptSettings) -> list[Sample]:
        samples = []
        for index in range(wanted.count):
            rng = random.Random(f"{task} {wanted.seed} {index}")
            from rope_ext_hf.eval.retrieval.statements import RETRIEVALS, ask

            drawn = ask(RETRIEVALS["key-value"], rng, keys=1, wording=index).about(0)
            (statement,) = drawn.statements
            room = wanted.room - 12 - sum(map(len, (drawn.head, statement, drawn.question)))
            start, place = rng.randrange(10_000), rng.randrange(room)
            hay = wanted.haystack[start : start + room]
            prompt = drawn.head + hay[:place] + statement + hay[place:]
            tokens = count_tokens(wanted.tokenizer, prompt + drawn.question) + 12
            samples.append(Sample(prompt, drawn.question, (drawn.answer.strip(),), 12, tokens))
        return samples


@pytest.fixture
def key_value(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(base._SUITES, KeyValue.name, KeyValue())
    return KeyValue.name


@pytest.mark.parametrize("score", ["generate", "rank"])
def test_a_model_without_numbers_has_no_score(key_value: str, score: str) -> None:
    model = load_model("reference", dtype="float32")
    torch.nn.init.constant_(model.lm_head.weight, torch.nan)
    with pytest.raises(UnsupportedModelError, match="gives NaN in place of numbers"):
        tasks(model, suite=key_value, lengths=[200], samples=2, score=score)


def test_a_suite_is_known_by_the_name_of_its_file() -> None:
    known = base.list_suites()  # other tests may have added suites that lie elsewhere
    assert all(each.name == name for name, each in known.items())
    assert {name: type(known[name]).__module__ for name in base.suite_names()} == {
        name: f"{base.__package__}.benchmarks.{name.replace('-', '_')}" for name in base.suite_names()
    }


@pytest.mark.thorough
@pytest.mark.parametrize("score", ["generate", pytest.param("rank", marks=pytest.mark.thorough)])
def test_the_bundled_model_answers_at_its_own_length_and_not_far_beyond(key_value: str, score: str) -> None:
    model = load_model("reference", dtype="float32")
    results = tasks(model, suite=key_value, lengths=[200, 1600], samples=10, score=score)
    near, far = ([r.score for r in results if r.length == length] for length in (200, 1600))
    assert min(near) >= 0.7, results
    assert max(far) <= 0.5, results
    assert [r.task for r in results] == ["first", "second"] * 2
    assert "The model as loaded alone was measured." in str(results.run.conclusion)
    assert "Its effective length by the score of" in str(results.run.conclusion)


@pytest.mark.slow
def test_a_run_from_python_has_every_file_and_goes_on(tmp_path: Path) -> None:
    model = load_model("reference", dtype="float32")
    read: list[int] = []
    first = tasks(model, **JSON_KV, out=tmp_path, progress=read.append)
    assert len(read) == 4
    assert tasks(model, **JSON_KV, out=tmp_path, progress=read.append) == first == tasks(model, **JSON_KV)
    assert len(read) == 4
    (folder,) = tmp_path.iterdir()
    assert {path.name for path in folder.iterdir()} >= {"results.csv", "results.json", "report.html"}
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Effective length" in page
    saved = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert [r["scores"] for r in saved["results"]] == [list(r.scores) for r in first]


@pytest.mark.slow
def test_two_processes_have_the_results_of_one(tmp_path: Path) -> None:
    model = load_model("reference", dtype="float32")
    plan = Tasks(**JSON_KV).plan(model, MethodChoice(method=Yarn(factor=4.0)))
    alone = carry_out(model, plan)
    for rank in (1, 0):
        shared = carry_out(model, plan, out=tmp_path, workers=Workers(rank, 2))
    assert shared.results == alone.results
    assert all((shared.folder / f"records.{rank}.jsonl").stat().st_size for rank in (0, 1))


@pytest.mark.slow
@pytest.mark.thorough
def test_killed_it_goes_on(tmp_path: Path) -> None:
    command = ["tasks", "reference", "--suite", "json-kv", "--lengths", "768,1024", "--score", "rank"]
    command += ["--samples", "4", "--dtype", "float32", "--out"]
    assert CliRunner().invoke(app, [*command, str(tmp_path / "whole")]).exit_code == 0
    kill_when(
        lambda: sum(path.read_bytes().count(b"\n") for path in tmp_path.glob("killed/*/records.0.jsonl")) >= 3,
        run_command,
        [*command, str(tmp_path / "killed")],
        folder=tmp_path,
    )
    (expected,), (folder,) = (list((tmp_path / name).iterdir()) for name in ("whole", "killed"))
    before = (folder / "records.0.jsonl").read_bytes().count(b"\n")
    assert 3 <= before < 8
    assert CliRunner().invoke(app, [*command, str(tmp_path / "killed")]).exit_code == 0
    assert read_run(folder).results == read_run(expected).results
    assert (folder / "records.0.jsonl").read_bytes().count(b"\n") == 8


TEMPLATE = "{% for m in messages %}<user>{{ m.content }}</user>{% endfor %}<answer>"


class Recorder:
    """Record the texts that a scorer reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
        self.read: list[tuple[str, int]] = []

        def generate(_: TokenScorer, prompt: torch.Tensor, count: int, *, stop: Sequence[int] = ()) -> torch.Tensor:
            self.read.append((tokenizer.decode(prompt), count))
            return torch.tensor(tokenizer(" it is 5", add_special_tokens=False)["input_ids"])

        monkeypatch.setattr(TokenScorer, "generate", generate)


@pytest.mark.parametrize(("chat", "extra"), [("auto", 0), ("never", 0), ("auto", 60)])
def test_chat_template_and_budget_are_inside_the_length(chat: str, extra: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer("reference")
    tokenizer.chat_template = TEMPLATE
    recorder = Recorder(monkeypatch, tokenizer)
    options = JSON_KV | {"score": "generate", "chat_template": chat, "extra_tokens": extra, "lengths": [1024]}
    tasks(build("llama", vocab_size=384), tokenizer=tokenizer, **options)
    assert len(recorder.read) == 2
    for text, count in recorder.read:
        assert count == 100 + extra
        assert text.endswith("</user><answer>Corresponding value:" if chat == "auto" else "\nCorresponding value:")
        assert ("<user>JSON data" in text) == (chat == "auto")
        assert len(text) + count <= 1024
        assert len(text) + count > 1024 - 2 * 82


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("method", [None, "yarn"])
def test_greedy_decoding_is_that_of_transformers(whole: bool, method: str | None) -> None:
    model = build("llama")
    if method:
        rope.patch(model, method, factor=4)
    prompt = torch.randint(3, 90, (70,), generator=torch.Generator().manual_seed(2))
    model.generation_config.eos_token_id = None
    expected = model.generate(prompt[None], max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 70:]
    scorer = TokenScorer(model, chunk=16)
    scorer.whole_because = "of this test" if whole else None
    assert torch.equal(scorer.generate(prompt, 12), expected)
    assert scorer.take_cost().tokens == 82
    stop = int(expected[5])
    cut = expected[: expected.tolist().index(stop)]
    assert torch.equal(scorer.generate(prompt, 12, stop={stop}), cut)


def test_a_length_dependent_method_is_held_at_prompt_and_budget() -> None:
    model = rope.patch(build("llama"), "dynamic-yarn")
    prompt = torch.randint(3, 90, (250,), generator=torch.Generator().manual_seed(2))
    model.generation_config.eos_token_id = None
    with rope.fixed_length(model, 290):
        expected = model.generate(prompt[None], max_new_tokens=40, do_sample=False, pad_token_id=0)[0, 250:]
    assert torch.equal(TokenScorer(model, chunk=64).generate(prompt, 40), expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"suite": "rulr"}, "unknown suite 'rulr'.*ruler"),
        ({"tasks": ["kw"]}, "suite 'json-kv' has no task 'kw'.*kv"),
        ({"tasks": []}, "no task was chosen"),
        ({"score": "f1"}, "score must be 'generate' or 'rank'"),
        ({"chat_template": "yes"}, "chat_template must be 'auto' or 'never'"),
        ({"samples": 1}, "samples must be at least 2 where answers are ranked"),
        ({"lengths": []}, "lengths must be"),
        ({"lengths": [300]}, "1 of 1 tasks do not fit into 300 tokens .*: kv needs"),
        ({"extra_tokens": 900}, r"do not fit into 768 and 1,024 tokens .* kv needs 1,[56]\d\d tokens"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_what_is_impossible_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(rope.MethodError, match=message):
        Tasks(**JSON_KV | changed).plan(build("llama", vocab_size=384), tokenizer=load_tokenizer("reference"))


def test_a_length_that_is_too_short_is_answered_with_one_that_is_not() -> None:
    tokenizer = load_tokenizer("reference")
    make_samples = partial(suite("json-kv").samples, "kv", tokenizer, count=2, seed=0, haystack="")
    with pytest.raises(
        rope.MethodError, match=r"length 300 is too short for task 'kv'.* at least ([\d,]+) tokens"
    ) as caught:
        make_samples(length=300)
    match = re.search(r"at least ([\d,]+) tokens", str(caught.value))
    assert match is not None
    least = int(match[1].replace(",", ""))
    assert make_samples(length=least)
    with pytest.raises(rope.MethodError, match="too short"):
        make_samples(length=least * 15 // 16 - 1)


@pytest.mark.parametrize(
    ("suite_name", "lengths", "clauses"),
    [
        (
            "ruler",
            [512],
            [
                r"10 of 11 tasks do not fit into",
                r": niah_single_1 needs 9\d\d tokens, niah_single_2 needs 4,\d+ tokens",
                r"at any length: vt \(its example has 8\d\d tokens, and 500 are allowed\)",
                r"--lengths 512 --tasks fwe$",
            ],
        ),
        (
            "ruler",
            [2048, 8192],
            [
                r"at some of these lengths: niah_single_2 needs 4,\d+ tokens",
                r"--lengths 2048,8192 --tasks niah_single_1,niah_multikey_2,niah_multikey_3,cwe,fwe$",
            ],
        ),
        ("babilong", [2048], [r": qa3 needs 2,\d+ tokens", r"--tasks qa1,qa2,qa4,qa5$"]),
        ("graphwalks", [2048, 8192], [r"at some of these lengths: bfs", r"--lengths 8192 --tasks bfs,parents$"]),
        ("json-kv", [256, 512], [r": kv needs (\d+) tokens", r"--lengths \d+ --tasks kv$"]),
    ],
)
def test_every_task_that_does_not_fit_is_named_at_once(suite_name: str, lengths: list[int], clauses: list[str]) -> None:
    pytest.importorskip("wonderwords")
    question = Tasks(suite=suite_name, lengths=lengths)
    with pytest.raises(rope.MethodError) as caught:
        question.plan(build("llama", vocab_size=384), tokenizer=load_tokenizer("reference"))
    for clause in clauses:
        assert re.search(clause, str(caught.value)), (clause, str(caught.value))


@pytest.mark.parametrize("name", ["babilong", "graphwalks", "json-kv"])
def test_the_least_length_of_a_task_takes_its_prompts_and_one_token_less_does_not(name: str) -> None:
    tokenizer, text = load_tokenizer("reference"), "A sentence of ten characters. " * 20
    for task in suite(name).tasks:
        wanted = PromptSettings(tokenizer, 64, 3, 0, text)
        least = suite(name).least_length(task, wanted)
        assert least is not None
        samples = suite(name).make(task, replace(wanted, length=least))
        assert max(sample.length for sample in samples) <= least
        with pytest.raises(base.TooShortError):
            suite(name).make(task, replace(wanted, length=least - 1))
