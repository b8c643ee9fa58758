"""mlx-lm: its classes make a model from a config, whose rope rotates a prompt of the length that is asked for."""

from __future__ import annotations

import json
from functools import cache
from importlib.metadata import version as installed
from typing import Any

from mlx_lm.utils import _get_classes
from mlx_rope import Rope


def version() -> str:
    return f"mlx-lm {installed('mlx-lm')}, mlx {installed('mlx')}"


@cache
def _model(written: str) -> Any:
    model, arguments = _get_classes(json.loads(written))
    return model(arguments.from_dict(json.loads(written)))


def _rope(config: dict[str, Any], layer_type: str | None, length: int | None) -> Rope:
    return Rope(_model(json.dumps(config)).layers, config, layer_type, length)


def inv_freq(config: dict[str, Any], layer_type: str | None = None, length: int | None = None) -> Any:
    return _rope(config, layer_type, length).inv_freq()


def magnitude(config: dict[str, Any], layer_type: str | None = None, length: int | None = None) -> Any:
    return _rope(config, layer_type, length).magnitude()
