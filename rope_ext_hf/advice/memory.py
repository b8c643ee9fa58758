"""The memory of an engine's keys and values, by dtype, batch and length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rope_ext_hf.errors import ServingError
from rope_ext_hf.hub import foreign_errors
from rope_ext_hf.reading.cache_memory import cached_bytes, cached_layers

_WIDTHS = {"float32": 4, "bfloat16": 2, "8 bits": 1}
"""Bytes of a number by dtype; float16 has those of bfloat16."""


@dataclass(frozen=True)
class CacheMemory:
    """Memory of keys and values.

    Attributes:
        dtype: one of `_WIDTHS`.
        batch: inputs at a time.
        tokens: tokens of each input.
        bytes: of all of them together.
    """

    dtype: str
    batch: int
    tokens: int
    bytes: int


def cache_memory(config: Any, lengths: list[int], batches: list[int]) -> tuple[CacheMemory, ...]:
    """The memory of every dtype, batch and length.

    Raises:
        CheckpointError: a config without the sizes of its heads.
        ServingError: it has no layers.
    """
    with foreign_errors("the sizes of the heads cannot be read from this config"):
        if not cached_layers(config):
            raise ServingError("a model without layers that keep keys and values of their own cannot be served")
        return tuple(
            CacheMemory(dtype, batch, tokens, batch * cached_bytes(config, tokens, width=width))
            for tokens in dict.fromkeys(lengths)
            for batch in batches
            for dtype, width in _WIDTHS.items()
        )
