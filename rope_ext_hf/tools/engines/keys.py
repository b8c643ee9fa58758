"""`RopeKeys`, the rope keys that engines read from a config.json, and `Computed`, the numbers they compute from them.

The rope settings that this package's plug-ins for engines read are defined here too.
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
from rope_ext_hf.models.config_keys import Config, needed, rope_settings, rotated_dims, text_settings, yarn_magnitude
from rope_ext_hf.tools.engines import formulas

PLUGIN_TYPE = "rope_ext_hf"
"""The rope type of the plug-ins; `rope_ext_hf.tools.plugins.tables` describes its settings and builds their tables."""
REMAPPING_KEY = "remapping"
"""The setting in which version 0.1.0 named a remapping method for the plug-in of vLLM."""


def check_sliding_layers(text: Config, every: int, engine: str) -> None:
    """Raise ServingError for a Gemma 3 whose layers do not alternate as the engine takes for granted.

    The engine takes every `every`-th layer as one with full attention, and all others as sliding-window layers.
    """
    if text.get("model_type") != "gemma3_text":
        return
    layers = text.get("layer_types")
    pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern", every))
    usual = [(index + 1) % every == 0 for index in range(len(layers or ()))]
    if [kind == "full_attention" for kind in layers or ()] != usual or (not layers and pattern != every):
        raise ServingError(
            f"{engine} takes every {every}th layer for a full-attention layer, which does not hold for this model"
        )


def length_setting(text: Config) -> int:
    """Return max_position_embeddings, in tokens; ServingError: it is missing or not a length."""
    length = text.get("max_position_embeddings") or text_settings(text).get("max_position_embeddings")
    if not isinstance(length, (int, float)) or isinstance(length, bool) or not 0 < length <= MOST_TOKENS:
        problem = "it is missing" if length is None else f"got {length!r}"
        raise ServingError(f"max_position_embeddings must be a length in tokens; {problem}")
    return int(length)


def rope_divisors(settings: Config, key: str, dim: int) -> list[float]:
    """Return one of the two lists of rope settings of the type longrope: a divisor above 0 for each rotated pair.

    Raises:
        ServingError: the list is missing or has the wrong length, or a number in it is not above 0.
    """
    values = settings.get(key)
    if not isinstance(values, (list, tuple)) or len(values) != dim // 2:
        raise ServingError(f"{key} must be a list of {dim // 2} numbers")
    if [value for value in values if not isinstance(value, (int, float)) or not 0 < value < math.inf]:
        raise ServingError(f"every number in {key} must be above 0")
    return list(values)


def plugin_settings(settings: Config) -> dict[str, Any] | None:
    """Return rope settings for this package's plug-in, with the keys `inv_freq` and `attention_factor`.

    Return None if the settings are not for the plug-in. The two numbers may stand under other names, since vLLM's code
    for some models passes on only certain keys. Its gpt-oss passes on YaRN's keys alone, so `beta_fast` holds the
    frequencies and `beta_slow` the magnitude. Its DeepSeek has another use for `attention_factor`, so `magnitude` holds
    the magnitude.
    """
    if "inv_freq" in settings:
        return {"attention_factor": settings.get("magnitude")} | dict(settings)
    if isinstance(settings.get("beta_fast"), str):
        return dict(settings) | {"inv_freq": settings["beta_fast"], "attention_factor": settings["beta_slow"]}
    return None


def plugin_frequencies(settings: Config) -> tuple[tuple[float, ...], float]:
    """Return the frequencies and the magnitude that are written in rope settings for this package's plug-in."""
    numbers = plugin_settings(settings) or {}
    return tuple(map(float, json.loads(numbers["inv_freq"]))), float(numbers["attention_factor"])


_EXACT = 1e-6  # the largest relative difference of frequencies and magnitudes that counts as the same
STILL = 1e-30
"""The frequency, in radians per position, up to which a pair does not rotate: float32 has no divisor that gives 0."""


@dataclass(frozen=True)
class Computed:
    """The RoPE frequencies, magnitude and length that an engine computes from a config or a GGUF file."""

    inv_freq: tuple[float, ...]  # radians per position, for every rotated pair of a full-attention layer
    attention_factor: float  # the number that cos and sin are multiplied by
    length: int | None  # the length in tokens that it serves by default; None: it leaves that to the user
    table: int | None = None  # the number of positions that it has angles for; None: as many as it is started for
    softmax_scale: float = 1.0  # the number that attention multiplies its softmax scale by (DeepSeek's mscale_all_dim)
    notes: tuple[str, ...] = ()  # sentences on settings of this config that the engine ignores or reads differently
    depends_on_total_length: bool = False  # whether shorter inputs get other numbers than these

    def difference(
        self, inv_freq: Sequence[float], attention_factor: float, softmax_scale: float, *, within: float = _EXACT
    ) -> str | None:
        """Return a clause on the first of the given numbers that differs from those of the engine; None if all agree.

        Numbers agree if their relative difference is at most `within`.
        """
        if len(inv_freq) != len(self.inv_freq):
            return f"it rotates {len(self.inv_freq)} pairs, not {len(inv_freq)}"
        worst = 0.0
        for a, b in zip(self.inv_freq, inv_freq, strict=True):
            if max(a, b) > STILL:
                worst = max(worst, abs(a - b) / b if b > STILL else a)
        if worst > within:
            return f"its frequencies differ by up to {float(f'{100 * worst:.2g}'):g}%"
        if not math.isclose(self.attention_factor, attention_factor, rel_tol=within):
            return f"its magnitude would be {self.attention_factor:.6g} instead of {attention_factor:.6g}"
        if not math.isclose(self.softmax_scale, softmax_scale, rel_tol=within):
            return f"its softmax scale would be multiplied by {self.softmax_scale:.6g} instead of {softmax_scale:.6g}"
        return None


@dataclass(frozen=True)
class RopeKeys:
    """The keys for RoPE that an engine reads from a config, with the length and other values for any rope type."""

    text: Config  # the text config
    settings: Config  # its rope settings, with the base as `rope_theta`
    kind: str  # the rope type
    dim: int  # rotated dims per head
    most: int  # max_position_embeddings, in tokens
    started_for: int | None  # the length in tokens that the engine is started for; None: its default
    length: int | None  # this and the next three fields are those of `Computed`
    table: int | None = None
    softmax_scale: float = 1.0
    notes: tuple[str, ...] = ()
    usual: Mapping[str, float] = field(default_factory=dict)
    """The numbers that the engine takes for missing keys; a key that is missing here too is an error."""

    @classmethod
    def of(cls, config: Config, started_for: int | None) -> RopeKeys:
        """Return the rope keys of a config, in the form in which transformers 5 standardises them.

        `started_for` is the length in tokens that the engine is started with; None: max_position_embeddings.
        """
        text = text_settings(config)
        settings, most = rope_settings(text), length_setting(text)
        return cls(text, settings, settings["rope_type"], rotated_dims(text, settings), most, started_for, length=most)

    @cached_property
    def model_type(self) -> str:
        return str(self.text.get("model_type"))

    @cached_property
    def theta(self) -> float:
        return float(self.settings["rope_theta"])

    def number(self, key: str) -> float:
        """Return the number under a key of the rope settings, or the engine's default where the key is missing.

        Raises:
            ServingError: the key is missing, and the engine has no default.
        """
        return needed(self.settings, key, self.usual.get(key))

    def yarn(self, factor: float, original: float, *, truncate: bool) -> list[float]:
        """Return YaRN's frequencies, with beta_fast and beta_slow from the rope settings."""
        fast, slow = self.settings.get("beta_fast") or 32.0, self.settings.get("beta_slow") or 1.0
        return formulas.yarn(self.theta, self.dim, factor, original, fast, slow, truncate)

    def mscale_ratio(self, factor: float) -> float:
        """Return the magnitude of YaRN in DeepSeek's models, from the keys mscale and mscale_all_dim.

        Where they are missing, mscale is 1 and mscale_all_dim is 0.
        """
        mscale, all_dim = float(self.settings.get("mscale", 1)), float(self.settings.get("mscale_all_dim", 0))
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)

    @property
    def latent_scale(self) -> float:
        """The number by which DeepSeek's attention multiplies its softmax scale under YaRN; 1 without mscale_all_dim.

        It is the square of YaRN's magnitude at mscale_all_dim. DeepSeek's attention is called latent attention.
        """
        if not self.settings.get("mscale_all_dim"):
            return 1.0
        return yarn_magnitude(self.number("factor"), needed(self.settings, "mscale_all_dim")) ** 2

    def divided(self, key: str) -> list[float]:
        """Return LongRoPE's frequencies for one of its lists of divisors; `key` is "long_factor" or "short_factor"."""
        return formulas.divided(self.theta, self.dim, rope_divisors(self.settings, key, self.dim))

    def computed(self, inv_freq: Sequence[float], magnitude: float = 1.0, *notes: str) -> Computed:
        """Return a `Computed` with this inv_freq and magnitude, and with the length and other fields of these keys.

        `notes` are added to those that these keys have already.
        """
        return Computed(tuple(inv_freq), magnitude, self.length, self.table, self.softmax_scale, (*self.notes, *notes))
