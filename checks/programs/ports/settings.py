"""Rope settings of a config in any spelling, for programs whose users write them into arguments."""

from __future__ import annotations

from typing import Any


def settings(config: dict[str, Any], layer_type: str | None = None) -> dict[str, Any]:
    """Return the rope settings of a layer, with its `rope_type` and `rope_theta`."""
    saved = config.get("rope_parameters")
    if not saved:  # as transformers 4 saved them
        saved = {"rope_theta": config["rope_theta"], **(config.get("rope_scaling") or {})}
        if layer_type == "sliding_attention":
            saved = {"rope_theta": config.get("rope_local_base_freq", config["rope_theta"])}
    elif layer_type in saved:
        saved = saved[layer_type]
    return {"rope_type": saved.get("type", "default")} | saved
