"""Advice: which method for a longer context, and the commands to type next.

from rope_ext_hf.tools.advice import advise
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rope_ext_hf.lazy import lazy_names

if TYPE_CHECKING:
    from rope_ext_hf.tools.advice.advice import Advice as Advice
    from rope_ext_hf.tools.advice.advising import advise as advise

__all__, __getattr__, __dir__ = lazy_names(__name__)
