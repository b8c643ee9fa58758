"""The memory of a key-value cache, by the config of a model alone.

>>> from transformers import LlamaConfig
>>> config = LlamaConfig(num_hidden_layers=32, num_key_value_heads=8, head_dim=128)  # Llama 3.1 8B
>>> cached_bytes(config, tokens=131072, width=2) / 1e9  # in bfloat16
17.179869184
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from rope_ext_hf.patches.layer_types import SLIDING, AttentionLayers

_WITHOUT_KEYS = frozenset({"linear_attention", "conv", "moe", "mlp", "mamba", "recurrent"})
"""Layer types that keep no keys and values: they have a state of fixed size, or none."""

_STATE_KEYS = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("n_mamba_heads", "mamba_headdim", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
)
"""Config keys whose product is the size of a recurrent state, in each family. A convolution's state is far smaller."""

_MORE_KEY_HEADS = {"mimo_v2_flash": 2}
"""How many times the key heads of its config a family has in layers with a window; no config key says it."""

_STATE_WIDTH = 4  # bytes of a number of a recurrent state, which is kept in float32 because it sums over all tokens


class _LayerMemory(NamedTuple):
    """The numbers that one layer keeps in a key-value cache, and the heads that may be shared between GPUs."""

    per_token: int  # numbers of the keys and values of one token
    window: int | None  # tokens that are kept at most; None: all
    state: int  # numbers that are kept however long the input is
    heads: int  # query heads
    head_dim: int  # dims of a query head
    shards: int  # GPUs that can each hold a different part of the keys and values; more GPUs hold copies


def cached_bytes(config: Any, tokens: int, *, width: int = 2, gpus: int = 1, ahead: int = 0, layers: Any = None) -> int:
    """Return the bytes that the key-value cache for one input takes on each GPU.

    A layer with a sliding window keeps as many tokens as its window. Latent attention keeps the latent, a short vector
    from which it computes keys and values. A layer that shares the keys and values of an earlier one keeps none. Linear
    attention and Mamba keep a state.

    Args:
        config: the config of the text model.
        tokens: the length of the input.
        width: bytes of each number of keys and values.
        gpus: the number of GPUs that share the heads (tensor parallelism).
        ahead: the number of tokens in the step that is being computed, which a layer with a window holds beyond its
            window.
        layers: the result of `cached_layers(config)`, if it was computed before.
    """
    total = 0
    for layer in layers or cached_layers(config):
        kept = min(tokens, (layer.window or tokens) + ahead)
        total += layer.per_token * kept * width // min(gpus, layer.shards)
        total += layer.state * _STATE_WIDTH // gpus
    return total


def cached_layers(config: Any) -> list[_LayerMemory]:
    """Return the memory that each layer takes in the cache.

    Layers that share the keys and values of another layer are left out.
    """
    count = int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", None) or 0)
    attention = AttentionLayers(config)
    kinds = list(getattr(config, "layer_types", None) or [next(iter(SLIDING)) if attention.sliding else ""] * count)
    is_heterogeneous = getattr(config, "is_heterogeneous", False)
    configs = list(config.per_layer_config) if is_heterogeneous else [config] * count
    return [
        _layer_memory(kind, layer_config, attention)
        for kind, layer_config in zip(kinds[:count], configs[:count], strict=True)
    ]


def _layer_memory(kind: str, config: Any, attention: AttentionLayers) -> _LayerMemory:
    """Return the memory that one layer takes in the cache, from its layer type and the config."""
    known = vars(config)
    heads = int(config.num_attention_heads)
    head_dim = int(known.get("head_dim") or config.hidden_size // heads)
    if getattr(config, "kv_lora_rank", None):  # latent attention
        per_token, key_heads = int(config.kv_lora_rank + config.qk_rope_head_dim), 1
        per_token += int(getattr(config, "index_head_dim", None) or 0)  # keys of a sparse attention's indexer
    else:
        key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        if kind in SLIDING:
            key_heads *= _MORE_KEY_HEADS.get(config.model_type, 1)
        per_token = key_heads * (head_dim + int(known.get("v_head_dim") or head_dim))
    has_keys = kind not in _WITHOUT_KEYS
    return _LayerMemory(
        per_token=per_token if has_keys else 0,
        window=attention.window if kind in SLIDING else None,
        state=_state_numbers(config) if not has_keys or kind.startswith("hybrid") else 0,
        heads=heads,
        head_dim=head_dim,
        shards=key_heads,
    )


def _state_numbers(config: Any) -> int:
    """Return how many numbers the state of a recurrent layer has; 0 if the config has none of the known keys."""
    for keys in _STATE_KEYS:
        sizes: list[Any] = [getattr(config, key, None) for key in keys]
        if all(isinstance(size, int) for size in sizes):
            return int(math.prod(sizes))
    return 0
