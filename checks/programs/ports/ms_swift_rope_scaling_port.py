"""ms-swift, where `--rope_scaling` and `--max_model_len` ask for the scaling of a config, and the folder has none."""

from __future__ import annotations

from typing import Any

import loaded
from ms_swift_port import load, version

__all__ = ["inv_freq", "magnitude", "version"]

WORDS = ("linear", "dynamic", "yarn")


def _extended(config: loaded.Config, context_length: int, original_length: int) -> Any:
    config, kind = loaded.without_scaling(config, original_length)
    if kind == "default":
        return load(config)
    if kind not in WORDS:
        raise NotImplementedError
    return load(config, rope_scaling=kind, max_model_len=context_length)


inv_freq, magnitude = loaded.functions(_extended)
