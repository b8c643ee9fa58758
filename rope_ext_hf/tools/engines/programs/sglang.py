"""The rules by which SGLang (sgl-project/sglang 0.5.23) computes RoPE from a config.

They were read in python/sglang/srt/layers/rotary_embedding/ (factory.py, yarn.py, mrope.py, rope_variant.py), in
models/llama.py, qwen2.py, qwen3.py, gemma3_causal.py, gpt_oss.py, mixtral.py, deepseek_v2.py, configs/model_config.py,
utils/hf_transformers/ (config.py, common.py) and plugins/ (__init__.py, hook_registry.py), and in every file of
models/, for the arguments that it passes to get_rope.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rope_ext_hf.errors import ServingError
from rope_ext_hf.models.config_keys import Config, needed, yarn_magnitude
from rope_ext_hf.tools.engines.base import NotCheckedError, engine_table, register_engine
from rope_ext_hf.tools.engines.hf_transformers import Transformers
from rope_ext_hf.tools.engines.keys import PLUGIN_TYPE, Computed, RopeKeys
from rope_ext_hf.tools.engines.overrides import OverridingEngine, plugin_encoding
from rope_ext_hf.tools.engines.programs.vllm import DEEPSEEK_FAMILIES, deepseek_yarn, phi3_longrope
from rope_ext_hf.tools.engines.target import Encoding, Target

_DEEPSEEK_FAMILIES = DEEPSEEK_FAMILIES - {"axk1", "longcat_flash"}
"""The same families as in vLLM, without axk1, which SGLang has no file for, and longcat_flash, whose file reads
settings of its own."""


@register_engine("sglang")
class SGLang(OverridingEngine):
    """SGLang, started with `python -m sglang.launch_server`."""

    title = "SGLang"
    option = "--json-model-override-args"
    drafts = (
        "--json-model-override-args and --context-length go to the draft as well (from_server_args of "
        "configs/model_config.py), also to one in a folder of its own, which must have the same rotary embedding."
    )
    on_gpus = "--tp-size {gpus} --kv-cache-dtype {keys} --max-running-requests {inputs} --mem-fraction-static {static}"
    version = "0.5.23"
    table = engine_table("sglang")

    def with_plugin(self) -> SGLang:
        return _SGLangWithPlugin()

    def start(self, target: Target) -> tuple[str, ...]:
        command = ("python", "-m", "sglang.launch_server", "--model-path", target.model)
        return (*command, "--context-length", str(target.length))

    def spelled(self, target: Target, settings: dict[str, Any]) -> dict[str, Any]:
        if settings["rope_type"] != "yarn" or target.model_type in {"gemma3_text", *_DEEPSEEK_FAMILIES}:
            return settings
        if "mrope_section" in settings:
            settings = {k: v for k, v in settings.items() if k not in ("mscale", "mscale_all_dim")}
        return settings | {"attn_factor": target.attention_factor / _yarn_magnitude(settings)}

    def config(self, target: Target, changes: dict[str, Any]) -> dict[str, Any]:
        config = super().config(target, changes)
        if not target.composite and "rope_parameters" in changes:
            config["rope_parameters"] = dict(target.config["rope_parameters"]) | changes["rope_parameters"]
        return config

    def read(self, config: Config, length: int | None) -> RopeKeys:
        rope = RopeKeys.of(config, length)
        settings, kind, most = rope.settings, rope.kind, rope.most
        usual = {"factor": needed(settings, "factor", 1.0)}
        usual["original_max_position_embeddings"] = needed(settings, "original_max_position_embeddings", most)
        multiplied = "original_max_position_embeddings" not in settings and kind != "llama3"
        notes = [
            f"{key} is missing and replaced by {number:g}."
            for key, number in usual.items()
            if kind in ("yarn", "llama3") and key not in settings
        ]
        usual |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        derived = int(most * usual["factor"]) if multiplied else most
        return replace(rope, length=derived, notes=tuple(notes), usual=usual)

    def computes(self, config: Config, length: int | None = None) -> Computed:
        rope = self.read(config, length)
        if rope.model_type == "gemma3_text":  # it takes transformers' class, with the settings of full-attention layers
            flat = {key: value for key, value in rope.settings.items() if key != "_shared_truncate"}
            theirs = Transformers().computes({**rope.text, "rope_parameters": flat, "rope_scaling": None}, length)
            return Computed(theirs.inv_freq, theirs.attention_factor, rope.length, notes=theirs.notes)
        if rope.model_type in _DEEPSEEK_FAMILIES and rope.kind != "default":
            inv_freq, magnitude = deepseek_yarn(rope)
            magnitude *= needed(rope.settings, "attn_factor", 1.0)
            return replace(rope.computed(inv_freq, magnitude), softmax_scale=rope.latent_scale)
        if rope.kind != "default":
            _check_settings_reach(rope.model_type)
        return self.by_type(rope)

    def yarn(self, rope: RopeKeys) -> Computed:
        settings = rope.settings
        if "mrope_section" in settings and ("mscale" in settings or "mscale_all_dim" in settings):
            raise ServingError("SGLang's YaRN class for M-RoPE takes no mscale")
        factor, original = rope.number("factor"), rope.number("original_max_position_embeddings")
        inv_freq = rope.yarn(factor, original, truncate=bool(settings.get("truncate", True)))
        magnitude = _yarn_magnitude(settings) * needed(settings, "attn_factor", 1.0)
        ignored = settings.get("attention_factor") is not None
        return rope.computed(inv_freq, magnitude, *(("yarn: attention_factor is ignored.",) if ignored else ()))

    def longrope(self, rope: RopeKeys) -> Computed:
        computed = phi3_longrope(rope, rope.started_for or rope.most)
        if rope.settings["long_factor"] == rope.settings["short_factor"]:
            return computed
        note = "longrope: cached keys keep the list that they were rotated with when an input grows."
        return replace(computed, notes=(*computed.notes, note))


class _SGLangWithPlugin(SGLang):
    """SGLang with this package installed beside it; the package's plug-in lets it compute RoPE with any frequencies."""

    def encodings(self, target: Target) -> Iterator[Encoding]:
        parameters = target.config["rope_parameters"]
        own = parameters if target.layer_type is None else parameters[target.layer_type]
        if target.model_type in _DEEPSEEK_FAMILIES:  # it computes the softmax scale from these
            kept = ("factor", "mscale_all_dim", "original_max_position_embeddings")
            yield plugin_encoding(target, **{key: own[key] for key in kept if key in own})
        else:  # it merges settings key by key, so a factor of the config would multiply the length
            yield plugin_encoding(target, **({"factor": 1.0} if "factor" in own else {}))

    def computes(self, config: Config, length: int | None = None) -> Computed:
        rope = self.read(config, length)
        if rope.kind != PLUGIN_TYPE:
            return super().computes(config, length)
        _check_settings_reach(rope.model_type)
        return self.by_plugin(rope, rope.length, latent=rope.model_type in _DEEPSEEK_FAMILIES)


def _yarn_magnitude(settings: Config) -> float:
    """Return YaRN's magnitude as SGLang computes it: multiplied by the setting attn_factor."""
    factor = needed(settings, "factor", 1.0)
    mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
    if mscale is not None and all_dim is not None:
        return yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
    return yarn_magnitude(factor)


def _check_settings_reach(model_type: str) -> None:
    """Raise a NotCheckedError if SGLang's code for a model family does not read the rope settings of the config."""
    if model_type == "longcat_flash":
        raise NotCheckedError("SGLang's code for longcat_flash reads rope_scaling from a config class of its own")
