"""Length-dependent methods in a live model: row lengths for the rotary modules, and a cache whose keys follow.

A rotary module is given positions only. Which of them are padding, and what the cache holds, is known one level up, so
hooks stand around the decoder's forward while its method depends on the length (`rotary/rotating_cache.py` describes
how the keys of the cache follow).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import LengthError, one_line
from rope_ext_hf.patches.decoder_arguments import (
    arguments,
    cache_argument,
    cache_of_output,
    cache_parameter,
    paged_cache,
)
from rope_ext_hf.patches.forward_context import ForwardContext, row_lengths, several_inputs
from rope_ext_hf.patches.forward_hooks import DecoderHooks, forward_without_hooks
from rope_ext_hf.patches.slots import PatchedSlot, tables_of
from rope_ext_hf.rotary.cache_state import (
    CacheState,
    RowState,
    check_origin,
    discard_state,
    follow_rows,
    has_origin,
    packed_error,
)
from rope_ext_hf.rotary.embedding import RotaryEmbedding, override_angles
from rope_ext_hf.rotary.forward_state import graph_break
from rope_ext_hf.rotary.key_rotation import KeyLayout, KeyRotation, infer_key_layout
from rope_ext_hf.rotary.rotating_cache import Layers, rotate_cached_keys_, rotate_keys_on_read

_REMEDY = "Hold one length for all calls: with rope_ext_hf.fixed_length(model, prompt_length + max_new_tokens): ..."


class CacheCannotFollowError(LengthError):
    """The keys in the cache of this class of decoders cannot follow the length; with one length held, all works."""


class LengthHooks(DecoderHooks):
    """Hooks around the forward of a decoder under a length-dependent method.

    They refuse a cache that was filled elsewhere, or whose keys cannot be rotated again, by a LengthError; not under
    `fixed_length`, where no frequencies change.
    """

    def __init__(self, slots: Sequence[PatchedSlot]) -> None:
        super().__init__(slots)
        self.key_layouts: list[KeyLayout | None] | None = None  # of the layers of its cache; found out at first need

    def pre_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Work out the lengths of the rows, and rotate the keys in the cache to their frequencies."""
        tables = [table for table in tables_of(self.slots) if table.length_dependent]
        call = arguments(decoder, args, kwargs)
        if not tables:
            cache = cache_argument(decoder, call)
            if cache is not None and self._held() and not torch.compiler.is_compiling():
                origin = self.origin()  # keys may have been stored at another length than is held now
                if not has_origin(cache, origin) and cache.get_seq_length():
                    check_origin(cache, origin)
            return
        if paged_cache(call) is not None:
            raise LengthError(
                f"a paged cache holds parts of many inputs, whose keys cannot be rotated again. {_REMEDY}"
            )
        if cache_argument(decoder, call) is None:
            self._begin(decoder, call, tables)
        else:  # tensors that stay with a cache must not be outputs of a CUDA graph, which its next run overwrites
            graph_break(self._begin)(decoder, call, tables)

    def _begin(self, decoder: nn.Module, call: Mapping[str, Any], tables: list[RotaryEmbedding]) -> None:
        context = self.begin(decoder, call)
        if context is not None:
            self._begin_rows(decoder, context, tables)

    def _begin_rows(self, decoder: nn.Module, context: ForwardContext, tables: list[RotaryEmbedding]) -> None:
        table, positions = tables[0], _token_positions(context)
        context.tables = tuple(tables)
        context.row_lengths = table.resolve_lengths(row_lengths(positions, context.padding_mask, context.past_length))
        # Whether row lengths are no larger than numbers of tokens, and no other forward changes them.
        counted = context.padding_mask is not None or context.position_ids is None
        counted = counted and not table.method.sticky_length
        lengths = context.row_lengths if context.row_lengths.ndim == 1 else context.row_lengths.amax(-1)
        if context.past_length:
            self._rotate_cache_to(decoder, context, lengths, positions, counted)
            return
        if context.cache is not None:
            discard_state(context.cache)
        first_change = table.method.constant_until(table.rotary, 1)
        # An exported program has one graph for all lengths, and keeps no cache that this would save a look at.
        counted = counted and not torch.compiler.is_exporting()
        valid_up_to = first_change if counted and context.new_tokens.shape[1] <= first_change else 0
        context.cache_state = CacheState(self.origin())
        context.cache_rows = RowState(lengths, positions, valid_up_to, context.position_ids is None)

    def post_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        context = self.end(decoder)
        if output is None:
            return
        cache = cache_argument(decoder, arguments(decoder, args, kwargs))
        if context is None:
            if self._held():
                self.record(cache, output, CacheState(self.origin()))
            return
        if (state := context.cache_state) is not None:
            state.rows = context.cache_rows
            self.record(cache, output, state)

    def _held(self) -> bool:
        return any(table.fixed_length for table in tables_of(self.slots))

    def _continued(self, context: ForwardContext, positions: Tensor) -> tuple[CacheState, RowState, Tensor, Tensor]:
        """The state of a cache that fits this forward, and of its rows, and the positions of past and of all tokens."""
        rows = context.new_tokens.shape[0]
        context.cache_state = state = check_origin(context.cache, self.origin())
        stored = state.rows
        if stored is None:
            raise LengthError("an error has left the keys in this cache rotated half-way: fill a new one")
        filled = max(stored.lengths.shape[0], stored.positions.shape[0])
        if filled not in (1, rows):
            raise LengthError(
                f"this cache was filled with {filled} rows, and which of them became the {rows} of this call is not "
                f"known. {_REMEDY}"
            )
        if stored.positions.shape[1] < context.past_length:
            raise LengthError(f"something else has added keys to this cache. {_REMEDY}")
        past = stored.positions[:, : context.past_length].expand(max(len(positions), len(stored.positions)), -1)
        return state, stored, past, torch.cat([past, positions.expand(past.shape[0], -1)], dim=1)

    @graph_break  # it looks at values
    def _rotate_cache_to(
        self, decoder: nn.Module, context: ForwardContext, lengths: Tensor, positions: Tensor, counted: bool
    ) -> None:
        """Rotate the keys of a cache to the frequencies of rows of `lengths` (rows or 1,) tokens.

        `positions` (rows or 1, tokens): of the new tokens; `counted`: no row is longer than its number of tokens.
        """
        tables = [table for table in context.tables if isinstance(table, RotaryEmbedding)]
        table, cache = tables[0], context.cache
        state, stored, past, every = self._continued(context, positions)
        if lengths.shape[0] == 1:
            lengths = lengths.expand_as(stored.lengths)
        total = every.shape[1]
        cropped = stored.positions.shape[1] - context.past_length
        context.cache_rows = replace(stored, positions=every)
        if not state.follows:  # compiled code made this cache, and code between the two may have moved its rows
            grown = stored.lengths + positions.shape[1] - cropped
            if not table.method.sticky_length and not bool((grown == lengths).all()):
                raise LengthError(
                    "the rows of this cache, which compiled code has made, are not as long as they were: its rows were "
                    "moved, or tokens were padded in between. Pass a cache to the first forward: "
                    f"{cache_parameter(decoder)}=DynamicCache()"
                )
            follow_rows(cache, state)
        if counted and not cropped and total <= stored.valid_up_to:
            return  # follows from the number of tokens, without waiting for the device
        if self.key_layouts is None:
            self.key_layouts = _key_layouts(decoder, context.new_tokens, tables)
        layers = [(layer, layout) for layer, layout in zip(cache.layers, self.key_layouts, strict=False) if layout]
        in_steps = table.method.changes_in_steps(table.rotary) and _can_rotate_in_place(cache, layers)
        packed = None if stored.one_input_each else several_inputs(past, context.padding_mask)
        if in_steps or packed is not None:
            now, before = _read_on_host(lengths, stored.lengths, packed)
            stored = replace(stored, one_input_each=True)
            context.cache_rows = replace(stored, positions=every)
            if in_steps:
                ends = [table.method.constant_until(table.rotary, length) for length in now]
                if ends != [table.method.constant_until(table.rotary, length) for length in before]:
                    state.rows = None  # an error on the way leaves the cache without it, and so refused
                    for scaled, some in _by_attention_factor(layers):
                        rotation, _ = KeyRotation.read_and_store(table, stored.lengths, lengths, past, 0, scaled)
                        rotate_cached_keys_(some, rotation)
                    state.rows = replace(stored, lengths=lengths, positions=past)
                slack = min(end - length for end, length in zip(ends, now, strict=True))
                context.cache_rows = RowState(lengths, every, total + slack if counted else 0, True)
                return
        context.undo = ExitStack()
        for scaled, some in _by_attention_factor(layers):
            after_reading, before_storing = KeyRotation.read_and_store(
                table, stored.lengths, lengths, every, positions.shape[1], scaled
            )
            context.undo.enter_context(rotate_keys_on_read(some, before_storing, after_reading))


def _token_positions(context: ForwardContext) -> Tensor:
    """Positions of the new tokens, (rows or 1, tokens); LengthError: the length of a row does not follow from them."""
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


def _read_on_host(lengths: Tensor, stored: Tensor, packed: Tensor | None) -> tuple[list[int], list[int]]:
    """Lengths (rows,) and stored lengths (rows,), in one wait for the device; LengthError: a row is packed."""
    flag = torch.zeros_like(lengths[:1]) if packed is None else packed.reshape(1).to(lengths.device)
    *values, any_packed = torch.cat([lengths, stored.to(lengths.device), flag.to(lengths.dtype)]).tolist()
    if any_packed:
        raise packed_error()
    return values[: len(lengths)], values[len(lengths) :]


def _can_rotate_in_place(cache: Any, layers: Layers) -> bool:
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    # An offloading cache may be copying its keys elsewhere.
    plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer, _ in layers)
    return plain and not getattr(cache, "offloading", False)


def _by_attention_factor(layers: Layers) -> list[tuple[bool, Layers]]:
    """The layers whose keys carry the attention factor (True) and the others, where there are any."""
    groups = [(scaled, [pair for pair in layers if pair[1].scaled == scaled]) for scaled in (True, False)]
    return [(scaled, some) for scaled, some in groups if some]


def _cache_of_one_token(decoder: nn.Module, token: dict[str, Tensor]) -> Any:
    """The cache that a decoder fills with one token: its own, or one given to it where it returns none."""
    from transformers.cache_utils import DynamicCache

    cache = cache_of_output(forward_without_hooks(decoder, **token, use_cache=True, return_dict=True))
    if cache is None:
        cache = DynamicCache(config=decoder.config)
        given = token | {cache_parameter(decoder): cache}
        forward_without_hooks(decoder, **given, use_cache=True, return_dict=True)
    return cache


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
            try:
                caches.append(_cache_of_one_token(decoder, token))
            except (TypeError, ValueError) as error:  # the decoder of an encoder and decoder needs both
                raise CacheCannotFollowError(
                    f"{type(decoder).__name__} does not run on one token alone, so how it keeps its keys cannot be "
                    f"found out ({one_line(error)}). {_REMEDY}"
                ) from error
    try:
        unrotated, rotated, rotated_scaled = (cache.layers for cache in caches)
        return [infer_key_layout(*layers, radians) for layers in zip(unrotated, rotated, rotated_scaled, strict=True)]
    except ValueError as error:
        raise CacheCannotFollowError(
            f"the {error} that {type(decoder).__name__} keeps in its cache are not simply rotated (a norm after the "
            f"rotation, or an index with keys of its own), so they cannot follow other frequencies. {_REMEDY}"
        ) from error


class _CheckedBatching:
    """`init_continuous_batching` of one model, refused while its frequencies follow the length of the input.

    Forwards of continuous batching run in a thread, whose errors reach a log and not the caller.
    """

    def __init__(self, model: Any, slots: Sequence[PatchedSlot]) -> None:
        self.model, self.slots = model, slots
        model.__dict__["init_continuous_batching"] = self

    def remove(self) -> None:
        self.model.__dict__.pop("init_continuous_batching", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(table.length_dependent for table in tables_of(self.slots)):
            raise LengthError(
                "continuous batching holds parts of many inputs in one cache, whose keys cannot follow the length of "
                f"each. {_REMEDY}"
            )
        return type(self.model).init_continuous_batching(self.model, *args, **kwargs)


def check_batching(model: nn.Module, slots: Sequence[PatchedSlot]) -> None:
    """Have continuous batching of a model, and of every model inside it, refused; the first slot keeps the way back."""
    for module in model.modules():
        if hasattr(type(module), "init_continuous_batching"):
            slots[0].hooks.append(_CheckedBatching(module, slots))
