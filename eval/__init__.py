"""Measurements of how far a model reads.

from rope_ext_hf.eval import passkey, perplexity, sweep
from rope_ext_hf.eval import RopeHFLM      # needs lm-eval
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rope_ext_hf.eval.measuring import perplexity
from rope_ext_hf.eval.results import Result
from rope_ext_hf.eval.retrieval import passkey
from rope_ext_hf.eval.sweeps import sweep

if TYPE_CHECKING:
    from rope_ext_hf.eval.lm_eval_adapter import RopeHFLM

__all__ = ["Result", "RopeHFLM", "passkey", "perplexity", "sweep"]


def __getattr__(name: str) -> Any:
    if name == "RopeHFLM":  # lm-eval takes seconds to import, and is optional
        from rope_ext_hf.eval.lm_eval_adapter import RopeHFLM

        return RopeHFLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
