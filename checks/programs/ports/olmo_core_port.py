"""OLMo-core: the rope of a named size, with the base and the scaling of a config.

It reads the config.json of gpt-oss alone. For other families a user names a size, its base, and a scaling.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version as installed
from typing import Any

import rope_settings
import torch
from olmo_core.nn.moe.v2.gpt_oss import build_gpt_oss_20b_config_from_hf_config
from olmo_core.nn.rope import PIRoPEScalingConfig, StepwiseRoPEScalingConfig, YaRNRoPEScalingConfig
from olmo_core.nn.transformer import TransformerConfig

SIZES = {
    ("llama", 128): "llama3_8B",
    ("llama", 64): "llama3_1B",
    ("qwen3", 128): "qwen3_8B",
    ("olmo3", 128): "olmo3_7B",
}


def _linear(rope: dict[str, Any]) -> Any:
    return PIRoPEScalingConfig(factor=rope["factor"])


def _llama3(rope: dict[str, Any]) -> Any:
    return StepwiseRoPEScalingConfig(
        factor=rope["factor"],
        low_freq_proportion=1 - 1 / rope["low_freq_factor"],
        high_freq_proportion=1 / rope["high_freq_factor"],
        old_context_len=rope["original_max_position_embeddings"],
    )


def _yarn(rope: dict[str, Any]) -> Any:
    betas = {key: rope[key] for key in ("beta_fast", "beta_slow") if key in rope}
    return YaRNRoPEScalingConfig(
        factor=rope["factor"], old_context_len=rope["original_max_position_embeddings"], **betas
    )


SCALINGS: dict[str, Callable[[dict[str, Any]], Any]] = {"linear": _linear, "llama3": _llama3, "yarn": _yarn}


def version() -> str:
    return f"ai2-olmo-core {installed('ai2-olmo-core')}, torch {torch.__version__}"


def _rotary(config: dict[str, Any], layer_type: str | None) -> Any:
    """Return the rope of a layer."""
    if config["model_type"] == "gpt_oss":
        block, *_ = build_gpt_oss_20b_config_from_hf_config(config).block.values()
        return block.sequence_mixer.rope.build(block.sequence_mixer.head_dim)
    rope, key = rope_settings.read(config), (config["model_type"], config.get("head_dim"))
    if key not in SIZES or rope["rope_type"] not in ("default", *SCALINGS):
        raise NotImplementedError
    model = getattr(TransformerConfig, SIZES[key])(vocab_size=64, rope_theta=rope["rope_theta"])
    if rope["rope_type"] in SCALINGS:
        model = model.with_rope_scaling(SCALINGS[rope["rope_type"]](rope))
    layer = 0 if layer_type == "sliding_attention" else model.n_layers - 1
    block = (model.block_overrides or {}).get(layer, model.block)
    return block.sequence_mixer.rope.build(config["head_dim"])


def _first_turn(config: dict[str, Any], layer_type: str | None) -> Any:
    """Return cos + i sin of each pair at position 1, times the magnitude."""
    tables = _rotary(config, layer_type).get_buffers(2, torch.device("cpu"))
    turn = torch.complex(tables.pos_cos[1].double(), tables.pos_sin[1].double())
    return turn[: len(turn) // 2]


def inv_freq(config: dict[str, Any], layer_type: str | None = None) -> Any:
    return _first_turn(config, layer_type).angle().tolist()


def magnitude(config: dict[str, Any], layer_type: str | None = None) -> float:
    return float(_first_turn(config, layer_type).abs()[0])
