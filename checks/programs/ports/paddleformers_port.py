"""paddleformers: its AutoConfig reads the config.json, and the rotary class of the family says the frequencies.

The modules of Qwen and DeepSeek import paddlefleet, which PyPI does not have; stand-ins let them be imported. The cells
of Qwen are those of `Qwen2Model` and `Qwen3Model`: with paddlefleet, `Qwen2ForCausalLM` is a model of that package.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import paddle
import paddleformers
import transformers
from paddleformers.transformers import AutoConfig

provider: Any = ModuleType("paddleformers.transformers.gpt_provider")
provider.GPTModelProvider = object
sys.modules[provider.__name__] = provider
for name in ("paddlefleet_ops", "paddlefleet_ops.deep_ep"):
    sys.modules[name] = MagicMock()

CLASSES = {
    "llama": "LlamaRotaryEmbedding",
    "qwen2": "Qwen2RotaryEmbedding",
    "qwen3": "Qwen3RotaryEmbedding",
    "phi3": "Phi3RotaryEmbedding",
    "gemma3_text": "Gemma3RotaryEmbedding",
    "gpt_oss": "GptOssRotaryEmbedding",
    "deepseek_v3": "DeepseekV3YarnRotaryEmbedding",
}


def version() -> str:
    used = f"paddle {paddle.__version__}, transformers {transformers.__version__}"
    return f"paddleformers {paddleformers.__version__}, {used}"


@cache
def _config(written: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(written, encoding="utf-8")
        return AutoConfig.from_pretrained(folder)


def _rotary(config: dict[str, Any], length: int | None) -> Any:
    """Return the rotary module of a model, after it has read a text of this length; all layers share it."""
    family = config["model_type"]
    if family not in CLASSES:
        raise NotImplementedError
    loaded = _config(json.dumps(config))
    module = importlib.import_module(f"paddleformers.transformers.{family}.modeling")
    rotary = getattr(module, CLASSES[family])(loaded)
    if length is not None:
        rotary(paddle.zeros([1, 1, 4]), paddle.to_tensor([[length - 1]]))
    return rotary


def inv_freq(config: dict[str, Any], length: int | None = None) -> Any:
    return _rotary(config, length).inv_freq.numpy().astype(np.float64).tolist()


def magnitude(config: dict[str, Any], length: int | None = None) -> float:
    return float(_rotary(config, length).attention_scaling)
