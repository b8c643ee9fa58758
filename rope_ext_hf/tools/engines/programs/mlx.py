"""The rules by which mlx-lm (ml-explore/mlx-lm 0.32.2) computes RoPE from a config.

They were read in mlx_lm/models/rope_utils.py, and in llama.py, qwen2.py, qwen3.py, phi3.py, gemma3_text.py, gpt_oss.py,
deepseek_v3.py and qwen3_vl.py beside it, for the keys that each family passes on. These files read top-level
`rope_theta` and `rope_scaling`, not `rope_parameters`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from rope_ext_hf.errors import ServingError
from rope_ext_hf.models.config_keys import Config, needed
from rope_ext_hf.tools.engines.base import engine_table, register_engine
from rope_ext_hf.tools.engines.former_spelling import FormerSpellingEngine
from rope_ext_hf.tools.engines.keys import Computed, RopeKeys, check_sliding_layers
from rope_ext_hf.tools.engines.target import Encoding, Target

_ORIGINAL = "original_max_position_embeddings"


@register_engine("mlx")
class MLX(FormerSpellingEngine):
    """mlx-lm, started with `mlx_lm.server`.

    It takes no overrides of the config, so the keys are written into config.json in a copy of the model's folder.
    """

    title = "mlx-lm"
    version = "0.32.2"
    table = engine_table("mlx")
    aliases: ClassVar = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}

    def write_yarn(self, target: Target, settings: dict[str, Any], changed: dict[str, Any]) -> None:
        if not target.config.get("qk_rope_head_dim") and settings["factor"] > 1:  # a factor of 1 has the magnitude 1
            mscale = (target.attention_factor - 1) / (0.1 * math.log(settings["factor"]))
            settings |= {"mscale": mscale, "mscale_all_dim": 0.0}

    def changes(self, target: Target, encoding: Encoding) -> dict[str, Any]:
        keys = super().changes(target, encoding)
        if target.model_type == "phi3" and encoding.name != "native":
            keys[_ORIGINAL] = encoding.settings[_ORIGINAL]
        return keys

    def command(self, target: Target) -> tuple[str, ...]:
        return ("mlx_lm.server", "--model", "FOLDER")

    def read(self, config: Config, length: int | None) -> RopeKeys:
        text, model_type = self.known_text(config)
        notes: tuple[str, ...] = ()
        scaling = text.get("rope_scaling")
        if text.get("rope_parameters") and not scaling:
            notes = ("rope_parameters is not read, only rope_theta is.",)
        if (scaling or {}).get("rope_theta", text.get("rope_theta")) is None:
            theta = self.table["families"][model_type].get("theta")
            if theta is None:
                raise ServingError(f"mlx-lm's code for {model_type!r} needs rope_theta at the top level of config.json")
            text["rope_theta"], notes = theta, (f"rope_parameters is not read; theta is {theta:,g}, its default.",)
        rope = RopeKeys.of({**text, "rope_parameters": None}, length)
        if model_type == "gemma3_text":
            pattern = int(text.get("sliding_window_pattern", 6))  # layer_types is not read
            check_sliding_layers(text, pattern, "mlx-lm")
            if needed(text, "num_hidden_layers", pattern) < pattern:
                raise ServingError(f"mlx-lm's code for Gemma 3 stops at fewer than {pattern} layers")
        if model_type == "phi3" and scaling and not {"long_factor", "type"} <= set(scaling):
            raise ServingError("mlx-lm's code for Phi-3 needs the keys long_factor and type in rope_scaling")
        kind, dropped = self.passed_type(model_type, str((scaling or {}).get("type") or rope.kind))
        softmax_scale = rope.latent_scale if text.get("qk_rope_head_dim") and scaling else 1.0
        usual, notes = self.table["usual"].get(kind, {}), notes + dropped
        return replace(rope, kind=kind, length=None, softmax_scale=softmax_scale, notes=notes, usual=usual)

    def yarn(self, rope: RopeKeys) -> Computed:
        factor, original = rope.number("factor"), rope.number(_ORIGINAL)
        ignored = {
            "attention_factor": rope.settings.get("attention_factor") is not None,
            "truncate": rope.settings.get("truncate") is False,
        }
        notes = [f"yarn: {key} is ignored." for key, is_ignored in ignored.items() if is_ignored]
        inv_freq = rope.yarn(factor, original, truncate=True)
        return rope.computed(inv_freq, rope.mscale_ratio(factor), *notes)

    def longrope(self, rope: RopeKeys) -> Computed:
        if rope.text.get("qk_rope_head_dim") or rope.model_type == "gpt_oss":
            raise ServingError(f"mlx-lm's code for {rope.model_type!r} cannot run longrope")
        return super().longrope(rope)
