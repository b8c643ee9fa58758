"""Attention of a remapping method over a paged cache: keys lie in blocks, rotated once to where the method stores them.

Queries are turned for each zone of keys, and the zones are merged by their log-sum-exp (`rope_ext_hf.attention`).
`stairs` stores keys at their own positions, as every engine does. An experiment, for `vllm_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.attention.blockwise import attend
from rope_ext_hf.attention.rules import Rotation, RotationTable, TokenPositions
from rope_ext_hf.config_keys.keys import plugin_frequencies
from rope_ext_hf.plugins.tables import held_remapping
from rope_ext_hf.rotary.kv_cache import KeyLayout


class _Request(NamedTuple):
    """One request in a step of an engine."""

    tokens: slice  # where its new tokens stand among those of the step
    blocks: Tensor  # (blocks,) of the cache, in the order of its tokens
    positions: TokenPositions  # of its new tokens and of all its tokens; layers share the rotations kept there


def requests_of(starts: Sequence[int], lengths: Sequence[int], block_table: Tensor, size: int) -> Iterator[_Request]:
    """The requests of a step that have new tokens.

    Args:
        starts: where the new tokens of each request begin, and where those of the last one end.
        lengths: tokens of each request, the new ones included.
        block_table: (requests, most blocks) numbers of blocks of `size` tokens.
    """
    for row, length in enumerate(lengths):
        new = slice(starts[row], starts[row + 1])
        count = new.stop - new.start
        if count:
            n = torch.arange(length, device=block_table.device)[None]
            positions = TokenPositions(n[:, length - count :], n, (0,), None)
            yield _Request(new, block_table[row, : -(-length // size)], positions)


def store(cache: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Write keys and values into their slots of a cache.

    Args:
        cache: (blocks, kv_heads, tokens in a block, 2 x head_dim): keys, then values.
        key, value: (tokens, kv_heads, head_dim).
        slots: (tokens,) number of a block times its size, plus the place in it; below 0: the token has none.
    """
    slots = slots.clamp(min=0)  # block 0 is no request's, and what stands in it is never read
    cache[slots // cache.shape[2], :, slots % cache.shape[2]] = torch.cat((key, value), -1)


class PagedAttention:
    """The method and the frequencies in rope settings, as `serve-config` writes them, over the cache of one layer."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        held = held_remapping(settings)
        if held is None:
            raise ValueError(
                "the attention backend CUSTOM of rope-ext-hf is for remapping methods, and the rope settings of this "
                "config have none; leave the option away, or see rope-ext serve-config"
            )
        self.method, pairing = held  # with every parameter filled in
        frequencies, _ = plugin_frequencies(settings)
        table = RotationTable(torch.tensor(frequencies, dtype=torch.float64, device="cpu"))
        self.rotation = Rotation(table, KeyLayout(pairing, 0, 2 * len(frequencies)))  # as the engine rotates

    def run(self, query: Tensor, cache: Tensor, requests: Sequence[_Request], scale: float, out: Tensor) -> None:
        """Write the attention of new tokens to their requests into `out`; scores are multiplied by `scale`.

        Args:
            query, out: (tokens, heads, head_dim); queries are rotated as the keys of these tokens are.
            cache: as `store` fills it, the new tokens included.
        """
        for new, blocks, positions in requests:
            length = positions.key_positions.shape[-1]
            held = cache[blocks].transpose(0, 1).flatten(1, 2)[None, :, :length]  # (1, kv_heads, length, 2 x head_dim)
            key, value = held.chunk(2, dim=-1)
            part = attend(self.method, self.rotation, positions, query[new].transpose(0, 1)[None], key, value, scale)
            out[new] = part[0].transpose(0, 1)
