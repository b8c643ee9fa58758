"""The papers' formulas on a config.json, in 40 digits. Nothing here imports the package.

>>> rope = read({"model_type": "llama", "head_dim": 4, "rope_theta": 100.0, "max_position_embeddings": 64})
>>> [float(value) for value in rope.inv_freq]
[1.0, 0.1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import cos, sin
from typing import Any

import mpmath
from mpmath import mpf

mpmath.mp.dps = 40
Json = dict[str, Any]
TWO_PI = Fraction(str(mpmath.nstr(2 * mpmath.pi, 38)))


@dataclass(frozen=True)
class Rope:
    """What a config says of one layer type; `axes`: which axis of M-RoPE's positions rotates each pair."""

    inv_freq: list[Any]
    magnitude: Any
    softmax_scale: Any
    width: int
    axes: tuple[int, ...]


def read(config: Json, layer_type: str | None = None, length: int | None = None) -> Rope:
    text = config.get("text_config", config)
    settings = settings_of(text, layer_type)
    width = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if layer_type == "full_attention":
        width = text.get("global_head_dim", width)
    partial = settings.get("partial_rotary_factor", text.get("partial_rotary_factor", text.get("rotary_pct", 1)))
    kind = str(settings.get("rope_type", settings.get("type", "default")))
    width = text.get("qk_rope_head_dim", width)
    dim = width if kind == "proportional" or "qk_rope_head_dim" in text else int(partial * width)
    theta = mpf(settings["rope_theta"])
    plain = [theta ** (-mpf(2 * i) / dim) for i in range(dim // 2)]
    inv_freq, magnitude = KINDS[kind](plain, settings, text, length)
    if kind == "proportional":
        inv_freq = [f if i < int(partial * dim // 2) else mpf(0) for i, f in enumerate(inv_freq)]
    return Rope(inv_freq, magnitude, scores_scale(text, settings, width), width, axes_of(settings, dim // 2))


def settings_of(text: Json, layer_type: str | None) -> Json:
    """The settings of one layer type, theta included."""
    stated = text.get("rope_parameters") or {}
    if layer_type in stated:
        return dict(stated[layer_type])
    if stated:
        return dict(stated)
    theta = text.get("rope_theta", text.get("rotary_emb_base"))
    if layer_type == "sliding_attention":  # Gemma 3 has a base for them; nothing is scaled there, nor in OLMo 3
        return {"rope_theta": text.get("rope_local_base_freq", theta)}
    return {"rope_theta": theta, **(text.get("rope_scaling") or {})}


def scores_scale(text: Json, settings: Json, width: int) -> Any:
    if text["model_type"] == "gemma4_text":  # Gemma 4 normalises queries and keys instead
        return mpf(1)
    if "attention_multiplier" in text:
        return mpf(text["attention_multiplier"])
    scale = 1 / mpmath.sqrt(text.get("query_pre_attn_scalar", width + text.get("qk_nope_head_dim", 0)))
    if "qk_nope_head_dim" in text and settings.get("mscale_all_dim"):  # DeepSeek-V2's code, softmax_scale * mscale**2
        scale *= temperature(settings["factor"], settings["mscale_all_dim"]) ** 2
    return scale


def axes_of(settings: Json, pairs: int) -> tuple[int, ...]:
    """Qwen2-VL splits the pairs into sections; Qwen3-VL deals the first ones out in turn: time, height, width, time."""
    sections = settings.get("mrope_section")
    if not sections:
        return ()
    axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
    if settings.get("mrope_interleaved"):
        axes = [0] * pairs
        for axis in (1, 2):
            axes[axis : 3 * sections[axis] : 3] = [axis] * len(axes[axis : 3 * sections[axis] : 3])
    return tuple(axes)


# --- the scalings: plain frequencies, settings, text config, length -> frequencies, magnitude -------------------------

Scaled = tuple[list[Any], Any]


def default(plain: list[Any], settings: Json, text: Json, length: int | None) -> Scaled:
    return plain, mpf(1)


def linear(plain: list[Any], settings: Json, text: Json, length: int | None) -> Scaled:
    """Position interpolation (2306.15595), eq. 4."""
    return [f / mpf(settings.get("factor", 1)) for f in plain], mpf(1)


def dynamic(plain: list[Any], settings: Json, text: Json, length: int | None) -> Scaled:
    """Dynamic NTK as transformers has it; with Hunyuan's alpha, a static NTK (YaRN paper, 2309.00071, eq. 9)."""
    most = text["max_position_embeddings"]
    s, longest = mpf(settings["factor"]), max(length or most, most)
    alpha = mpf(settings["alpha"]) if settings.get("alpha") else s * longest / most - (s - 1)
    last = len(plain) - 1
    return [f * alpha ** (-mpf(i) / last) for i, f in enumerate(plain)], mpf(1)


def yarn(plain: list[Any], settings: Json, text: Json, length: int | None) -> Scaled:
    """YaRN (2309.00071): the frequencies of the authors' code, and sqrt(1/t) of eq. 22 with DeepSeek's mscale."""
    s, original = mpf(settings["factor"]), settings["original_max_position_embeddings"]
    dim, theta = 2 * len(plain), mpf(settings["rope_theta"])

    def index_with(turns: float) -> Any:
        return dim * mpmath.log(original / (turns * 2 * mpmath.pi)) / (2 * mpmath.log(theta))

    low, high = index_with(settings.get("beta_fast", 32)), index_with(settings.get("beta_slow", 1))
    if settings.get("truncate", True):
        low, high = mpmath.floor(low), mpmath.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += mpf("0.001") if low == high else 0
    ramps = [min(mpf(1), max(mpf(0), (i - low) / (high - low))) for i in range(len(plain))]
    inv_freq = [f / s * ramp + f * (1 - ramp) for f, ramp in zip(plain, ramps, strict=True)]
    if settings.get("attention_factor"):
        return inv_freq, mpf(settings["attention_factor"])
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return inv_freq, temperature(s, settings["mscale"]) / temperature(s, settings["mscale_all_dim"])
    return inv_freq, temperature(s, 1)


def temperature(s: float, m: float) -> Any:
    return mpf(m) / 10 * mpmath.log(s) + 1


def llama3(plain: list[Any], settings: Json, text: Json, length: int | None) -> Scaled:
    """Llama 3.1's published code: pairs by their wavelength against the original length."""
    s, original = mpf(settings["factor"]), settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    result = []
    for f in plain:
        turns = original * f / (2 * mpmath.pi)
        kept = mpf(turns > high) if turns > high or turns < low else (turns - low) / (high - low)
        result.append(kept * f + (1 - kept) * f / s)
    return result, mpf(1)


def longrope(plain: list[Any], settings: Json, text: Json, length: int | None) -> Scaled:
    """LongRoPE (2402.13753) as Phi-3 has it: a list up to the original length, another beyond."""
    original = text.get("original_max_position_embeddings") or settings["original_max_position_embeddings"]
    divisors: Sequence[float] = settings["long_factor" if (length or 0) > original else "short_factor"]
    inv_freq = [f / mpf(divisor) for f, divisor in zip(plain, divisors, strict=True)]
    if settings.get("attention_factor"):
        return inv_freq, mpf(settings["attention_factor"])
    s = mpf(text["max_position_embeddings"]) / original
    return inv_freq, mpmath.sqrt(1 + mpmath.log(s) / mpmath.log(original))


KINDS: dict[str, Callable[[list[Any], Json, Json, int | None], Scaled]] = {
    "default": default,
    "mrope": default,
    "linear": linear,
    "proportional": linear,
    "dynamic": dynamic,
    "yarn": yarn,
    "llama3": llama3,
    "longrope": longrope,
}


def turned(position: int, frequency: float) -> complex:
    """cos + i sin of an exact product, by exact fractions of a turn."""
    angle = float(position * Fraction(frequency) % TWO_PI)
    return complex(cos(angle), sin(angle))
