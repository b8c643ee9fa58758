"""mlx-lm: ml-explore/mlx-lm 0.32.2.

Read: mlx_lm/models/rope_utils.py, and which keys llama.py, qwen2.py, qwen3.py, phi3.py, gemma3_text.py, gpt_oss.py,
deepseek_v3.py and qwen3_vl.py hand to it. They read top-level `rope_theta` and `rope_scaling`, not `rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_ext_hf.engines.base import (
    Computed,
    Encoding,
    Target,
    needed,
    register_engine,
    rope_divisors,
    rope_settings,
    rotated_dims,
)
from rope_ext_hf.engines.former_spelling import FormerSpellingEngine, mscale_ratio, write_mscale
from rope_ext_hf.engines.formulas import divided, linear, llama3, longrope_magnitude, plain, yarn_magnitude
from rope_ext_hf.engines.hf_transformers import yarn_by_config
from rope_ext_hf.errors import ServingError


@register_engine("mlx")
class MLX(FormerSpellingEngine):
    """mlx-lm, started with `mlx_lm.server`; it takes no overrides, so the keys go into a copy of the folder."""

    title = "mlx-lm"
    version = "0.32.2"
    families = frozenset(
        {"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_vl_text"}
    ) | {"qwen3_vl"}

    def write_yarn(self, target: Target, settings: dict[str, Any], changed: dict[str, Any]) -> None:
        if not target.config.get("qk_rope_head_dim"):
            write_mscale(settings, target.attention_factor)

    def keys(self, target: Target, encoding: Encoding) -> dict[str, Any]:
        keys = super().keys(target, encoding)
        if target.model_type == "phi3" and encoding.name != "native":
            keys["original_max_position_embeddings"] = encoding.settings["original_max_position_embeddings"]
        return keys

    def command(self, target: Target) -> tuple[str, ...]:
        return ("mlx_lm.server", "--model", "FOLDER")

    def computes(self, config: Mapping[str, Any], length: int | None = None) -> Computed:
        text, model_type, most = self.read(config)
        notes: list[str] = []
        scaling = text.get("rope_scaling")
        if text.get("rope_parameters") and not scaling and text.get("rope_theta") is None:
            raise ServingError("rope_parameters is not read; rope_theta and rope_scaling are missing")
        if text.get("rope_parameters") and not scaling:
            notes.append("rope_parameters is not read; only rope_theta is.")
        old = {key: value for key, value in text.items() if key != "rope_parameters"}
        settings = rope_settings(old)
        kind = (scaling or {}).get("type") or settings["rope_type"]
        dim, theta = rotated_dims(old, settings), settings["rope_theta"]
        magnitude, softmax_scale = 1.0, 1.0
        if model_type == "phi3" and scaling:
            if not {"long_factor", "type"} <= set(scaling):
                raise ServingError("its Phi-3 file wants the keys long_factor and type")
            if kind not in ("longrope", "su", "linear"):
                notes.append(f"Phi-3: the rope type {kind} is dropped.")
                kind = "default"
        if text.get("qk_rope_head_dim") and scaling and scaling.get("mscale_all_dim"):
            factor = needed(settings, "factor")
            softmax_scale = yarn_magnitude(factor, needed(settings, "mscale_all_dim")) ** 2
        if kind in ("default", "mrope"):
            inv_freq = plain(theta, dim)
        elif kind == "linear":
            inv_freq = linear(theta, dim, needed(settings, "factor"))
        elif kind == "llama3":
            low, high = needed(settings, "low_freq_factor", 1.0), needed(settings, "high_freq_factor", 4.0)
            original = needed(settings, "original_max_position_embeddings", 8192)
            inv_freq = llama3(theta, dim, needed(settings, "factor"), original, low, high)
        elif kind in ("yarn", "deepseek_yarn"):
            factor = needed(settings, "factor")
            original = needed(settings, "original_max_position_embeddings", 4096)
            inv_freq = yarn_by_config(settings, dim, factor, original, truncate=True)
            magnitude = mscale_ratio(settings, factor)
            if settings.get("attention_factor") is not None:
                notes.append("yarn: attention_factor is ignored.")
            if settings.get("truncate") is False:
                notes.append("yarn: truncate is ignored.")
        elif kind in ("longrope", "su"):
            if text.get("qk_rope_head_dim") or model_type == "gpt_oss":
                raise ServingError(f"its file for {model_type!r} cannot run longrope")
            original = needed(settings, "original_max_position_embeddings")
            inv_freq = divided(theta, dim, rope_divisors(settings, "long_factor", dim))
            magnitude = longrope_magnitude(most / original, original)
            if settings.get("short_factor") != settings["long_factor"]:
                notes.append("longrope: the long list for every input.")
        else:
            raise ServingError(f"mlx-lm {self.version} has no static rope type {kind!r}")
        return Computed(tuple(inv_freq), magnitude, None, None, softmax_scale, tuple(notes))
