"""Effective lengths, and tables of suites' scores."""

from __future__ import annotations

from typing import Any

import pytest

from rope_ext_hf.reading.scorer import Cost
from rope_ext_hf.runs.conclusions.labels import method_key
from rope_ext_hf.runs.conclusions.measures import EffectiveLength
from rope_ext_hf.runs.kinds import run_kind
from rope_ext_hf.runs.run import Run
from rope_ext_hf.tools.suites.task_runs import TaskResult, TaskScore, TaskSetting, effective_lengths

SETTING = TaskSetting("ruler", "vt,cwe", "generate", 42, False, 0)
YARN = {"method": "yarn", "factor": 4.0}


def a_run(scores: dict[Any, dict[int, tuple[list[float], list[float]]]], chance: float = 0.0) -> Run[TaskResult]:
    """Return a run with scores of both tasks, by method ("yarn" or None) and length."""
    kind = run_kind("tasks")
    results = [
        kind.result(YARN if method else None, SETTING, (length, task), [TaskScore(s, "") for s in some], [Cost()])
        for method, row in scores.items()
        for length, both in row.items()
        for task, some in enumerate(both)
    ]
    settings = {"kind": "tasks", "loaded": None, "context_length": 1024, "over": "own", "model": "m", "data": "d"}
    return Run(None, settings | {"setting": vars(SETTING) | {"chance": chance}}, results, kind)  # type: ignore[arg-type]


ONES, HALF = [1.0] * 16, [1.0, 0.0] * 8


def reaches(run: Run[TaskResult]) -> tuple[Any, ...]:
    lengths = effective_lengths(run)
    return lengths.get(method_key(None)), lengths.get(method_key(YARN))


def test_the_longest_length_that_keeps_the_score_of_the_shortest() -> None:
    run = a_run(
        {
            None: {1024: (ONES, ONES), 2048: (HALF, HALF), 4096: (ONES, ONES)},
            "yarn": {1024: (ONES, ONES), 2048: (ONES, ONES), 4096: ([1.0] * 12 + [0.0] * 4, ONES)},
        }
    )
    loaded, yarn = reaches(run)
    assert loaded == EffectiveLength(1024, 1024, 1024)  # half of the prompts: surely below 85%
    assert yarn == EffectiveLength(4096, 0, 4096)  # 16 prompts, all right, may be of a model that answers 80%
    many = a_run({None: {1024: (ONES * 8, ONES * 8), 2048: (ONES * 8, ONES * 8), 4096: (HALF * 8, ONES * 8)}})
    assert reaches(many)[0] == EffectiveLength(2048, 2048, 2048)


def test_scores_at_luck_have_no_effective_length() -> None:
    """A model that answers one in twenty, where one in twenty is right by chance, has no effective length."""
    lucky = ([1.0] + [0.0] * 15, [0.0] * 16)
    run = a_run({None: {1024: lucky, 2048: lucky}}, chance=0.05)
    assert effective_lengths(run) == {}
    assert effective_lengths(a_run({None: {1024: (ONES, ONES), 2048: lucky}}, chance=0.05)) != {}


def test_one_length_is_no_effective_length() -> None:
    assert effective_lengths(a_run({None: {1024: (ONES, ONES)}})) == {}


def test_a_method_is_held_against_the_model_as_loaded_and_alone_against_itself() -> None:
    worse = {1024: (HALF, HALF), 2048: (HALF, HALF)}
    loaded, yarn = reaches(a_run({None: {1024: (ONES, ONES), 2048: (ONES, ONES)}, "yarn": worse}))
    assert loaded.length == 2048
    assert yarn.length == 0
    _, alone = reaches(a_run({"yarn": worse}))
    assert alone.length == 2048


def test_nothing_right_at_the_shortest_length_has_no_effective_length() -> None:
    zero = [0.0] * 16
    run = a_run({None: {1024: (zero, zero), 2048: (zero, zero)}})
    assert effective_lengths(run) == {}
    assert "no method is significantly above chance" in str(run.conclusion)


def test_a_length_counts_once_all_tasks_are_complete() -> None:
    run = a_run({None: {1024: (ONES, ONES), 2048: (ONES, ONES)}})
    assert reaches(run)[0].length == 2048
    run = Run(None, run.settings, run.results[:-1], run.kind)
    assert reaches(run)[0] is None
    assert [row["suite_score"] for row in run.rows()] == [1.0, 1.0, ""]


def test_table_conclusion_and_charts() -> None:
    run = a_run(
        {
            None: {1024: (ONES, HALF), 2048: (HALF, HALF)},
            "yarn": {1024: (ONES, HALF), 2048: (ONES, HALF)},
        }
    )
    table = run.table(detailed=True)
    assert table is not None
    cells = [list(column.cells) for column in table.columns]
    assert [str(cell) for cell in cells[1]] == ["all", "vt", "cwe"] * 2
    assert cells[2] == ["75.0% ", "100.0% ", "50.0% "] * 2
    assert cells[3][:3] == ["50.0%\N{DAGGER}"] * 3  # twice the context length of the model as loaded
    assert cells[3][3:] == ["75.0% ", "100.0% ", "50.0% "]
    assert str(cells[4][3]).startswith("2,048 (")
    text = str(run.conclusion)
    assert text.startswith("Best at 2,048 tokens (2x): yarn x4, score of ruler 75.0% (unpatched 50.0%)")
    assert run.chart is not None
    chart = run.chart.svg()
    assert chart.count('stroke-dasharray="6 3"') == 1  # the threshold
    matplotlib = pytest.importorskip("matplotlib")
    figure = run.plot()
    levels = [line.get_ydata()[0] for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert any(abs(level - 0.85 * 75) < 1e-6 for level in levels), matplotlib.__version__


@pytest.mark.parametrize("value", [[1], [2.0, ""], [True, ""], [0.5, 3], "x", [float("nan"), ""]])
def test_a_damaged_value_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="expected \\[score, answer\\]"):
        run_kind("tasks").parse("sample 0", value)


def test_a_value_returns_from_the_journal() -> None:
    value = TaskScore(0.25, "an answer")
    assert run_kind("tasks").parse("sample 0", value.to_record()) == value
