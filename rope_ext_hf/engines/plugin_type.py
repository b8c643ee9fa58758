"""The rope type of this package's plug-ins for engines: its settings hold the frequencies themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rope_ext_hf.engines.base import GEOMETRY_KEYS, ConfigEngine, Encoding, ServingConfig, Target
from rope_ext_hf.errors import ServingError
from rope_ext_hf.installing import install_command

PLUGIN_TYPE = "rope_ext_hf"
"""The rope type; `rope_ext_hf.plugins.tables` describes its settings and builds their tables."""
REMAPPING_KEY = "remapping"
"""The setting that holds a remapping method and the pairing of the model, as JSON text."""


class EngineWithPlugin(ConfigEngine):
    """Base of the engines that load a plug-in of this package."""

    def config_for(self, target: Target) -> ServingConfig:
        try:
            return super().config_for(target)
        except ServingError as error:
            with suppress(ServingError):
                plugin = self.with_plugin()
                if type(plugin) is not type(self) and plugin.config_for(target):
                    error.args = (f"{error}. {self.name} with the plug-in of this package serves it: --plugin",)
            raise


def plugin_encoding(target: Target, more: Mapping[str, Any] | None = None) -> Encoding:
    """The frequencies and magnitude of a target in the settings that the plug-ins read, with more settings."""
    settings = {key: value for key, value in target.settings.items() if key in GEOMETRY_KEYS} | {
        "rope_type": PLUGIN_TYPE,
        "rope_theta": target.theta,
        "inv_freq": json.dumps(list(target.inv_freq)),
        "attention_factor": target.attention_factor,
        **({REMAPPING_KEY: target.remapping} if target.remapping else {}),
    }
    return Encoding(
        "frequencies for the plug-in", settings | dict(more or {}), {"max_position_embeddings": target.length}
    )


def plugin_settings(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """Rope settings with their `inv_freq` and `attention_factor`, under whatever keys they came; None without them.

    Some models of engines read or hand on certain keys alone: vLLM's gpt-oss YaRN's, of which `beta_fast` holds the
    frequencies and `beta_slow` the magnitude, and its DeepSeek has another use for an `attention_factor` of 1.
    """
    if "inv_freq" in settings:
        return {"attention_factor": settings.get("magnitude")} | dict(settings)
    if isinstance(settings.get("beta_fast"), str):
        return dict(settings) | {"inv_freq": settings["beta_fast"], "attention_factor": settings["beta_slow"]}
    return None


def plugin_frequencies(settings: Mapping[str, Any]) -> tuple[tuple[float, ...], float]:
    """The frequencies and the magnitude that settings for the plug-ins hold."""
    held = plugin_settings(settings) or {}
    return tuple(map(float, json.loads(held["inv_freq"]))), float(held["attention_factor"])


def plugin_note(config: ServingConfig, title: str) -> tuple[str, ...]:
    """The notes of a config, and what to install beside an engine for it."""
    return (*config.notes, f"Install this package beside {title}, which loads it: {install_command('', '--no-deps')}")
