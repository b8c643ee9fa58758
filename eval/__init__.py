"""How well a model reads at long context lengths: perplexity, retrieval, task suites, lm-evaluation-harness.

    from rope_ext_hf.eval import passkey, perplexity, sweep, tasks
    from rope_ext_hf.eval import RopeHFLM      # needs lm-eval

The names are imported at first use: the command line reads the registry of protocols without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rope_ext_hf.eval.comparison import Comparison, compare_runs
    from rope_ext_hf.eval.documents import Document
    from rope_ext_hf.eval.lm_eval_adapter import RopeHFLM
    from rope_ext_hf.eval.measuring import perplexity, sweep
    from rope_ext_hf.eval.needs import Need, need
    from rope_ext_hf.eval.results import Result, Retrieval
    from rope_ext_hf.eval.retrieval import passkey
    from rope_ext_hf.eval.run_folder import read_run
    from rope_ext_hf.eval.runs import Results, Run
    from rope_ext_hf.eval.task_runs import TaskResult
    from rope_ext_hf.eval.task_suites import tasks

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

_MODULES = {
    "Comparison": "comparison",
    "compare_runs": "comparison",
    "Document": "documents",
    "Need": "needs",
    "Result": "results",
    "Results": "runs",
    "Retrieval": "results",
    "RopeHFLM": "lm_eval_adapter",
    "need": "needs",
    "passkey": "retrieval",
    "perplexity": "measuring",
    "Run": "runs",
    "read_run": "run_folder",
    "sweep": "measuring",
    "TaskResult": "task_runs",
    "tasks": "task_suites",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"rope_ext_hf.eval.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
