"""A plug-in of vLLM: RoPE with any frequencies, by the rope type "rope_ext_hf" in a model's config.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its processes, before it builds
a model. The rope settings hold the frequencies themselves:

    {"rope_type": "rope_ext_hf", "rope_theta": 10000.0, "inv_freq": "[1.0, 0.5, ...]", "attention_factor": 1.1}

`inv_freq` is text, because vLLM keeps tables in a dict whose keys are the settings. There is no `factor`: vLLM would
multiply the model's length by it. Every other rope type goes to vLLM's own function, untouched.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from rope_ext_hf.engines.vllm import PLUGIN_TYPE

__all__ = ["register"]

BLOCK = 65536  # positions whose angles are computed at a time, in float64


def register() -> None:
    """Let vLLM's `get_rope` build rotary embeddings of the rope type "rope_ext_hf"; a second call changes nothing."""
    from vllm.model_executor.layers import rotary_embedding

    stock = rotary_embedding.get_rope
    if getattr(stock, PLUGIN_TYPE, False):
        return
    wrapped = _wrap(stock)
    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.")]:
        if getattr(module, "get_rope", None) is stock:  # models that were imported before
            module.get_rope = wrapped  # type: ignore[attr-defined]


def _wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(stock)
    tables: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(stock)
    def get_rope(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        settings = given.arguments.get("rope_parameters") or {}
        if settings.get("rope_type") != PLUGIN_TYPE:
            return stock(*args, **kwargs)
        key = tuple((name, _hashable(value)) for name, value in given.arguments.items())
        if key not in tables:
            tables[key] = _build(given.arguments, settings)
        return tables[key]

    setattr(get_rope, PLUGIN_TYPE, True)
    return get_rope


def _hashable(value: Any) -> Any:
    return json.dumps(value, sort_keys=True, default=str) if isinstance(value, dict) else value


def _build(arguments: dict[str, Any], settings: dict[str, Any]) -> Any:
    """The rotary module of vLLM for these settings.

    Raises:
        ValueError: settings without frequencies, or with others than the model rotates.
    """
    from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding, RotaryEmbedding

    frequencies: list[float] = json.loads(settings["inv_freq"])
    factor = float(settings["attention_factor"])
    head_size = arguments["head_size"]
    rotary_dim = int(head_size * (settings.get("partial_rotary_factor") or 1.0))
    if 2 * len(frequencies) != rotary_dim:
        raise ValueError(
            f"the rope type {PLUGIN_TYPE!r} of this config has {len(frequencies)} frequencies, and the model rotates "
            f"{rotary_dim} dims in pairs; write the config anew with rope-ext serve-config"
        )

    def inverse_frequencies(self: Any, base: float) -> torch.Tensor:
        return torch.tensor(frequencies, dtype=torch.float32)

    def table(self: Any) -> torch.Tensor:
        """cos and sin of every position, (positions, rotary_dim) float32, from float64 angles: rounded once."""
        exact = torch.tensor(frequencies, dtype=torch.float64)
        parts = []
        for start in range(0, _positions(self), BLOCK):
            positions = torch.arange(start, min(start + BLOCK, _positions(self)), dtype=torch.float64)
            angles = positions[:, None] * exact
            parts.append(torch.cat((angles.cos(), angles.sin()), dim=-1).mul(factor).float())
        return torch.cat(parts)

    several_axes = "mrope_section" in settings
    base: type[Any] = MRotaryEmbedding if several_axes else RotaryEmbedding
    methods = {"_compute_inv_freq": inverse_frequencies, "_compute_cos_sin_cache": table}
    cls = type(f"RopeExt{base.__name__}", (base,), methods)
    more: dict[str, Any] = {}
    if several_axes:
        more = {"mrope_section": settings["mrope_section"]}
        if "mrope_interleaved" in settings:
            more["mrope_interleaved"] = settings["mrope_interleaved"]
    dtype = arguments.get("dtype") or torch.get_default_dtype()
    return cls(
        head_size,
        rotary_dim,
        arguments["max_position"],
        settings.get("rope_theta", 10000.0),
        arguments["is_neox_style"],
        dtype,
        **more,
    )


def _positions(module: Any) -> int:
    """How many positions a module has angles for; that of several axes has room for more than it is told."""
    return int(getattr(module, "cache_max_position_num", module.max_position_embeddings))
