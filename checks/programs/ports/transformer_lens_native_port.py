"""transformer-lens: its own model, whose TransformerBridgeConfig takes `rotary_base` and, once made, `rope_scaling`."""

from __future__ import annotations

from importlib.metadata import version as installed
from typing import Any

import numpy as np
import rope_settings
import rotation
import torch
from transformer_lens.config import TransformerBridgeConfig
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources.native.model import NativeRotary

USUAL = {"n_layers": 1, "n_heads": 1, "d_vocab": 8, "act_fn": "silu", "n_ctx": 2}
USUAL |= {"positional_embedding_type": "rotary"}


def version() -> str:
    return f"transformer-lens {installed('transformer-lens')}"


def arguments(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the arguments of a TransformerBridgeConfig, and its `rope_scaling`."""
    rope = rope_settings.read(config)
    if rope_settings.local_theta(config) is not None or config["model_type"] == "olmo3":  # all layers have one scaling
        raise NotImplementedError
    width = rope_settings.head_dim(config)
    sizes = {"d_model": width, "d_head": width, "rotary_dim": rope_settings.rotated_dims(config)}
    return USUAL | sizes | {"rotary_base": rope["rope_theta"]}, None if rope["rope_type"] == "default" else rope


def pairs(given: Any) -> Any:
    """Return cos + i sin of each pair at position 1 in the model of a config or dict."""
    bridge = TransformerBridge.boot_native(given)
    (rotary,) = (module for module in bridge.modules() if isinstance(module, NativeRotary))

    def rotate(vectors: Any) -> Any:
        heads = torch.tensor(vectors)[None, None]
        return rotary.apply_rope(heads, heads)[0][0, 0].numpy()

    return rotation.pairs(rotate, rotary.rotary_dim, None)


def _pairs(config: dict[str, Any]) -> Any:
    usual, scaling = arguments(config)
    given = TransformerBridgeConfig(**usual)
    given.rope_scaling = scaling
    return pairs(given)


def inv_freq(config: dict[str, Any]) -> Any:
    return np.angle(_pairs(config)).tolist()


def magnitude(config: dict[str, Any]) -> float:
    return float(np.median(np.abs(_pairs(config))))
