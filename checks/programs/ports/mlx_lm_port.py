"""mlx-lm: its classes make a model from a config, whose rope rotates a prompt of the length that is asked for."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version as installed
from typing import Any

import mlx.core as mx
import numpy as np
import rotation
from mlx_lm.utils import _get_classes

mx.set_default_device(mx.cpu)


def version() -> str:
    return f"mlx-lm {installed('mlx-lm')}, mlx {installed('mlx')}"


@cache
def _model(written: str) -> Any:
    model, arguments = _get_classes(json.loads(written))
    return model(arguments.from_dict(json.loads(written)))


def _pairs(config: dict[str, Any], layer_type: str | None, length: int | None) -> Any:
    layers = _model(json.dumps(config)).layers
    rope = layers[config["layer_types"].index(layer_type) if layer_type else 0].self_attn.rope
    width = getattr(rope, "dims", None) or rope.dim

    def rotate(vectors: Any) -> Any:
        return np.array(rope(mx.array(vectors)[None, None])[0, 0])

    return rotation.pairs(rotate, width, length)


def inv_freq(config: dict[str, Any], layer_type: str | None = None, length: int | None = None) -> Any:
    return np.angle(_pairs(config, layer_type, length)).tolist()


def magnitude(config: dict[str, Any], layer_type: str | None = None, length: int | None = None) -> float:
    return float(np.median(np.abs(_pairs(config, layer_type, length))))
