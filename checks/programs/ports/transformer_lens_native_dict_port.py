"""transformer-lens: its own model out of a dict, one key of which is `rope_scaling`."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformer_lens_native_port import arguments, pairs, version

__all__ = ["inv_freq", "magnitude", "version"]


def _pairs(config: dict[str, Any]) -> Any:
    usual, scaling = arguments(config)
    return pairs(usual | {"rope_scaling": scaling})


def inv_freq(config: dict[str, Any]) -> Any:
    return np.angle(_pairs(config)).tolist()


def magnitude(config: dict[str, Any]) -> float:
    return float(np.median(np.abs(_pairs(config))))
