"""The rules by which transformers (5.23.0 and 4.57.6) computes RoPE from a config.

They were read in src/transformers/modeling_rope_utils.py of huggingface/transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rope_ext_hf.models.config_keys import Config, needed, text_settings, yarn_magnitude_by_config
from rope_ext_hf.tools.engines.base import register_engine
from rope_ext_hf.tools.engines.config_engine import ConfigEngine
from rope_ext_hf.tools.engines.formulas import alpha_theta, linear, longrope_magnitude, plain
from rope_ext_hf.tools.engines.keys import Computed, RopeKeys
from rope_ext_hf.tools.engines.serving_config import ServingConfig
from rope_ext_hf.tools.engines.target import Encoding, Target

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
        "hy_v4_vl_text",
        "kimi_k2",
        "longcat_flash",
        "minicpm3",
        "mistral4",
        "mistral_large4_text",
        "sarvam_mla",
        "youtu",
    }
)
"""Families with latent attention, whose softmax scale depends on mscale_all_dim."""
NTK_ALPHA_FAMILIES = frozenset({"hunyuan_v1_dense", "hunyuan_v1_moe"})
"""Families whose dynamic scaling, with `alpha`, gives all lengths the same frequencies."""


class _Rules(ConfigEngine):
    """Rules that transformers 4 and 5 share; each version has a subclass."""

    title = "transformers"
    unknown_type = "has no rope type {!r}"
    follows_input = True

    def checked(self, model_type: str) -> str:
        return "run"  # the tests of this package compare every family

    def encodings(self, target: Target) -> Iterator[Encoding]:
        changed = {key: value for key, value in target.patched.items() if target.config.get(key) != value}
        changed.pop("rope_parameters", None)
        yield Encoding("native", target.settings, changed)

    def served(self, target: Target, encoding: Encoding, changes: dict[str, Any], computed: Computed) -> ServingConfig:
        keys = target.placed(changes)
        note = "Write these keys into config.json (rope-ext patch does), or patch the loaded model."
        return self.serving(target, encoding.name, computed, config_keys=keys, notes=(note,))

    def read(self, config: Config, length: int | None) -> RopeKeys:
        rope = RopeKeys.of(config, length)
        return rope if rope.kind == "llama3" else replace(rope, usual={"original_max_position_embeddings": rope.most})

    def computes(self, config: Config, length: int | None = None) -> Computed:
        rope = self.read(config, length)
        computed = self.by_type(rope)
        latent = rope.model_type in MLA_FAMILIES and rope.kind != "default"
        return replace(computed, softmax_scale=rope.latent_scale) if latent else computed

    def yarn(self, rope: RopeKeys) -> Computed:
        settings, original = rope.settings, rope.number("original_max_position_embeddings")
        factor = needed(settings, "factor", max(1.0, rope.most / original))
        truncate = settings.get("_shared_truncate", settings.get("truncate", True))
        inv_freq = rope.yarn(factor, original, truncate=bool(truncate))
        return rope.computed(inv_freq, yarn_magnitude_by_config(settings, factor))

    def longrope(self, rope: RopeKeys) -> Computed:
        settings, original = rope.settings, rope.number("original_max_position_embeddings")
        scale = needed(settings, "factor", rope.most / original)
        magnitude = needed(settings, "attention_factor", longrope_magnitude(scale, original))
        long = (rope.started_for or rope.most) > original
        inv_freq = rope.divided("long_factor" if long else "short_factor")
        if settings["long_factor"] == settings["short_factor"]:
            return rope.computed(inv_freq, magnitude)
        note = f"longrope: inputs of up to {original:g} tokens get short_factor, longer ones long_factor."
        return replace(rope.computed(inv_freq, magnitude, note), depends_on_total_length=True)

    def other(self, rope: RopeKeys) -> Computed:
        if rope.kind == "proportional":
            rotated = int(needed(rope.settings, "partial_rotary_factor", 1.0) * rope.dim // 2)
            whole = linear(rope.theta, rope.dim, needed(rope.settings, "factor", 1.0))
            return rope.computed([value * (pair < rotated) for pair, value in enumerate(whole)])
        if rope.kind == "dynamic" and rope.model_type in NTK_ALPHA_FAMILIES and rope.settings.get("alpha"):
            return rope.computed(plain(alpha_theta(rope.theta, rope.dim, rope.number("alpha")), rope.dim))
        if rope.kind == "dynamic":
            note = "dynamic: the frequencies follow the longest input so far; these are for short inputs."
            return rope.computed(plain(rope.theta, rope.dim), 1.0, note)
        return super().other(rope)


class _FormerTransformers(_Rules):
    """transformers 4, which reads `rope_theta` and `rope_scaling` at the top level of the config."""

    version = "4.57"

    def computes(self, config: Config, length: int | None = None) -> Computed:
        text = text_settings(config)
        scaling = dict(text.get("rope_scaling") or {})
        kind = scaling.get("rope_type", scaling.get("type"))
        if kind in (
            "longrope",
            "su",
        ):  # its class reads this key at the top level of the config, and not in rope_scaling
            scaling.pop("original_max_position_embeddings", None)
        return super().computes({**text, "rope_scaling": scaling, "rope_parameters": None}, length)


@register_engine("transformers")
class Transformers(_Rules):
    """transformers 5 without this package: the reference that other engines are compared with."""

    version = "5.23.0"
    reference = True
    former = _FormerTransformers
