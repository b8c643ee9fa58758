"""Hooks of length-dependent methods: row lengths for the rotary modules, and a cache whose keys follow them.

Under dynamic NTK, for example, the frequencies of a text of 5,000 tokens are not those of its first 4,000. A rotary
module cannot know which frequencies to use: it gets positions only, and neither the padding nor the contents of a
cache. So hooks stand around the decoder's forward, where the mask and the cache are arguments. They work out the length
of every row, which the rotary modules inside look up, and see to it that the keys in the cache meet the new queries as
if they had been rotated by the frequencies of that length from the start (see `rotary/rotating_cache.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import LengthError
from rope_ext_hf.models.decoder_arguments import arguments, cache_argument, cache_parameter, paged_cache
from rope_ext_hf.patches.forward.forward_call import HOLD_ONE_LENGTH, ForwardContext, row_lengths, several_inputs
from rope_ext_hf.patches.forward.forward_hooks import DecoderHooks
from rope_ext_hf.patches.forward.key_layout_probe import CacheCannotFollowError, find_key_layouts
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding, tables_of
from rope_ext_hf.rotary.cache_state import (
    CacheState,
    RowState,
    check_origin,
    discard_state,
    follow_rows,
    has_origin,
    packed_error,
)
from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.rotary.forward_state import graph_break
from rope_ext_hf.rotary.key_rotation import KeyLayout, KeyRotation
from rope_ext_hf.rotary.rotating_cache import Layers, rotate_cached_keys_, rotate_keys_on_read


class LengthHooks(DecoderHooks):
    """Hooks around a decoder's forward that make its frequencies those of each input's length.

    Before a forward they set the frequencies of the rotary modules by the lengths of the rows, and rotate the keys in
    the cache to these frequencies. After it they record with the cache how its keys are rotated.

    They raise LengthError for a cache that other code has filled, or whose keys cannot be rotated again. Inside
    `fixed_length` no frequencies change, so any cache that this model filled at the same fixed length is accepted.
    """

    def __init__(self, slots: Sequence[PatchedRotaryEmbedding]) -> None:
        super().__init__(slots)
        self.key_layouts: list[KeyLayout | None] = []  # of each layer of a cache
        self.cannot_follow = ""  # why the keys of a cache cannot be rotated again; empty: they can

    def prepare(self, model: nn.Module, decoder: nn.Module) -> None:
        """Find out how the decoder keeps its keys; a cache that cannot be followed is refused when it is used."""
        try:
            self.key_layouts = find_key_layouts(model, decoder, self.slots)
        except CacheCannotFollowError as error:
            self.cannot_follow = str(error)

    def pre_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Work out the lengths of the rows, and rotate the keys in the cache to their frequencies."""
        tables = [table for table in tables_of(self.slots) if table.length_dependent]
        call = arguments(decoder, args, kwargs)
        if not tables:
            self._check_held_cache(cache_argument(decoder, call))
            return
        if paged_cache(call) is not None:
            raise LengthError(
                f"a paged cache holds parts of many inputs, whose keys cannot be rotated again. {HOLD_ONE_LENGTH}"
            )
        if cache_argument(decoder, call) is None:
            self._begin_forward(decoder, call, tables)
        else:  # tensors that stay with a cache must not be outputs of a CUDA graph, which its next run overwrites
            graph_break(self._begin_forward)(decoder, call, tables)

    def _check_held_cache(self, cache: Any) -> None:
        """Check inside `fixed_length` that the keys in a cache were not stored at another length."""
        if cache is None or not self._is_held() or torch.compiler.is_compiling():
            return
        origin = self.origin()
        if not has_origin(cache, origin) and cache.get_seq_length():
            check_origin(cache, origin)

    def _begin_forward(self, decoder: nn.Module, call: Mapping[str, Any], tables: list[RotaryEmbedding]) -> None:
        """Give the rotary modules `tables` the lengths of the rows, and prepare the cache for them."""
        context = self.begin(decoder, call)
        if context is None:
            return
        table, positions = tables[0], _token_positions(context)
        context.tables = tuple(tables)
        context.row_lengths = table.resolve_lengths(row_lengths(positions, context.padding_mask, context.past_length))
        # Is a row never longer than its number of tokens in the cache? Then the number tells when frequencies change,
        # without a look at the lengths, which are on the device. Positions that are given may be larger; and under
        # sticky growth another forward may change the lengths.
        bounded = context.padding_mask is not None or context.position_ids is None
        bounded = bounded and not table.method.sticky_length
        lengths = context.row_lengths if context.row_lengths.ndim == 1 else context.row_lengths.amax(-1)
        if context.past_length:
            self._rotate_cache_to(decoder, context, lengths, positions, bounded)
            return
        if context.cache is not None:
            discard_state(context.cache)
        first_change = table.method.constant_until(table.rotary, 1)
        valid_up_to = first_change if bounded and context.new_tokens.shape[1] <= first_change else 0
        context.cache_state = CacheState(self.origin())
        context.cache_rows = RowState(lengths, positions, valid_up_to, context.position_ids is None)

    def post_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Store with the cache a record of how its keys are rotated, so that the next forward onto it can go on."""
        context = self.end(decoder)
        if output is None:
            return
        cache = cache_argument(decoder, arguments(decoder, args, kwargs))
        if context is None:
            if self._is_held():
                self.record(cache, output, CacheState(self.origin()))
            return
        state = context.cache_state
        if state is not None:
            state.rows = context.cache_rows
            self.record(cache, output, state)

    def _is_held(self) -> bool:
        """Return whether the model is inside `fixed_length`."""
        return any(table.fixed_length for table in tables_of(self.slots))

    @graph_break  # it branches on the values of tensors
    def _rotate_cache_to(
        self, decoder: nn.Module, context: ForwardContext, lengths: Tensor, positions: Tensor, bounded: bool
    ) -> None:
        """Make the keys in a cache meet the new queries at the frequencies of the rows' new lengths.

        Args:
            lengths: (rows or 1,) integers, the lengths of the rows with their new tokens.
            positions: (rows or 1, tokens), the positions of the new tokens.
            bounded: no row is longer than its number of tokens in the cache.
        """
        tables = [table for table in context.tables if isinstance(table, RotaryEmbedding)]
        cache = context.cache
        context.cache_state = state = check_origin(cache, self.origin())
        continued = _continue(state, context, tables[0], lengths, positions)
        stored = continued.stored
        context.cache_rows = replace(stored, positions=continued.positions)
        cropped = stored.positions.shape[1] - context.past_length
        if not state.follows:  # compiled code made this cache, and code between the two may have moved its rows
            if not continued.table.method.sticky_length:
                _check_rows_stayed(decoder, stored.lengths + positions.shape[1] - cropped, continued.lengths)
            follow_rows(cache, state)
        if bounded and not cropped and continued.positions.shape[1] <= stored.valid_up_to:
            return  # no frequencies have changed: known from the number of tokens, without waiting for the device
        if self.cannot_follow:
            raise CacheCannotFollowError(self.cannot_follow)
        layers = [(layer, layout) for layer, layout in zip(cache.layers, self.key_layouts, strict=False) if layout]
        method, rotary = continued.table.method, continued.table.rotary
        in_steps = method.changes_in_steps(rotary) and _can_rotate_in_place(cache, layers)
        packed = None
        if not stored.one_input_each:
            packed = several_inputs(continued.past_positions, context.padding_mask)
        if in_steps or packed is not None:
            now, before = _read_on_host(continued.lengths, stored.lengths, packed)
            continued = replace(continued, stored=replace(stored, one_input_each=True))
            context.cache_rows = replace(continued.stored, positions=continued.positions)
            if in_steps:
                slack = _rotate_in_place(state, continued, layers, now, before)
                valid_up_to = continued.positions.shape[1] + slack if bounded else 0
                context.cache_rows = RowState(continued.lengths, continued.positions, valid_up_to, True)
                return
        context.undo = _rotate_on_read(continued, layers, positions.shape[1])


@dataclass(frozen=True)
class _Continued:
    """The rows of a cache in one forward: their lengths, the positions of their keys, and how these are rotated."""

    table: RotaryEmbedding  # the rotary module whose frequencies change
    stored: RowState  # how the keys in the cache are rotated
    lengths: Tensor  # (rows or 1,) int64, of the rows with their new tokens
    past_positions: Tensor  # (rows or 1, past) int64, of the keys in the cache
    positions: Tensor  # (rows or 1, past + tokens) int64, of all keys


def _continue(
    state: CacheState, context: ForwardContext, table: RotaryEmbedding, lengths: Tensor, positions: Tensor
) -> _Continued:
    """Return the rows of a cache that a forward goes on from; see `LengthHooks._rotate_cache_to` for the arguments.

    Raises:
        LengthError: the state that is kept with the cache does not describe its keys, or not this number of rows.
    """
    rows = context.new_tokens.shape[0]
    stored = state.rows
    if stored is None:
        raise LengthError("an error has left the keys in this cache rotated half-way: fill a new one")
    stored_rows = max(stored.lengths.shape[0], stored.positions.shape[0])
    if stored_rows not in (1, rows):
        raise LengthError(
            f"this cache was filled with {stored_rows} rows, and which of them became the {rows} of this call is not "
            f"known. {HOLD_ONE_LENGTH}"
        )
    if stored.positions.shape[1] < context.past_length:
        raise LengthError(
            "other code has added keys to this cache, and the length that they were rotated for is not known. "
            f"{HOLD_ONE_LENGTH}"
        )
    past = stored.positions[:, : context.past_length].expand(max(len(positions), len(stored.positions)), -1)
    return _Continued(
        table=table,
        stored=stored,
        lengths=lengths.expand_as(stored.lengths) if lengths.shape[0] == 1 else lengths,
        past_positions=past,
        positions=torch.cat([past, positions.expand(past.shape[0], -1)], dim=1),
    )


def _check_rows_stayed(decoder: nn.Module, expected: Tensor, lengths: Tensor) -> None:
    """Check that every row of a cache is as long as its tokens make it, in the order in which the cache was filled.

    `expected` and `lengths`: (rows or 1,) integers.
    """
    if not bool((expected == lengths).all()):
        raise LengthError(
            "the rows of this cache, which compiled code has made, are not as long as they were: its rows were "
            "moved, or tokens were padded in between. Pass a cache to the first forward: "
            f"{cache_parameter(decoder)}=DynamicCache()"
        )


def _rotate_in_place(
    state: CacheState, continued: _Continued, layers: Layers, lengths: Sequence[int], stored_lengths: Sequence[int]
) -> int:
    """Rotate the keys in a cache once where a row has passed a length at which frequencies change.

    Args:
        lengths: the lengths of the rows now.
        stored_lengths: the lengths of the rows when their keys were rotated.

    Returns:
        How many tokens every row can take before the frequencies of any change again.
    """
    table, stored = continued.table, continued.stored
    ends = [table.method.constant_until(table.rotary, length) for length in lengths]
    if ends != [table.method.constant_until(table.rotary, length) for length in stored_lengths]:
        state.rows = None  # so that a cache which an error leaves half rotated is refused from then on
        for scaled, group in _by_attention_factor(layers):
            rotation, _ = KeyRotation.read_and_store(
                table, stored.lengths, continued.lengths, continued.past_positions, 0, scaled
            )
            rotate_cached_keys_(group, rotation)
        state.rows = replace(stored, lengths=continued.lengths, positions=continued.past_positions)
    return min(end - length for end, length in zip(ends, lengths, strict=True))


def _rotate_on_read(continued: _Continued, layers: Layers, new: int) -> ExitStack:
    """Make the layers of a cache return their keys at the present frequencies, until the returned stack is closed.

    The cache itself keeps every key of a row at the frequencies of one earlier length, `continued.stored.lengths`.
    Reading therefore returns copies of the keys, rotated to the frequencies of the present length. The last `new` keys
    are those of this forward, which the model has rotated with the present frequencies. They are rotated to the earlier
    frequencies before they are stored, so that one rotation is right for all keys at the next reading, too.
    """
    undo = ExitStack()
    for scaled, group in _by_attention_factor(layers):
        after_reading, before_storing = KeyRotation.read_and_store(
            continued.table, continued.stored.lengths, continued.lengths, continued.positions, new, scaled
        )
        undo.enter_context(rotate_keys_on_read(group, before_storing, after_reading))
    return undo


def _token_positions(context: ForwardContext) -> Tensor:
    """Return the positions of the new tokens, (rows or 1, tokens).

    Raises:
        LengthError: the length of each row does not follow from the arguments of the call.
    """
    positions = context.position_ids
    if positions is None:
        if context.prepared_mask:
            raise LengthError(
                "the length of each row does not follow from a prepared attention mask; give position_ids with it, or "
                "a mask of shape (rows, tokens). If a model around this decoder has prepared it, patch that model. "
                f"{HOLD_ONE_LENGTH}"
            )
        tokens, past_length = context.new_tokens.shape[1], context.past_length
        return torch.arange(past_length, past_length + tokens, device=context.new_tokens.device)[None]
    if positions.ndim != 2:
        raise LengthError(
            f"the length of each row does not follow from position_ids of shape {tuple(positions.shape)}; give one "
            f"position per token, (rows, tokens). {HOLD_ONE_LENGTH}"
        )
    return positions


def _read_on_host(lengths: Tensor, stored: Tensor, packed: Tensor | None) -> tuple[list[int], list[int]]:
    """Return lengths (rows,) and stored lengths (rows,) as numbers, waiting once for the device.

    Raises:
        LengthError: the bool scalar `packed` says that a row holds several inputs one after the other.
    """
    flag = torch.zeros_like(lengths[:1]) if packed is None else packed.reshape(1).to(lengths.device)
    *values, any_packed = torch.cat([lengths, stored.to(lengths.device), flag.to(lengths.dtype)]).tolist()
    if any_packed:
        raise packed_error()
    return values[: len(lengths)], values[len(lengths) :]


def _can_rotate_in_place(cache: Any, layers: Layers) -> bool:
    """Return whether nothing but the model itself reads or moves the keys of a cache."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    # Other kinds of layers keep keys in a form of their own; an offloading cache may be copying them elsewhere.
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer, _ in layers)
    return plain and not getattr(cache, "offloading", False)


def _by_attention_factor(layers: Layers) -> list[tuple[bool, Layers]]:
    """Return the layers whose keys carry the attention factor, as (True, layers), and the others, as (False, layers).

    A group without layers is left out.
    """
    groups = [(scaled, [pair for pair in layers if pair[1].scaled == scaled]) for scaled in (True, False)]
    return [(scaled, group) for scaled, group in groups if group]
