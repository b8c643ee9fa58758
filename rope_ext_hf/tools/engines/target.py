"""`Target`, a model with a RoPE method that an engine is to serve, and `Encoding`, one way to write it in a config."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rope_ext_hf.bounds import NO_ROTATION
from rope_ext_hf.models.config_keys import Config


@dataclass(frozen=True, eq=False)
class Target:
    """A model with a RoPE method that an engine is to serve, and the numbers that the engine must compute for it.

    Targets are compared and hashed by identity, so that functions can cache their result for a target.
    """

    model: str  # the folder or Hub id, for the commands
    config: Config  # the text config before the method, in the spelling of transformers 5
    patched: Config  # the text config with the method in it
    composite: bool  # whether the text config lies under `text_config` of the model's config
    layer_type: str | None  # the type of the layers that the method applies to; None: all layers
    inv_freq: tuple[float, ...]  # measured, like the next two numbers; `Computed` describes all three
    attention_factor: float
    softmax_scale: float
    theta: float  # the base of the rotary embedding
    original: int  # the length in tokens that RoPE without any scaling is for
    length: int  # the length in tokens to serve
    method: str  # the name of the method, for messages
    notes: tuple[str, ...] = ()  # sentences for the user, e.g. on layers that the method does not reach
    mistral_format: bool = False  # whether the folder holds params.json, Mistral's own format, beside config.json

    @functools.cached_property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """The rope settings that transformers would save for the layers that the method applies to."""
        parameters = self.patched["rope_parameters"]
        settings = dict(parameters if self.layer_type is None else parameters[self.layer_type])
        settings.setdefault("rope_type", settings.get("type", "default"))
        return settings

    @functools.cached_property
    def divisors(self) -> list[float]:
        """The unscaled frequency of each rotated pair, theta^(-2i/d), divided by its frequency under the method.

        A frequency of 0 has the divisor `NO_ROTATION`.
        """
        dim = 2 * len(self.inv_freq)
        return [
            min(float(self.theta) ** (-2 * i / dim) / value, NO_ROTATION) if value else NO_ROTATION
            for i, value in enumerate(self.inv_freq)
        ]

    def placed(self, keys: dict[str, Any]) -> dict[str, Any]:
        """Return keys of the text config as the model's config nests them.

        In a composite model they lie under `text_config`.
        """
        return {"text_config": keys} if self.composite and keys else keys

    def with_settings(self, settings: Config) -> dict[str, Any]:
        """Return the value of `rope_parameters` with these settings for the layers that the method applies to.

        The other layers keep their own settings.
        """
        if self.layer_type is None:
            return dict(settings)
        layers = {key: value for key, value in self.patched["rope_parameters"].items() if isinstance(value, Mapping)}
        return layers | {self.layer_type: dict(settings)}


@dataclass(frozen=True)
class Encoding:
    """One way to write a RoPE method in a config, as rope settings and other config keys that an engine reads."""

    name: str  # names it in reports: "native", "longrope with equal lists", ...
    settings: dict[str, Any]  # the rope settings
    config: dict[str, Any] = field(default_factory=dict)  # further keys of the text config
