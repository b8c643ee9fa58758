"""The rules by which vLLM (vllm-project/vllm 0.33.0) computes RoPE from a config.

They were read in these parts of its source: vllm/model_executor/layers/rotary_embedding/ (`__init__.py`,
yarn_scaling_rope.py, mrope.py, llama3_rope.py, deepseek_scaling_rope.py, phi3_long_rope_scaled_rope.py);
models/llama.py, qwen3.py, gemma3.py, gpt_oss.py, deepseek_v2.py, AXK1.py, glm4_moe_lite.py, longcat_flash.py and
registry.py; every file of models/, for the arguments that it passes to get_rope; and `_get_and_verify_max_len` and
`_apply_dict_overrides` of config/model.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rope_ext_hf.errors import ServingError
from rope_ext_hf.models.config_keys import Config, needed, yarn_magnitude, yarn_magnitude_by_config
from rope_ext_hf.tools.engines.base import NotCheckedError, engine_table, register_engine
from rope_ext_hf.tools.engines.formulas import longrope_magnitude, plain, yarn
from rope_ext_hf.tools.engines.keys import Computed, RopeKeys, plugin_settings
from rope_ext_hf.tools.engines.overrides import OverridingEngine, plugin_encoding
from rope_ext_hf.tools.engines.target import Encoding, Target

_TABLE = engine_table("vllm")
DEEPSEEK_FAMILIES = frozenset(_TABLE["deepseek"])
"""Families that take the rotary class of DeepSeek, with latent attention."""
INTERLEAVED_FAMILIES = DEEPSEEK_FAMILIES.union(_TABLE["interleaved"])
"""Families that rotate in the interleaved pairing."""
_LENGTH_STATED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default"})
"""Rope types for which max_position_embeddings is the length to serve, and is not multiplied by the factor."""
HF_FORMAT = ("--config-format", "hf", "--load-format", "safetensors")
"""Options for a folder that has Mistral's own files, params.json and consolidated*.safetensors, beside config.json.

Without them vLLM reads the model from Mistral's files, and refuses overrides: `get_config` of
transformers_utils/config.py, and `_prepare_weights` of model_loader/default_loader.py.
"""
_MROPE_TABLE = 4
"""The number by which its M-RoPE class multiplies the original length, for its table and for YaRN's ramp."""


def deepseek_yarn(rope: RopeKeys) -> tuple[list[float], float]:
    """Compute YaRN's frequencies and magnitude as vLLM's rotary class for DeepSeek does.

    Unlike its other classes it ignores `truncate`, and takes the magnitude from mscale and mscale_all_dim.
    """
    factor, original = needed(rope.settings, "factor"), needed(rope.settings, "original_max_position_embeddings")
    magnitude = rope.mscale_ratio(factor)
    return rope.yarn(factor, original, truncate=True), magnitude


def phi3_longrope(rope: RopeKeys, served: int) -> Computed:
    """Compute LongRoPE as vLLM's rotary class for Phi-3 does.

    When vLLM starts, the class chooses the long or the short list for all inputs, by the length to serve (`served`).
    """
    if rope.model_type in INTERLEAVED_FAMILIES:
        raise ServingError(
            "the engine's LongRoPE class for Phi-3 rotates in the half pairing alone, and "
            f"{rope.model_type!r} models need the interleaved pairing"
        )
    original = rope.number("original_max_position_embeddings")
    key = "long" if served > original else "short"
    magnitude = needed(rope.settings, f"{key}_mscale", longrope_magnitude(rope.most / original, original))
    return replace(rope, table=rope.most).computed(rope.divided(f"{key}_factor"), magnitude)


def of_mistral_params(params: Config, like: Computed) -> Computed:
    """Compute RoPE as vLLM does from params.json, the config in Mistral's own format.

    The rule is `_remap_mistral_yarn_args` of vLLM's configs/mistral.py. `like` is the result from config.json: its
    number of pairs is used if params.json has no head_dim.
    """
    theta, dim = needed(params, "rope_theta", 10000.0, above=1.0), 2 * len(like.inv_freq)
    dim = int(needed(params, "head_dim", dim))
    scaling = params.get("yarn")
    if not isinstance(scaling, Mapping) or not scaling:
        return Computed(tuple(plain(theta, dim)), 1.0, None)
    factor, original = needed(scaling, "factor"), needed(scaling, "original_max_position_embeddings")
    fast, slow = needed(scaling, "beta", 32.0), needed(scaling, "alpha", 1.0)
    magnitude = yarn_magnitude(factor) if scaling.get("apply_scale", True) else 1.0
    return Computed(tuple(yarn(theta, dim, factor, original, fast, slow)), magnitude, None)


@register_engine("vllm")
class VLLM(OverridingEngine):
    """vLLM, started with `vllm serve`."""

    title = "vLLM"
    option = "--hf-overrides"
    drafts = (
        "--hf-overrides does not reach a draft (compose_draft_hf_overrides of config/speculative.py; vLLM #37443, "
        "#58080): write the same keys, config_keys of --json, into config.json, and into that of a draft with a "
        "folder of its own."
    )
    on_gpus = (
        "--tensor-parallel-size {gpus} --kv-cache-dtype {keys} --max-num-seqs {inputs} --gpu-memory-utilization {share}"
    )
    usual_server = True
    version = "0.33.0"
    table = _TABLE
    oldest = ("0.11.1", "there is no --hf-overrides for rope_parameters; it takes --rope-scaling, whose keys differ")

    def with_plugin(self) -> VLLM:
        return _VLLMWithPlugin()

    def start(self, target: Target) -> tuple[str, ...]:
        command = ("vllm", "serve", target.model, "--max-model-len", str(target.length))
        return (*command, *(HF_FORMAT if target.mistral_format else ()))

    def spelled(self, target: Target, settings: dict[str, Any]) -> dict[str, Any]:
        if settings["rope_type"] != "yarn":
            return settings
        if target.model_type not in DEEPSEEK_FAMILIES:
            settings = settings | {
                "attention_factor": target.attention_factor,
                "attn_factor": target.attention_factor / yarn_magnitude(settings["factor"]),
            }
        if _quadruple(settings, target.model_type):
            quarter, rest = divmod(settings["original_max_position_embeddings"], _MROPE_TABLE)
            settings = settings if rest else settings | {"original_max_position_embeddings": quarter}
        return settings

    def stated_length(self, target: Target, settings: dict[str, Any]) -> int:
        if _length_stated(settings["rope_type"], target.model_type):
            return target.length
        return math.ceil(target.length / float(settings.get("factor", 1.0)))

    def config(self, target: Target, changes: dict[str, Any]) -> dict[str, Any]:
        config = super().config(target, changes)
        if target.composite and "rope_parameters" in changes:  # it merges nested overrides key by key
            before = dict(target.config.get("rope_parameters") or {})
            config["rope_parameters"] = _merged(before, changes["rope_parameters"])
        return config

    def read(self, config: Config, length: int | None) -> RopeKeys:
        rope = RopeKeys.of(config, length)
        if rope.text.get("dual_chunk_attention_config"):  # get_rope looks at this before it looks at the rope type
            raise NotCheckedError(
                "vLLM runs dual chunk attention for this config, with a rotary class that this package does not know"
            )
        if rope.model_type in self.table["theta_inside"]:
            inside = rope.text.get("rope_parameters") or rope.text.get("rope_scaling") or {}
            settings = {**rope.settings, "rope_theta": needed(inside, "rope_theta", 10000.0, above=1.0)}
            notes = ("rope_theta is read only inside the rope settings (vLLM #56066); write it there.",)
            rope = replace(rope, settings=settings, notes=notes)
        derived = rope.most
        if not _length_stated(rope.kind, rope.model_type):
            derived = int(derived * needed(rope.settings, "factor", 1.0))
        return replace(rope, length=derived, table=derived)

    def computes(self, config: Config, length: int | None = None) -> Computed:
        rope = self.read(config, length)
        if rope.model_type in DEEPSEEK_FAMILIES and rope.kind != "default":
            inv_freq, magnitude = deepseek_yarn(rope)  # for every rope type
            settings = rope.settings
            scale = 1.0 if settings.get("attention_factor") == 1.0 else rope.latent_scale
            table = int(settings["original_max_position_embeddings"] * settings["factor"])
            return replace(rope, table=table, softmax_scale=scale).computed(inv_freq, magnitude)
        if rope.model_type == "gpt_oss":
            rope = self._passed_on_by_gpt_oss(rope)
        if rope.model_type in self.table["by_layer"] and rope.kind != "default":
            raise NotCheckedError(
                f"vLLM's code for {rope.model_type} chooses a rope type for each layer, by rules that this package "
                "does not know"
            )
        return self.by_type(rope)

    def _passed_on_by_gpt_oss(self, rope: RopeKeys) -> RopeKeys:
        """Return the rope keys that vLLM's code for gpt-oss passes on: those of YaRN alone, whatever the rope type."""
        settings = rope.settings
        for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
            try:
                rope.number(key)
            except ServingError as error:
                raise ServingError(f"vLLM's code for gpt-oss passes on YaRN's keys alone, and {error}") from error
        kept = ("rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")
        ignored = settings.get("attention_factor") is not None or rope.kind != "yarn"
        notes = ("gpt-oss: run as yarn, without attention_factor.",) if ignored else ()
        passed_on = {key: settings[key] for key in kept if key in settings}
        return replace(rope, settings=passed_on, kind="yarn", notes=notes)

    def linear(self, rope: RopeKeys) -> Computed:
        return replace(super().linear(rope), table=int(rope.most * rope.number("factor")))

    def yarn(self, rope: RopeKeys) -> Computed:
        factor, original = rope.number("factor"), rope.number("original_max_position_embeddings")
        notes = []
        if _quadruple(rope.settings, rope.model_type):
            original *= _MROPE_TABLE
            notes.append(f"yarn with M-RoPE: the ramp is computed for an original length of {original:g} tokens.")
        inv_freq = rope.yarn(factor, original, truncate=bool(rope.settings.get("truncate", True)))
        magnitude = yarn_magnitude_by_config(rope.settings, factor)
        return replace(rope, table=int(original * factor)).computed(inv_freq, magnitude, *notes)

    def longrope(self, rope: RopeKeys) -> Computed:
        by_transformers = rope.model_type in self.table["run_by_transformers"]
        if by_transformers and rope.settings["long_factor"] != rope.settings["short_factor"]:
            raise ServingError(
                f"vLLM runs {rope.model_type} with transformers' class, whose longrope takes one list for a whole "
                "batch, by its longest input"
            )
        served = rope.started_for or int(rope.text.get("original_max_position_embeddings") or rope.most)
        return phi3_longrope(replace(rope, length=served), served)


class _VLLMWithPlugin(VLLM):
    """vLLM with this package installed beside it; the package's plug-in lets it compute RoPE with any frequencies."""

    def encodings(self, target: Target) -> Iterator[Encoding]:
        encoding = plugin_encoding(target)
        settings = dict(encoding.settings)
        if target.model_type in DEEPSEEK_FAMILIES:
            # Its file computes the softmax scale from mscale_all_dim, unless attention_factor is 1. This rope type
            # leaves the length as it is, and without the plug-in vLLM stops at the missing original length.
            settings |= {
                "rope_type": "deepseek_yarn",
                "magnitude": settings.pop("attention_factor"),
                "factor": math.e,  # yarn_magnitude(e, m) is 1 + m / 10
                "mscale_all_dim": 10 * (math.sqrt(target.softmax_scale) - 1),
            }
        elif target.model_type == "gpt_oss":  # its file passes on YaRN's keys alone
            settings |= {
                "factor": 1.0,
                "original_max_position_embeddings": target.length,
                "beta_fast": settings.pop("inv_freq"),  # as text, at which vLLM stops without the plug-in
                "beta_slow": settings.pop("attention_factor"),
            }
        yield replace(encoding, settings=settings)

    def computes(self, config: Config, length: int | None = None) -> Computed:
        rope = self.read(config, length)
        if plugin_settings(rope.settings) is None:
            return super().computes(config, length)
        if rope.model_type in self.table["by_layer"]:
            raise NotCheckedError(
                f"vLLM's code for {rope.model_type} chooses a rope type for each layer, by rules that this package "
                "does not know"
            )
        return self.by_plugin(rope, rope.most, latent=rope.model_type in DEEPSEEK_FAMILIES)


def _length_stated(kind: str, model_type: str) -> bool:
    """Return True if vLLM serves max_position_embeddings as it is, and does not multiply it by the factor."""
    return kind in _LENGTH_STATED or "gemma3" in model_type


def _quadruple(settings: Config, model_type: str) -> bool:
    """Return True if vLLM computes YaRN's ramp for four times the original length, as its M-RoPE class does."""
    return "mrope_section" in settings and model_type not in _TABLE["single_table"]


def _merged(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return two dicts merged key by key at every depth; where both have a key, the value in `after` is taken."""
    merged = dict(before)
    for key, value in after.items():
        if isinstance(before.get(key), dict) and isinstance(value, dict):
            merged[key] = _merged(before[key], value)
        else:
            merged[key] = value
    return merged
