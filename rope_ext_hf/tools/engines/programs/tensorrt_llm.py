"""The rules by which TensorRT-LLM (NVIDIA/TensorRT-LLM 1.2.0rc2, PyTorch backend) computes RoPE from a config.

They were read, at commits around that version, in tensorrt_llm/version.py (b35ac1b6), `RopeParams` of
tensorrt_llm/_torch/attention_backend/interface.py (51ea5c96), `RopeEmbeddingUtils` of tensorrt_llm/functional.py, `MLA`
of _torch/modules/attention.py, and modeling_llama.py, modeling_mistral.py, modeling_qwen.py, modeling_qwen3.py and
modeling_gemma3.py of _torch/models. These files read `rope_theta` and `rope_scaling`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from rope_ext_hf.errors import ServingError
from rope_ext_hf.models.config_keys import Config, needed, yarn_magnitude_by_config
from rope_ext_hf.tools.engines.base import NotCheckedError, engine_table, register_engine
from rope_ext_hf.tools.engines.former_spelling import FormerSpellingEngine, set_length_for_factor
from rope_ext_hf.tools.engines.formulas import plain
from rope_ext_hf.tools.engines.keys import Computed, RopeKeys
from rope_ext_hf.tools.engines.target import Target

_FUSED = frozenset({"qwen3", "qwen3_moe"})
"""Families whose kernel normalises and rotates in one step, with YaRN's parameters whatever the rope type is."""
_USUAL = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 1024, "factor": 1.0}
"""The numbers that it takes for missing keys."""


@register_engine("tensorrt-llm")
class TensorRTLLM(FormerSpellingEngine):
    """TensorRT-LLM, started with `trtllm-serve`.

    It takes no overrides of the config, so the keys are written into config.json in a copy of the model's folder.
    """

    title = "TensorRT-LLM"
    version = "1.2.0rc2"
    table = engine_table("tensorrt_llm")
    newest = (
        "1.2.1",
        "it reads other keys and builds other tables than 1.2.0rc2, whose source the rules here were taken from",
    )
    aliases: ClassVar = {}

    def write_yarn(self, target: Target, settings: dict[str, Any], changed: dict[str, Any]) -> None:
        if target.model_type in _FUSED:
            settings["attention_factor"] = target.attention_factor
            set_length_for_factor(settings, changed)

    def command(self, target: Target) -> tuple[str, ...]:
        return ("trtllm-serve", "serve", "FOLDER", "--max_seq_len", str(target.length))

    def read(self, config: Config, length: int | None) -> RopeKeys:
        text, model_type = self.known_text(config)
        if text.get("rope_parameters") and not text.get("rope_scaling") and text.get("rope_theta") is None:
            raise ServingError(
                "the engine reads rope_theta and rope_scaling, which are missing, and not rope_parameters"
            )
        rope = RopeKeys.of({**text, "rope_parameters": None}, length)
        kind = rope.settings.get("type") or rope.kind
        if kind == "default" and text.get("rope_scaling"):
            raise ServingError("TensorRT-LLM has no rope type 'default': rope_scaling must be null")
        kind, _ = self.passed_type(model_type, str(kind))
        return replace(rope, kind=kind, table=rope.most, usual=_USUAL)

    def computes(self, config: Config, length: int | None = None) -> Computed:
        rope = self.read(config, length)
        if rope.model_type in _FUSED:
            return self._fused(rope)
        if rope.model_type == "deepseek_v3" and rope.kind not in ("default", "yarn"):
            raise NotCheckedError(
                "this package does not know what TensorRT-LLM's kernels for DeepSeek do with the rope type "
                f"{rope.kind!r}"
            )
        for key in ("original_max_position_embeddings", "factor"):  # it reads these for every rope type
            rope.number(key)
        return self.by_type(rope)

    def yarn(self, rope: RopeKeys) -> Computed:
        if rope.model_type != "deepseek_v3":
            raise ServingError(
                "TensorRT-LLM's table for YaRN holds every angle twice, except for latent attention "
                "(duplicate_data), so position p gets the angles of floor(p / 2)"
            )
        factor, original = rope.number("factor"), rope.number("original_max_position_embeddings")
        inv_freq = rope.yarn(factor, original, truncate=True)
        notes = [f"yarn: {key} is ignored." for key in ("attention_factor", "truncate") if key in rope.settings]
        return replace(rope.computed(inv_freq, rope.mscale_ratio(factor), *notes), softmax_scale=rope.latent_scale)

    def longrope(self, rope: RopeKeys) -> Computed:
        original = rope.number("original_max_position_embeddings")
        if original != int(original):
            raise ServingError(
                "TensorRT-LLM takes a whole number as original_max_position_embeddings, and this magnitude needs "
                f"{original:g}"
            )
        return super().longrope(rope)

    def _fused(self, rope: RopeKeys) -> Computed:
        """Compute RoPE as TensorRT-LLM's fused kernel for Qwen3 does: every rope type but "default" is run as YaRN."""
        rope = replace(rope, table=None)
        if rope.kind == "default":
            return rope.computed(plain(rope.theta, rope.dim))
        settings, original, factor = rope.settings, rope.most, rope.number("factor")
        notes = [] if rope.kind == "yarn" else [f"Qwen3: the rope type {rope.kind} is run as yarn."]
        if "original_max_position_embeddings" in settings:
            original = int(needed(settings, "original_max_position_embeddings"))
            factor = rope.most / original
        inv_freq = rope.yarn(factor, original, truncate=bool(settings.get("truncate", True)))
        return rope.computed(inv_freq, yarn_magnitude_by_config(settings, factor), *notes)
