"""LLaMA-Factory, where `rope_scaling` and `cutoff_len` ask for the scaling of a config, and the folder has none."""

from __future__ import annotations

from typing import Any

import loaded
from llamafactory_port import load, version

__all__ = ["inv_freq", "magnitude", "version"]

WORDS = ("linear", "dynamic", "yarn", "llama3")


def _extended(config: loaded.Config, context_length: int, original_length: int) -> Any:
    config, kind = loaded.without_scaling(config, original_length)
    if kind == "default":
        return load(config, context_length)
    if kind not in WORDS:
        raise NotImplementedError
    return load(config, context_length, rope_scaling=kind)


inv_freq, magnitude = loaded.functions(_extended)
