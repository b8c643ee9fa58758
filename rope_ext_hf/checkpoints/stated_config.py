"""The config of a checkpoint from its config.json alone, where that states all that reading the weights takes.

Importing the class of a config and that of its model takes seconds, several times as long as `detect` works. For the
families that give `attention` in the family table the classes are asked only where config.json leaves something open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rope_ext_hf.models.families import Family, family
from rope_ext_hf.models.patch_records import PATCH_KEY

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
"""Rope types that every class reads alike; Phi-3 reads others than these in a way of its own."""


def stated_config(values: Mapping[str, Any]) -> Any | None:
    """Return the config that a config.json describes, without its class; None: the class has to be asked.

    The config has the sizes that decide which rows rotate, and its rope settings under `rope_parameters`, as
    transformers 5 writes them. What its class would add, such as defaults, is missing.

    Args:
        values: the values of the config.json.
    """
    from transformers.configuration_utils import PreTrainedConfig

    model_type = values.get("model_type")
    known = family(model_type) if isinstance(model_type, str) else Family()
    if known.attention is None:
        return None
    if known.remote:
        return PreTrainedConfig(**values)
    rope = _rope_parameters(values, known)
    if rope is None or not all(_is_count(values.get(key)) for key in _SIZES):
        return None
    head_dim = values.get("head_dim")
    if not _is_count(head_dim) and (head_dim is not None or known.own_head_dim):
        return None
    if any(values.get(key) for key in (PATCH_KEY, "text_config", "auto_map")):
        return None
    return PreTrainedConfig(**{key: values[key] for key in values if key not in _ROPE_KEYS}, rope_parameters=rope)


def _rope_parameters(values: Mapping[str, Any], known: Family) -> dict[str, Any] | None:
    """Return the rope settings of a config.json, as transformers 5 writes them; None: its class has to be asked."""
    stated = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(stated, Mapping) or any(isinstance(value, Mapping) for value in stated.values()):
        return None  # settings for each layer type
    rope = dict(stated)
    rope_type = rope.setdefault("rope_type", rope.pop("type", "default"))
    theta = rope.setdefault("rope_theta", values.get("rope_theta"))
    accepted = [each for each in _ROPE_TYPES if each in (known.rope_types or _ROPE_TYPES)]
    if rope_type not in accepted or not isinstance(theta, (int, float)) or isinstance(theta, bool):
        return None
    partial = [each.get("partial_rotary_factor") for each in (values, rope)]
    return rope if all(share in (None, 1) for share in partial) else None  # which some classes read, and others do not


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0
