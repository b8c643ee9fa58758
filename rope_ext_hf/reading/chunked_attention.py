"""Attention of a chunk of tokens to everything before it, without a mask tensor: what the scorer reads texts with.

transformers describes every mask by a function of indices before it makes a tensor of it. Here the description alone
goes to the attention modules (`_MaskRule`), so that a window counts wherever a model class states it: in its mask, or
in its mask and its attention's keywords. Whatever is more than causality with a window or with chunks is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.rules import LocalAttention, TokenPositions
from rope_ext_hf.patches.attention_function import attend_from_kwargs
from rope_ext_hf.patches.attention_interface import (
    UNSUPPORTED_KWARGS,
    attending,
    chunk_size,
    is_sliding,
    tokens_before_queries,
)

_ATTENTION = "rope_ext_hf.chunks"
_UNSUPPORTED = (*UNSUPPORTED_KWARGS, "indices")  # change which keys count; `indices` are those that an index chose
_REACH_SEEN: ContextVar[Callable[[int | None], None] | None] = ContextVar("rope_ext_hf_reach_seen", default=None)
"""While a model is checked: called at every attention with the keys that a query may see, None for all."""


class NotReadInChunksError(Exception):
    """A model that cannot be read in chunks; the message is the reason."""


class _MaskReadError(NotReadInChunksError, AttributeError):
    """A decoder that works with its mask itself; an AttributeError, so that `hasattr` is False (accelerate asks)."""


@dataclass(frozen=True)
class _MaskRule:
    """The rule that a mask follows, in place of the mask."""

    window: int | None  # keys a query sees, itself included; None: no window
    # queries see keys of their own chunk of so many tokens alone, counted from the first token; None: all
    chunk: int | None
    past: int  # tokens before the queries
    keys: int  # keys that the layer's cache hands out, those of the queries included
    placed: dict[Hashable, TokenPositions] = field(default_factory=dict, compare=False)  # of the first layer, for all

    def __getattr__(self, name: str) -> NoReturn:
        raise _MaskReadError(f"its decoder works with its attention mask itself (.{name})")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise _MaskReadError(f"its decoder works with its attention mask itself ({function.__name__})")


def _mask_rule(*args: Any, **kwargs: Any) -> _MaskRule:
    """The rule of the mask that transformers asks for; arguments as of `transformers.masking_utils.sdpa_mask`."""
    from transformers.masking_utils import causal_mask_function

    window = chunk = None
    padding: Tensor | None = kwargs.get("attention_mask")  # some decoders make one of ones
    if padding is not None and not bool(padding.all()):
        raise NotReadInChunksError("its decoder hides some tokens from all others")
    if is_sliding(kwargs):
        window = kwargs["local_size"]
    elif (size := chunk_size(kwargs)) is not None:
        chunk = size
    elif kwargs.get("mask_function") is not causal_mask_function:
        raise NotReadInChunksError("its mask is another one than causality, with or without a window")
    return _MaskRule(window, chunk, tokens_before_queries(kwargs), kwargs["kv_length"])


def _chunked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _MaskRule | Tensor | None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Causal attention of the newest queries to a cache that ends with their own keys.

    Args:
        query: (batch, heads, tokens, head_dim).
        key, value: (batch, kv_heads, past + tokens, head_dim); heads share them in groups.
        attention_mask: None: causality alone, where the model class asks transformers for no mask.
        given: transformers' keywords: `scaling`, `softcap`, `s_aux`, and `sliding_window`, which the mask has as well.

    Returns:
        (batch, tokens, heads, head_dim), None for the weights.
    """
    if unknown := given.keys() & _UNSUPPORTED and [name for name in _UNSUPPORTED if given.get(name) is not None]:
        raise NotReadInChunksError(f"its attention is given {', '.join(unknown)}")
    if not getattr(module, "is_causal", True) or given.get("is_causal") is False:
        raise NotReadInChunksError("its attention is not causal")
    if isinstance(attention_mask, Tensor):
        raise NotReadInChunksError("its decoder makes a mask of its own")
    tokens, keys = query.shape[-2], key.shape[-2]
    rule = _MaskRule(None, None, keys - tokens, keys) if attention_mask is None else attention_mask
    if rule.keys != keys:
        raise NotReadInChunksError(f"its attention has {keys} keys for {rule.keys} tokens")
    if given.get("sliding_window") not in (None, rule.window):
        # sdpa and eager attention follow the mask, flash attention the keyword: which one is meant is unknown
        raise NotReadInChunksError(
            f"its mask has the window {rule.window}, its attention the window {given['sliding_window']}"
        )
    if (seen := _REACH_SEEN.get()) is not None:
        seen(rule.window or rule.chunk)
    given["dropout"] = 0.0  # whatever mode the model is in
    start, end = rule.past, rule.past + tokens
    begin = first_key = end - keys  # a sliding-window cache has dropped the keys before
    parts = []
    while start < end:
        stop = end
        if rule.chunk is not None:  # its queries see keys from its beginning on, causally and nothing else
            begin = start // rule.chunk * rule.chunk
            stop = min(begin + rule.chunk, end)
        entry = (query.device, len(query), stop - start, stop - begin)
        if entry not in rule.placed:
            positions = torch.arange(stop - begin, device=query.device)[None]  # what counts is their distance
            rule.placed[entry] = TokenPositions(positions[:, start - stop :], positions, (0,) * len(query), None)
        some, here = query[:, :, start - rule.past : stop - rule.past], slice(begin - first_key, stop - first_key)
        tensors = some, key[:, :, here], value[:, :, here], None
        parts.append(attend_from_kwargs(LocalAttention(rule.window), None, rule.placed[entry], *tensors, **given)[0])
        start = stop
    return torch.cat(parts, dim=1) if parts[1:] else parts[0], None


def reading_in_chunks(
    model: nn.Module, reach_seen: Callable[[int | None], None] | None = None
) -> AbstractContextManager[None]:
    """Have a model use `_chunked_attention` inside, and call `reach_seen` with the keys that a query may see."""
    return attending(model, _ATTENTION, _chunked_attention, _mask_rule, _REACH_SEEN, reach_seen)
