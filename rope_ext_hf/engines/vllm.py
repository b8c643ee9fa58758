"""vLLM: vllm-project/vllm 0.33.0.

Read: vllm/model_executor/layers/rotary_embedding/ (`__init__.py`, yarn_scaling_rope.py, mrope.py, llama3_rope.py,
deepseek_scaling_rope.py, phi3_long_rope_scaled_rope.py), models/llama.py, qwen3.py, gemma3.py, gpt_oss.py,
deepseek_v2.py, AXK1.py, glm4_moe_lite.py, longcat_flash.py and registry.py, what every file of models/ hands to
get_rope, and `_get_and_verify_max_len` and `_apply_dict_overrides` of config/model.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rope_ext_hf.engines.base import (
    Computed,
    Encoding,
    Engine,
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
from rope_ext_hf.engines.hf_transformers import MLA_FAMILIES, config_changes, yarn_by_config, yarn_magnitude_by_config
from rope_ext_hf.engines.plugin_type import (
    EngineWithPlugin,
    plugin_encoding,
    plugin_frequencies,
    plugin_note,
    plugin_settings,
)
from rope_ext_hf.errors import ServingError

DEEPSEEK_FAMILIES = frozenset(
    {"axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "longcat_flash"}
)
"""Families whose model file runs every rope type by the class for DeepSeek's yarn, and takes its softmax scale."""
INTERLEAVED_FAMILIES = DEEPSEEK_FAMILIES | {"glm", "glm4", "cohere", "cohere2", "ernie4_5", "ernie4_5_moe", "gptj"}
"""Families whose models here rotate dims (2i, 2i + 1); the longrope class refuses them."""
_THETA_ALONE = frozenset({"dbrx", "mimo_v2_flash", "minimax_m3_vl_text"})
"""Families whose model file hands on nothing of the rope settings but theta; that of dbrx cut to a whole number."""
_BY_TRANSFORMERS = frozenset(
    {
        "arcee",
        "bitnet",
        "cwm",
        "diffllama",
        "flex_olmo",
        "glm",
        "gpt_neox",
        "helium",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "jais2",
        "mellum",
        "nanochat",
        "olmo",
        "olmo2",
        "olmo3",
        "phi",
        "seed_oss",
        "smollm3",
        "starcoder2",
        "vaultgemma",
        "youtu",
    }
)
"""Families that the classes of transformers run there, by its registry of models or for want of a model file."""
_NOT_READ = frozenset({"deepseek_v4", "dots3_note_text"})
"""Families whose model files choose a rope type for each layer by themselves."""
_LENGTH_STATED = frozenset({"su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "default"})
"""Rope types whose max_position_embeddings is not multiplied by the factor."""
_MROPE_TABLE = 4
"""Its M-RoPE class takes so many times the original length for its table, and for YaRN's ramp as well."""
_SINGLE_TABLE = frozenset({"qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text"})
"""Families whose model file asks for a table of the original length, where no video tokens are pruned."""


def _position_setting(settings: Mapping[str, Any], model_type: str, length: int) -> int:
    """max_position_embeddings from which the engine derives this length, its factor applied once."""
    if settings["rope_type"] in _LENGTH_STATED or "gemma3" in model_type:
        return length
    return math.ceil(length / float(settings.get("factor", 1.0)))


def deepseek_yarn(settings: Mapping[str, Any], dim: int) -> tuple[list[float], float]:
    """Frequencies and magnitude of the class for DeepSeek: no truncate, and mscale with other defaults."""
    factor, original = needed(settings, "factor"), needed(settings, "original_max_position_embeddings")
    ratio = [
        yarn_magnitude(factor, float(settings.get(key, default)))
        for key, default in (("mscale", 1), ("mscale_all_dim", 0))
    ]
    return yarn_by_config(settings, dim, factor, original, truncate=True), ratio[0] / ratio[1]


@register_engine("vllm")
class VLLM(EngineWithPlugin):
    """vLLM, started with `vllm serve`."""

    title = "vLLM"
    drafts = (
        "--hf-overrides does not reach a draft (compose_draft_hf_overrides of config/speculative.py; vLLM #37443, "
        "#58080): write the same keys, config_keys of --json, into config.json, and into that of a draft with a "
        "folder of its own."
    )
    usual_server = True
    version = "0.33.0"
    oldest = ("0.11.1", "there is no --hf-overrides for rope_parameters; it takes --rope-scaling, whose keys differ")

    def with_plugin(self) -> Engine:
        return _VLLMWithPlugin()

    def encodings(self, target: Target) -> Iterator[Encoding]:
        yield from self.published(target)
        for encoding in super().encodings(target):
            settings = encoding.settings
            if settings["rope_type"] == "yarn" and target.model_type not in DEEPSEEK_FAMILIES:
                factor = settings["factor"]
                settings = settings | {
                    "attention_factor": target.attention_factor,
                    "attn_factor": target.attention_factor / yarn_magnitude(factor),
                }
            if settings["rope_type"] == "yarn" and _quadruple(settings, target.model_type):
                quarter, rest = divmod(settings["original_max_position_embeddings"], _MROPE_TABLE)
                settings = settings if rest else settings | {"original_max_position_embeddings": quarter}
            changed = {"max_position_embeddings": _position_setting(settings, target.model_type, target.length)}
            if target.config.get("original_max_position_embeddings") and encoding.name != "native":
                changed["original_max_position_embeddings"] = settings["original_max_position_embeddings"]
            yield Encoding(encoding.name, settings, changed)

    def config(self, target: Target, encoding: Encoding) -> dict[str, Any]:
        changes = config_changes(target, encoding)
        if target.composite and "rope_parameters" in changes:  # merged key by key
            before = dict(target.config.get("rope_parameters") or {})
            changes["rope_parameters"] = _nested(before, changes["rope_parameters"])
        return merged(target.config, changes)

    def served(self, target: Target, encoding: Encoding, computed: Computed) -> ServingConfig:
        changes = config_changes(target, encoding)
        overrides = target.placed(changes)
        flags = ("--hf-overrides", json.dumps(overrides)) if overrides else ()
        return self.serving(
            target,
            encoding.name,
            computed,
            command=("vllm", "serve", target.model, "--max-model-len", str(target.length), *flags),
            overrides=overrides or None,
            config_keys=overrides,
            notes=computed.notes,
        )

    def computes(self, config: Mapping[str, Any], length: int | None = None) -> Computed:
        text = text_settings(config)
        settings, model_type = rope_settings(text), str(text.get("model_type"))
        kind, most = settings["rope_type"], length_setting(text)
        dim, theta, mrope = rotated_dims(text, settings), settings["rope_theta"], "mrope_section" in settings
        derived = most
        if kind not in _LENGTH_STATED and "gemma3" not in model_type:
            derived = int(most * needed(settings, "factor", 1.0))
        magnitude, softmax_scale, table = 1.0, 1.0, derived
        notes: list[str] = []
        if model_type in DEEPSEEK_FAMILIES and kind != "default":
            inv_freq, magnitude = deepseek_yarn(settings, dim)
            if settings.get("attention_factor") != 1.0:
                softmax_scale = yarn_magnitude(settings["factor"], float(settings.get("mscale_all_dim") or 0)) ** 2
            table = int(settings["original_max_position_embeddings"] * settings["factor"])
            return Computed(tuple(inv_freq), magnitude, derived, table, softmax_scale)
        if model_type == "gpt_oss":
            for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"):
                try:
                    needed(settings, key)
                except ServingError as error:
                    raise ServingError(f"its file of gpt-oss hands on YaRN's keys alone, and {error}") from error
            kept = ("rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate")
            if settings.get("attention_factor") is not None or kind != "yarn":
                notes.append("gpt-oss: run as yarn, without attention_factor.")
            settings = {key: settings[key] for key in kept if key in settings} | {"rope_type": "yarn"}
            kind = "yarn"
        if model_type in _THETA_ALONE:
            notes = [] if kind == "default" else [f"{model_type}: the rope type {kind} is ignored."]
            theta = int(theta) if model_type == "dbrx" else theta
            return Computed(tuple(plain(theta, dim)), 1.0, derived, table, notes=tuple(notes))
        if model_type in _NOT_READ and kind != "default":
            raise NotCheckedError(f"how its file for {model_type} scales layers was not checked")
        if mrope and kind not in ("default", "yarn"):
            raise ServingError(f"its class for {kind} knows no M-RoPE positions")
        if kind == "default":
            inv_freq = plain(theta, dim)
        elif kind == "linear":
            inv_freq = linear(theta, dim, needed(settings, "factor"))
            table = int(most * settings["factor"])
        elif kind == "llama3":
            low, high = needed(settings, "low_freq_factor"), needed(settings, "high_freq_factor")
            original = needed(settings, "original_max_position_embeddings")
            inv_freq = llama3(theta, dim, needed(settings, "factor"), original, low, high)
        elif kind == "yarn":
            factor, original = needed(settings, "factor"), needed(settings, "original_max_position_embeddings")
            truncate = bool(settings.get("truncate", True))
            if _quadruple(settings, model_type):
                original *= _MROPE_TABLE
                notes.append(f"yarn with M-RoPE: the ramp is that of an original length of {original:g} tokens.")
            inv_freq = yarn_by_config(settings, dim, factor, original, truncate=truncate)
            magnitude, table = yarn_magnitude_by_config(settings, factor), int(original * factor)
        elif kind in ("longrope", "su"):
            if model_type in INTERLEAVED_FAMILIES:
                raise ServingError("its longrope class takes half-paired rotation only")
            if model_type in _BY_TRANSFORMERS and settings["long_factor"] != settings["short_factor"]:
                raise ServingError(
                    f"it runs {model_type} by the class of transformers, whose longrope takes the list of the longest "
                    "input of a batch"
                )
            original = needed(settings, "original_max_position_embeddings")
            served = length or int(text.get("original_max_position_embeddings") or derived)
            key = "long" if served > original else "short"
            inv_freq = divided(theta, dim, rope_divisors(settings, f"{key}_factor", dim))
            magnitude = needed(settings, f"{key}_mscale", longrope_magnitude(most / original, original))
            derived, table = served, most
        elif kind == "proportional":
            raise NotCheckedError("its class for Gemma 4 was not checked")
        else:
            raise ServingError(f"vLLM {self.version} freezes or refuses the rope type {kind!r}")
        return Computed(tuple(inv_freq), magnitude, derived, table, softmax_scale, tuple(notes))


class _VLLMWithPlugin(VLLM):
    """vLLM with this package installed beside it, whose plug-in builds a table of any frequencies."""

    remaps = True

    def encodings(self, target: Target) -> Iterator[Encoding]:
        encoding = plugin_encoding(target)
        settings = dict(encoding.settings)
        if target.remapping and (target.model_type in {*MLA_FAMILIES, "gpt_oss"} or "mrope_section" in settings):
            raise ServingError(f"{target.method} in vLLM is for models without latent attention, sinks and M-RoPE")
        if target.model_type in DEEPSEEK_FAMILIES:
            # Its model takes the softmax scale from mscale_all_dim, unless attention_factor is 1. This rope type leaves
            # the length as it is; without the plug-in vLLM stops at the missing original length.
            settings |= {
                "rope_type": "deepseek_yarn",
                "magnitude": settings.pop("attention_factor"),
                "factor": math.e,  # yarn_magnitude(e, m) is 1 + m / 10
                "mscale_all_dim": 10 * (math.sqrt(target.softmax_scale) - 1),
            }
        elif target.model_type == "gpt_oss":  # its model hands on YaRN's keys alone
            settings |= {
                "factor": 1.0,
                "original_max_position_embeddings": target.length,
                "beta_fast": settings.pop("inv_freq"),  # text: without the plug-in vLLM stops at it
                "beta_slow": settings.pop("attention_factor"),
            }
        yield replace(encoding, settings=settings)

    def computes(self, config: Mapping[str, Any], length: int | None = None) -> Computed:
        text = text_settings(config)
        settings, model_type = rope_settings(text), str(text.get("model_type"))
        if plugin_settings(settings) is None:
            return super().computes(config, length)
        if model_type in _THETA_ALONE:
            raise ServingError(f"its {model_type} model hands on theta alone, so that the plug-in gets no settings")
        if model_type in _NOT_READ:
            raise NotCheckedError(f"how its file for {model_type} scales layers was not checked")
        softmax_scale = 1.0
        if model_type in DEEPSEEK_FAMILIES:
            softmax_scale = yarn_magnitude(settings["factor"], settings["mscale_all_dim"]) ** 2
        inv_freq, magnitude = plugin_frequencies(settings)
        return Computed(inv_freq, magnitude, length_setting(text), softmax_scale=softmax_scale)

    def served(self, target: Target, encoding: Encoding, computed: Computed) -> ServingConfig:
        config = super().served(target, encoding, computed)
        notes = plugin_note(config, self.title)
        if target.remapping:
            config = replace(config, command=(*config.command, "--attention-backend", "CUSTOM"))
            notes += ("An experiment, in plain torch and slow: docs/engine-vllm.md has its limits.",)
        return replace(config, notes=notes)


def _quadruple(settings: Mapping[str, Any], model_type: str) -> bool:
    return "mrope_section" in settings and model_type not in _SINGLE_TABLE


def _nested(before: dict[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(before)
    for key, value in after.items():
        inner = result.get(key)
        result[key] = _nested(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return result
