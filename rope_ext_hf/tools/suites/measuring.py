"""Measure a suite of tasks, or how much a model uses its context, at several context lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.eval.measuring import results_of
from rope_ext_hf.questions import forward
from rope_ext_hf.runs.results import Results
from rope_ext_hf.tools.suites.questions import Tasks
from rope_ext_hf.tools.suites.task_runs import TaskResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@forward(Tasks)
def tasks(
    model: PreTrainedModel | str | Path, *, progress: Callable[[int], object] | bool | None = None, **asked: Any
) -> Results[TaskResult]:
    """Measure a suite of tasks at several context lengths; model and errors are those of
    `rope_ext_hf.eval.measure`.

    Nothing is downloaded. ImportError: a package that makes the prompts is not installed.

    Args:
        progress: called with the number of tokens read, after each prompt; True: a bar of tqdm.
        **asked: fields of `Tasks`, and further arguments of `measure`: methods, out and others. The tokenizer's BOS
            token is not counted, as in RULER.

    Returns:
        One TaskResult per length and task, as a list that a notebook shows as a table; `.run.table()` has the suite's
        scores and effective lengths.
    """
    return results_of(model, Tasks, asked, progress)
