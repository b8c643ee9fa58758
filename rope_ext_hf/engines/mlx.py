"""mlx-lm: ml-explore/mlx-lm 0.32.2.

Read: mlx_lm/models/rope_utils.py, and which keys llama.py, qwen2.py, qwen3.py, phi3.py, gemma3_text.py, gpt_oss.py,
deepseek_v3.py and qwen3_vl.py hand to it. They read top-level `rope_theta` and `rope_scaling`, not `rope_parameters`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rope_ext_hf.engines.base import (
    Computed,
    ConfigEngine,
    Encoding,
    NotCheckedError,
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
from rope_ext_hf.engines.formulas import divided, linear, llama3, longrope_magnitude, plain, yarn_magnitude
from rope_ext_hf.engines.hf_transformers import yarn_by_config
from rope_ext_hf.errors import ServingError

__all__ = ["MLX"]

_FAMILIES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "phi3", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_vl_text", "qwen3_vl"}
)
"""Families whose model file was read."""


@register_engine("mlx")
class MLX(ConfigEngine):
    """mlx-lm, started with `mlx_lm.server`; it takes no overrides, so the keys go into a copy of the folder."""

    title = "mlx-lm"
    version = "0.32.2"

    def encodings(self, target: Target) -> Iterator[Encoding]:
        for encoding in super().encodings(target):
            settings = {key: value for key, value in encoding.settings.items() if key != "rope_theta"}
            kind, magnitude = settings["rope_type"], target.attention_factor
            changed: dict[str, Any] = {"max_position_embeddings": target.length}
            if kind == "yarn" and settings["factor"] > 1 and not target.config.get("qk_rope_head_dim"):
                settings["mscale"] = (magnitude - 1) / (0.1 * math.log(settings["factor"]))
                settings["mscale_all_dim"] = 0.0
            if (
                encoding.name != "native" and magnitude >= 1
            ):  # the original length from which it computes this magnitude
                settings["original_max_position_embeddings"] = target.length ** (1 / magnitude**2)
                if target.model_type == "phi3":
                    changed["original_max_position_embeddings"] = settings["original_max_position_embeddings"]
            yield Encoding(
                encoding.name, settings | {"type": kind}, changed | {"rope_theta": encoding.settings["rope_theta"]}
            )

    def config(self, target: Target, encoding: Encoding) -> dict[str, Any]:
        kept = {key: value for key, value in target.config.items() if key != "rope_parameters"}
        return merged(kept, self._keys(target, encoding))

    def _keys(self, target: Target, encoding: Encoding) -> dict[str, Any]:
        scaling = None if encoding.settings["rope_type"] == "default" else encoding.settings
        local = {}
        if target.layer_type is not None:
            sliding = target.patched["rope_parameters"].get("sliding_attention")
            local = {"rope_local_base_freq": sliding["rope_theta"]} if sliding else {}
        return encoding.config | local | {"rope_scaling": scaling}

    def served(self, target: Target, encoding: Encoding, computed: Computed) -> ServingConfig:
        keys = self._keys(target, encoding)
        return self.serving(
            target,
            encoding.name,
            computed,
            command=("mlx_lm.server", "--model", "FOLDER"),
            config_keys=target.placed(keys),
            notes=(*computed.notes, "Write these keys into config.json of a copy of the model, FOLDER."),
        )

    def computes(self, config: Mapping[str, Any], length: int | None = None) -> Computed:
        text = text_settings(config)
        model_type, most = str(text.get("model_type")), length_setting(text)
        if model_type not in _FAMILIES:
            raise NotCheckedError(f"which keys its file for {model_type!r} reads was not checked")
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
            ratio = [float(settings.get(key, default)) for key, default in (("mscale", 1), ("mscale_all_dim", 0))]
            magnitude = yarn_magnitude(factor, ratio[0]) / yarn_magnitude(factor, ratio[1])
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
