"""Base class of vLLM and SGLang, which take overrides of config.json on their command line, and can load a plug-in."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from rope_ext_hf.errors import ServingError
from rope_ext_hf.installing import install_command
from rope_ext_hf.models.config_keys import GEOMETRY_KEYS
from rope_ext_hf.tools.engines.base import NotCheckedError
from rope_ext_hf.tools.engines.config_engine import ConfigEngine
from rope_ext_hf.tools.engines.formulas import alpha_theta, plain
from rope_ext_hf.tools.engines.keys import PLUGIN_TYPE, Computed, RopeKeys, length_setting, plugin_frequencies
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.engines.target import Encoding, Target

_BY_PLUGIN = "frequencies for the plug-in"  # the name of the encoding, in reports


class OverridingEngine(ConfigEngine):
    """Base class of the engines that take JSON on their command line which overrides keys of config.json."""

    unknown_type = "freezes or refuses the rope type {!r}"
    option: ClassVar[str]  # the option that takes the overrides, as JSON

    @abstractmethod
    def start(self, target: Target) -> tuple[str, ...]:
        """Return the command line that starts the engine for a target, without the overrides of the config."""

    def spelled(self, target: Target, settings: dict[str, Any]) -> dict[str, Any]:
        """Return rope settings with the keys that this engine alone needs; by default they stay unchanged."""
        return settings

    def stated_length(self, target: Target, settings: dict[str, Any]) -> int:
        """Return the value for max_position_embeddings from which the engine derives the length to be served."""
        return target.length

    def encodings(self, target: Target) -> Iterator[Encoding]:
        unchanged = target.patched["rope_parameters"] == target.config["rope_parameters"]
        if unchanged and target.length <= length_setting(target.config):
            yield Encoding("as published", target.settings)
        for encoding in super().encodings(target):
            settings = self.spelled(target, encoding.settings)
            changed = {"max_position_embeddings": self.stated_length(target, settings)}
            if target.config.get("original_max_position_embeddings") and encoding.name != "native":
                changed["original_max_position_embeddings"] = settings["original_max_position_embeddings"]
            yield Encoding(encoding.name, settings, changed)

    def by_type(self, rope: RopeKeys) -> Computed:
        if rope.model_type in self.table["theta_alone"]:
            notes = () if rope.kind == "default" else (f"{rope.model_type}: the rope type {rope.kind} is ignored.",)
            theta = int(rope.theta) if rope.model_type in self.table["whole_theta"] else rope.theta
            return replace(rope, notes=notes).computed(plain(theta, rope.dim))
        if "mrope_section" in rope.settings and rope.kind not in ("default", "yarn"):
            raise ServingError(f"the engine's class for {rope.kind} does not take the positions of M-RoPE")
        return super().by_type(rope)

    def other(self, rope: RopeKeys) -> Computed:
        if rope.kind == "proportional":
            raise NotCheckedError("this package does not know how the engine's rotary class for Gemma 4 computes RoPE")
        if rope.kind == "dynamic" and "alpha" in rope.settings:  # both have DynamicNTKAlphaRotaryEmbedding
            return rope.computed(plain(alpha_theta(rope.theta, rope.dim, rope.number("alpha")), rope.dim))
        return super().other(rope)

    def by_plugin(self, rope: RopeKeys, length: int | None, *, latent: bool) -> Computed:
        """Return the frequencies and magnitude that the engine computes with this package's plug-in.

        `latent` says that the model has DeepSeek's latent attention, with a softmax scale that depends on the rope
        settings.

        Raises:
            ServingError: the engine's code for this family does not pass the rope settings to the plug-in.
        """
        if rope.model_type in self.table["theta_alone"]:
            raise ServingError(
                f"the engine's code for {rope.model_type} passes on theta alone, so the plug-in would get no settings"
            )
        inv_freq, magnitude = plugin_frequencies(rope.settings)
        return Computed(inv_freq, magnitude, length, softmax_scale=rope.latent_scale if latent else 1.0)

    def served(self, target: Target, encoding: Encoding, changes: dict[str, Any], computed: Computed) -> ServingConfig:
        overrides = target.placed(changes)
        notes = computed.notes
        if encoding.name == _BY_PLUGIN:
            command = install_command("", "--no-deps")
            notes += (f"Install this package beside {self.title}, which loads it: {command}",)
        return self.serving(
            target,
            encoding.name,
            computed,
            command=(*self.start(target), *((self.option, json.dumps(overrides)) if overrides else ())),
            overrides=overrides or None,
            config_keys=overrides,
            notes=notes,
        )

    def config_for(self, target: Target) -> ServingConfig:
        try:
            return super().config_for(target)
        except ServingError as error:
            served = False
            with suppress(ServingError):
                if type(plugin := self.with_plugin()) is not type(self):
                    plugin.config_for(target)
                    served = True
            if not served:
                raise
            raise ServingError(
                f"{error}. With the plug-in of this package {self.name} serves it: add --plugin"
            ) from error


def plugin_encoding(target: Target, **more: Any) -> Encoding:
    """Return an encoding for this package's plug-in: settings with the target's frequencies and magnitude.

    `more` are further settings.
    """
    settings = {key: value for key, value in target.settings.items() if key in GEOMETRY_KEYS} | {
        "rope_type": PLUGIN_TYPE,
        "rope_theta": target.theta,
        "inv_freq": json.dumps(list(target.inv_freq)),
        "attention_factor": target.attention_factor,
    }
    return Encoding(_BY_PLUGIN, settings | more, {"max_position_embeddings": target.length})
