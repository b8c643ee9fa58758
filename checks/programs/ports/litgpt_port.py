"""litgpt: its GPT from a config by name, with the rope settings of another config.

It never reads a config.json: a user writes `rope_base` and `rope_adjustments` by hand. The port writes them from the
settings of a config in any spelling. litgpt needs beta_fast and beta_slow for YaRN: 32 and 1 where a config has none.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version as installed
from typing import Any

import rope_settings
import torch
from litgpt import GPT, Config

NAMES = {
    "llama": "Llama-3-8B",
    "mistral": "Mistral-7B-v0.3",
    "qwen2": "Qwen2.5-7B",
    "qwen3": "Qwen3-8B",
    "gemma3_text": "Gemma-3-4b-it",
}
SIZES = {"n_layer": 1, "padded_vocab_size": 64, "intermediate_size": 64, "block_size": 2}
ADJUSTMENTS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "mscale", "mscale_all_dim"),
}
RENAMED = {"original_max_position_embeddings": "original_max_seq_len"}
NEEDED = {"yarn": {"beta_fast": 32.0, "beta_slow": 1.0}}


def version() -> str:
    return f"litgpt {installed('litgpt')}, torch {torch.__version__}"


@cache
def _tables(written: str) -> tuple[Any, Any]:
    config = json.loads(written)
    if config["model_type"] not in NAMES:
        raise NotImplementedError
    rope = rope_settings.read(config)
    kind = rope["rope_type"]
    adjustments = None
    if kind != "default":
        if kind not in ADJUSTMENTS:
            raise NotImplementedError
        rope = NEEDED.get(kind, {}) | rope
        adjustments = {RENAMED.get(key, key): rope[key] for key in ADJUSTMENTS[kind] if key in rope}
    changes = SIZES | {
        "rope_base": rope["rope_theta"],
        "rope_adjustments": adjustments,
        "head_size": config["head_dim"],
    }
    changes |= {"n_head": config["num_attention_heads"], "n_query_groups": config["num_key_value_heads"]}
    local = rope_settings.local_theta(config)
    if local is not None:
        changes |= {"rope_local_base_freq": local, "rope_indices": [0], "sliding_window_indices": [0]}
    model = GPT(Config.from_name(NAMES[config["model_type"]], n_embd=config["hidden_size"], **changes))
    return model.cos[1], model.sin[1]


def _first_angles(config: dict[str, Any], layer_type: str | None) -> tuple[Any, Any]:
    """Return cos and sin of position 1, (pairs,) each."""
    cos, sin = _tables(json.dumps(config))
    if cos.dim() == 2:  # global layers, then local ones
        index = int(layer_type == "sliding_attention")
        cos, sin = cos[:, index], sin[:, index]
    return cos[: len(cos) // 2].double(), sin[: len(sin) // 2].double()


def inv_freq(config: dict[str, Any], layer_type: str | None = None) -> Any:
    cos, sin = _first_angles(config, layer_type)
    return torch.arctan2(sin, cos).tolist()


def magnitude(config: dict[str, Any], layer_type: str | None = None) -> float:
    cos, sin = _first_angles(config, layer_type)
    return float(torch.hypot(cos, sin)[0])
