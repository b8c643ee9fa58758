"""Measurements of how far a model reads.

from rope_ext_hf.eval import passkey, perplexity, sweep
"""

from __future__ import annotations

from rope_ext_hf.eval.perplexity import perplexity
from rope_ext_hf.eval.results import Result
from rope_ext_hf.eval.retrieval import passkey
from rope_ext_hf.eval.runs import sweep

__all__ = ["Result", "passkey", "perplexity", "sweep"]
