"""The memory of keys and values, from a config alone.

>>> cached_bytes(config, tokens=131072, width=2) / 1e9    # Llama 3.1 8B in bfloat16
17.179869184
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_ext_hf.errors import ServingError
from rope_ext_hf.eval.preflight import cached_per_token
from rope_ext_hf.hub import foreign_errors
from rope_ext_hf.patches.layer_types import SLIDING, sliding_layers

__all__ = ["CacheMemory", "cache_memory"]

WIDTHS = {"float32": 4, "bfloat16": 2, "8 bits": 1}
"""Bytes of a number by dtype; float16 has those of bfloat16."""
_STATELESS = frozenset({"linear_attention", "conv", "moe"})
"""Layer types that keep no keys and values: a state of fixed size, or nothing."""


@dataclass(frozen=True)
class CacheMemory:
    """Memory of keys and values.

    Attributes:
        dtype: one of `WIDTHS`.
        batch: inputs at a time.
        tokens: tokens of each input.
        bytes: of all of them together.
    """

    dtype: str
    batch: int
    tokens: int
    bytes: int


def cached_bytes(config: Any, tokens: int, *, width: int = 2) -> int:
    """Bytes of the keys and values of one input.

    Layers with a sliding window keep that many tokens; latent attention keeps what it makes keys and values from;
    layers that share the keys and values of an earlier one keep none. The states of linear attention are not counted.

    Args:
        config: a text config.
        tokens: tokens of the input.
        width: bytes of a number.

    Raises:
        CheckpointError: a config without the sizes of its heads.
        ServingError: it has no layers.
    """
    with foreign_errors("the sizes of the heads cannot be read from this config"):
        count = int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", None) or 0)
        window, sliding = sliding_layers(config)
        kinds = list(getattr(config, "layer_types", None) or [next(iter(SLIDING)) if sliding else ""] * count)
        each = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config] * count
        if count < 1:
            raise ServingError(f"a model of {count} layers with keys and values of their own cannot be served")
        numbers = 0
        for kind, layer in zip(kinds[:count], each[:count], strict=True):
            if kind not in _STATELESS:
                kept = min(tokens, window) if window and kind in SLIDING else tokens
                numbers += kept * cached_per_token(layer)
    return numbers * width


def cache_memory(config: Any, lengths: list[int], batches: list[int]) -> tuple[CacheMemory, ...]:
    """The memory of every dtype, batch and length."""
    return tuple(
        CacheMemory(dtype, batch, tokens, batch * cached_bytes(config, tokens, width=width))
        for tokens in dict.fromkeys(lengths)
        for batch in batches
        for dtype, width in WIDTHS.items()
    )
