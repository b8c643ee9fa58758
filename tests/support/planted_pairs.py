"""Tiny models whose weights show which pairing they are in, as those of trained models do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.models import build, plant_pairs


def separate(attention: Any) -> tuple[Tensor, Tensor]:
    """q_proj of 4 heads, k_proj of 2, heads of 16."""
    return attention.q_proj.weight.view(2, 2, 16, 64), attention.k_proj.weight.view(2, 16, 64)


def _partly(attention: Any) -> tuple[Tensor, Tensor]:
    """The first 8 of 16 dims."""
    queries, keys = separate(attention)
    return queries[:, :, :8], keys[:, :8]


def _fused(attention: Any) -> tuple[Tensor, Tensor]:
    """4 query heads, then 2 key heads, then the values."""
    weight = attention.qkv_proj.weight
    return weight[:64].view(2, 2, 16, 64), weight[64:96].view(2, 16, 64)


def _grouped(attention: Any) -> tuple[Tensor, Tensor]:
    """Query, key and value of one head after another; 8 of 16 dims rotate."""
    heads = attention.query_key_value.weight.view(4, 3, 16, 64)
    return heads[:, :1, :8], heads[:, 1, :8]


PLANTED: dict[str, Callable[[Any], tuple[Tensor, Tensor]]] = {
    "llama": separate,
    "qwen3": separate,
    "olmo2": separate,
    "gemma2": separate,
    "cohere": separate,
    "glm": _partly,
    "phi3": _fused,
    "gpt_neox": _grouped,
}


def planted(name: str, pairing: str) -> Any:
    """A model of a family, whose weights are in this pairing whatever its config and its class say."""
    model = build(name, num_hidden_layers=4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms of queries and keys that are not one
                parameter.add_(0.3 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(5)))
        for layer in model.base_model.layers:
            plant_pairs(*PLANTED[name](layer.attention if name == "gpt_neox" else layer.self_attn), pairing)
    return model
