"""Divergence of a model's distributions from those of an earlier run, which has stored its last hidden states.

from rope_ext_hf.tools.divergence import Divergence, divergence
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rope_ext_hf.lazy import lazy_names

if TYPE_CHECKING:
    from rope_ext_hf.tools.divergence.divergence_options import Divergence as Divergence
    from rope_ext_hf.tools.divergence.divergence_runs import DivergenceResult as DivergenceResult
    from rope_ext_hf.tools.divergence.evaluation import divergence as divergence

__all__, __getattr__, __dir__ = lazy_names(__name__)
