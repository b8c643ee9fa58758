"""`search`: a method and divisors from a text, in a folder that loads plainly, measured on text it did not read."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.errors import CorpusError, FileError, MethodError
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.reading.corpora import load, stdlib_held_out
from rope_ext_hf.runs.journal import exclusive
from rope_ext_hf.runs.verdicts import Outcome, verdict
from rope_ext_hf.training import search
from rope_ext_hf.training.candidates import Candidate, Reader
from tests.support.forks import kill_when, run_command, run_commands, run_forked
from tests.support.inputs import write_model
from tests.support.models import TRAINED, logits, tokens
from tests.support.wrapped_text import unwrapped

LONG = 4 * TRAINED
QUICK: dict[str, Any] = {"data": "texts/*.txt", "target_length": LONG, "passages": 5, "max_spans": 3}
pytestmark = pytest.mark.filterwarnings("ignore:.*would load .* and run another model:UserWarning")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model, and texts in the folder that the test runs in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for document in stdlib_held_out():
        (tmp_path / "texts" / f"{document.name.replace('/', '-')}.txt").write_text(document.text[:4000])
    return write_model(tmp_path / "small")


def read_trials(folder: Path) -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = json.loads((folder / "trials.json").read_text())["trials"]
    return [trial | {"seconds": 0, "cpu_seconds": 0} for trial in trials]


@pytest.mark.thorough
def test_a_search_ends_in_a_folder_that_loads_plainly(small: Path, tmp_path: Path) -> None:
    said: list[str] = []
    run = tmp_path / "run"
    report = search(small, run, **QUICK, trials=20, most_lost=1.0, report=said.append)
    plain, ours = AutoModelForCausalLM.from_pretrained(run / "model").eval(), rope.from_pretrained(run / "model")
    for length in (TRAINED, LONG):
        ids = tokens(length)
        torch.testing.assert_close(logits(plain, ids), logits(ours, ids), atol=1e-4, rtol=0)
    described = rope.describe(ours)
    assert (described.context_length, described.extended_length) == (TRAINED, LONG)
    assert "; known to be read right by transformers 5" in report.save_route

    trials = read_trials(run)
    assert [trial["stage"] for trial in trials] == ["methods"] * 5 + ["bands"] * 7 + ["pairs"] * 8
    fixed = ["linear x4", "ntk x4", "by-parts x4", "yarn x4", "llama3 x4"]
    assert [trial["label"] for trial in trials[:5]] == fixed
    assert not any(trial["stopped"] for trial in trials[:5])
    rows = list(csv.DictReader((run / "trials.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["label"] for row in rows] == [trial["label"] for trial in trials]
    assert (run / "divisors.png").read_bytes().startswith(b"\x89PNG")

    # Random weights: nothing is told from a fixed method, which is written.
    assert list(report.losses) == ["unpatched", *fixed, "found", "chosen"]
    assert report.label == report.best_fixed
    assert report.method == next(trial for trial in trials if trial["label"] == report.label)["method"]
    assert re.fullmatch(
        rf"The perplexity of what was found, .*, at {LONG} tokens, compared with {report.label}, the best fixed "
        rf"method, is not significantly different .*: {report.label} is written.",
        report.decision,
    )
    assert "lower by -" not in unwrapped(report)
    gain = report.gains["found"]
    assert gain.value == pytest.approx(report.losses["found"][str(LONG)] - report.losses["chosen"][str(LONG)])
    assert gain.low is not None
    assert gain.high is not None
    assert gain.low <= gain.value <= gain.high
    lost = report.losses["chosen"][str(TRAINED)] - report.losses["unpatched"][str(TRAINED)]
    assert report.lost.value == pytest.approx(lost)
    assert "tokens, compared with the unpatched model, the perplexity of what is written is" in unwrapped(report)
    assert json.loads((run / "report.json").read_text())["losses"] == report.losses
    assert f"rope-ext ppl {run / 'model'} --lengths 64,256" in str(report).splitlines()[-1]
    assert any("trial 1, methods: linear x4" in line for line in said)
    results = yaml.safe_load((run / "model" / ".eval_results" / "rope-ext-perplexity-1.yaml").read_text())
    losses = {int(each["dataset"]["task_id"].rpartition("_")[2]): math.log(each["value"]) for each in results}
    assert losses == {int(n): pytest.approx(loss, abs=1e-5) for n, loss in report.losses["chosen"].items()}
    assert report.decision.split(":")[0] in unwrapped((run / "model" / "README.md").read_text())

    with pytest.raises(FileError, match="holds a run with other settings: seed"):
        search(small, run, **QUICK, trials=20, most_lost=1.0, seed=1)
    longer = search(small, run, **QUICK, trials=22, most_lost=1.0)  # the same run, continued
    assert read_trials(run)[:20] == trials
    assert longer.trials == 22


@pytest.mark.thorough
def test_the_search_compares_where_the_result_is_measured(small: Path, tmp_path: Path) -> None:
    """Over the same documents, each as long as the target length, a fixed method has one loss."""
    (tmp_path / "whole").mkdir()
    for document in stdlib_held_out():
        for part in range(2):
            text = document.text[5000 * part :].encode()[:LONG]
            (tmp_path / "whole" / f"{document.name.replace('/', '-')}-{part}.txt").write_bytes(text)
    options: dict[str, Any] = {"data": "whole/*.txt", "eval_data": "whole/*.txt", "passages": 16, "max_spans": 16}
    report = search(small, tmp_path / "run", **QUICK | options, trials=5, most_lost=9.0)
    for trial in read_trials(tmp_path / "run"):
        assert len(trial["losses"]) == 16
        assert trial["loss"] == pytest.approx(report.losses[trial["label"]][str(LONG)], abs=1e-4)


@pytest.mark.thorough
def test_what_surely_reads_better_than_the_fixed_methods_is_written(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": "stdlib", "target_length": 320, "passages": 4, "max_spans": 8, "trials": 6}
    report = search("reference", tmp_path / "run", **options, methods=["linear"], device="cpu")
    assert report.label == "divisors by pair, from linear x1.25"
    assert ", the best fixed method, is lower by " in report.decision
    assert report.decision.endswith(f" percent: {report.label} is written.")
    assert verdict(report.gains["linear x1.25"], higher_is_better=True).outcome is Outcome.BETTER
    assert "found" not in report.losses


@pytest.mark.slow
def test_what_is_measured_was_not_searched_on(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[Reader] = []
    read = Reader.read

    def spy(self: Reader, *args: Any, **kwargs: Any) -> Candidate:
        readers.append(self)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Reader, "read", spy)
    search(small, tmp_path / "run", **QUICK, trials=1, most_lost=1.0)
    tokenizer = AutoTokenizer.from_pretrained(small)
    texts = {document.name: document.text for document in load("texts/*.txt")}
    of_passage = [
        {name for name, text in texts.items() if tokenizer.decode(passage.ids) in text}
        for passage in (*readers[0].passages, *readers[0].short)
    ]
    assert all(of_passage)
    searched = set().union(*of_passage)
    (journal,) = (tmp_path / "run" / "measured").glob("*/run.json")
    measured = {name.partition(",")[0] for name in json.loads(journal.read_text())["items"]}
    assert measured
    assert not measured & searched
    assert measured | searched <= set(texts)


@pytest.mark.thorough
def test_a_killed_command_goes_on_to_the_same_model(small: Path, tmp_path: Path) -> None:
    command = [
        "search", str(small), "--target-length", "256", "--data", "texts/*.txt", "--trials", "40", "--passages", "5",
        "--max-spans", "2", "--most-lost-at-1x", "1", "--device", "cpu", "--out",
    ]  # fmt: skip
    saved = tmp_path / "cut" / "trials.json"
    kill_when(
        lambda: saved.exists() and len(read_trials(tmp_path / "cut")) >= 8,
        run_command,
        [*command, str(tmp_path / "cut")],
        folder=tmp_path,
    )
    assert len(read_trials(tmp_path / "cut")) < 40
    for name in ("cut", "whole"):
        run_forked(run_commands, [[*command, str(tmp_path / name)]], folder=tmp_path)
    assert read_trials(tmp_path / "cut") == read_trials(tmp_path / "whole")
    configs = [json.loads((tmp_path / name / "model" / "config.json").read_text()) for name in ("cut", "whole")]
    assert configs[0] == configs[1]


def fake_read(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Let every candidate take ten seconds, and lose a little more than the one before."""

    def read(
        self: Reader, stage: str, method: RopeMethod, before: list[Candidate], parameters: Any, label: str
    ) -> Candidate:
        made: dict[str, Any] = {
            "losses": (1.0,) * 5, "loss": 1 + len(before) / 100, "lost": 0.0, "most_lost": 0.0, "stopped": False,
            "seconds": 10.0, "cpu_seconds": 5.0,
        }  # fmt: skip
        return Candidate(stage, method.to_dict(), label, parameters=parameters, **made | values)

    monkeypatch.setattr(Reader, "read", read)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("minutes", "max_spans", "expected"),
    [
        (10, 1, 58),  # 600 seconds, less 8 methods on one passage of 2 seconds and one of half a second
        (5, 100, 15),  # at least half of the time is searched
        (0.01, 1, 5),  # every fixed method is read
    ],
)
def test_the_time_is_shared_between_searching_and_measuring(
    minutes: float, max_spans: int, expected: int, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_read(monkeypatch)
    monkeypatch.setattr("rope_ext_hf.training.searching._PATIENCE", 1000)
    report = search(small, tmp_path / "run", **QUICK | {"max_spans": max_spans}, minutes=minutes)
    assert (report.trials, report.seconds, report.cpu_seconds) == (expected, 10 * expected, 5 * expected)


@pytest.mark.slow
def test_a_stage_ends_when_nothing_better_comes(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_read(monkeypatch)
    report = search(small, tmp_path / "run", **QUICK, trials=1000)
    stages = [trial["stage"] for trial in read_trials(tmp_path / "run")]
    assert {stage: stages.count(stage) for stage in stages} == {"methods": 5, "bands": 40, "pairs": 40}
    assert report.label == "linear x4"
    assert "compared with" in report.decision


def test_the_bound_is_held_or_the_nearest_is_named(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_read(monkeypatch, lost=0.1, most_lost=0.3)
    said = r"more than 2\.0 percent .*; nearest was linear x4, with up to 35\.0 percent\. Allow as much \(.* 0\.30.\)"
    with pytest.raises(MethodError, match=f"{said}$"):
        search(small, tmp_path / "two lists", **QUICK, trials=6)
    with pytest.raises(MethodError, match=f"{said}, or leave static out"):
        search(small, tmp_path / "one list", **QUICK, trials=6, static=True)


@pytest.mark.slow
def test_static_candidates_are_saved_as_they_are(small: Path, tmp_path: Path) -> None:
    report = search(small, tmp_path / "run", **QUICK, trials=2, methods=["yarn"], static=True, most_lost=9.0)
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert report.method["method"] in ("yarn", "factors")
    assert config["rope_parameters"]["rope_type"] in ("yarn", "longrope")
    assert all(trial["method"]["method"] != "longrope" for trial in read_trials(tmp_path / "run"))


@pytest.mark.slow
def test_other_methods_are_tried_as_they_are_fitted(small: Path, tmp_path: Path) -> None:
    report = search(small, tmp_path / "run", **QUICK, trials=2, methods=["rerope"], most_lost=9.0)
    assert report.method["method"] == "rerope"
    assert "plain transformers stops" in report.save_route
    assert "plain transformers stops with that text" in unwrapped(report)
    assert rope.describe(rope.from_pretrained(tmp_path / "run" / "model")).extended_length == LONG


@pytest.mark.slow
def test_answers_of_a_retrieval_task_may_count_instead(small: Path, tmp_path: Path) -> None:
    report = search(small, tmp_path / "run", **QUICK, trials=1, methods=["yarn"], fitness="key-value", most_lost=9.0)
    assert report.keys_by == "the answers of 5 prompts, in text that the search did not read"
    assert list(report.key_losses) == list(report.losses)
    assert report.key_gains["yarn x4"].value == 0
    assert "perplexity of the tokens that count" in unwrapped(report)


@pytest.mark.thorough
def test_key_tokens_may_count_instead(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data": "stdlib", "target_length": 512, "passages": 6, "max_spans": 8, "trials": 2}
    report = search("reference", tmp_path / "run", **options, fitness="key-tokens", dtype="float32", device="cpu")
    assert list(report.key_losses) == list(report.losses)
    for name, gain in report.key_gains.items():
        assert gain.value == pytest.approx(report.key_losses[name]["512"] - report.key_losses["chosen"]["512"])
    shown = unwrapped(report)
    assert "The perplexity over the tokens that count of" in report.decision
    assert re.search(r"key tokens: [1-9]\d* of 1024, found with the model under \w+", shown)
    assert json.loads((tmp_path / "run" / "report.json").read_text())["key_losses"] == report.key_losses


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "how long is searched"),
        ({"minutes": 1, "trials": 1}, "one of the two"),
        ({"minutes": 0}, "minutes must be above 0, got 0"),
        ({"trials": 1, "passages": 0}, "passages must be a whole number of at least 1, got 0"),
        (
            {"trials": 1, "target_length": TRAINED},
            "target_length must be above the context length of 64 tokens, got 64",
        ),
        ({"trials": 1, "methods": ["yarm"]}, "unknown method 'yarm'. Did you mean 'yarn'?"),
        ({"trials": 1, "fitness": "best"}, "unknown fitness 'best'"),
    ],
)
def test_refused(given: dict[str, Any], said: str, small: Path, tmp_path: Path) -> None:
    with pytest.raises(MethodError, match=said):
        search(small, tmp_path / "run", **QUICK | given)
    assert not (tmp_path / "run" / "trials.json").exists()


def test_too_little_held_out_text_is_refused_before_the_search(small: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("word " * 40)
    with pytest.raises(CorpusError, match="no held-out document has 256 tokens"):
        search(small, tmp_path / "run", **QUICK, trials=1, eval_data="short.txt")
    assert not (tmp_path / "run" / "trials.json").exists()


@pytest.mark.slow
def test_spans_begin_as_the_tokenizer_begins_texts(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the BOS token, where it puts one before every text: in the search and in the measurement."""
    readers: list[Reader] = []
    read = Reader.read

    def spy(self: Reader, *args: Any, **kwargs: Any) -> Candidate:
        readers.append(self)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Reader, "read", spy)
    monkeypatch.setattr("rope_ext_hf.reading.spans.leading_tokens", lambda tokenizer: (5,))
    search(small, tmp_path / "run", **QUICK, trials=1, most_lost=9.0)
    assert all(int(passage.ids[0]) == 5 and len(passage.ids) == LONG for passage in readers[0].passages)
    (settings,) = (tmp_path / "run" / "measured").glob("*/run.json")
    assert json.loads(settings.read_text())["setting"]["bos"]


@pytest.mark.slow
@pytest.mark.parametrize("content", ["{}", '{"trials": [{"stage": "methods"}]}', '{"trials": 3}', "{", ""])
def test_damaged_trials_are_refused_before_anything_is_measured(
    content: str, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_read(monkeypatch)
    search(small, tmp_path / "run", **QUICK, trials=1)
    trials = tmp_path / "run" / "trials.json"
    trials.write_text(content or trials.read_text().replace('"loss": 1', '"loss": 0'))
    monkeypatch.setattr("rope_ext_hf.training.searching.Reader", pytest.fail)
    with pytest.raises(FileError, match=r"trials\.json"):
        search(small, tmp_path / "run", **QUICK, trials=1)


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["the model", "the tokenizer", "the text"])
def test_a_search_is_not_continued_over_what_changed_in_place(changed: str, small: Path, tmp_path: Path) -> None:
    search(small, tmp_path / "run", **QUICK, trials=1, most_lost=9.0)
    if changed == "the model":
        weights = small / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    elif changed == "the tokenizer":
        tokenizer = AutoTokenizer.from_pretrained(small)
        tokenizer.add_tokens(["<more>"])
        tokenizer.save_pretrained(small)
    else:
        text = next((tmp_path / "texts").iterdir())
        text.write_text(text.read_text()[1:])
    with pytest.raises(FileError, match=rf"^{changed}[a-z(), ]* changed since the run in"):
        search(small, tmp_path / "run", **QUICK, trials=2, most_lost=9.0)


@pytest.mark.slow
def test_a_folder_has_one_writer(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_read(monkeypatch)
    search(small, tmp_path / "run", **QUICK, trials=1)
    with exclusive(tmp_path / "run", 0), pytest.raises(FileError, match="another process is writing"):
        search(small, tmp_path / "run", **QUICK, trials=6)
    assert len(read_trials(tmp_path / "run")) == 5


@pytest.mark.thorough
def test_the_bundled_model_reads_better_than_with_any_fixed_method(tmp_path: Path) -> None:
    report = search(
        "reference",
        tmp_path / "run",
        data="stdlib",
        dtype="float32",
        target_length=2048,  # at four times its context length mrrope is as good as what is found
        trials=48,
        passages=8,
        max_spans=24,
    )
    assert verdict(report.gains[report.best_fixed], higher_is_better=True).outcome is Outcome.BETTER
    assert verdict(report.lost, than=0.02).outcome is not Outcome.WORSE  # the bound holds on the text searched on
