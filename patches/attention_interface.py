"""Our names in transformers' two attention tables, and how a model is made to run one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from rope_ext_hf.attention.rules import AttentionRule, Rotation

__all__ = [
    "ATTENTION_NAME",
    "LAYER_ATTRIBUTE",
    "PROBE_NAME",
    "PROBE_RECORDS",
    "UNSUPPORTED_KWARGS",
    "Layer",
    "register_attention",
    "use_attention",
]

ATTENTION_NAME = "rope_ext_hf.remapped"
"""A name without a slash: transformers looks for one with a slash among the kernels on the Hub."""

PROBE_NAME = "rope_ext_hf.probe"

LAYER_ATTRIBUTE = "_rope_ext_hf_layer"
"""The attribute of an attention module that holds its `Layer` while its model is patched."""

UNSUPPORTED_KWARGS = ("position_bias", "sinks", "head_mask")
"""Additions to the scores that blockwise attention does not apply."""

PROBE_RECORDS: ContextVar[list[Any] | None] = ContextVar("rope_ext_hf_probe_records", default=None)
"""While a model is probed: what its attention functions were called with (see attention_probe.py)."""


@dataclass(frozen=True)
class Layer:
    """How one attention module attends; it does not change from one forward to the next."""

    rule: AttentionRule
    rotation: Rotation | None


def register_attention(name: str, function: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Add an attention function and its mask function to transformers' tables; no existing entry changes."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)


@contextmanager
def use_attention(model: nn.Module, name: str) -> Iterator[None]:
    """Run the function of that name in transformers' tables in every attention module of a model."""
    every: list[Any] = [module.__dict__.get("config") for module in model.modules()]
    configs = {id(config): config for config in every if hasattr(config, "_attn_implementation")}
    before = {key: config._attn_implementation for key, config in configs.items()}
    for config in configs.values():
        config._attn_implementation = name
    try:
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation = before[key]
