"""Measurements: perplexity beyond the trained length.

from rope_ext_hf.eval import perplexity
"""

from __future__ import annotations

from rope_ext_hf.eval.perplexity import perplexity
from rope_ext_hf.eval.results import Result

__all__ = ["Result", "perplexity"]
