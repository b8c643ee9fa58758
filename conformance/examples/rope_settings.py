"""The rope settings of a config in any spelling, for ports to programs in which people write them as arguments."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def read(config: Config) -> Config:
    """Return the rope settings of layers without a window, with their `rope_theta` and `rope_type`."""
    text = config.get("text_config", config)
    rope = text.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope) | (text.get("rope_scaling") or {})
    theta = rope.get("rope_theta") or text.get("rope_theta") or text["rotary_emb_base"]
    return {"rope_type": rope.get("type", "default")} | rope | {"rope_theta": theta}


def local_theta(config: Config) -> float | None:
    """Return the base of layers with a window, or None where they have that of the other layers."""
    text = config.get("text_config", config)
    local = (text.get("rope_parameters") or {}).get("sliding_attention") or {}
    theta: float | None = local.get("rope_theta", text.get("rope_local_base_freq"))
    return theta


def head_dim(config: Config) -> int:
    """Return the number of dims of a head."""
    text = config.get("text_config", config)
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def rotated_dims(config: Config) -> int:
    """Return the number of dims of a head that rotate."""
    text = config.get("text_config", config)
    if "qk_rope_head_dim" in text:  # a part of its own, as DeepSeek's
        return int(text["qk_rope_head_dim"])
    keys = text | (text.get("rope_parameters") or {})
    return int(head_dim(config) * keys.get("partial_rotary_factor", keys.get("rotary_pct", 1)))
