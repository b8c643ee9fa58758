"""keras-hub: `Backbone.from_preset` of a folder with the config.json, whose rotary layers say the frequencies."""

from __future__ import annotations

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import keras_hub
import numpy as np
from keras import ops

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt_oss")
GEMMA_PERIOD = 6
"""keras-hub does not read `layer_types`: every sixth layer of a Gemma 3 is global."""


def version() -> str:
    return f"keras-hub {keras_hub.__version__}, keras {keras.__version__}"


@cache
def _backbone(written: str) -> Any:
    config = json.loads(written)
    if config["model_type"] not in FAMILIES:
        raise NotImplementedError
    if config["model_type"] == "gemma3_text":  # layers enough for a global one
        config["num_hidden_layers"] = GEMMA_PERIOD
        config["layer_types"] = ["sliding_attention"] * (GEMMA_PERIOD - 1) + ["full_attention"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        return keras_hub.models.Backbone.from_preset(folder, load_weights=False)


def _rotary(config: dict[str, Any], layer_type: str | None) -> Any:
    """Return the rotary layer of the first layer, or of the last one for "full_attention"."""
    modules = [
        inner
        for layer in _backbone(json.dumps(config)).layers
        for inner in layer._flatten_layers(include_self=False)
        if "RotaryEmbedding" in type(inner).__name__
    ]
    return modules[-1 if layer_type == "full_attention" else 0]


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def inv_freq(config: dict[str, Any], layer_type: str | None = None) -> Any:
    rotary = _rotary(config, layer_type)
    return np.array(ops.convert_to_numpy(rotary._get_inverse_freq(_head_dim(config))), np.float64).tolist()


def magnitude(config: dict[str, Any], layer_type: str | None = None) -> float:
    """Return the length of the first pair of a unit vector after rotation at position 1."""
    unit = np.zeros((1, 2, 1, _head_dim(config)), np.float32)
    unit[..., 0] = 1
    rotated = ops.convert_to_numpy(_rotary(config, layer_type)(ops.convert_to_tensor(unit)))
    return float(np.linalg.norm(rotated[0, 1, 0]))
