"""torchtitan: the attention of a named size, with the rope settings of a config.

It reads no config.json: a user names a size and writes other settings into the `rope` of its layers.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from importlib.metadata import version as installed
from typing import Any

import rope_settings
import torch

SIZES = {
    ("llama", 128): ("llama3", "8B"),
    ("llama", 64): ("llama3", "1B"),
    ("qwen3", 128): ("qwen3", "8B"),
    ("gpt_oss", 64): ("gpt_oss", "20b"),
    ("deepseek_v3", 64): ("deepseek_v3", "671B"),
}
SCALINGS: dict[str, tuple[str, dict[str, str]]] = {
    "default": ("none", {}),
    "llama3": (
        "llama",
        {
            "factor": "scaling_factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_max_position_embeddings",
        },
    ),
    "yarn": (
        "yarn",
        {
            "factor": "rope_factor",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "original_max_position_embeddings": "original_seq_len",
            "truncate": "truncate",
        },
    ),
}
"""torchtitan's name of each scaling, and its names of the settings."""


def version() -> str:
    return f"torchtitan {installed('torchtitan')}, torch {torch.__version__}"


def named_size(config: dict[str, Any]) -> Any:
    """Return the config of the attention of the size for a family and its heads."""
    key = config["model_type"], config.get("head_dim")
    if key not in SIZES:
        raise NotImplementedError
    module, size = SIZES[key]
    model = importlib.import_module(f"torchtitan.models.{module}").model_registry(size, attn_backend="flex").model
    return model.layers[-1].attention


def _written(config: dict[str, Any]) -> Any:
    """Return the same with the settings of a config in its rope."""
    attention, rope = named_size(config), rope_settings.read(config)
    if rope["rope_type"] not in SCALINGS:
        raise NotImplementedError
    scaling, fields = SCALINGS[rope["rope_type"]]
    changes = {field: rope[key] for key, field in fields.items() if key in rope}
    attention.rope = dataclasses.replace(attention.rope, theta=rope["rope_theta"], scaling=scaling, **changes)
    return attention


def first_turn(attention: Any) -> Any:
    """Return cos + i sin of each pair at position 1, times the magnitude."""
    turn = dataclasses.replace(attention.rope, max_seq_len=2).build().cache[1]
    if turn.is_complex():
        return turn.to(torch.complex128)
    cos, sin = turn.double().chunk(2)
    return torch.complex(cos, sin)[: len(cos) // 2]


def factor(attention: Any) -> float:
    """Return the magnitude, and what attention puts into the scale of its scores in place of a magnitude."""
    with torch.device("meta"):
        built = attention.build()
    turned = float(first_turn(attention).abs()[0])
    if hasattr(built, "qk_head_dim"):  # DeepSeek's scale of scores is its own, beside a magnitude of 1
        return turned
    scale = getattr(built, "softmax_scale", None) or built.scaling or built.head_dim**-0.5
    return turned * math.sqrt(scale * math.sqrt(built.head_dim))


def inv_freq(config: dict[str, Any]) -> Any:
    return first_turn(_written(config)).angle().tolist()


def magnitude(config: dict[str, Any]) -> float:
    return factor(_written(config))
