"""transformers: huggingface/transformers 5.23.0 and 4.57.6, src/transformers/modeling_rope_utils.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rope_ext_hf.engines.base import (
    Computed,
    ConfigEngine,
    Encoding,
    ServingConfig,
    Target,
    length_setting,
    merged,
    needed,
    register_engine,
    rope_divisors,
    rope_settings,
    rotated_dims,
    text_settings,
)
from rope_ext_hf.engines.formulas import divided, linear, llama3, longrope_magnitude, plain, yarn, yarn_magnitude
from rope_ext_hf.errors import ServingError

MLA_FAMILIES = frozenset(
    {
        "axk1",
        "axk2",
        "bailing_hybrid",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "hy_v4",
        "kimi_k2",
        "longcat_flash",
        "minicpm3",
        "mistral4",
        "mistral_large4_text",
        "youtu",
    }
)
"""Families with latent attention, whose softmax scale depends on mscale_all_dim."""


def _mla_softmax_scale(text: Mapping[str, Any], settings: Mapping[str, Any]) -> float:
    """What the attention of DeepSeek and its kin multiplies its softmax scale by."""
    if text.get("model_type") not in MLA_FAMILIES or settings["rope_type"] == "default":
        return 1.0
    if not settings.get("mscale_all_dim"):
        return 1.0
    return yarn_magnitude(needed(settings, "factor"), needed(settings, "mscale_all_dim")) ** 2


def yarn_by_config(settings: Mapping[str, Any], dim: int, factor: float, original: float, *, truncate: bool) -> Any:
    """The frequencies of a yarn with the betas of its settings."""
    fast, slow = settings.get("beta_fast") or 32.0, settings.get("beta_slow") or 1.0
    return yarn(settings["rope_theta"], dim, factor, original, fast, slow, truncate)


def yarn_magnitude_by_config(settings: Mapping[str, Any], factor: float) -> float:
    """The magnitude of a yarn: attention_factor, else the ratio of both mscales, else 0.1 ln s + 1."""
    if settings.get("attention_factor") is not None:
        return needed(settings, "attention_factor")
    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale and all_dim:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    return yarn_magnitude(factor)


def config_changes(target: Target, encoding: Encoding) -> dict[str, Any]:
    """The keys of the text config that a encoding changes."""
    written = {"rope_parameters": target.with_settings(encoding.settings)} | encoding.config
    return {key: value for key, value in written.items() if target.config.get(key) != value}


class _Rules(ConfigEngine):
    """What the versions of transformers have in common."""

    title = "transformers"
    follows_input = True

    def encodings(self, target: Target) -> Iterator[Encoding]:
        changed = {key: value for key, value in target.patched.items() if target.config.get(key) != value}
        changed.pop("rope_parameters", None)
        yield Encoding("native", target.settings, changed)

    def config(self, target: Target, encoding: Encoding) -> dict[str, Any]:
        return merged(target.config, config_changes(target, encoding))

    def served(self, target: Target, encoding: Encoding, computed: Computed) -> ServingConfig:
        keys = config_changes(target, encoding)
        return self.serving(
            target,
            encoding.name,
            computed,
            config_keys=target.placed(keys),
            notes=("Write these keys into config.json (rope-ext patch does), or patch the loaded model.",),
        )

    def computes(self, config: Mapping[str, Any], length: int | None = None) -> Computed:
        text = text_settings(config)
        settings = rope_settings(text)
        kind, most = settings["rope_type"], length_setting(text)
        notes: list[str] = []
        magnitude, served, by_length = 1.0, most, False
        proportional = kind == "proportional"
        dim = rotated_dims(text, {} if proportional else settings)
        theta = settings["rope_theta"]
        if kind == "default":
            inv_freq = plain(theta, dim)
        elif kind == "linear":
            inv_freq = linear(theta, dim, needed(settings, "factor"))
        elif proportional:
            rotated = int(needed(settings, "partial_rotary_factor", 1.0) * dim // 2)
            factor = needed(settings, "factor", 1.0)
            inv_freq = [value * (pair < rotated) for pair, value in enumerate(linear(theta, dim, factor))]
        elif kind == "dynamic":
            inv_freq = plain(theta, dim)
            notes.append("dynamic: the frequencies follow the longest input so far; these are for short inputs.")
        elif kind == "llama3":
            low, high = needed(settings, "low_freq_factor"), needed(settings, "high_freq_factor")
            original = needed(settings, "original_max_position_embeddings")
            inv_freq = llama3(theta, dim, needed(settings, "factor"), original, low, high)
        elif kind == "yarn":
            original = needed(settings, "original_max_position_embeddings", most)
            factor = needed(settings, "factor", max(1.0, most / original))
            truncate = settings.get("_shared_truncate", settings.get("truncate", True))
            inv_freq = yarn_by_config(settings, dim, factor, original, truncate=bool(truncate))
            magnitude = yarn_magnitude_by_config(settings, factor)
        elif kind in ("longrope", "su"):
            original = needed(settings, "original_max_position_embeddings", most)
            scale = needed(settings, "factor", most / original)
            magnitude = needed(settings, "attention_factor", longrope_magnitude(scale, original))
            long = (length or most) > original
            inv_freq = divided(theta, dim, rope_divisors(settings, "long_factor" if long else "short_factor", dim))
            by_length = settings["long_factor"] != settings["short_factor"]
            if by_length:
                notes.append(f"longrope: short_factor up to {original:g} tokens, long_factor beyond, for each input.")
        else:
            raise ServingError(f"transformers {self.version} has no rope type {kind!r}")
        scale = _mla_softmax_scale(text, settings)
        return Computed(tuple(inv_freq), magnitude, served, None, scale, tuple(notes), by_length)


class _FormerTransformers(_Rules):
    """transformers 4, which reads top-level `rope_theta` and `rope_scaling`."""

    version = "4.57"

    def computes(self, config: Mapping[str, Any], length: int | None = None) -> Computed:
        text = text_settings(config)
        scaling = dict(text.get("rope_scaling") or {})
        if scaling.get("rope_type", scaling.get("type")) in (
            "longrope",
            "su",
        ):  # its class reads the config's key alone
            scaling.pop("original_max_position_embeddings", None)
        return super().computes({**text, "rope_scaling": scaling, "rope_parameters": None}, length)


@register_engine("transformers")
class Transformers(_Rules):
    """Plain transformers."""

    version = "5.23.0"
    reference = True
    former = _FormerTransformers
