"""The rules by which ExLlamaV3 (turboderp-org/exllamav3 1.6.5) computes RoPE from a config.

They were read in exllamav3/util/rope.py, in `read_rope_settings_default` of model/config.py, in `read_dict` of
util/file.py, and in llama.py, mistral.py, qwen2.py, qwen3.py, qwen3_moe.py, qwen3_vl.py, mixtral.py, phi3.py,
gemma3.py, gpt_oss.py and deepseek_v3.py of architecture/, for the keys that each family passes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from rope_ext_hf.errors import ServingError
from rope_ext_hf.models.config_keys import Config, needed, rotated_dims, yarn_magnitude
from rope_ext_hf.tools.engines.base import engine_table, register_engine
from rope_ext_hf.tools.engines.former_spelling import FormerSpellingEngine, set_length_for_factor
from rope_ext_hf.tools.engines.formulas import longrope_magnitude
from rope_ext_hf.tools.engines.keys import Computed, RopeKeys, length_setting
from rope_ext_hf.tools.engines.target import Encoding, Target


@register_engine("exllamav3")
class ExLlamaV3(FormerSpellingEngine):
    """ExLlamaV3, the engine that TabbyAPI serves with.

    It takes no overrides of the config on its command line, so the keys are written into config.json in the folder with
    the quantised weights.
    """

    title = "ExLlamaV3"
    version = "1.6.5"
    table = engine_table("exllamav3")
    aliases: ClassVar = {"su": "longrope", "mrope": "default"}
    unknown_type = "has no rope type {!r} that was checked"
    where = "Write these keys into config.json of the quantised folder. TabbyAPI serves max_seq_len tokens."

    def write_yarn(self, target: Target, settings: dict[str, Any], changed: dict[str, Any]) -> None:
        settings["attention_factor"] = target.attention_factor
        set_length_for_factor(settings, changed)

    def changes(self, target: Target, encoding: Encoding) -> dict[str, Any]:
        return encoding.config | {"rope_scaling": encoding.settings}

    def read(self, config: Config, length: int | None) -> RopeKeys:
        text, model_type = self.known_text(config)
        settings = text.get("rope_scaling") or text.get("rope_parameters") or {}
        if not isinstance(settings, Mapping):
            raise ServingError(f"the rope settings must be an object, got {type(settings).__name__}")
        notes: tuple[str, ...] = ()
        if dict in map(type, settings.values()):
            notes = ("rope_parameters by layer type is not read: it runs without scaling, with its default theta.",)
            settings = {}
        theta = (
            text.get("rope_theta") or settings.get("rope_theta") or self.table["families"][model_type].get("theta", 1e4)
        )
        settings = {**settings, "rope_theta": needed({"rope_theta": theta}, "rope_theta", above=1.0)}
        partial = text.get("partial_rotary_factor") or (text.get("rope_parameters") or {}).get("partial_rotary_factor")
        settings["partial_rotary_factor"] = partial or 1.0
        kind, most = settings.get("rope_type") or settings.get("type") or "default", length_setting(text)
        rope = RopeKeys(text, settings, kind, rotated_dims(text, settings), most, length, most, notes=notes)
        latent = model_type == "deepseek_v3" and kind != "default"
        usual = self.table["usual"].get(str(kind), {})
        return replace(rope, softmax_scale=rope.latent_scale if latent else 1.0, usual=usual)

    def yarn(self, rope: RopeKeys) -> Computed:
        settings, stated = rope.settings, rope.settings.get("factor")
        original = settings.get("original_max_position_embeddings")
        if original is None:
            original, factor = rope.most, rope.number("factor")
        else:
            factor = rope.most / rope.number("original_max_position_embeddings")
            if isinstance(stated, (int, float)) and stated != factor:
                note = f"yarn: it takes the factor {factor:g}, max_position_embeddings divided by the original length."
                rope = replace(rope, notes=(*rope.notes, note))
        if original != int(original):
            raise ServingError(f"original_max_position_embeddings must be a whole number, got {original}")
        mscale, all_dim = settings.get("mscale"), settings.get("mscale_all_dim")
        magnitude = 1.0 if settings.get("llama_4_scaling_beta") else yarn_magnitude(factor)
        if settings.get("attention_factor") is not None:
            magnitude = rope.number("attention_factor")
        elif rope.model_type == "deepseek_v3" and mscale and all_dim:
            magnitude = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, all_dim)
        return rope.computed(rope.yarn(factor, original, truncate=bool(settings.get("truncate", True))), magnitude)

    def longrope(self, rope: RopeKeys) -> Computed:
        original = needed({**rope.text, **rope.settings}, "original_max_position_embeddings")
        tokens = rope.started_for if rope.started_for and rope.model_type == "phi3" else rope.most
        inv_freq = rope.divided("long_factor" if tokens > original else "short_factor")
        ignored = rope.settings.get("attention_factor") is not None
        notes = ("longrope: attention_factor is ignored.",) if ignored else ()
        return rope.computed(inv_freq, longrope_magnitude(rope.most / original, original), *notes)
