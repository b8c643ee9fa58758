"""`tasks`: a function that measures a suite of tasks at several context lengths."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rope_ext_hf.eval.evaluations import results_of
from rope_ext_hf.options.arguments import with_fields_of
from rope_ext_hf.runs.run import Results
from rope_ext_hf.tools.suites.suite_options import Tasks
from rope_ext_hf.tools.suites.task_runs import TaskResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@with_fields_of(Tasks)
def tasks(
    model: PreTrainedModel | str | Path, *, progress: Callable[[int], object] | bool | None = None, **fields: Any
) -> Results[TaskResult]:
    """Measure a suite of tasks at several context lengths. Nothing is downloaded.

    Args:
        model: as in `rope_ext_hf.eval.measure`.
        progress: called with the number of tokens read, after each prompt; True shows a tqdm bar.
        **fields: fields of `Tasks`, and further arguments of `measure` such as `methods` and `out`. The tokenizer's
            BOS token does not count towards a length, as in RULER.

    Returns:
        One TaskResult per length and task, as a list that a notebook shows as a table; `.run.table()` has the suite's
        scores and effective lengths.

    Raises:
        ImportError: a package that the prompts are made with is not installed.
        RopeExtError: as in `rope_ext_hf.eval.measure`.
    """
    return results_of(model, Tasks, fields, progress)
