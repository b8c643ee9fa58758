"""The rope keys that engines read from a config.json, and those of this package's plug-ins for engines.

The keys that an engine reads are a `RopeKeys`, the numbers that it computes from them a `Computed`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rope_ext_hf.bounds import MOST_TOKENS
from rope_ext_hf.errors import ServingError
from rope_ext_hf.patches.config_keys import Config, needed, rope_settings, rotated_dims, text_settings, yarn_magnitude
from rope_ext_hf.tools.engines import formulas

PLUGIN_TYPE = "rope_ext_hf"
"""The rope type of the plug-ins; `rope_ext_hf.tools.plugins.tables` describes its settings and builds their tables."""
REMAPPING_KEY = "remapping"  # the setting by which version 0.1.0 named a remapping method to the plug-in of vLLM


def check_sliding_layers(text: Config, every: int, engine: str) -> None:
    """Refuse a Gemma 3 whose full-attention layers are not each `every`-th, as an engine takes them to be."""
    if text.get("model_type") != "gemma3_text":
        return
    layers = text.get("layer_types")
    pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern", every))
    usual = [(index + 1) % every == 0 for index in range(len(layers or ()))]
    if [kind == "full_attention" for kind in layers or ()] != usual or (not layers and pattern != every):
        raise ServingError(
            f"{engine} takes every {every}th layer for one of full attention, and those of this model are others"
        )


def length_setting(text: Config) -> int:
    """max_position_embeddings, in tokens."""
    length = text.get("max_position_embeddings") or text_settings(text).get("max_position_embeddings")
    if not isinstance(length, (int, float)) or isinstance(length, bool) or not 0 < length <= MOST_TOKENS:
        given = "is missing" if length is None else f"is {length!r}"
        raise ServingError(f"max_position_embeddings must be a length in tokens and {given}")
    return int(length)


def rope_divisors(settings: Config, key: str, dim: int) -> list[float]:
    """One of the lists of a longrope, a number above 0 for each rotated pair."""
    values = settings.get(key)
    if not isinstance(values, (list, tuple)) or len(values) != dim // 2:
        raise ServingError(f"{key} must be a list of {dim // 2} numbers")
    if [value for value in values if not isinstance(value, (int, float)) or not 0 < value < math.inf]:
        raise ServingError(f"every number in {key} must be above 0")
    return list(values)


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
    held = plugin_settings(settings) or {}
    return tuple(map(float, json.loads(held["inv_freq"]))), float(held["attention_factor"])


# --- what an engine reads, and what it computes ---------------------------------------------------------------------

_EXACT = 1e-6  # the largest relative difference of frequencies and magnitudes that counts as the same


@dataclass(frozen=True)
class Computed:
    """The numbers that an engine computes from a config."""

    inv_freq: tuple[float, ...]  # radians per position of every rotated pair of a full-attention layer
    attention_factor: float  # the number that cos and sin are multiplied by
    length: int | None  # tokens that the engine serves by default; None: it leaves that to the user
    table: int | None = None  # positions that the engine has angles for; None: as many as asked for
    softmax_scale: float = 1.0  # what the attention multiplies its softmax scale by (DeepSeek's mscale_all_dim)
    notes: tuple[str, ...] = ()  # the settings that the engine passes over in this config, in sentences
    by_length: bool = False  # whether these are for inputs of this length alone, and shorter ones get others

    def difference(
        self, inv_freq: Sequence[float], attention_factor: float, softmax_scale: float, *, within: float = _EXACT
    ) -> str | None:
        """The first relative difference above `within` from these numbers, as text; None where all agree."""
        if len(inv_freq) != len(self.inv_freq):
            return f"it rotates {len(self.inv_freq)} pairs, not {len(inv_freq)}"
        worst = 0.0
        for a, b in zip(self.inv_freq, inv_freq, strict=True):
            worst = max(worst, abs(a - b) / abs(b) if b else abs(a))
        if worst > within:
            return f"its frequencies differ by up to {worst:.2g}"
        if not math.isclose(self.attention_factor, attention_factor, rel_tol=within):
            return f"its magnitude would be {self.attention_factor:.6g} instead of {attention_factor:.6g}"
        if not math.isclose(self.softmax_scale, softmax_scale, rel_tol=within):
            return f"its softmax scale would be multiplied by {self.softmax_scale:.6g} instead of {softmax_scale:.6g}"
        return None


@dataclass(frozen=True)
class RopeKeys:
    """The keys that an engine reads from a config, and the numbers that follow whatever the rope type is."""

    text: Config  # the text config
    settings: Config  # its rope settings, with the base as `rope_theta`
    kind: str  # the rope type
    dim: int  # rotated dims per head
    most: int  # max_position_embeddings, in tokens
    asked: int | None  # tokens that the engine is started for; None: its default
    length: int | None  # this and the next three as in `Computed`
    table: int | None = None
    softmax_scale: float = 1.0
    notes: tuple[str, ...] = ()
    usual: Mapping[str, float] = field(default_factory=dict)
    """The numbers that the engine takes for missing keys; a missing key without one is an error."""

    @classmethod
    def of(cls, config: Config, asked: int | None) -> RopeKeys:
        """The keys of a config as transformers standardises them; the length is max_position_embeddings."""
        text = text_settings(config)
        settings, most = rope_settings(text), length_setting(text)
        return cls(text, settings, settings["rope_type"], rotated_dims(text, settings), most, asked, length=most)

    @cached_property
    def model_type(self) -> str:
        return str(self.text.get("model_type"))

    @cached_property
    def theta(self) -> float:
        return float(self.settings["rope_theta"])

    def number(self, key: str) -> float:
        """A number of the rope settings, else the usual one; ServingError where there is neither."""
        return needed(self.settings, key, self.usual.get(key))

    def yarn(self, factor: float, original: float, *, truncate: bool) -> list[float]:
        """The frequencies of a yarn with the betas of the settings."""
        fast, slow = self.settings.get("beta_fast") or 32.0, self.settings.get("beta_slow") or 1.0
        return formulas.yarn(self.theta, self.dim, factor, original, fast, slow, truncate)

    def mscale_ratio(self, factor: float) -> float:
        """The magnitude of a yarn by DeepSeek's settings, with 1 and 0 where they are missing."""
        mscale, all_dim = float(self.settings.get("mscale", 1)), float(self.settings.get("mscale_all_dim", 0))
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)

    @property
    def latent_scale(self) -> float:
        """What DeepSeek's models multiply their softmax scale by: the square of the magnitude by mscale_all_dim."""
        if not self.settings.get("mscale_all_dim"):
            return 1.0
        return yarn_magnitude(self.number("factor"), needed(self.settings, "mscale_all_dim")) ** 2

    def divided(self, key: str) -> list[float]:
        """The frequencies of a longrope by one of its lists, "long_factor" or "short_factor"."""
        return formulas.divided(self.theta, self.dim, rope_divisors(self.settings, key, self.dim))

    def computed(self, inv_freq: Sequence[float], magnitude: float = 1.0, *notes: str) -> Computed:
        """The result, with further notes."""
        return Computed(tuple(inv_freq), magnitude, self.length, self.table, self.softmax_scale, (*self.notes, *notes))
