"""How well a model reads at long context lengths: perplexity, retrieval, task suites, lm-evaluation-harness.

from rope_ext_hf.eval import passkey, perplexity, sweep, tasks
from rope_ext_hf.eval import RopeHFLM      # needs lm-eval
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rope_ext_hf.eval.need_question import need
from rope_ext_hf.eval.need_verdicts import Need
from rope_ext_hf.eval.perplexity_question import perplexity, sweep
from rope_ext_hf.eval.perplexity_results import Result
from rope_ext_hf.eval.retrieval_question import passkey
from rope_ext_hf.eval.retrieval_runs import Retrieval
from rope_ext_hf.eval.task_question import tasks
from rope_ext_hf.eval.task_runs import TaskResult
from rope_ext_hf.reading.documents import Document
from rope_ext_hf.runs.comparison import Comparison, compare_runs
from rope_ext_hf.runs.folder import read_run
from rope_ext_hf.runs.kinds import Results, Run

if TYPE_CHECKING:
    from rope_ext_hf.eval.lm_eval_adapter import RopeHFLM

__all__ = [
    "Comparison",
    "Document",
    "Need",
    "Result",
    "Results",
    "Retrieval",
    "RopeHFLM",
    "Run",
    "TaskResult",
    "compare_runs",
    "need",
    "passkey",
    "perplexity",
    "read_run",
    "sweep",
    "tasks",
]


def __getattr__(name: str) -> Any:
    if name != "RopeHFLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("rope_ext_hf.eval.lm_eval_adapter").RopeHFLM
