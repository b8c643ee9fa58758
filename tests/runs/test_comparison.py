"""Several runs of one model on one page: the choice, its price, whether measures agree, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import FileError, MethodError
from rope_ext_hf.eval import compare_runs, passkey, perplexity, read_run
from rope_ext_hf.eval.retrieval.retrieval_runs import RetrievalSetting, TrialScore
from rope_ext_hf.eval.spans.perplexity_measurement import DocumentLoss
from rope_ext_hf.methods.static import NTK, Linear, Yarn
from rope_ext_hf.reading.scorer import Cost
from rope_ext_hf.reading.spans import Setting
from rope_ext_hf.reference import path
from rope_ext_hf.runs.comparison import Comparison
from rope_ext_hf.runs.conclusions.labels import method_key, short_labels
from rope_ext_hf.runs.kinds import run_kind
from rope_ext_hf.runs.run import Run
from tests.support.texts import ONE_MODULE, TWO_MODULES

METHODS = {"unpatched": None, "yarn": Yarn(factor=4.0).to_dict(), "linear": Linear(factor=4.0).to_dict()}
METHODS["ntk"] = NTK(factor=4.0).to_dict()
COMMON = {"model": "model", "data": "text", "loaded": None, "context_length": 64, "over": "own", "weights": "w"}


def losses(folder: Path, values: dict[str, dict[int, float]], speeds: dict[str, float] | None = None) -> Run[Any]:
    kind, setting = run_kind("perplexity"), Setting("matched", 5, 256, False, 0)
    results = []
    for name, row in values.items():
        for n, loss in row.items():
            documents = [DocumentLoss(f"d{i}", 10 * (loss + 0.01 * i), 10, 12, 1) for i in range(9)]
            cost = Cost(100, 100 / (speeds or {}).get(name, 50.0), 0)
            results.append(kind.result(METHODS[name], setting, (n,), documents, [cost] * 9))
    return Run(folder, COMMON | {"kind": "perplexity", "setting": vars(setting)}, results, kind)


def answers(folder: Path, values: dict[str, dict[int, int]], **changed: Any) -> Run[Any]:
    """A passkey run in which so many of 40 trials are answered."""
    kind, setting = run_kind("passkey"), RetrievalSetting("needle", 1, 19, 0)
    results = [
        kind.result(METHODS[name], setting, (n, 0.5), [TrialScore(i < right, 20.0) for i in range(40)], [Cost()])
        for name, row in values.items()
        for n, right in row.items()
    ]
    return Run(folder, COMMON | {"kind": "passkey", "setting": vars(setting)} | changed, results, kind)


def retrieval(folder: Path, values: dict[str, dict[int, int]]) -> Run[Any]:
    kind, setting = run_kind("passkey"), RetrievalSetting("needle", 1, 19, 0)
    results = [
        kind.result(METHODS[name], setting, (n, depth), [TrialScore(i < right, 1.0) for i in range(20)], [Cost()])
        for name, row in values.items()
        for n, right in row.items()
        for depth in (0.0, 1.0)
    ]
    return Run(folder, COMMON | {"kind": "passkey", "setting": vars(setting)}, results, kind)


LOSSES = {
    "unpatched": {64: 1.0, 256: 5.0},
    "yarn": {64: 1.2, 256: 1.5},
    "linear": {64: 3.0, 256: 3.0},
    "ntk": {64: 1.1, 256: 1.4},
}
ANSWERS = {
    "unpatched": {64: 36, 256: 0},
    "yarn": {64: 35, 256: 34},
    "linear": {64: 10, 256: 8},
    "ntk": {64: 36, 256: 12},
}


def best(comparison: Comparison) -> str | None:
    return None if comparison.conclusion.best is None else comparison.findings.names[comparison.conclusion.best]


def test_answers_decide_before_losses(tmp_path: Path) -> None:
    comparison = Comparison([losses(tmp_path, LOSSES, {"yarn": 40.0}), answers(tmp_path, ANSWERS)])
    assert best(comparison) == "yarn x4"
    assert str(comparison.conclusion).startswith(
        "Best at 256 tokens (4x): yarn x4, exact match (needle) 85.0% and perplexity 4.66 (unpatched 0.0% and 154). "
        "Short inputs (64 tokens): no significant difference in exact match (needle) (87.5%, unpatched 90.0%); "
        "perplexity gets worse (2.83 to 3.46). By perplexity alone, ntk x4 would be best (4.22). "
    )


def run_of(name: str, folder: Path, values: dict[str, dict[int, float]], text: str, **settings: Any) -> Run[Any]:
    run = losses(folder / name, values, settings.pop("speeds", None))
    cells = {json.dumps([n]): f"{text} {n}" for n in (64, 256)}
    return Run(
        run.path, run.settings | {"text": text, "cell_texts": cells, "data": text} | settings, run.results, run.kind
    )


ONE = {"unpatched": LOSSES["unpatched"], "linear": LOSSES["linear"]}
OTHER = {"unpatched": LOSSES["unpatched"], "yarn": LOSSES["yarn"]}


def every_order(*runs: Run[Any]) -> tuple[Comparison, list[Any]]:
    """The comparison, and what each order of the runs says and shows."""
    said = []
    for order in itertools.permutations(runs):
        comparison = Comparison(order)
        console = Console(width=200)
        with console.capture() as captured:
            console.print(comparison.table(detailed=True))
        said.append((str(comparison.conclusion), captured.get(), [m.name for m in comparison.measures]))
    return comparison, said


def test_runs_over_the_same_text_count_as_one_in_every_order(tmp_path: Path) -> None:
    comparison, said = every_order(run_of("a", tmp_path, ONE, "text"), run_of("b", tmp_path, OTHER, "text"))
    assert best(comparison) == "yarn x4"
    assert said.count(said[0]) == 2
    assert [measure.name for measure in comparison.measures] == ["perplexity"]
    assert "perplexity gets worse (2.83 to 3.46)" in said[0][0]


def test_runs_that_share_some_lengths_count_as_one(tmp_path: Path) -> None:
    """A run of 64 and 256 tokens and one of 256 alone, by the digests of their cells."""
    short = run_of("b", tmp_path, {"yarn": {256: 1.5}}, "text", cell_texts={"[256]": "text 256"})
    comparison, said = every_order(run_of("a", tmp_path, ONE, "text"), short)
    assert best(comparison) == "yarn x4"
    assert said.count(said[0]) == 2


def test_runs_over_different_text_are_not_compared(tmp_path: Path) -> None:
    comparison, said = every_order(run_of("a", tmp_path, ONE, "text"), run_of("b", tmp_path, OTHER, "other text"))
    assert best(comparison) is None
    assert "Linear x4 and yarn x4 cannot be compared: at no length were they measured on the same text" in said[0][0]
    assert said.count(said[0]) == 2
    assert {measure.name for measure in comparison.measures} == {"perplexity, text", "perplexity, other text"}


def test_measures_of_one_name_and_text_are_named_by_length_or_number(tmp_path: Path) -> None:
    same = {"data": "text"}
    longer = run_of("b", tmp_path, {"yarn": {512: 1.0}}, "b", **same)
    named = Comparison([run_of("a", tmp_path, ONE, "a", **same), longer]).measures
    assert [measure.name for measure in named] == ["perplexity, text, to 512 tokens", "perplexity, text, to 256 tokens"]
    equal = Comparison([run_of(name, tmp_path, ONE, name, **same) for name in "ab"]).measures
    assert [measure.name for measure in equal] == [f"perplexity, text, to 256 tokens, {n}" for n in (1, 2)]


@pytest.mark.slow
def test_a_unit_that_no_run_has_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path())
    run = perplexity(model, ONE_MODULE, lengths=[64], max_spans=1, out=tmp_path).run
    assert compare_runs([run.folder, run.folder], "bits").measures[0].unit == "bits per byte"
    with pytest.raises(MethodError, match="'perplexity', 'nats' and 'bits'"):
        compare_runs([run.folder, run.folder], "bytes")


def test_the_unpatched_model_may_be_best(tmp_path: Path) -> None:
    comparison = Comparison([losses(tmp_path, LOSSES | {"unpatched": {64: 1.0, 256: 0.9}})])
    assert str(comparison.conclusion).startswith("Best at 256 tokens (4x): the unpatched model, perplexity 2.56. At")


def test_agreement_of_measures(tmp_path: Path) -> None:
    comparison = Comparison([losses(tmp_path, LOSSES), answers(tmp_path, ANSWERS)])
    (row,) = comparison.agreements()
    # losses, best first: ntk yarn linear loaded; answers: yarn ntk linear loaded: one of six pairs is turned
    assert (row.length, row.methods) == (256, 4)
    assert row.tau == pytest.approx(4 / 6)


def test_retrieval_is_over_all_depths(tmp_path: Path) -> None:
    run = retrieval(tmp_path, {"unpatched": {64: 20, 256: 0}, "yarn": {64: 20, 256: 15}})
    (measure,) = Comparison([run]).measures
    assert measure.value(method_key(METHODS["yarn"]), 256) == 0.75
    assert len(measure.items[method_key(None)][256]) == 20  # trials, not trials x depths


def test_ranks_count_where_nothing_is_answered_exactly(tmp_path: Path) -> None:
    kind, setting = run_kind("passkey"), RetrievalSetting("needle", 1, 19, 0)
    scores = [TrialScore(False, 1.0 if i < 15 else 3.0) for i in range(20)]
    run = Run(tmp_path, COMMON | {"kind": "passkey"}, [kind.result(None, setting, (64, 0.5), scores, [Cost()])], kind)
    (measure,) = kind.measures(run)
    assert (measure.name, measure.chance) == ("top-1 accuracy (needle)", 0.05)
    assert measure.value(method_key(None), 64) == 0.75


def lost(folder: Path, values: Mapping[str, Mapping[int, float | None]], name: str = "run", **changed: Any) -> Run[Any]:
    """A passkey run without exact answers or right ranks, by the loss of the answer; None: a run of before has none."""
    kind, setting = run_kind("passkey"), RetrievalSetting("needle", 1, 19, 0, own_prompts=True)
    results = [
        kind.result(
            METHODS[method],
            setting,
            (n, depth),
            [TrialScore(False, 9.0, None if loss is None else loss + depth + 0.01 * i) for i in range(5)],
            [Cost()],
        )
        for method, row in values.items()
        for n, loss in row.items()
        for depth in (0.0, 1.0)
    ]
    settings = COMMON | {"kind": "passkey", "setting": vars(setting)} | changed
    return Run(folder / name, settings, results, kind)


def test_the_loss_of_the_answer_decides_where_nothing_is_answered(tmp_path: Path) -> None:
    run = lost(tmp_path, {"unpatched": {64: 0.5, 256: 3.2}, "yarn": {64: 0.6, 256: 0.9}})
    share, loss = run.kind.measures(run)
    assert (loss.name, loss.unit, loss.higher_is_better) == ("loss of the answer (needle)", "nats per token", False)
    assert loss.value(method_key(None), 256) == pytest.approx(3.2 + 0.5 + 0.02)
    assert len(loss.items[method_key(None)][256]) == 10  # each depth has prompts of its own
    assert share.flaw
    assert str(run.conclusion) == (
        "Best at 256 tokens (4x): yarn x4, loss of the answer (needle) 1.420 nats per token (unpatched 3.720). "
        "Short inputs (64 tokens): loss of the answer (needle) gets worse (1.020 to 1.120). "
        "Top-1 accuracy (needle): no method is significantly above chance (5.0%)."
    )
    together = Comparison([run, losses(tmp_path, {name: LOSSES[name] for name in ("unpatched", "yarn")})])
    assert str(together.conclusion).startswith(
        "Best at 256 tokens (4x): yarn x4, loss of the answer (needle) 1.420 nats per token and perplexity 4.66 "
    )
    page = together.write_page(tmp_path / "page.html").read_text("utf-8")
    assert "lower is better: loss of the answer (needle), nats per token; perplexity\n" in page


def test_prompts_of_one_text_are_one_item_of_the_loss(tmp_path: Path) -> None:
    setting: dict[str, Any] = {"setting": vars(RetrievalSetting("needle", 1, 19, 0))}
    _, loss = run_kind("passkey").measures(lost(tmp_path, {"yarn": {256: 1.0}}, **setting))
    means, weights = zip(*loss.items[method_key(METHODS["yarn"])][256], strict=True)
    assert means == pytest.approx([1.5 + 0.01 * i for i in range(5)])
    assert weights == (1.0,) * 5


def test_a_loss_that_is_not_known_is_not_spoken_of(tmp_path: Path) -> None:
    old = lost(tmp_path, {"unpatched": {64: None, 256: None}, "yarn": {64: None, 256: None}})
    assert [measure.name for measure in old.kind.measures(old)] == ["top-1 accuracy (needle)"]
    said = f"{old}{old._repr_html_()}{old.conclusion}"
    assert "top-1" in str(old.conclusion).lower()
    assert "loss" not in said
    partly = lost(tmp_path, {"unpatched": {64: 0.5, 256: None}, "yarn": {64: 0.6, 256: 0.9}})
    _, loss = partly.kind.measures(partly)
    assert {key: list(row) for key, row in loss.items.items()} == {
        method_key(None): [64],
        method_key(METHODS["yarn"]): [64, 256],
    }
    assert str(partly).count(" -") >= 2


def test_of_two_runs_over_the_same_prompts_the_one_with_losses_counts(tmp_path: Path) -> None:
    same: dict[str, Any] = {"cell_texts": {"[64, 0.0]": "same"}}
    old = lost(tmp_path, {"unpatched": {64: None, 256: None}}, "a", **same)
    new = lost(tmp_path, {"unpatched": {64: 0.5, 256: 3.2}, "yarn": {64: 0.5, 256: 0.9}}, "b", **same)
    comparison, said = every_order(old, new)
    assert best(comparison) == "yarn x4"
    assert "(unpatched 3.720)" in said[0][0]
    assert said.count(said[0]) == 2


def test_key_tokens_are_a_measure_of_their_own(tmp_path: Path) -> None:
    kind, setting = run_kind("perplexity"), Setting("matched", 5, 256, False, 0, "a file")
    results = [
        kind.result(
            METHODS[name],
            setting,
            (256,),
            [DocumentLoss(d, loss * 10, 10, 12, 1, nats * 2, 2) for d in "abcde"],
            [Cost()] * 5,
        )
        for name, loss, nats in (("unpatched", 1.0, 3.0), ("yarn", 1.1, 0.5))
    ]
    comparison = Comparison([Run(tmp_path, COMMON | {"kind": "perplexity", "setting": vars(setting)}, results, kind)])
    assert [measure.name for measure in comparison.measures] == ["LongPPL", "perplexity"]
    assert comparison.measures[0].value(method_key(METHODS["yarn"]), 256) == pytest.approx(math.exp(0.5))
    text = str(comparison.conclusion)
    assert "yarn x4, LongPPL 1.65 and perplexity 3.00 (unpatched 20.09 and 2.72)" in text
    assert "By perplexity alone, the unpatched model would be best" in text


@pytest.mark.slow
def test_real_runs_of_one_model_and_of_another(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(path())
    loss = perplexity(model, TWO_MODULES, lengths=[64, 128], max_spans=2, out=tmp_path).run.folder
    short: dict[str, Any] = {"lengths": [128], "depths": [0.5], "trials": 1, "haystack": ONE_MODULE}
    keys = passkey(model, task="key-value", out=tmp_path, **short).run.folder
    invoked = CliRunner().invoke(app, ["report", str(loss), str(keys)])
    assert invoked.exit_code == 0, invoked.output
    assert "2 documents are too few to compare methods" in " ".join(invoked.output.split())
    assert (tmp_path / "comparison.html").is_file()
    assert str(compare_runs([keys, loss]).conclusion) == str(compare_runs([loss, keys]).conclusion)
    model.get_input_embeddings().weight.data[0, 0] += 1
    other = perplexity(model, TWO_MODULES, lengths=[64, 128], max_spans=2, out=tmp_path).run.folder
    with pytest.raises(FileError, match="run of another model"):
        compare_runs([loss, other])


@pytest.mark.slow
def test_a_run_without_results_is_refused(tmp_path: Path) -> None:
    folder = perplexity(
        AutoModelForCausalLM.from_pretrained(path()), ONE_MODULE, lengths=[64], max_spans=1, out=tmp_path
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
        *("Exact match (needle), percent (higher is better)", "Perplexity (lower is better)")
    ]
    assert (tmp_path / "measures.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_the_verdict_and_one_table_of_all_measures(tmp_path: Path) -> None:
    comparison = Comparison([losses(tmp_path, LOSSES), answers(tmp_path, ANSWERS)])
    page = comparison.write_page(tmp_path / "page.html").read_text("utf-8")
    shown = page[page.index("<h1>") : page.index("<details>")]  # without what a click opens
    assert shown.count("<table ") == 1
    verdict = '<p class="verdict">Best at 256 tokens (4x): yarn x4, exact match (needle) 85.0% and perplexity 4.66 '
    assert shown.index("</h1>") < shown.index(verdict) < shown.index("<table ")
    head = shown[shown.index("<thead>") : shown.index("</thead>")]
    assert re.findall("<th[^>]*>([^<]+)</th>", head) == ["method", "exact match (needle)", "perplexity"]
    assert re.findall("<small>([^<]+)</small>", head) == ["64 (1x)", "256 (4x)"] * 2
    assert "higher is better: exact match (needle)\nlower is better: perplexity\n" in shown


def test_measures_at_more_than_two_lengths_have_a_chart(tmp_path: Path) -> None:
    longer = {name: row | {128: 2.0} for name, row in LOSSES.items()}
    for values, charts in ((LOSSES, []), (longer, ["Perplexity"])):
        comparison = Comparison([losses(tmp_path, values), answers(tmp_path, ANSWERS)])
        page = comparison.write_page(tmp_path / "page.html").read_text("utf-8")
        assert re.findall("<figcaption>([A-Z][a-z]+)", page) == charts
        assert ('<div class="charts">' in page) is bool(charts)


def test_labels_are_short_where_that_tells_methods_apart() -> None:
    assert short_labels(["unpatched", "yarn x8", "rerope llama4 window=128"]) == ["unpatched", "yarn x8", "rerope"]
    both = ["rerope window=128", "rerope window=64"]
    assert short_labels(both) == both
