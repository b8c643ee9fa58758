"""The forward of a decoder under a length-dependent method: the lengths of its rows, and a cache that follows them.

Under dynamic NTK, for example, the frequencies of a text of 5,000 tokens are not those of its first 4,000. A rotary
module cannot know which frequencies to use: it gets positions only, and neither the padding nor the contents of a
cache. So they are worked out here, where the mask and the cache are arguments: the length of every row, which the
rotary modules inside look up, and a cache whose keys meet the new queries as if they had been rotated by the
frequencies of that length from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import LengthError
from rope_ext_hf.models.decoder_arguments import paged_cache
from rope_ext_hf.patches.forward.cached_keys import CachedKeys
from rope_ext_hf.patches.forward.forward_call import HOLD_ONE_LENGTH, ForwardCall
from rope_ext_hf.patches.forward.patched_forward import DecoderForward
from rope_ext_hf.patches.slots.patched_slot import PatchedRotaryEmbedding
from rope_ext_hf.rotary.cache_memory import CachedRows, CacheMemory, forget, recall, was_filled_by
from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.rotary.exported import is_exporting
from rope_ext_hf.rotary.forward_state import graph_break
from rope_ext_hf.rotary.row_lengths import row_lengths


class LengthForward(DecoderForward):
    """The forward of a decoder whose frequencies are those of each input's length.

    It raises LengthError for a cache that other code has filled, or whose keys cannot be rotated again. Inside
    `fixed_length` no frequencies change, so any cache that this model filled at the same fixed length is accepted.
    """

    def __init__(self, module: nn.Module, slots: Sequence[PatchedRotaryEmbedding]) -> None:
        super().__init__(module, slots)
        self.cached_keys = CachedKeys()

    def prepare(self, model: nn.Module) -> None:
        """Find out how the decoder keeps its keys."""
        self.cached_keys = CachedKeys.of(model, self.module, self.slots)

    def begin(self, call: ForwardCall, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Work out the lengths of the rows, and rotate the keys in the cache to their frequencies."""
        tables = [table for table in self.tables if table.length_dependent]
        if not tables:
            self._check_held_cache(call.cache)
        elif call.cache is None:
            _check_not_paged(call)
            self._set_lengths(call, tables)
        else:  # tensors that stay with a cache must not be outputs of a CUDA graph, which its next run overwrites
            graph_break(self._set_lengths)(call, tables)
        return kwargs

    def _set_lengths(self, call: ForwardCall, tables: Sequence[RotaryEmbedding]) -> None:
        """Give the rotary modules `tables` the lengths of the rows, and prepare the cache for them."""
        call.read_values(self.axes)
        self.check(call)
        table, positions = tables[0], _token_positions(call)
        call.tables = tuple(tables)
        call.row_lengths = table.resolve_lengths(row_lengths(positions, call.padding_mask, call.past_length))
        # Is a row never longer than its number of tokens in the cache? Then the number tells when frequencies change,
        # without a look at the lengths, which are on the device. Positions that are given may be larger; and under
        # sticky growth another forward may change the lengths.
        bounded = call.padding_mask is not None or call.position_ids is None
        bounded = bounded and not table.method.sticky_length
        lengths = call.row_lengths if call.row_lengths.ndim == 1 else call.row_lengths.amax(-1)
        if call.past_length:
            self.cached_keys.rotate_to(call, table, self.origin(), lengths, positions, bounded=bounded)
            return
        if call.cache is not None:
            forget(call.cache)
        first_change = table.method.constant_until(table.rotary, 1)
        valid_up_to = first_change if bounded and call.new_tokens.shape[1] <= first_change else 0
        call.memory = CacheMemory(self.origin())
        call.cached_rows = CachedRows(lengths, positions, valid_up_to, call.position_ids is None)

    def end(self, call: ForwardCall, output: Any) -> None:
        """Remember with the cache how its keys are rotated, so that the next forward onto it can go on."""
        memory = call.memory
        if memory is None:  # no frequencies change inside `fixed_length`
            self.remember(call, output, CacheMemory(self.origin()))
            return
        memory.rows = call.cached_rows
        remember = self.remember if call.cache is None else graph_break(self.remember)
        remember(call, output, memory)

    # --- inside `fixed_length` ----------------------------------------------------------------------------------------

    def _is_held(self) -> bool:
        """Return whether the model is inside `fixed_length`."""
        return any(table.fixed_length for table in self.tables)

    def _check_held_cache(self, cache: Any) -> None:
        """Check inside `fixed_length` that the keys in a cache were not stored at another length.

        A traced or exported graph gets its keys from its own runs, whatever its example held.
        """
        if cache is None or not self._is_held() or torch.compiler.is_compiling() or is_exporting():
            return
        origin = self.origin()
        if not was_filled_by(cache, origin) and cache.get_seq_length():
            recall(cache, origin)


def _token_positions(call: ForwardCall) -> Tensor:
    """Return the positions of the new tokens, (rows or 1, tokens).

    Raises:
        LengthError: the length of each row does not follow from the arguments of the call.
    """
    positions = call.position_ids
    if positions is None:
        if call.prepared_mask:
            raise LengthError(
                "the length of each row does not follow from a prepared attention mask; give position_ids with it, or "
                "a mask of shape (rows, tokens). If a model around this decoder has prepared it, patch that model. "
                f"{HOLD_ONE_LENGTH}"
            )
        tokens, past_length = call.new_tokens.shape[1], call.past_length
        return torch.arange(past_length, past_length + tokens, device=call.new_tokens.device)[None]
    if positions.ndim != 2:
        raise LengthError(
            f"the length of each row does not follow from position_ids of shape {tuple(positions.shape)}; give one "
            f"position per token, (rows, tokens). {HOLD_ONE_LENGTH}"
        )
    return positions


def _check_not_paged(call: ForwardCall) -> None:
    """Check that a call has no cache of continuous batching, which is none of the caches that can be followed."""
    if paged_cache(call.kwargs) is not None:
        raise LengthError(
            f"a paged cache holds parts of many inputs, whose keys cannot be rotated again. {HOLD_ONE_LENGTH}"
        )
