"""TensorRT-LLM: NVIDIA/TensorRT-LLM 1.2.0rc2, its PyTorch backend.

Read, at commits around that version: tensorrt_llm/version.py (b35ac1b6), `RopeParams` of
tensorrt_llm/_torch/attention_backend/interface.py (51ea5c96), `RopeEmbeddingUtils` of tensorrt_llm/functional.py, `MLA`
of _torch/modules/attention.py, and _torch/models/modeling_llama.py, modeling_mistral.py, modeling_qwen.py,
modeling_qwen3.py, modeling_gemma3.py. They read `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_ext_hf.engines.base import (
    Computed,
    NotCheckedError,
    Target,
    needed,
    register_engine,
    rope_divisors,
    rope_settings,
    rotated_dims,
)
from rope_ext_hf.engines.former_spelling import FormerSpellingEngine, later_factor, mscale_ratio, write_mscale
from rope_ext_hf.engines.formulas import divided, linear, llama3, longrope_magnitude, plain, yarn_magnitude
from rope_ext_hf.engines.hf_transformers import yarn_by_config, yarn_magnitude_by_config
from rope_ext_hf.errors import ServingError

_FUSED = frozenset({"qwen3", "qwen3_moe"})
"""Families whose kernel rotates while it normalises, with the parameters of a yarn whatever the rope type is."""


@register_engine("tensorrt-llm")
class TensorRTLLM(FormerSpellingEngine):
    """TensorRT-LLM, started with `trtllm-serve`; the keys go into a copy of the folder."""

    title = "TensorRT-LLM"
    version = "1.2.0rc2"

    families = frozenset({"llama", "mistral", "qwen2", "gemma3_text", "deepseek_v3"}) | _FUSED

    def write_yarn(self, target: Target, settings: dict[str, Any], changed: dict[str, Any]) -> None:
        if target.model_type in _FUSED:
            settings["attention_factor"] = target.attention_factor
            later_factor(settings, changed)
        elif target.model_type != "deepseek_v3":
            write_mscale(settings, target.attention_factor)

    def command(self, target: Target) -> tuple[str, ...]:
        return ("trtllm-serve", "serve", "FOLDER", "--max_seq_len", str(target.length))

    def computes(self, config: Mapping[str, Any], length: int | None = None) -> Computed:
        text, model_type, most = self.read(config)
        old = {key: value for key, value in text.items() if key != "rope_parameters"}
        if text.get("rope_parameters") and not text.get("rope_scaling") and text.get("rope_theta") is None:
            raise ServingError("rope_parameters is not read; rope_theta and rope_scaling are missing")
        settings = rope_settings(old)
        kind = settings.get("type") or settings["rope_type"]
        if kind == "default" and text.get("rope_scaling"):
            raise ServingError("it has no rope type 'default': rope_scaling must be null")
        if model_type == "qwen2" and text.get("rope_scaling") and "type" not in settings:
            raise ServingError("its Qwen2 file wants the key type in rope_scaling")
        dim, theta = rotated_dims(old, settings), settings["rope_theta"]
        if model_type in _FUSED:
            return self._fused(settings, kind, dim, most)
        if model_type == "deepseek_v3" and kind not in ("default", "yarn"):
            raise NotCheckedError(f"its kernels for DeepSeek were not read with the rope type {kind!r}")
        original = needed(settings, "original_max_position_embeddings", 1024)
        factor = needed(settings, "factor", 1.0)
        magnitude, softmax_scale = 1.0, 1.0
        notes: list[str] = []
        if kind == "default":
            inv_freq = plain(theta, dim)
        elif kind == "linear":
            inv_freq = linear(theta, dim, factor)
        elif kind == "llama3":
            low, high = needed(settings, "low_freq_factor", 1.0), needed(settings, "high_freq_factor", 4.0)
            inv_freq = llama3(theta, dim, factor, original, low, high)
        elif kind == "yarn":
            inv_freq = yarn_by_config(settings, dim, factor, original, truncate=True)
            magnitude = mscale_ratio(settings, factor)
            if model_type == "deepseek_v3":
                softmax_scale = yarn_magnitude(factor, float(settings.get("mscale_all_dim", 0))) ** 2
            notes += [f"yarn: {key} is ignored." for key in ("attention_factor", "truncate") if key in settings]
        elif kind == "longrope":
            inv_freq = divided(theta, dim, rope_divisors(settings, "long_factor", dim))
            magnitude = longrope_magnitude(most / original, original)
            if settings.get("short_factor") != settings["long_factor"]:
                notes.append("longrope: the long list for every input.")
        else:
            raise ServingError(f"TensorRT-LLM {self.version} has no static rope type {kind!r}")
        return Computed(tuple(inv_freq), magnitude, most, most, softmax_scale, tuple(notes))

    def _fused(self, settings: Mapping[str, Any], kind: str, dim: int, most: int) -> Computed:
        """What the kernel of Qwen3 computes: a yarn, whatever the rope type is."""
        if kind == "default":
            return Computed(tuple(plain(settings["rope_theta"], dim)), 1.0, most)
        original, factor = most, needed(settings, "factor", 1.0)
        notes = [] if kind == "yarn" else [f"Qwen3: the rope type {kind} is run as yarn."]
        if "original_max_position_embeddings" in settings:
            original = int(needed(settings, "original_max_position_embeddings"))
            factor = most / original
        inv_freq = yarn_by_config(settings, dim, factor, original, truncate=bool(settings.get("truncate", True)))
        return Computed(tuple(inv_freq), yarn_magnitude_by_config(settings, factor), most, notes=tuple(notes))
