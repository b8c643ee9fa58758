"""mlx-lm as a port, run in an environment of its own: `python conformance/run.py --port mlx_port` in this folder."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, load_model

Config = dict[str, Any]
USUAL = {"rms_norm_eps": 1e-6, "layer_norm_eps": 1e-5, "tie_word_embeddings": False, "attention_bias": False}
USUAL |= {"use_qkv_bias": False, "mlp_bias": False, "logits_scaling": 1.0, "embedding_multiplier": 1.0}
USUAL |= {"residual_multiplier": 1.0, "use_bias": False, "use_cla": False, "use_qk_norm": True, "bias": False}
USUAL |= {"qkv_bias": False, "norm_topk_prob": True, "interleave_moe_layer_step": 1, "num_experts_per_tok": 1}
"""Keys that its model files want, and that RoPE does not depend on."""


def version() -> str:
    return f"mlx-lm {installed('mlx-lm')}"


@cache
def _model(written: str) -> Any:
    config = json.loads(written)
    try:
        model, arguments = _get_classes(config)
    except ValueError as error:  # a family that it does not have
        raise NotImplementedError from error
    text = {"text_config": USUAL | config["text_config"]} if "text_config" in config else {}
    try:
        return model(arguments.from_dict(USUAL | config | text))
    except IndexError as error:  # Gemma 4 with two layers
        raise NotImplementedError from error


def _attention(config: Config, layer_type: str | None) -> Any:
    model, text = _model(json.dumps(config)), config.get("text_config", config)
    types = text.get("layer_types", [])
    index = types.index(layer_type or "full_attention") if layer_type or "full_attention" in types else 0
    layer = model.layers[index]
    return getattr(layer, "self_attn", None) or layer.attention


def _turned(config: Config, vectors: Any, position: int, layer_type: str | None) -> Any:
    """(vectors, width) at one position."""
    attention = _attention(config, layer_type)
    rope = getattr(attention, "rope", None)
    if rope is None or type(rope).__name__ == "DynamicNTKScalingRoPE":  # it follows the call, see the tiny models
        raise NotImplementedError
    return np.array(rope(mx.array(vectors, mx.float32)[None, :, None], offset=position)[0, :, 0]).astype(np.float64)


def rotate(config: Config, vector: list[float], position: int, layer_type: str | None = None) -> Any:
    return _turned(config, [vector], position, layer_type)[0]


def _pairs(config: Config, layer_type: str | None) -> tuple[int, int, int]:
    """Rotated pairs, the width of a head, and how far the members of a pair are apart."""
    text, rope = config.get("text_config", config), _attention(config, layer_type).rope
    dims = [getattr(rope, name) for name in ("dims", "dim") if hasattr(rope, name)]
    dim = (*dims, text.get("qk_rope_head_dim"))[0]
    width = text.get("qk_rope_head_dim") or text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    width = max(width, dim)
    first = _turned(config, np.eye(width)[:1], 1, layer_type)[0]
    return dim // 2, width, 1 if abs(first[1]) > 1e-3 else dim // 2


def _complex(config: Config, position: int, layer_type: str | None) -> Any:
    """cos + i sin of each pair, with the magnitude."""
    pairs, width, apart = _pairs(config, layer_type)
    members = [i if apart == pairs else 2 * i for i in range(pairs)]
    out = _turned(config, np.eye(width)[members], position, layer_type)
    return np.array([complex(row[i], row[i + apart]) for row, i in zip(out, members, strict=True)])


def inv_freq(config: Config, layer_type: str | None = None) -> list[float]:
    return [math.atan2(each.imag, each.real) for each in _complex(config, 1, layer_type)]


def magnitude(config: Config, layer_type: str | None = None) -> float:
    return float(np.median(np.abs(_complex(config, 1, layer_type))))


def softmax_scale(config: Config, layer_type: str | None = None) -> float:
    attention = _attention(config, layer_type)
    scale = next(
        (getattr(attention, name) for name in ("scale", "sm_scale", "softmax_scale") if hasattr(attention, name)), None
    )
    if scale is None:
        raise NotImplementedError
    return float(scale)


def cos_sin(config: Config, positions: list[Any], layer_type: str | None = None) -> Any:
    if any(isinstance(each, list) for each in positions):
        raise NotImplementedError
    rows = [_complex(config, each, layer_type) for each in positions]
    return np.real(rows), np.imag(rows)


@cache
def _loaded(folder: Path) -> Any:
    if folder.name.startswith("gpt-oss"):  # it reads the experts in the format of the published files alone
        raise NotImplementedError
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return model


def logits(folder: Path, rows: list[list[int]], chunks: list[int] | None = None) -> Any:
    if len(rows) > 1:
        raise NotImplementedError
    model = _loaded(folder)
    cache_, end, out = make_prompt_cache(model), 0, None
    for size in chunks or [len(rows[0])]:
        out = model(mx.array([rows[0][end : end + size]]), cache=cache_)
        end += size
    assert out is not None
    return np.array(out[:, -1].astype(mx.float32)).astype(np.float64)
