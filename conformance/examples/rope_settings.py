"""The rope settings of a config in any spelling, for ports to programs in which people write them as arguments."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def read(config: Config) -> tuple[float, float | None, str, Config]:
    """Return the base, that of local layers, the kind of scaling, and its settings."""
    text = config.get("text_config", config)
    rope, local = text.get("rope_parameters") or {}, text.get("rope_local_base_freq")
    if "full_attention" in rope:
        local = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = rope | (text.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    return rope.get("rope_theta") or text.get("rope_theta") or text["rotary_emb_base"], local, kind, rope


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
