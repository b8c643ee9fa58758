"""The keys in the caches of a decoder under a length-dependent method, which follow the frequencies of growing rows.

The frequencies of a row change as it grows, and a query must meet all keys at the same ones. So a forward onto a cache
rotates the keys in it to the frequencies of the new length: once and for all where frequencies change in steps, and
else whenever the keys are read (rotary/rotating_cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import LengthError
from rope_ext_hf.models.decoder_arguments import cache_parameter
from rope_ext_hf.patches.forward.forward_call import HOLD_ONE_LENGTH, ForwardCall
from rope_ext_hf.patches.forward.key_layout_probe import CacheCannotFollowError, find_key_layouts
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding
from rope_ext_hf.rotary.cache_memory import CachedRows, CacheMemory, KeyOrigin, follow_rows, packed_error, recall
from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.rotary.key_rotation import KeyLayout
from rope_ext_hf.rotary.reading_rotation import ReadingRotation
from rope_ext_hf.rotary.rotating_cache import Layers, rotate_cached_keys_, rotate_keys_on_read
from rope_ext_hf.rotary.row_lengths import several_inputs


@dataclass(frozen=True)
class CachedKeys:
    """The form in which a decoder keeps the keys in its cache, by which they can be rotated again."""

    layouts: Sequence[KeyLayout | None] = ()  # of each layer of a cache; None: it keeps no rotated keys
    cannot_follow: str = ""  # why the keys cannot be rotated again; empty: they can

    @classmethod
    def of(cls, model: nn.Module, decoder: nn.Module, slots: Sequence[PatchedRotaryEmbedding]) -> Self:
        """Find out how a decoder keeps its keys; a cache that cannot be followed is refused when it is used."""
        try:
            return cls(find_key_layouts(model, decoder, slots))
        except CacheCannotFollowError as error:
            return cls(cannot_follow=str(error))

    def rotate_to(
        self,
        call: ForwardCall,
        table: RotaryEmbedding,
        origin: KeyOrigin,
        lengths: Tensor,
        positions: Tensor,
        *,
        bounded: bool,
    ) -> None:
        """Make the keys in the cache of a call meet the new queries at the frequencies of the rows' new lengths.

        Args:
            call: the call, whose `undo` and whose memory of the cache are set.
            table: the rotary module whose frequencies change.
            origin: what rotates the keys that this model stores now.
            lengths: (rows or 1,) integers, the lengths of the rows with their new tokens.
            positions: (rows or 1, tokens), the positions of the new tokens.
            bounded: no row is longer than its number of tokens in the cache.

        Raises:
            LengthError: other code has filled the cache, or its keys cannot be rotated again.
        """
        cache = call.cache
        call.memory = memory = recall(cache, origin)
        now = _continue(memory.rows, call, table, lengths, positions)
        stored = now.stored
        call.cached_rows = replace(stored, positions=now.positions)
        cropped = stored.positions.shape[1] - call.past_length
        if not memory.follows:  # compiled code made this cache, and code between the two may have moved its rows
            if not table.method.sticky_length:
                _check_rows_stayed(call.module, stored.lengths + positions.shape[1] - cropped, now.lengths)
            follow_rows(cache, memory)
        if bounded and not cropped and now.positions.shape[1] <= stored.valid_up_to:
            return  # no frequencies have changed: known from the number of tokens, without waiting for the device
        if self.cannot_follow:
            raise CacheCannotFollowError(self.cannot_follow)
        layers = [(layer, layout) for layer, layout in zip(cache.layers, self.layouts, strict=False) if layout]
        packed = None if stored.one_input_each else several_inputs(now.past_positions, call.padding_mask)
        if table.method.changes_in_steps(table.rotary) and _model_alone_holds(cache, layers):
            room = _rotate_in_place(memory, now, layers, *_read_on_host(now.lengths, stored.lengths, packed))
            valid_up_to = now.positions.shape[1] + room if bounded else 0
            call.cached_rows = CachedRows(now.lengths, now.positions, valid_up_to, one_input_each=True)
            return
        if packed is not None:
            if bool(packed):
                raise packed_error()
            call.cached_rows = replace(call.cached_rows, one_input_each=True)
        call.undo = _rotate_on_read(
            now, layers, positions.shape[1], in_attention=_attention_can_rotate(call, layers, now)
        )


@dataclass(frozen=True)
class _Continued:
    """The rows of a cache in one forward: their lengths, the positions of their keys, and how these are rotated."""

    table: RotaryEmbedding  # the rotary module whose frequencies change
    stored: CachedRows  # how the keys in the cache are rotated
    lengths: Tensor  # (rows or 1,) int64, of the rows with their new tokens
    past_positions: Tensor  # (rows or 1, past) int64, of the keys in the cache
    positions: Tensor  # (rows or 1, past + tokens) int64, of all keys


def _continue(
    stored: CachedRows | None, call: ForwardCall, table: RotaryEmbedding, lengths: Tensor, positions: Tensor
) -> _Continued:
    """Return the rows of a cache that a forward goes on from; see `CachedKeys.rotate_to` for the other arguments.

    `stored`: the rows that are remembered with the cache.

    Raises:
        LengthError: what is remembered does not describe the keys of the cache, or not this number of rows.
    """
    rows = call.new_tokens.shape[0]
    if stored is None:
        raise LengthError("an error has left the keys in this cache rotated half-way: fill a new one")
    stored_rows = max(stored.lengths.shape[0], stored.positions.shape[0])
    if stored_rows not in (1, rows):
        raise LengthError(
            f"this cache was filled with {stored_rows} rows, and which of them became the {rows} of this call is not "
            f"known. {HOLD_ONE_LENGTH}"
        )
    if stored.positions.shape[1] < call.past_length:
        raise LengthError(
            "other code has added keys to this cache, and the length that they were rotated for is not known. "
            f"{HOLD_ONE_LENGTH}"
        )
    past = stored.positions[:, : call.past_length].expand(max(len(positions), len(stored.positions)), -1)
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
    memory: CacheMemory, continued: _Continued, layers: Layers, lengths: Sequence[int], stored_lengths: Sequence[int]
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
        memory.rows = None  # so that a cache which an error leaves half rotated is refused from then on
        for scaled, group in _by_attention_factor(layers):
            reading = ReadingRotation(table, stored.lengths, continued.lengths, continued.past_positions, scaled)
            rotate_cached_keys_(group, reading.of_all(continued.past_positions.device))
        memory.rows = CachedRows(continued.lengths, continued.past_positions, stored.valid_up_to, one_input_each=True)
    return min(end - length for end, length in zip(ends, lengths, strict=True))


def _attention_can_rotate(call: ForwardCall, layers: Layers, continued: _Continued) -> bool:
    """Return whether attention can rotate the keys as it reads them: one new token, and positions without a gap.

    It does so on a CPU; on other devices one kernel rotates all keys.
    """
    positions, last = continued.positions, continued.positions[:, -1:]
    plain = not (torch.is_grad_enabled() or call.compiled) and _model_alone_holds(call.cache, layers)
    if not plain or positions.device.type != "cpu" or call.new_tokens.shape[1] != 1:
        return False
    if getattr(call.module.config, "_attn_implementation", None) != "sdpa":
        return False
    count = positions.shape[1]
    in_order = positions == last + torch.arange(1 - count, 1)
    if call.padding_mask is not None and call.padding_mask.shape[-1] == count:  # nobody sees the keys at padding
        in_order = in_order | (call.padding_mask == 0)
    return bool(in_order.all())


def _rotate_on_read(continued: _Continued, layers: Layers, new: int, *, in_attention: bool) -> ExitStack:
    """Make the layers of a cache return their keys at the present frequencies, until the returned stack is closed.

    The cache itself keeps every key of a row at the frequencies of one earlier length, `continued.stored.lengths`.
    Reading therefore returns copies of the keys, rotated to the frequencies of the present length. The last `new` keys
    are those of this forward, which the model has rotated with the present frequencies. They are rotated to the earlier
    frequencies before they are stored, so that one rotation is right for all keys at the next reading, too.
    """
    undo = ExitStack()
    for scaled, group in _by_attention_factor(layers):
        lengths = continued.stored.lengths, continued.lengths
        reading = ReadingRotation(continued.table, *lengths, continued.positions, scaled)
        undo.enter_context(rotate_keys_on_read(group, reading, new, in_attention=in_attention))
    return undo


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


def _model_alone_holds(cache: Any, layers: Layers) -> bool:
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
