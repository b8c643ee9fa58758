"""Length-dependent methods in a live model: row lengths for the rotary modules, and a cache whose keys follow.

A rotary module is given positions only. Which of them are padding, and what the cache holds, is known one level up, so
hooks stand around the decoder's forward while its method depends on the length (`rotary/kv_cache.py` describes how the
cache is kept).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import LengthError
from rope_ext_hf.patches.forward_context import ForwardContext, arguments, row_lengths, values_of
from rope_ext_hf.patches.forward_hooks import DecoderHooks
from rope_ext_hf.patches.slots import PatchedSlot
from rope_ext_hf.rotary.embedding import RotaryEmbedding, override_angles
from rope_ext_hf.rotary.graphs import graph_break
from rope_ext_hf.rotary.kv_cache import (
    CacheState,
    KeyLayout,
    KeyRotation,
    Layers,
    infer_key_layout,
    rotate_cached_keys_,
    rotate_keys_on_read,
)

__all__ = ["LengthHooks"]

CACHE_STATE = "_rope_ext_hf_cache_state"
"""The attribute of a transformers cache that holds its `CacheState`, or the length it was filled at by fixed_length."""

_REMEDY = "Hold one length for all calls: with rope_ext_hf.fixed_length(model, prompt_length + max_new_tokens): ..."


class LengthHooks(DecoderHooks):
    """Hooks around the forward of a decoder under a length-dependent method.

    Raises:
        LengthError: a cache that was filled elsewhere, or whose keys cannot be rotated again; not under
            `fixed_length`, where no frequencies change.
    """

    def __init__(self, slots: Sequence[PatchedSlot]) -> None:
        super().__init__(slots)
        self.key_layouts: list[KeyLayout | None] | None = None  # of the layers of its cache; found out at first need

    def pre_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Work out the lengths of the rows, and rotate the keys in the cache to their frequencies."""
        tables = [table for table in self._tables() if table.length_dependent]
        if not tables:
            self._check_fixed(arguments(decoder, args, kwargs).get("past_key_values"))
            return
        if arguments(decoder, args, kwargs).get("cache") is not None:
            raise LengthError(
                f"a paged cache holds parts of many inputs, whose keys cannot be rotated again. {_REMEDY}"
            )
        context = self.begin(decoder, args, kwargs)
        if context is None:
            return
        table, positions = tables[0], _positions(context)
        context.tables = tuple(tables)
        context.row_lengths = table.resolve_lengths(row_lengths(positions, context.padding_mask, context.past_length))
        # Whether row lengths are no larger than numbers of tokens, and no other forward changes them.
        counted = context.padding_mask is not None or context.position_ids is None
        counted = counted and not table.method.sticky_length
        lengths = context.row_lengths if context.row_lengths.ndim == 1 else context.row_lengths.amax(-1)
        if context.past_length:
            self._rotate_cache_to(decoder, context, lengths, positions, counted)
        else:
            first_change = table.method.constant_until(table.rotary, 1)
            short = counted and context.new_tokens.shape[1] <= first_change
            context.cache_state = CacheState(table.method.to_dict(), lengths, positions, first_change if short else 0)

    def post_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Undo `pre_forward` and record how the keys in the cache are rotated now."""
        from transformers.cache_utils import Cache

        context = self.end(decoder)
        state: CacheState | int | None = None
        if context is not None:
            state = context.cache_state
        elif not torch.compiler.is_compiling():
            state = self._held_length()
        if output is None or state is None:
            return
        cache = arguments(decoder, args, kwargs).get("past_key_values")
        if cache is None:
            cache = next((value for value in values_of(output) if isinstance(value, Cache)), None)
        if cache is not None:
            setattr(cache, CACHE_STATE, state)

    def _tables(self) -> list[RotaryEmbedding]:
        return [slot.table(name) for slot in self.slots for name in slot.tables]

    def _held_length(self) -> int | None:
        """The length that `fixed_length` holds, if it does."""
        return next(
            (table.fixed_length for table in self._tables() if table.method.depends_on_length(table.rotary)), None
        )

    def _check_fixed(self, cache: Any) -> None:
        """Refuse keys that were stored at another length than is held now."""
        if torch.compiler.is_compiling():
            return
        stored, held = getattr(cache, CACHE_STATE, None), self._held_length()
        if stored not in (None, held) and cache.get_seq_length():
            when = "outside fixed_length" if isinstance(stored, CacheState) else f"at a fixed length of {stored}"
            raise LengthError(f"the keys in this cache were stored {when}, and {held} is held now: fill a new one")

    @graph_break  # it looks at values
    def _rotate_cache_to(
        self, decoder: nn.Module, context: ForwardContext, lengths: Tensor, positions: Tensor, counted: bool
    ) -> None:
        """Rotate the keys of a cache to the frequencies of rows of `lengths` (rows or 1,) tokens.

        Args:
            positions: (rows or 1, tokens), of the new tokens.
            counted: no row is longer than the number of its tokens.
        """
        tables = [table for table in context.tables if isinstance(table, RotaryEmbedding)]
        table, cache, past_length = tables[0], context.cache, context.past_length
        stored = _checked_state(context, table)
        if lengths.shape[0] == 1:
            lengths = lengths.expand_as(stored.lengths)
        past = stored.positions[:, :past_length].expand(max(positions.shape[0], stored.positions.shape[0]), -1)
        every = torch.cat([past, positions.expand(past.shape[0], -1)], dim=1)
        total = every.shape[1]
        context.cache_state = CacheState(stored.method, stored.lengths, every, stored.valid_up_to)
        cropped = past_length < stored.positions.shape[1]
        if counted and not cropped and total <= stored.valid_up_to:
            return  # follows from the number of tokens, without waiting for the device
        if self.key_layouts is None:
            self.key_layouts = _key_layouts(decoder, context.new_tokens, tables)
        layers = [(layer, layout) for layer, layout in zip(cache.layers, self.key_layouts, strict=False) if layout]
        if table.method.changes_in_steps(table.rotary) and _can_rotate_in_place(cache, layers):
            context.cache_state = _rotate_past_steps(table, cache, layers, stored, lengths, past, every, counted)
            return
        context.undo = ExitStack()
        for scaled, some in _by_attention_factor(layers):
            before_storing = KeyRotation.between_lengths(table, lengths, stored.lengths, positions, scaled)
            after_reading = KeyRotation.between_lengths(table, stored.lengths, lengths, every, scaled)
            context.undo.enter_context(rotate_keys_on_read(some, before_storing, after_reading))


def _positions(context: ForwardContext) -> Tensor:
    """Positions of the new tokens, (rows or 1, tokens).

    Raises:
        LengthError: positions or a mask from which the length of a row does not follow.
    """
    positions = context.position_ids
    if positions is None:
        if context.prepared_mask:
            raise LengthError(
                "the length of each row does not follow from a prepared attention mask; give position_ids with it, or "
                f"a mask of shape (rows, tokens). {_REMEDY}"
            )
        tokens, past_length = context.new_tokens.shape[1], context.past_length
        return torch.arange(past_length, past_length + tokens, device=context.new_tokens.device)[None]
    if positions.ndim != 2:
        raise LengthError(
            f"the length of each row does not follow from position_ids of shape {tuple(positions.shape)}; give one "
            f"position per token, (rows, tokens). {_REMEDY}"
        )
    return positions


def _checked_state(context: ForwardContext, table: RotaryEmbedding) -> CacheState:
    """The state of a cache that fits this forward."""
    stored, rows = getattr(context.cache, CACHE_STATE, None), context.new_tokens.shape[0]
    if not isinstance(stored, CacheState) or stored.method != table.method.to_dict():
        raise LengthError(
            f"the keys in this cache were not stored under this model's {table.method.name}, so the frequencies they "
            f"are rotated with are not known. {_REMEDY}"
        )
    filled = max(stored.lengths.shape[0], stored.positions.shape[0])
    if filled not in (1, rows):
        raise LengthError(
            f"this cache was filled with {filled} rows, and which of them became the {rows} of this call is not "
            f"known. {_REMEDY}"
        )
    if stored.positions.shape[1] < context.past_length:
        raise LengthError(f"something else has added keys to this cache. {_REMEDY}")
    return stored


def _can_rotate_in_place(cache: Any, layers: Layers) -> bool:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    # An offloading cache may be copying its keys elsewhere.
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer, _ in layers)
    return plain and not getattr(cache, "offloading", False)


def _by_attention_factor(layers: Layers) -> list[tuple[bool, Layers]]:
    """The layers whose keys carry the attention factor (True) and the others, where there are any."""
    groups = [(scaled, [pair for pair in layers if pair[1].scaled == scaled]) for scaled in (True, False)]
    return [(scaled, some) for scaled, some in groups if some]


def _rotate_past_steps(
    table: RotaryEmbedding,
    cache: Any,
    layers: Layers,
    stored: CacheState,
    lengths: Tensor,
    past: Tensor,
    every: Tensor,
    counted: bool,
) -> CacheState:
    """Rotate cached keys in place where a row has passed a step of the method; the state of the cache afterwards.

    Args:
        past, every: (rows or 1, tokens), positions in the cache, and with the new tokens.
    """
    until = [table.method.constant_until(table.rotary, length) for length in lengths.tolist()]
    before = [table.method.constant_until(table.rotary, length) for length in stored.lengths.tolist()]
    if until != before:
        delattr(cache, CACHE_STATE)  # a cache whose rotation fails half-way must be refused from then on
        for scaled, some in _by_attention_factor(layers):
            rotation = KeyRotation.between_lengths(table, stored.lengths, lengths, past, scaled)
            rotate_cached_keys_(some, rotation)
        setattr(cache, CACHE_STATE, CacheState(stored.method, lengths, past, 0))
    slack = min(end - length for end, length in zip(until, lengths.tolist(), strict=True))
    return CacheState(stored.method, lengths, every, every.shape[1] + slack if counted else 0)


def _key_layouts(decoder: nn.Module, new_tokens: Tensor, tables: Sequence[RotaryEmbedding]) -> list[KeyLayout | None]:
    """Find out how each layer of a decoder's cache keeps its keys, by running one token with three rotations.

    A token that attends to itself alone is rotated together with its key, so that all hidden states are the same
    whatever the angle, and only the rotation differs in the cache. Quarters of a cycle are exact in any dtype.
    """
    name = "inputs_embeds" if new_tokens.is_floating_point() else "input_ids"
    token = {name: new_tokens[:1, -1:], "position_ids": torch.ones(1, 1, dtype=torch.int64, device=new_tokens.device)}
    radians = (1 + torch.arange(tables[0].rotary.dim // 2) % 3) * (math.pi / 2)
    caches = []
    for angles, factor in ((torch.zeros_like(radians), 1.0), (radians, 1.0), (radians, 1.25)):
        with override_angles(tables, angles, factor), torch.no_grad():
            caches.append(decoder.forward(**token, use_cache=True, return_dict=True).past_key_values)
    try:
        unrotated, rotated, rotated_scaled = (cache.layers for cache in caches)
        return [infer_key_layout(*layers, radians) for layers in zip(unrotated, rotated, rotated_scaled, strict=True)]
    except ValueError as error:
        raise LengthError(
            f"the {error} that {type(decoder).__name__} keeps in its cache are not simply rotated (a norm after the "
            f"rotation, or an index with keys of its own), so they cannot follow other frequencies. {_REMEDY}"
        ) from error
