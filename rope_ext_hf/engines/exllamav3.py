"""ExLlamaV3: turboderp-org/exllamav3 1.6.5.

Read: exllamav3/util/rope.py, `read_rope_settings_default` of model/config.py, `read_dict` of util/file.py, and which
keys architecture/llama.py, mistral.py, qwen2.py, qwen3.py, qwen3_moe.py, qwen3_vl.py, mixtral.py, phi3.py, gemma3.py,
gpt_oss.py and deepseek_v3.py hand to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_ext_hf.engines.base import Computed, Encoding, Target, needed, register_engine, rope_divisors, rotated_dims
from rope_ext_hf.engines.former_spelling import FormerSpellingEngine, later_factor
from rope_ext_hf.engines.formulas import divided, linear, llama3, longrope_magnitude, plain, yarn_magnitude
from rope_ext_hf.engines.hf_transformers import yarn_by_config
from rope_ext_hf.errors import ServingError

_THETA = {"gemma3_text": 1e6, "qwen3_vl_text": 5e6, "qwen3_vl": 5e6}
"""What families take for theta where the config has none at its top level or in flat rope settings; else 10,000."""


@register_engine("exllamav3")
class ExLlamaV3(FormerSpellingEngine):
    """ExLlamaV3, which TabbyAPI serves; it takes no overrides, so the keys go into the folder of quantised weights."""

    title = "ExLlamaV3"
    version = "1.6.5"

    families = frozenset(
        {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "gpt_oss", "deepseek_v3", *_THETA}
    )
    where = "Write these keys into config.json of the quantised folder. TabbyAPI serves max_seq_len tokens of it."

    def write_yarn(self, target: Target, settings: dict[str, Any], changed: dict[str, Any]) -> None:
        settings["attention_factor"] = target.attention_factor
        later_factor(settings, changed)

    def keys(self, target: Target, encoding: Encoding) -> dict[str, Any]:
        return encoding.config | {"rope_scaling": encoding.settings}

    def computes(self, config: Mapping[str, Any], length: int | None = None) -> Computed:
        text, model_type, most = self.read(config)
        settings = text.get("rope_scaling") or text.get("rope_parameters") or {}
        if not isinstance(settings, Mapping):
            raise ServingError(f"the rope settings must be an object, got {type(settings).__name__}")
        notes: list[str] = []
        if dict in map(type, settings.values()):
            notes.append("rope_parameters by layer type is not read: no scaling, and theta by default.")
            settings = {}
        theta = text.get("rope_theta") or settings.get("rope_theta") or _THETA.get(model_type, 1e4)
        settings = {**settings, "rope_theta": needed({"rope_theta": theta}, "rope_theta", above=1.0)}
        if text.get("partial_rotary_factor") is not None:
            settings["partial_rotary_factor"] = text["partial_rotary_factor"]
        kind = settings.get("rope_type") or settings.get("type") or "default"
        dim = rotated_dims(text, settings)
        magnitude, softmax_scale = 1.0, 1.0
        if model_type == "deepseek_v3" and kind != "default" and settings.get("mscale_all_dim"):
            softmax_scale = yarn_magnitude(needed(settings, "factor"), needed(settings, "mscale_all_dim")) ** 2
        if kind in ("default", "mrope"):
            inv_freq = plain(theta, dim)
        elif kind == "linear":
            inv_freq = linear(theta, dim, needed(settings, "factor", 1.0))
        elif kind == "llama3":
            low, high = needed(settings, "low_freq_factor", 1.0), needed(settings, "high_freq_factor", 4.0)
            original = needed(settings, "original_max_position_embeddings", 8192)
            inv_freq = llama3(theta, dim, needed(settings, "factor", 8.0), original, low, high)
        elif kind == "yarn":
            inv_freq, magnitude = self._yarn(settings, dim, most, model_type)
            stated = settings.get("factor")
            if settings.get("original_max_position_embeddings") is not None and isinstance(stated, (int, float)):
                used = most / settings["original_max_position_embeddings"]
                if stated != used:
                    notes.append(f"yarn: the factor is {used:g}, max_position_embeddings over the original length.")
        elif kind in ("longrope", "su"):
            original = needed({**text, **settings}, "original_max_position_embeddings")
            tokens = length if length and model_type == "phi3" else most
            inv_freq = divided(
                theta, dim, rope_divisors(settings, "long_factor" if tokens > original else "short_factor", dim)
            )
            magnitude = longrope_magnitude(most / original, original)
            if settings.get("attention_factor") is not None:
                notes.append("longrope: attention_factor is ignored.")
        else:
            raise ServingError(f"ExLlamaV3 {self.version} has no rope type {kind!r} that was checked")
        return Computed(tuple(inv_freq), magnitude, most, None, softmax_scale, tuple(notes))

    def _yarn(self, settings: Mapping[str, Any], dim: int, most: int, model_type: str) -> tuple[list[float], float]:
        """Frequencies and magnitude of a yarn."""
        original = settings.get("original_max_position_embeddings")
        factor = (
            needed(settings, "factor")
            if original is None
            else most / needed(dict(settings), "original_max_position_embeddings")
        )
        original = most if original is None else original
        if original != int(original):
            raise ServingError(f"original_max_position_embeddings must be a whole number and is {original}")
        inv_freq = yarn_by_config(settings, dim, factor, original, truncate=bool(settings.get("truncate", True)))
        if settings.get("attention_factor") is not None:
            return inv_freq, needed(settings, "attention_factor")
        mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
        if model_type == "deepseek_v3" and mscale and all_dim:
            return inv_freq, yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
        return inv_freq, 1.0 if settings.get("llama_4_scaling_beta") else yarn_magnitude(factor)
