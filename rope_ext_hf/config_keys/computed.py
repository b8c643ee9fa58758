"""The keys that an engine reads from a config (`RopeKeys`), and the numbers that it computes (`Computed`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rope_ext_hf.config_keys import formulas
from rope_ext_hf.config_keys.keys import Config, needed, rope_divisors

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

    def difference(self, inv_freq: Sequence[float], attention_factor: float, softmax_scale: float) -> str | None:
        """The first difference from these frequencies and magnitudes, as text; None where all agree to 1e-6."""
        if len(inv_freq) != len(self.inv_freq):
            return f"it rotates {len(self.inv_freq)} pairs, not {len(inv_freq)}"
        worst = 0.0
        for a, b in zip(self.inv_freq, inv_freq, strict=True):
            worst = max(worst, abs(a - b) / abs(b) if b else abs(a))
        if worst > _EXACT:
            return f"its frequencies differ by up to {worst:.2g}"
        if not math.isclose(self.attention_factor, attention_factor, rel_tol=_EXACT):
            return f"its magnitude would be {self.attention_factor:.6g} instead of {attention_factor:.6g}"
        if not math.isclose(self.softmax_scale, softmax_scale, rel_tol=_EXACT):
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
        return formulas.yarn_magnitude(factor, mscale) / formulas.yarn_magnitude(factor, all_dim)

    def divided(self, key: str) -> list[float]:
        """The frequencies of a longrope by one of its lists, "long_factor" or "short_factor"."""
        return formulas.divided(self.theta, self.dim, rope_divisors(self.settings, key, self.dim))

    def computed(self, inv_freq: Sequence[float], magnitude: float = 1.0, *notes: str) -> Computed:
        """The result, with further notes."""
        return Computed(tuple(inv_freq), magnitude, self.length, self.table, self.softmax_scale, (*self.notes, *notes))
