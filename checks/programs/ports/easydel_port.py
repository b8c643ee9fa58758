"""EasyDeL: its AutoConfig reads the config.json, and a small model of the family has the table of cos and sin.

Models round the table to bfloat16, but for Gemma 3's local layers; the port reads it before.
"""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from easydel import AutoEasyDeLConfig
from easydel.infra.factory import TaskType, registry
from flax import nnx

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_oss", "olmo3", "deepseek_v3", "phi3")


def version() -> str:
    used = (f"{name} {installed(name)}" for name in ("easydel", "jax", "transformers"))
    return ", ".join(used)


@cache
def _model(written: str) -> Any:
    family = json.loads(written)["model_type"]
    if family not in FAMILIES:
        raise NotImplementedError
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(written, encoding="utf-8")
        config = AutoEasyDeLConfig.from_pretrained(folder, model_task=TaskType.CAUSAL_LM)
    model = registry.get_module_registration(TaskType.BASE_MODULE, config.model_type).module
    return nnx.eval_shape(lambda: model(config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)))


@cache
def _table(written: str, local: bool) -> Any:
    """Return cos + i sin times the magnitude, (positions, pairs)."""
    model = _model(written)
    with patch.object(jnp, "bfloat16", jnp.float32):
        made = model.default_frequencies if local and hasattr(model, "default_frequencies") else model.frequencies
    values = np.asarray(jax.device_get(made.value), np.float64)
    cos, sin = np.split(values.reshape(-1, values.shape[-1]), 2, axis=-1)
    pairs = cos.shape[-1] // (values.ndim - 1)  # Phi-3's tables have three axes, and each pair twice
    return cos[:, :pairs] + 1j * sin[:, :pairs]


def _layer_table(config: dict[str, Any], layer_type: str | None) -> Any:
    return _table(json.dumps(config), layer_type == "sliding_attention")


def inv_freq(config: dict[str, Any], layer_type: str | None = None) -> Any:
    return np.angle(_layer_table(config, layer_type)[1]).tolist()


def magnitude(config: dict[str, Any], layer_type: str | None = None) -> float:
    return float(np.abs(_layer_table(config, layer_type)[0, 0]))


def table(config: dict[str, Any], layer_type: str | None = None) -> int:
    return len(_layer_table(config, layer_type))
