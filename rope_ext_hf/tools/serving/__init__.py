"""Configs and commands for serving engines, audits of configs and GGUF files, and model cards.

from rope_ext_hf.tools.serving import audit, serving_config, write_card
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rope_ext_hf.lazy import lazy_names

if TYPE_CHECKING:
    from rope_ext_hf.tools.engines.serving_config import ServingConfig as ServingConfig
    from rope_ext_hf.tools.serving.auditing import Audit as Audit
    from rope_ext_hf.tools.serving.auditing import audit as audit
    from rope_ext_hf.tools.serving.configs import serving_config as serving_config
    from rope_ext_hf.tools.serving.model_card import write_card as write_card
    from rope_ext_hf.tools.serving.serving_options import GPUServer as GPUServer

__all__, __getattr__, __dir__ = lazy_names(__name__)
