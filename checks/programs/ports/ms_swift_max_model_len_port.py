"""ms-swift, where `--max_model_len` states the length that a folder is for."""

from __future__ import annotations

import loaded
from ms_swift_port import load, version

__all__ = ["inv_freq", "magnitude", "version"]

inv_freq, magnitude = loaded.functions(
    lambda config, context_length, original_length: load(config, max_model_len=context_length)
)
