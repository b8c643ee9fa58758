"""lmdeploy's TurboMind: the rope settings that its parser hands to the engine, which computes on GPUs alone.

The frequencies are those of transformers for the settings as handed over: a cell says what the parser makes of a
config. For YaRN, the engine takes the length that it gets for the original one, and always rounds the bounds.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from functools import cache
from importlib.metadata import version as installed
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import transformers
from lmdeploy import turbomind
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

transformers.logging.set_verbosity_error()
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""Architectures that are in `SUPPORTED_ARCHS`; lmdeploy runs the other families with its PyTorch engine."""
# The compiled module needs CUDA; the parser fills its structures.
turbomind._tm = MagicMock(AttentionConfig=lambda: SimpleNamespace(rope=SimpleNamespace()))
utils = importlib.import_module("lmdeploy.turbomind.models.utils")


def version() -> str:
    return f"lmdeploy {installed('lmdeploy')}, transformers {transformers.__version__}"


@cache
def _handed_over(written: str) -> Any:
    config = json.loads(written)
    if config["model_type"] not in ARCHITECTURES:
        raise NotImplementedError
    config["architectures"] = [ARCHITECTURES[config["model_type"]]]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        return utils.make_attention_config(utils.load_model_config(folder)).rope


def _rotary(config: dict[str, Any], length: int | None) -> Any:
    rope = _handed_over(json.dumps(config))
    kind = next(name for name, number in utils._ROPE_TYPE_MAP.items() if number == rope.type)
    settings = {"rope_type": kind, "rope_theta": rope.base, "factor": rope.factor}
    original = {"original_max_position_embeddings": rope.max_position_embeddings}
    if kind == "yarn":
        settings |= original | {"attention_factor": rope.yarn_attention_factor}
        settings |= {"beta_fast": rope.yarn_beta_fast, "beta_slow": rope.yarn_beta_slow}
    elif kind == "llama3":
        settings |= {"original_max_position_embeddings": rope.llama3_original_max_position_embeddings}
        settings |= {"low_freq_factor": rope.llama3_low_freq_factor, "high_freq_factor": rope.llama3_high_freq_factor}
    read = LlamaConfig(
        hidden_size=rope.dim, num_attention_heads=1, max_position_embeddings=rope.max_position_embeddings,
        rope_parameters=settings,
    )  # fmt: skip
    rotary = LlamaRotaryEmbedding(read)
    if length is not None:
        rotary(torch.zeros(1), torch.tensor([[length - 1]]))
    return rotary


def inv_freq(config: dict[str, Any], length: int | None = None) -> Any:
    return _rotary(config, length).inv_freq.double().tolist()


def magnitude(config: dict[str, Any], length: int | None = None) -> float:
    return float(_rotary(config, length).attention_scaling)
