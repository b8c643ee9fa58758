"""Training of patched models: `finetune`, and a callback, collators and loss weights for your own trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rope_ext_hf.lazy import lazy_names

if TYPE_CHECKING:
    from rope_ext_hf.patches.trials.refusals import check_context_parallel as check_context_parallel
    from rope_ext_hf.tools.training.callback import RopeCallback as RopeCallback
    from rope_ext_hf.tools.training.collators import MixedWindowsCollator as MixedWindowsCollator
    from rope_ext_hf.tools.training.collators import PoSECollator as PoSECollator
    from rope_ext_hf.tools.training.collators import RandomPositionsCollator as RandomPositionsCollator
    from rope_ext_hf.tools.training.finetune_report import FinetuneReport as FinetuneReport
    from rope_ext_hf.tools.training.finetuning import finetune as finetune
    from rope_ext_hf.tools.training.finetuning_options import Finetuning as Finetuning
    from rope_ext_hf.tools.training.longce import longce_weights as longce_weights

__all__, __getattr__, __dir__ = lazy_names(__name__)
