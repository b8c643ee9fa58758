"""How long each row is, told to the rotary modules; and a cache whose keys follow.

A rotary module sees positions only. Which of them are padding, and what is in the cache, is known one level up, so two
hooks on the decoder stand around its forward while its method depends on the length (`rope_ext_hf/cache.py` says how
the cache is kept).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import LengthError
from rope_ext_hf.patches.forward_context import arguments, new_tokens, row_lengths, values_of
from rope_ext_hf.patches.slots import PatchedSlot
from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.rotary.graphs import graph_break
from rope_ext_hf.rotary.kv_cache import (
    CacheState,
    KeyLayout,
    KeyRotation,
    infer_key_layout,
    rotate_cached_keys_,
    rotate_keys_on_read,
)

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

__all__ = ["STORED", "LengthHooks", "install_length_hooks"]

STORED = "_rope_ext_hf_stored"
_REMEDY = "Hold one length for all calls: with rope_ext_hf.fixed_length(model, prompt_length + max_new_tokens): ..."


def install_length_hooks(model: nn.Module) -> None:
    """Hook every decoder of a model whose patched slots have a length-dependent method."""
    modules = dict(model.named_modules())
    decoders: dict[nn.Module, list[PatchedSlot]] = {}
    for path, slot in modules.items():
        if isinstance(slot, PatchedSlot):
            above = path.rpartition(".")[0]
            while above and not _takes_tokens(modules[above]):  # the rotary modules of some hang in their attention
                above = above.rpartition(".")[0]
            decoders.setdefault(modules[above], []).append(slot)
    for decoder, slots in decoders.items():
        hooks = LengthHooks(slots)
        slots[0].hooks += [
            decoder.register_forward_pre_hook(hooks.pre_forward, with_kwargs=True),
            decoder.register_forward_hook(hooks.post_forward, with_kwargs=True, always_call=True),
        ]


def _takes_tokens(module: nn.Module) -> bool:
    return not {"input_ids", "inputs_embeds"}.isdisjoint(inspect.signature(type(module).forward).parameters)


class _CachedForward(NamedTuple):
    """A forward onto a cache that is not empty."""

    cache: Cache
    past_length: int  # tokens in it
    new_tokens: Tensor  # ids or embeddings of the new ones
    positions: Tensor  # (rows or 1, new)
    rows: Tensor  # (rows or 1,) how long they are to be
    from_mask: bool  # whether no row can be longer than its tokens are many, nor another call matter


class LengthHooks:
    """Hooks around the forward of the decoder that these patched slots are in.

    Raises:
        LengthError: a cache that was filled elsewhere, or that keeps its keys in a way that is not understood; not
            under `fixed_length`, where nothing changes.
    """

    def __init__(self, slots: Sequence[PatchedSlot]) -> None:
        self.slots = slots
        self.layouts: list[KeyLayout | None] | None = None  # of the layers of its cache, once they were needed
        self._undo: ExitStack | None = None  # what a forward has changed until it ends
        self._next_state: CacheState | None = None  # what its cache will hold then

    def pre_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Work out the lengths of the rows, and bring the keys in the cache to their frequencies."""
        call = arguments(decoder, args, kwargs)
        cache = call.get("past_key_values")
        tables = [table for table in self._tables() if table.length_dependent]
        if not tables:
            self._check_fixed(cache)
            return
        given = new_tokens(call)
        if given is None:
            return  # the decoder's own error says it better
        if call.get("cache") is not None:
            raise LengthError(f"a paged cache holds pieces of many inputs, whose keys cannot follow. {_REMEDY}")
        known = int(cache.get_seq_length()) if cache is not None else 0
        positions, mask = call.get("position_ids"), call.get("attention_mask")
        counted = isinstance(mask, Tensor) and mask.ndim == 2
        if positions is None:
            if mask is not None and not counted:
                raise LengthError(
                    "a prepared attention mask does not say how long each row is; give position_ids with it, or a mask "
                    f"of shape (rows, tokens). {_REMEDY}"
                )
            counted = True
            positions = torch.arange(known, known + given.shape[1], device=given.device)[None]
        if positions.ndim != 2:
            raise LengthError(f"positions of shape {tuple(positions.shape)} do not say how long each row is. {_REMEDY}")
        lengths = row_lengths(positions, mask, known)
        self._undo, self._next_state = ExitStack(), None
        table = tables[0]
        counted = counted and not table.method.sticky_length
        lengths = table.resolve_lengths(lengths)
        rows = lengths if lengths.ndim == 1 else lengths.amax(-1)
        if known:
            self._rotate_cache_to(decoder, tables, _CachedForward(cache, known, given, positions, rows, counted))
        for each in tables:
            self._undo.callback(setattr, each, "row_lengths", None)
            each.row_lengths = lengths
        if self._next_state is None:
            short = counted and given.shape[1] <= table.rotary.trained_length
            self._next_state = CacheState(
                table.method.to_dict(), rows, positions, table.rotary.trained_length if short else 0
            )

    def _tables(self) -> list[RotaryEmbedding]:
        return [slot.table(name) for slot in self.slots for name in slot.tables]

    def _held(self) -> int | None:
        """The length that is held, if one is."""
        return next((table.fixed_length for table in self._tables() if table.method.length_dependent), None)

    def _check_fixed(self, cache: Any) -> None:
        """Keys stored at one length are no use at another that is held now."""
        if torch.compiler.is_compiling():
            return
        stored, held = getattr(cache, STORED, None), self._held()
        if stored not in (None, held) and cache.get_seq_length():
            when = "outside fixed_length" if isinstance(stored, CacheState) else f"at a fixed length of {stored}"
            raise LengthError(f"the keys in this cache were stored {when}, and {held} is held now: fill a new one")

    @graph_break  # it looks at values
    def _rotate_cache_to(self, decoder: nn.Module, tables: Sequence[RotaryEmbedding], onto: _CachedForward) -> None:
        """Bring the keys of a cache to the frequencies of rows as long as they will be."""
        cache, known, given, positions, rows, counted = onto
        table = tables[0]
        stored = getattr(cache, STORED, None)
        if not isinstance(stored, CacheState) or stored.method != table.method.to_dict():
            raise LengthError(
                f"the keys in this cache were not stored under this model's {table.method.name}, so with which "
                f"frequencies they were turned is not known. {_REMEDY}"
            )
        filled = max(stored.lengths.shape[0], stored.positions.shape[0])
        if filled not in (1, given.shape[0]):
            raise LengthError(
                f"this cache was filled with {filled} rows, and which of them became the {given.shape[0]} of now is "
                f"not known. {_REMEDY}"
            )
        if rows.shape[0] == 1:
            rows = rows.expand_as(stored.lengths)
        if stored.positions.shape[1] < known:
            raise LengthError(f"something else has added keys to this cache. {_REMEDY}")
        past = stored.positions[:, :known].expand(max(positions.shape[0], stored.positions.shape[0]), -1)
        every = torch.cat([past, positions.expand(past.shape[0], -1)], dim=1)
        total = every.shape[1]
        self._next_state = CacheState(stored.method, stored.lengths, every, stored.valid_up_to)
        cropped = known < stored.positions.shape[1]
        if counted and not cropped and total <= stored.valid_up_to:
            return  # known from their number alone, without waiting for the device
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        if self.layouts is None:
            self.layouts = _layouts(decoder, given, tables)
        layers = [(layer, layout) for layer, layout in zip(cache.layers, self.layouts, strict=False) if layout]
        by_factor = [(scaled, [pair for pair in layers if pair[1].scaled == scaled]) for scaled in (True, False)]
        groups = [(scaled, some) for scaled, some in by_factor if some]
        plain = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer, _ in layers)
        plain = plain and not getattr(cache, "offloading", False)  # whose keys are on their way somewhere
        if table.method.steps and plain:
            until = [table.method.constant_until(table.rotary, length) for length in rows.tolist()]
            before = [table.method.constant_until(table.rotary, length) for length in stored.lengths.tolist()]
            if until != before:
                delattr(cache, STORED)  # should turning fail half-way, this cache is to be refused
                for scaled, some in groups:
                    rotate_cached_keys_(some, KeyRotation.between_lengths(table, stored.lengths, rows, past, scaled))
                setattr(cache, STORED, CacheState(stored.method, rows, past, 0))
            slack = min(end - length for end, length in zip(until, rows.tolist(), strict=True))
            self._next_state = CacheState(stored.method, rows, every, total + slack if counted else 0)
            return
        assert self._undo is not None
        for scaled, some in groups:
            back = KeyRotation.between_lengths(table, rows, stored.lengths, positions, scaled)
            forth = KeyRotation.between_lengths(table, stored.lengths, rows, every, scaled)
            self._undo.enter_context(rotate_keys_on_read(some, back, forth))

    def post_forward(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Undo what `before` did to others, and note what the cache holds now. Called after an exception, too."""
        from transformers.cache_utils import Cache

        holds: CacheState | int | None = self._next_state
        if self._undo is not None:
            self._undo.close()
            self._undo = self._next_state = None
        elif not torch.compiler.is_compiling():
            holds = self._held()
        if output is None or holds is None:
            return
        cache = arguments(decoder, args, kwargs).get("past_key_values")
        if cache is None:
            cache = next((value for value in values_of(output) if isinstance(value, Cache)), None)
        if cache is not None:
            setattr(cache, STORED, holds)


def _layouts(decoder: nn.Module, given: Tensor, tables: Sequence[RotaryEmbedding]) -> list[KeyLayout | None]:
    """How each layer of this decoder's cache keeps its keys, by passing one token through it a few times and looking.

    A token that sees only itself is turned together with its key, so that all hidden states are the same whatever the
    angle, and what differs in the cache is the turn. Quarters of a turn are exact in any dtype.
    """
    name = "inputs_embeds" if given.is_floating_point() else "input_ids"
    token = {name: given[:1, -1:], "position_ids": torch.ones(1, 1, dtype=torch.int64, device=given.device)}
    radians = (1 + torch.arange(tables[0].rotary.dim // 2) % 3) * (math.pi / 2)
    caches = []
    for turn, factor in ((torch.zeros_like(radians), 1.0), (radians, 1.0), (radians, 1.25)):
        with ExitStack() as stack, torch.no_grad():
            for table in tables:
                stack.enter_context(table.override_angles(turn, factor))
            caches.append(decoder.forward(**token, use_cache=True, return_dict=True).past_key_values)
    try:
        still, turned, scaled = (cache.layers for cache in caches)
        return [infer_key_layout(*layers, radians) for layers in zip(still, turned, scaled, strict=True)]
    except ValueError as error:
        raise LengthError(
            f"the {error} that {type(decoder).__name__} keeps in its cache are not simply turned (a norm after the "
            f"rotation, or an index of its own), so they cannot follow other frequencies. {_REMEDY}"
        ) from error
