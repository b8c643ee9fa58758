"""SGLang: sgl-project/sglang 0.5.23.

Read: python/sglang/srt/layers/rotary_embedding/ (factory.py, yarn.py, mrope.py, rope_variant.py), models/llama.py,
qwen2.py, qwen3.py, gemma3_causal.py, gpt_oss.py, mixtral.py, deepseek_v2.py, configs/model_config.py,
utils/hf_transformers/ (config.py, common.py), plugins/ (__init__.py, hook_registry.py), and what every file of
models/ hands to get_rope.
"""

from __future__ import annotations

import json
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
from rope_ext_hf.engines.hf_transformers import Transformers, config_changes, yarn_by_config
from rope_ext_hf.engines.plugin_type import (
    PLUGIN_TYPE,
    EngineWithPlugin,
    plugin_encoding,
    plugin_frequencies,
    plugin_note,
)
from rope_ext_hf.engines.vllm import DEEPSEEK_FAMILIES, INTERLEAVED_FAMILIES, deepseek_yarn
from rope_ext_hf.errors import ServingError

_WHOLE_THETA = frozenset({"dbrx", "granitemoe", "mixtral", "starcoder2"})
"""Families whose model file hands on nothing but theta, cut to a whole number."""
_THETA_ALONE = _WHOLE_THETA | {"gemma", "gemma2", "olmo", "persimmon", "phi", "stablelm"}
"""Families whose model file hands on nothing of the rope settings but theta."""
_DEEPSEEK_FAMILIES = DEEPSEEK_FAMILIES - {"axk1", "longcat_flash"}
"""Those of vLLM but for one that SGLang has no model file for, and one whose file reads settings of its own."""


@register_engine("sglang")
class SGLang(EngineWithPlugin):
    """SGLang, started with `python -m sglang.launch_server`."""

    title = "SGLang"
    drafts = (
        "--json-model-override-args and --context-length go to the draft as well (from_server_args of "
        "configs/model_config.py), also to one in a folder of its own, which must have the same rotary embedding."
    )
    version = "0.5.23"

    def with_plugin(self) -> Engine:
        return _SGLangWithPlugin()

    def encodings(self, target: Target) -> Iterator[Encoding]:
        yield from self.published(target)
        for encoding in super().encodings(target):
            settings = dict(encoding.settings)
            changed = {"max_position_embeddings": target.length}
            if target.config.get("original_max_position_embeddings") and encoding.name != "native":
                changed["original_max_position_embeddings"] = settings["original_max_position_embeddings"]
            if settings["rope_type"] == "yarn" and target.model_type not in {"gemma3_text", *_DEEPSEEK_FAMILIES}:
                if "mrope_section" in settings:
                    settings = {k: v for k, v in settings.items() if k not in ("mscale", "mscale_all_dim")}
                settings["attn_factor"] = target.attention_factor / _yarn_magnitude(settings)
            yield Encoding(encoding.name, settings, changed)

    def config(self, target: Target, encoding: Encoding) -> dict[str, Any]:
        changes = config_changes(target, encoding)
        if not target.composite and "rope_parameters" in changes:
            changes["rope_parameters"] = dict(target.config["rope_parameters"]) | changes["rope_parameters"]
        return merged(target.config, changes)

    def served(self, target: Target, encoding: Encoding, computed: Computed) -> ServingConfig:
        changes = config_changes(target, encoding)
        overrides = target.placed(changes)
        flags = ("--json-model-override-args", json.dumps(overrides)) if overrides else ()
        command = ("python", "-m", "sglang.launch_server", "--model-path", target.model)
        return self.serving(
            target,
            encoding.name,
            computed,
            command=(*command, "--context-length", str(target.length), *flags),
            overrides=overrides or None,
            config_keys=overrides,
            notes=computed.notes,
        )

    def computes(self, config: Mapping[str, Any], length: int | None = None) -> Computed:
        text = text_settings(config)
        settings, model_type = rope_settings(text), str(text.get("model_type"))
        kind, most = settings["rope_type"], length_setting(text)
        dim, theta = rotated_dims(text, settings), settings["rope_theta"]
        factor = needed(settings, "factor", 1.0)
        original = needed(settings, "original_max_position_embeddings", most)
        derived = most if "original_max_position_embeddings" in settings or kind == "llama3" else int(most * factor)
        magnitude, softmax_scale, table = 1.0, 1.0, None
        notes: list[str] = []
        mrope = "mrope_section" in settings
        if model_type in _THETA_ALONE:
            notes = [] if kind == "default" else [f"{model_type}: the rope type {kind} is ignored."]
            theta = int(theta) if model_type in _WHOLE_THETA else theta
            return Computed(tuple(plain(theta, dim)), 1.0, derived, notes=tuple(notes))
        if model_type == "gemma3_text":  # the functions of transformers, on the settings of the full-attention layers
            flat = {key: value for key, value in settings.items() if key != "_shared_truncate"}
            theirs = Transformers().computes(text | {"rope_parameters": flat, "rope_scaling": None}, length)
            return Computed(theirs.inv_freq, theirs.attention_factor, derived, notes=theirs.notes)
        for key in ("factor", "original_max_position_embeddings"):
            if kind in ("yarn", "llama3") and key not in settings:
                notes.append(f"{key} is missing and replaced by {factor if key == 'factor' else original:g}.")
        if model_type in _DEEPSEEK_FAMILIES and kind != "default":
            inv_freq, magnitude = deepseek_yarn(settings, dim)
            magnitude *= needed(settings, "attn_factor", 1.0)
            softmax_scale = yarn_magnitude(factor, float(settings.get("mscale_all_dim") or 0)) ** 2
            return Computed(tuple(inv_freq), magnitude, derived, table, softmax_scale, tuple(notes))
        if kind != "default":
            _check_settings_reach(model_type)
        if mrope and kind not in ("default", "yarn"):
            raise ServingError(f"its class for {kind} knows no M-RoPE positions")
        if kind == "default":
            inv_freq = plain(theta, dim)
        elif kind == "linear":
            inv_freq = linear(theta, dim, factor)
        elif kind == "llama3":
            low, high = needed(settings, "low_freq_factor", 1.0), needed(settings, "high_freq_factor", 4.0)
            inv_freq = llama3(theta, dim, factor, original, low, high)
        elif kind == "yarn":
            if mrope and ("mscale" in settings or "mscale_all_dim" in settings):
                raise ServingError("its yarn class for M-RoPE takes no mscale")
            inv_freq = yarn_by_config(settings, dim, factor, original, truncate=bool(settings.get("truncate", True)))
            magnitude = _yarn_magnitude(settings) * needed(settings, "attn_factor", 1.0)
            if settings.get("attention_factor") is not None:
                notes.append("yarn: attention_factor is ignored.")
        elif kind in ("longrope", "su"):
            if model_type in INTERLEAVED_FAMILIES:
                raise ServingError("its longrope class takes half-paired rotation only")
            key = "long" if (length or most) > original else "short"
            inv_freq = divided(theta, dim, rope_divisors(settings, f"{key}_factor", dim))
            magnitude = needed(settings, f"{key}_mscale", longrope_magnitude(most / original, original))
            table = most
            if settings["long_factor"] != settings["short_factor"]:
                notes.append("longrope: cached keys keep the list that they were rotated with when an input grows.")
        elif kind == "proportional":
            raise NotCheckedError("its class for Gemma 4 was not checked")
        else:
            raise ServingError(f"SGLang {self.version} freezes or refuses the rope type {kind!r}")
        return Computed(tuple(inv_freq), magnitude, derived, table, softmax_scale, tuple(notes))


class _SGLangWithPlugin(SGLang):
    """SGLang with this package installed beside it, whose plug-in builds a table of any frequencies."""

    def encodings(self, target: Target) -> Iterator[Encoding]:
        parameters = target.config["rope_parameters"]
        own = parameters if target.layer_type is None else parameters[target.layer_type]
        if target.model_type in _DEEPSEEK_FAMILIES:  # the softmax scale follows from these
            kept = ("factor", "mscale_all_dim", "original_max_position_embeddings")
            yield plugin_encoding(target, {key: own[key] for key in kept if key in own})
        else:  # settings are merged key by key, and a factor multiplies the length
            yield plugin_encoding(target, {"factor": 1.0} if "factor" in own else None)

    def computes(self, config: Mapping[str, Any], length: int | None = None) -> Computed:
        text = text_settings(config)
        settings, model_type = rope_settings(text), str(text.get("model_type"))
        if settings["rope_type"] != PLUGIN_TYPE:
            return super().computes(config, length)
        if model_type in _THETA_ALONE:
            raise ServingError(f"its {model_type} model hands on theta alone, so that the plug-in gets no settings")
        _check_settings_reach(model_type)
        factor, softmax_scale = needed(settings, "factor", 1.0), 1.0
        if model_type in _DEEPSEEK_FAMILIES:
            softmax_scale = yarn_magnitude(factor, float(settings.get("mscale_all_dim") or 0)) ** 2
        most = length_setting(text)
        derived = most if "original_max_position_embeddings" in settings else int(most * factor)
        inv_freq, magnitude = plugin_frequencies(settings)
        return Computed(inv_freq, magnitude, derived, None, softmax_scale)

    def served(self, target: Target, encoding: Encoding, computed: Computed) -> ServingConfig:
        config = super().served(target, encoding, computed)
        return replace(config, notes=plugin_note(config, self.title))


def _yarn_magnitude(settings: Mapping[str, Any]) -> float:
    """The magnitude of a yarn before attn_factor."""
    factor = needed(settings, "factor", 1.0)
    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale is not None and all_dim is not None:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    return yarn_magnitude(factor)


def _check_settings_reach(model_type: str) -> None:
    if model_type == "longcat_flash":
        raise NotCheckedError("its file for longcat_flash reads rope_scaling of a config class of its own")
