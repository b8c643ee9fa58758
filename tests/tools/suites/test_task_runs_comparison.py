"""Scores of tasks beside losses on one page: the best method, effective lengths, and scores at chance level."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rope_ext_hf.reading.scorer import Cost
from rope_ext_hf.runs.comparison import Comparison
from rope_ext_hf.runs.kinds import run_kind
from rope_ext_hf.runs.run import Run
from rope_ext_hf.tools.suites.task_runs import TaskScore, TaskSetting
from tests.runs.test_comparison import ANSWERS, COMMON, LOSSES, METHODS, best, losses


def answers(folder: Path, values: dict[str, dict[int, int]], **changed: Any) -> Run[Any]:
    """Return a run of tasks in which so many of 40 prompts are answered, by method and length."""
    kind, setting = run_kind("tasks"), TaskSetting("ruler", "vt", "generate", 42, False, 0)
    results = [
        kind.result(METHODS[name], setting, (n, 0), [TaskScore(float(i < right), "") for i in range(40)], [Cost()])
        for name, row in values.items()
        for n, right in row.items()
    ]
    return Run(folder, COMMON | {"kind": "tasks", "setting": vars(setting)} | changed, results, kind)


def test_answers_decide_before_losses(tmp_path: Path) -> None:
    comparison = Comparison([losses(tmp_path, LOSSES, {"yarn": 40.0}), answers(tmp_path, ANSWERS)])
    assert best(comparison) == "yarn x4"
    assert str(comparison.conclusion) == (
        "Best at 256 tokens (4x): yarn x4, score of ruler 85.0% and perplexity 4.66 (unpatched 0.0% and 154). "
        "Short inputs (64 tokens): no significant difference in score of ruler (87.5%, unpatched 90.0%); perplexity "
        "gets worse (2.83 to 3.46). "
        "By perplexity alone, ntk x4 would be best (4.22). "
        "Effective length by score of ruler: 256 tokens, the longest measured (95% confidence interval: 0 or more); "
        "unpatched 64 tokens."
    )


def test_a_measure_at_luck_decides_nothing(tmp_path: Path) -> None:
    nothing = {name: {64: 0, 256: 0} for name in ANSWERS}
    comparison = Comparison([answers(tmp_path, nothing), losses(tmp_path, LOSSES)])
    assert best(comparison) == "ntk x4"
    assert "Score of ruler: no method is significantly above chance." in str(comparison.conclusion)
    assert comparison.agreements() == []


def test_the_page_and_the_json(tmp_path: Path) -> None:
    longer = {name: row | {128: 2.0} for name, row in LOSSES.items()}
    comparison = Comparison([losses(tmp_path, longer), answers(tmp_path, ANSWERS)])
    page = comparison.write_page(tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2  # of the perplexity, for a phone and for a wide window
    order = ("How well", "Best at", "<table", "<svg", "<details", "(0.0% to", "Do the measures agree", "<pre>")
    assert (places := [page.index(text) for text in order]) == sorted(places)
    assert "http" not in page.replace("http://www.w3.org", "")
    values = json.loads(json.dumps(comparison.to_dict()))
    assert values["best"] == "yarn x4"
    assert values["measures"][0]["effective_lengths"]["unpatched"] == {"length": 64, "low": 64, "high": 64}
    assert len(values["measures"][1]["values"]) == 12
    assert comparison._repr_html_().startswith("<p>Best at 256")
