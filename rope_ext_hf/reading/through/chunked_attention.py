"""Attention of a chunk of tokens to everything before it, without a mask tensor.

transformers describes every mask by a function of indices before it makes a tensor of it. Here the description alone
goes to the attention modules (`_MaskRule`), so that a window holds wherever a model class states it: in its mask, or in
its mask and its attention's keywords. A mask that is more than causality with a window or with chunks is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.rules import LocalAttention, TokenPositions
from rope_ext_hf.patches.forward.attention_function import attend_from_kwargs
from rope_ext_hf.patches.forward.attention_interface import (
    UNSUPPORTED_KWARGS,
    attending,
    chunk_size,
    is_sliding,
    tokens_before_queries,
)

_ATTENTION = "rope_ext_hf.chunks"
_UNSUPPORTED = (
    *UNSUPPORTED_KWARGS,
    "indices",
)
"""Keywords that change which keys count; an indexer chooses `indices`."""
_REACH_SEEN: ContextVar[Callable[[int | None], None] | None] = ContextVar("rope_ext_hf_reach_seen", default=None)
"""Called by every attention, while a model is checked, with the number of keys that a query may see; None: all."""


class NotReadInChunksError(Exception):
    """Raised for a model that cannot be read in chunks; the message is the reason."""


class _MaskReadError(NotReadInChunksError, AttributeError):
    """Raised if a decoder works with its mask itself, because it gets a `_MaskRule` in place of a mask.

    It is an AttributeError, so that `hasattr` finds no attribute.
    """


@dataclass(frozen=True)
class _MaskRule:
    """A description of an attention mask, which attention modules get in place of the mask tensor.

    Attributes:
        window: the number of keys that a query sees, its own included; None: no window.
        chunk: the size of chunks, counted from the first token, if queries see the keys of their own chunk alone (Llama
            4); None: they see all.
        past: the number of tokens before the queries.
        keys: the number of keys that the layer's cache returns, those of the queries included.
    """

    window: int | None
    chunk: int | None
    past: int
    keys: int

    def __getattr__(self, name: str) -> NoReturn:
        raise _MaskReadError(f"the model's decoder works with its attention mask itself (.{name})")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise _MaskReadError(f"the model's decoder works with its attention mask itself ({function.__name__})")


def _mask_rule(*args: Any, **kwargs: Any) -> _MaskRule:
    """Return the description of a mask; the arguments are those of `transformers.masking_utils.sdpa_mask`."""
    from transformers.masking_utils import causal_mask_function

    window = chunk = None
    padding: Tensor | None = kwargs.get("attention_mask")  # some decoders make one of ones
    if padding is not None and not bool(padding.all()):
        raise NotReadInChunksError("the model's decoder hides some tokens from all others")
    if is_sliding(kwargs):
        window = kwargs["local_size"]
    elif (size := chunk_size(kwargs)) is not None:
        chunk = size
    elif kwargs.get("mask_function") is not causal_mask_function:
        raise NotReadInChunksError("the model's mask is more than causality with or without a window")
    return _MaskRule(window, chunk, tokens_before_queries(kwargs), kwargs["kv_length"])


def _chunked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _MaskRule | Tensor | None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attend causally from the latest queries to a cache that ends with their own keys.

    Args:
        module: the attention module.
        query: (batch, heads, tokens, head_dim).
        key, value: (batch, kv_heads, past + tokens, head_dim); heads share them in groups.
        attention_mask: the description of the mask. None if the model class asks transformers for no mask: then
            causality alone holds.
        keywords: transformers' keywords: `scaling`, `softcap`, `s_aux`, and `sliding_window`, which the mask has as
            well.

    Returns:
        (batch, tokens, heads, head_dim), and None in place of attention weights.

    Raises:
        NotReadInChunksError: the attention is more than causality with a window or with chunks.
    """
    unsupported = [name for name in _UNSUPPORTED if keywords.get(name) is not None]
    if unsupported:
        raise NotReadInChunksError(f"the model's attention is given {', '.join(unsupported)}")
    if not getattr(module, "is_causal", True) or keywords.get("is_causal") is False:
        raise NotReadInChunksError("the model's attention is not causal")
    if isinstance(attention_mask, Tensor):
        raise NotReadInChunksError("the model's decoder makes a mask of its own")
    tokens, keys = query.shape[-2], key.shape[-2]
    rule = _MaskRule(None, None, keys - tokens, keys) if attention_mask is None else attention_mask
    if rule.keys != keys:
        raise NotReadInChunksError(f"the model's attention has {keys} keys for {rule.keys} tokens")
    if keywords.get("sliding_window") not in (None, rule.window):
        # sdpa and eager attention follow the mask, flash attention the keyword: it is unknown which one is meant
        raise NotReadInChunksError(
            f"the model's mask has the window {rule.window}, but its attention has the window "
            f"{keywords['sliding_window']}"
        )
    reach_seen = _REACH_SEEN.get()
    if reach_seen is not None:
        reach_seen(rule.window or rule.chunk)
    keywords["dropout"] = 0.0  # whatever mode the model is in

    first_query, end = rule.past, rule.past + tokens
    first_key = end - keys  # a sliding-window cache has dropped the keys before it
    parts = []
    start = first_query
    while start < end:  # once; under a chunk rule once per chunk, whose queries see keys from its beginning on
        if rule.chunk is None:
            begin, stop = first_key, end
        else:
            begin = start // rule.chunk * rule.chunk
            stop = min(begin + rule.chunk, end)
        queries = query[:, :, start - first_query : stop - first_query]
        here = slice(begin - first_key, stop - first_key)
        placed = _positions(query, stop - start, stop - begin)
        attention = LocalAttention(rule.window)
        out, _ = attend_from_kwargs(
            attention, None, placed, queries, key[:, :, here], value[:, :, here], None, **keywords
        )
        parts.append(out)
        start = stop
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0], None


def _positions(query: Tensor, queries: int, keys: int) -> TokenPositions:
    """Return the positions of the last `queries` of `keys` tokens, and of all keys, counted from the first key."""
    # Not kept for the next layer: read layer by layer, each chunk would keep positions as long as all before it.
    positions = torch.arange(keys, device=query.device)[None]  # attention depends on their distances alone
    return TokenPositions(positions[:, -queries:], positions, (0,) * len(query), None)


def reading_in_chunks(
    model: nn.Module, reach_seen: Callable[[int | None], None] | None = None
) -> AbstractContextManager[None]:
    """Make a model compute its attention by `_chunked_attention` inside the with block.

    Every attention module calls `reach_seen`, if it is given, with the number of keys that a query may see; None stands
    for all keys.
    """
    return attending(model, _ATTENTION, _chunked_attention, _mask_rule, _REACH_SEEN, reach_seen)
