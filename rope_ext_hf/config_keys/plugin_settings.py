"""The settings of the rope type of this package's plug-ins for engines: they hold the frequencies themselves."""

from __future__ import annotations

import json
from typing import Any

from rope_ext_hf.config_keys.keys import Config

PLUGIN_TYPE = "rope_ext_hf"
"""The rope type; `rope_ext_hf.plugins.tables` describes its settings and builds their tables."""
REMAPPING_KEY = "remapping"
"""The setting that holds a remapping method and the pairing of the model, as JSON text."""


def plugin_settings(settings: Config) -> dict[str, Any] | None:
    """Rope settings with their `inv_freq` and `attention_factor`, under whatever keys they came; None without them.

    Some models of engines read or hand on certain keys alone: vLLM's gpt-oss YaRN's, of which `beta_fast` holds the
    frequencies and `beta_slow` the magnitude, and its DeepSeek has another use for an `attention_factor` of 1.
    """
    if "inv_freq" in settings:
        return {"attention_factor": settings.get("magnitude")} | dict(settings)
    if isinstance(settings.get("beta_fast"), str):
        return dict(settings) | {"inv_freq": settings["beta_fast"], "attention_factor": settings["beta_slow"]}
    return None


def plugin_frequencies(settings: Config) -> tuple[tuple[float, ...], float]:
    """The frequencies and the magnitude that settings for the plug-ins hold."""
    held = plugin_settings(settings) or {}
    return tuple(map(float, json.loads(held["inv_freq"]))), float(held["attention_factor"])
