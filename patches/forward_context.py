"""One forward of a decoder, as hooks and attention functions see it: tokens, past length, padding, positions."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from rope_ext_hf.attention.rules import AttentionRule, ForwardContext, Rotation
from rope_ext_hf.errors import LengthError, UnsupportedModelError
from rope_ext_hf.patches.attention_interface import ATTENTION_NAME
from rope_ext_hf.rotary.embedding import segment_lengths
from rope_ext_hf.rotary.graphs import graph_break

__all__ = ["PROBE_RECORDS", "ForwardTracker", "Layer", "arguments", "new_tokens", "row_lengths", "values_of"]

PROBE_RECORDS: ContextVar[list[Any] | None] = ContextVar("rope_ext_hf_probe_records", default=None)
"""While a model is being probed: what its attention functions were called with (see attention_probe.py)."""


@dataclass(frozen=True)
class Layer:
    """What the attention function must know of a module it is called for."""

    rule: AttentionRule
    rotation: Rotation | None
    tracker: ForwardTracker


class ForwardTracker:
    """Hooks around the forward of a decoder: positions and padding of the call under way, for its attention."""

    def __init__(self) -> None:
        self.current: ForwardContext | None = None
        self._by_positions: MutableMapping[Tensor, ForwardContext] = WeakIdKeyDictionary()

    @graph_break  # it looks at values
    def pre_forward(
        self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        config: Any = decoder.config
        if PROBE_RECORDS.get() is not None:
            return None
        if config._attn_implementation != ATTENTION_NAME:
            raise UnsupportedModelError(
                f"this model is patched with an attention-level method, and its attention was set to "
                f"{config._attn_implementation!r} since: unpatch it first, or set {ATTENTION_NAME!r} again"
            )
        call = arguments(decoder, args, kwargs)
        given = new_tokens(call)
        if given is None:
            return None  # the decoder's own error says it better
        cache, positions = call.get("past_key_values"), call.get("position_ids")
        known = int(cache.get_seq_length()) if cache is not None else 0
        self.current = build_context(
            given, known, _padding(call.get("attention_mask"), known + given.shape[1]), positions
        )
        if positions is not None and "position_ids" not in kwargs:
            self._by_positions[positions] = self.current
            return None
        named = self.current.query_positions.view_as(self.current.query_positions)  # a tensor of this call alone
        self._by_positions[named] = self.current
        return args, kwargs | {"position_ids": named}

    def context_for(self, positions: Tensor | None) -> ForwardContext | None:
        """The call whose attention runs: with gradient checkpointing a backward runs that of earlier ones again."""
        if positions is None or torch.compiler.is_compiling():
            return self.current
        return self._by_positions.get(positions, self.current)

    def post_forward(self, *_: Any) -> None:
        """What served all layers of this forward is of no use to the next; called after an exception, too."""
        if self.current is not None:
            self.current.rotations.clear()


def _padding(mask: Any, total: int) -> Tensor | None:
    """(rows, total) bool, where a mask of that kind was given."""
    masks = mask.values() if isinstance(mask, Mapping) else [mask]
    found = next((m for m in masks if isinstance(m, Tensor) and m.ndim == 2), None)
    if found is None:
        return None
    real = found.bool()
    return nn.functional.pad(real, (0, max(0, total - real.shape[1])), value=True)[:, :total]


def build_context(
    new_tokens: Tensor, past_length: int, key_mask: Tensor | None, positions: Tensor | None
) -> ForwardContext:
    """The context of a forward, with one look at values where it takes any.

    Args:
        past_length: tokens in the cache.
        key_mask: (rows, past_length + tokens) bool, False where padding is.
        positions: (rows or 1, tokens) as given.
    """
    rows, tokens = new_tokens.shape[:2]
    total = past_length + tokens
    if positions is not None:
        if positions.ndim != 2:
            raise LengthError(f"attention-level methods need one position per token, got {tuple(positions.shape)}")
        positions = positions.to(new_tokens.device)

    def agree(keys: Tensor, key_mask: Tensor | None) -> Tensor:
        """Whether the positions given, if any, are those of the last keys, but for padding; a scalar bool."""
        if positions is None:
            return torch.ones((), dtype=torch.bool, device=new_tokens.device)
        differs = keys[:, past_length:] != positions
        return ~(differs if key_mask is None else differs & key_mask[:, past_length:]).any()

    keys = torch.arange(total, device=new_tokens.device)[None]
    offsets: tuple[int, ...] | None = (0,) * rows
    if key_mask is None and positions is None:
        return ForwardContext(keys[:, past_length:], keys, offsets, None)
    looks = agree(keys, None)[None]
    if key_mask is not None:
        counted = (key_mask.cumsum(-1) - 1).clamp(min=0)
        begins = key_mask.int().argmax(-1)
        unbroken = key_mask.int().diff(dim=-1).clamp(min=0).sum(-1) + key_mask[:, 0] == 1  # one run of real tokens
        to_the_end = (begins + key_mask.sum(-1) == total) | (past_length == 0)
        facts = [agree(counted, key_mask), key_mask.all(), (unbroken & to_the_end).all()]
        looks = torch.cat([looks, torch.stack(facts), begins])
    agreed, *padded = looks.tolist()
    if padded and padded[1]:
        key_mask = None
    elif padded:
        agreed, _, in_order, *begin = padded
        keys, offsets = counted, tuple(begin) if in_order else None
    if agreed:
        return ForwardContext(keys[:, past_length:], keys, offsets, key_mask)
    assert positions is not None
    if past_length == 0:  # inputs one after the other in a row, or not from 0 on
        return ForwardContext(positions, positions, None, key_mask)
    keys = keys + positions[:, -1:] - keys[:, -1:]
    if not bool(agree(keys, key_mask)):
        raise LengthError("the positions given do not follow those of the keys in the cache")
    if key_mask is None and not bool((keys[:, 0] > 0).any()):  # padding that only the positions tell of
        before = (-keys[:, 0]).expand(rows)
        return ForwardContext(
            positions, keys.clamp(min=0), tuple(before.tolist()), None if not bool(before.any()) else keys >= 0
        )
    return ForwardContext(positions, keys, None, key_mask)


def arguments(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
    """What a decoder is called with, by name, whichever way it was given."""
    if not args:
        return kwargs
    call: dict[str, Any] = inspect.signature(type(decoder).forward).bind_partial(decoder, *args, **kwargs).arguments
    return {**call, **call.get("kwargs", {})}


def new_tokens(call: Mapping[str, Any]) -> Tensor | None:
    """Ids or embeddings of what a decoder is to read."""
    ids: Tensor | None = call.get("input_ids")
    return call.get("inputs_embeds") if ids is None else ids


def values_of(output: Any) -> list[Any]:
    if isinstance(output, Mapping):
        return list(output.values())
    return list(output) if isinstance(output, tuple) else []


def row_lengths(positions: Tensor, mask: Any, known: int) -> Tensor:
    """Real tokens so far: (rows, tokens) of the input that each token belongs to, or (rows,) onto a cache.

    What a mask leaves out is padding; positions that start anew begin another input of the same row.
    """
    by_position = positions.amax(-1) + 1 if known else segment_lengths(positions)
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return by_position
    count = mask.sum(-1).to(by_position.device, by_position.dtype)
    return torch.minimum(count if known else count[:, None], by_position).clamp(min=1)
