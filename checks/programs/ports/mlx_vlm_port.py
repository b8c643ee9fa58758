"""mlx-vlm: its classes make a model from a config, whose rope rotates a prompt of the length that is asked for."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version as installed
from typing import Any

from mlx_rope import Rope
from mlx_vlm.utils import get_model_and_args


def version() -> str:
    return f"mlx-vlm {installed('mlx-vlm')}, mlx {installed('mlx')}"


@cache
def _model(written: str) -> Any:
    config = json.loads(written)
    module, _ = get_model_and_args(config)
    return module.Model(module.ModelConfig.from_dict(config))


def _rope(config: dict[str, Any], layer_type: str | None, length: int | None) -> Rope:
    return Rope(_model(json.dumps(config)).layers, config, layer_type, length)


def inv_freq(config: dict[str, Any], layer_type: str | None = None, length: int | None = None) -> Any:
    return _rope(config, layer_type, length).inv_freq()


def magnitude(config: dict[str, Any], layer_type: str | None = None, length: int | None = None) -> Any:
    return _rope(config, layer_type, length).magnitude()
