"""lmdeploy's PyTorch engine: the rotary modules of its models without decoder layers, on a CPU."""

from __future__ import annotations

import importlib
import json
import tempfile
from functools import cache
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import torch
import transformers
from lmdeploy.hf_configs import config_from_pretrained
from lmdeploy.pytorch import backends
from lmdeploy.pytorch.backends.default.op_backend import DefaultOpsBackend

backends.get_backend = lambda: DefaultOpsBackend  # a GPU has the same rotary modules
transformers.logging.set_verbosity_error()
CLASSES = {
    "llama": "llama.LlamaModel",
    "mistral": "mistral.MistralModel",
    "qwen2": "qwen2.Qwen2Model",
    "qwen3": "qwen3.Qwen3model",
    "internlm3": "internlm3.InternLM3Model",
    "phi3": "phi3.Phi3Model",
    "gpt_oss": "gpt_oss.GptOssModel",
    "gemma3_text": "gemma.GemmaModel",
    "deepseek_v3": "deepseek_v2.DeepseekV2Model",
}


def version() -> str:
    return f"lmdeploy {installed('lmdeploy')}, transformers {transformers.__version__}"


@cache
def _model(written: str) -> Any:
    family = json.loads(written)["model_type"]
    if family not in CLASSES:
        raise NotImplementedError
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(written, encoding="utf-8")
        config = config_from_pretrained(folder, trust_remote_code=False)
    config.num_hidden_layers = 0
    module, _, name = CLASSES[family].partition(".")
    model = getattr(importlib.import_module(f"lmdeploy.pytorch.models.{module}"), name)
    return model(config, dtype=torch.float32, device="cpu")


def _first_angles(config: dict[str, Any], layer_type: str | None, length: int | None) -> tuple[Any, Any]:
    """Return cos and sin of position 1, (pairs,) each, in a text of this length."""
    model = _model(json.dumps(config))
    local = layer_type == "sliding_attention" and hasattr(model, "rotary_emb_local")
    rotary = model.rotary_emb_local if local else model.rotary_emb
    positions = torch.tensor([[1, (length or 2) - 1]])
    cos, sin = (table[0, 0].double() for table in rotary(torch.zeros(1, 2, 1), positions))
    return cos[: len(cos) // 2], sin[: len(sin) // 2]


def inv_freq(config: dict[str, Any], layer_type: str | None = None, length: int | None = None) -> Any:
    cos, sin = _first_angles(config, layer_type, length)
    return torch.arctan2(sin, cos).tolist()


def magnitude(config: dict[str, Any], layer_type: str | None = None, length: int | None = None) -> float:
    cos, sin = _first_angles(config, layer_type, length)
    return float(torch.hypot(cos, sin)[0])
