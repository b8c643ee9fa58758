"""rotary-embedding-torch, a module for models that people write: they state the rope settings as its arguments.

Its pairs are interleaved, and the port has no `rotate`: weights of a model that rotates halves are permuted first.
"""

from __future__ import annotations

from importlib.metadata import version as installed
from typing import Any

import rope_settings
import torch
from rotary_embedding_torch import RotaryEmbedding


def version() -> str:
    return f"rotary-embedding-torch {installed('rotary-embedding-torch')}"


def _module(config: dict[str, Any]) -> RotaryEmbedding:
    rope = rope_settings.read(config)
    if rope_settings.local_theta(config) is not None or rope["rope_type"] not in ("default", "linear"):
        raise NotImplementedError  # it has no arguments for them
    return RotaryEmbedding(
        rope_settings.rotated_dims(config), theta=rope["rope_theta"], interpolate_factor=rope.get("factor", 1.0)
    )


def inv_freq(config: dict[str, Any]) -> Any:
    module = _module(config)
    return (module.freqs.detach().double() / module.interpolate_factor).tolist()


@torch.no_grad()
def cos_sin(config: dict[str, Any], positions: list[int]) -> tuple[Any, Any]:
    """Return what the first dims of pairs become at each position, where they are 1 and the second ones 0."""
    if isinstance(positions[0], list):
        raise NotImplementedError  # M-RoPE
    module = _module(config)
    heads = torch.tensor([1.0, 0.0]).repeat(1, 1, 1, len(module.freqs))  # (batch, heads, tokens, dims)
    turned = torch.cat([module.rotate_queries_or_keys(heads, offset=position)[0, 0] for position in positions])
    return turned[:, 0::2].tolist(), turned[:, 1::2].tolist()
