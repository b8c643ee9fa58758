"""Several runs of one model on one page: the choice, its price, whether measures agree, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import FileError
from rope_ext_hf.eval import compare_runs, passkey, perplexity, read_run
from rope_ext_hf.eval.comparison import Comparison
from rope_ext_hf.eval.results import Cost, DocumentLoss, RetrievalSetting, Setting, TrialScore, method_key, short_labels
from rope_ext_hf.eval.runs import Run, run_kind
from rope_ext_hf.eval.task_runs import TaskScore, TaskSetting
from rope_ext_hf.methods.static import NTK, Linear, Yarn
from rope_ext_hf.reference import path

METHODS = {"as loaded": None, "yarn": Yarn(factor=4.0).to_dict(), "linear": Linear(factor=4.0).to_dict()}
METHODS["ntk"] = NTK(factor=4.0).to_dict()
COMMON = {"model": "model", "data": "text", "loaded": None, "context_length": 64, "over": "own", "weights": "w"}


def losses(folder: Path, values: dict[str, dict[int, float]], speeds: dict[str, float] | None = None) -> Run[Any]:
    kind, setting = run_kind("perplexity"), Setting("matched", 5, 256, False, 0)
    results = []
    for name, row in values.items():
        for n, loss in row.items():
            documents = [DocumentLoss(f"d{i}", 10 * (loss + 0.01 * i), 10, 12, 1) for i in range(9)]
            cost = Cost(100, 100 / (speeds or {}).get(name, 50.0), 0)
            results.append(kind.result(METHODS[name], setting, (n,), documents, cost))
    return Run(folder, COMMON | {"kind": "perplexity", "setting": vars(setting)}, results)


def answers(folder: Path, values: dict[str, dict[int, int]], **changed: Any) -> Run[Any]:
    """A tasks run in which so many of 40 prompts are answered."""
    kind, setting = run_kind("tasks"), TaskSetting("ruler", "vt", "generate", 42, False, 0)
    results = [
        kind.result(METHODS[name], setting, (n, 0), [TaskScore(float(i < right), "") for i in range(40)], Cost())
        for name, row in values.items()
        for n, right in row.items()
    ]
    return Run(folder, COMMON | {"kind": "tasks", "setting": vars(setting)} | changed, results)


def retrieval(folder: Path, values: dict[str, dict[int, int]]) -> Run[Any]:
    kind, setting = run_kind("passkey"), RetrievalSetting("needle", 1, 19, 0)
    results = [
        kind.result(METHODS[name], setting, (n, depth), [TrialScore(i < right, 1.0) for i in range(20)], Cost())
        for name, row in values.items()
        for n, right in row.items()
        for depth in (0.0, 1.0)
    ]
    return Run(folder, COMMON | {"kind": "passkey", "setting": vars(setting)}, results)


LOSSES = {
    "as loaded": {64: 1.0, 256: 5.0},
    "yarn": {64: 1.2, 256: 1.5},
    "linear": {64: 3.0, 256: 3.0},
    "ntk": {64: 1.1, 256: 1.4},
}
ANSWERS = {
    "as loaded": {64: 36, 256: 0},
    "yarn": {64: 35, 256: 34},
    "linear": {64: 10, 256: 8},
    "ntk": {64: 36, 256: 12},
}


def test_answers_decide_before_losses(tmp_path: Path) -> None:
    comparison = Comparison([losses(tmp_path, LOSSES, {"yarn": 40.0}), answers(tmp_path, ANSWERS)])
    assert comparison.choice == (method_key(METHODS["yarn"]), [method_key(METHODS["yarn"])])
    text = comparison.conclusion()
    assert "At 256 tokens (4x), yarn x4 reads best: score of ruler 85.0% (as loaded 0.0%), loss 1.540" in text
    assert "effective length by the score of ruler is 256 [64 to 256] tokens; as loaded 64 [64 to 64]" in text
    assert "At 64 tokens (1x) it changes the score of ruler by -2.5 [" in text
    assert "the loss by +0.200 [+0.200 to +0.200] nats per token" in text
    assert "takes 1.25 times as long" in text
    assert "By the loss alone it would be ntk x4" in text


def test_methods_with_equal_answers_are_told_apart_by_the_loss(tmp_path: Path) -> None:
    equal = ANSWERS | {"ntk": {64: 36, 256: 33}}
    comparison = Comparison([answers(tmp_path, equal), losses(tmp_path, LOSSES)])
    assert comparison.names[comparison.choice[0]] == "ntk x4"
    undecided = Comparison([answers(tmp_path, equal)])
    assert "These measures do not tell it from ntk x4" in undecided.conclusion()


def test_a_measure_at_luck_decides_nothing(tmp_path: Path) -> None:
    nothing = {name: {64: 0, 256: 0} for name in ANSWERS}
    comparison = Comparison([answers(tmp_path, nothing), losses(tmp_path, LOSSES)])
    assert comparison.names[comparison.choice[0]] == "ntk x4"
    assert "The score of ruler is better than luck with no method" in comparison.conclusion()
    assert comparison.agreements() == []


def test_the_model_as_loaded_may_be_the_best(tmp_path: Path) -> None:
    comparison = Comparison([losses(tmp_path, LOSSES | {"as loaded": {64: 1.0, 256: 0.9}})])
    assert "At 256 tokens (4x), the model as loaded reads best" in comparison.conclusion()
    assert "changes" not in comparison.conclusion()


def test_agreement_of_measures(tmp_path: Path) -> None:
    comparison = Comparison([losses(tmp_path, LOSSES), answers(tmp_path, ANSWERS)])
    (row,) = comparison.agreements()
    # losses, best first: ntk yarn linear loaded; answers: yarn ntk linear loaded: one of six pairs is turned
    assert (row.length, row.methods) == (256, 4)
    assert row.tau == pytest.approx(4 / 6)
    assert row.low <= row.tau <= row.high


def test_retrieval_is_over_all_depths(tmp_path: Path) -> None:
    run = retrieval(tmp_path, {"as loaded": {64: 20, 256: 0}, "yarn": {64: 20, 256: 15}})
    (measure,) = Comparison([run]).measures
    assert measure.value(method_key(METHODS["yarn"]), 256) == 0.75
    assert len(measure.items[method_key(None)][256]) == 20  # trials, not trials x depths


def test_ranks_count_where_nothing_is_answered_exactly(tmp_path: Path) -> None:
    kind, setting = run_kind("passkey"), RetrievalSetting("needle", 1, 19, 0)
    scores = [TrialScore(False, 1.0 if i < 15 else 3.0) for i in range(20)]
    run = Run(tmp_path, COMMON | {"kind": "passkey"}, [kind.result(None, setting, (64, 0.5), scores, Cost())])
    (measure,) = kind.measures(run)
    assert (measure.name, measure.chance) == ("right answers first, needle", 0.05)
    assert measure.value(method_key(None), 64) == 0.75


def test_key_tokens_are_a_measure_of_their_own(tmp_path: Path) -> None:
    kind, setting = run_kind("perplexity"), Setting("matched", 5, 256, False, 0, "a file")
    results = [
        kind.result(
            METHODS[name],
            setting,
            (256,),
            [DocumentLoss(d, loss * 10, 10, 12, 1, nats * 2, 2) for d in "abcde"],
            Cost(),
        )
        for name, loss, nats in (("as loaded", 1.0, 3.0), ("yarn", 1.1, 0.5))
    ]
    comparison = Comparison([Run(tmp_path, COMMON | {"kind": "perplexity", "setting": vars(setting)}, results)])
    assert [measure.name for measure in comparison.measures] == ["loss of key tokens", "loss"]
    assert comparison.measures[0].value(method_key(METHODS["yarn"]), 256) == 0.5
    assert "yarn x4 reads best: loss of key tokens 0.500 nats per token (as loaded 3.000)" in comparison.conclusion()
    assert "By the loss alone it would be the model as loaded" in comparison.conclusion()


def test_two_runs_with_a_measure_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one, other = losses(tmp_path, LOSSES), losses(tmp_path, LOSSES)
    other.settings["data"] = "other text"
    assert [m.name for m in Comparison([one, other]).measures] == ["loss, text", "loss, other text"]


def test_the_page_and_the_json(tmp_path: Path) -> None:
    comparison = Comparison([losses(tmp_path, LOSSES), answers(tmp_path, ANSWERS)])
    page = comparison.write_page(tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert page.index("reads best") < page.index("<table") < page.index("<svg") < page.index("Do the measures agree")
    assert "http" not in page.replace("http://www.w3.org", "")
    found = json.loads(json.dumps(comparison.to_dict()))
    assert found["best"] == "yarn x4"
    assert found["measures"][0]["effective_lengths"]["as loaded"] == {"length": 64, "low": 64, "high": 64}
    assert len(found["measures"][1]["values"]) == 8
    assert comparison._repr_html_().startswith("<p>At 256")


@pytest.mark.slow
def test_real_runs_of_one_model_and_of_another(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path())
    loss = perplexity(model, "stdlib", lengths=[64, 128], max_spans=2, out=tmp_path).run.folder
    keys = passkey(model, lengths=[128], depths=[0.5], trials=1, task="key-value", out=tmp_path).run.folder
    invoked = CliRunner().invoke(app, ["report", str(loss), str(keys)])
    assert invoked.exit_code == 0, invoked.output
    assert "reads best" in " ".join(invoked.output.split())
    assert (tmp_path / "comparison.html").is_file()
    assert compare_runs([keys, loss]).choice[0] == method_key(None)
    model.get_input_embeddings().weight.data[0, 0] += 1
    other = perplexity(model, "stdlib", lengths=[64, 128], max_spans=2, out=tmp_path).run.folder
    with pytest.raises(FileError, match="run of another model"):
        compare_runs([loss, other])


@pytest.mark.slow
def test_a_run_without_results_is_refused(tmp_path: Path) -> None:
    folder = perplexity(
        AutoModelForCausalLM.from_pretrained(path()), "stdlib", lengths=[64], max_spans=1, out=tmp_path
    ).run.folder
    for journal in folder.glob("*.jsonl"):
        journal.write_text("")
    assert read_run(folder).results == []
    with pytest.raises(FileError, match="no result yet"):
        compare_runs([folder, folder])


@pytest.mark.slow
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    comparison = Comparison([losses(tmp_path, LOSSES), answers(tmp_path, ANSWERS)])
    figure = comparison.draw(tmp_path / "measures.png", "a $strange$ title")
    assert [axes.get_ylabel() for axes in figure.axes] == [
        *("Score of ruler, percent; higher is better", "Loss, nats per token; lower is better")
    ]
    assert (tmp_path / "measures.png").read_bytes().startswith(b"\x89PNG")


def test_labels_are_short_where_that_tells_methods_apart() -> None:
    assert short_labels(["as loaded", "yarn x8", "rerope llama4 window=128"]) == ["as loaded", "yarn x8", "rerope"]
    both = ["rerope window=128", "rerope window=64"]
    assert short_labels(both) == both
