"""The memory of a cache, from a config alone: what a measurement needs, and what an engine needs.

>>> from transformers import LlamaConfig
>>> config = LlamaConfig(num_hidden_layers=32, num_key_value_heads=8, head_dim=128)  # Llama 3.1 8B
>>> cached_bytes(config, tokens=131072, width=2) / 1e9  # in bfloat16
17.179869184
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from rope_ext_hf.patches.layer_types import SLIDING, sliding_layers

_WITHOUT_KEYS = frozenset({"linear_attention", "conv", "moe", "mlp", "mamba", "recurrent"})
"""Layer types that keep no keys and values: a state of fixed size, or nothing."""

_STATES = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("n_mamba_heads", "mamba_headdim", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
)
"""Config keys whose product is the numbers of a recurrent state; those of convolutions are far smaller."""

_MORE_KEY_HEADS = {"mimo_v2_flash": 2}  # times the key heads of a config in layers with a window, which no config says
_STATE_WIDTH = 4  # bytes of a number of a recurrent state, which sums over all tokens


class _LayerMemory(NamedTuple):
    """The memory of one layer, in numbers."""

    per_token: int
    window: int | None  # tokens that are kept at most; None: all
    state: int  # numbers whatever the tokens
    heads: int  # of queries
    head_dim: int  # of queries
    shards: int  # GPUs that can have a part of the keys and values each; on more of them, parts are kept twice


def cached_bytes(config: Any, tokens: int, *, width: int = 2, gpus: int = 1, ahead: int = 0, layers: Any = None) -> int:
    """Bytes of the cache of one input, on one of several GPUs that share the heads (tensor parallelism).

    Layers with a sliding window keep that many tokens, and while a step is computed also its tokens, which are `ahead`;
    latent attention keeps what it makes keys and values from; layers that share the keys and values of an earlier one
    keep none; linear attention and Mamba keep a state. A number of keys and values has `width` bytes.
    `layers`: what `cached_layers` returns, where it is known.
    """
    return sum(
        layer.per_token * min(tokens, (layer.window or tokens) + ahead) * width // min(gpus, layer.shards)
        + layer.state * _STATE_WIDTH // gpus
        for layer in layers or cached_layers(config)
    )


def cached_layers(config: Any) -> list[_LayerMemory]:
    """The memory of each layer that does not share the keys and values of another."""
    count = int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", None) or 0)
    window, sliding = sliding_layers(config)
    kinds = list(getattr(config, "layer_types", None) or [next(iter(SLIDING)) if sliding else ""] * count)
    several = getattr(config, "is_heterogeneous", False)
    each = list(config.per_layer_config) if several else [config] * count
    return list(_layers(kinds[:count], each[:count], window))


def _layers(kinds: list[str], configs: list[Any], window: int | None) -> Iterator[_LayerMemory]:
    for kind, config in zip(kinds, configs, strict=True):
        known = vars(config)
        heads = int(config.num_attention_heads)
        head_dim = int(known.get("head_dim") or config.hidden_size // heads)
        keyless = kind in _WITHOUT_KEYS
        state = _state(config) if keyless or kind.startswith("hybrid") else 0
        if getattr(config, "kv_lora_rank", None):  # what latent attention makes keys and values from
            per_token, key_heads = int(config.kv_lora_rank + config.qk_rope_head_dim), 1
            per_token += int(getattr(config, "index_head_dim", None) or 0)  # keys of a sparse attention's indexer
        else:
            key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
            if kind in SLIDING:
                key_heads *= _MORE_KEY_HEADS.get(config.model_type, 1)
            per_token = key_heads * (head_dim + int(known.get("v_head_dim") or head_dim))
        kept = window if kind in SLIDING else None
        yield _LayerMemory(0 if keyless else per_token, kept, state, heads, head_dim, key_heads)


def _state(config: Any) -> int:
    stated = ([getattr(config, key, None) for key in keys] for keys in _STATES)
    known: list[list[Any]] = [sizes for sizes in stated if all(isinstance(size, int) for size in sizes)]
    return int(math.prod(known[0])) if known else 0
