"""torchtitan: the attention of the named size for a model, as a user gets it who names the size and writes no more."""

from __future__ import annotations

from typing import Any

import rope_settings
from torchtitan_port import factor, first_turn, named_size, version

__all__ = ["inv_freq", "magnitude", "version"]


def _size(config: dict[str, Any]) -> Any:
    attention = named_size(config)
    if attention.rope.theta != rope_settings.read(config)["rope_theta"]:
        raise NotImplementedError  # no size is for this model
    return attention


def inv_freq(config: dict[str, Any]) -> Any:
    return first_turn(_size(config)).angle().tolist()


def magnitude(config: dict[str, Any]) -> float:
    return float(factor(_size(config)))
