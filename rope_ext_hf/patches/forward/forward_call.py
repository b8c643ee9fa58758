"""One call of a decoder: its arguments, read once, and what the forward works out from them.

A rotary module or an attention function is called deep inside the decoder, with few arguments. What it needs to know
beyond them (which tokens are padding, how long each row is) is in the `ForwardCall` that is under way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.rules import RowGroup, TokenPositions
from rope_ext_hf.attention.static_step import StaticStep
from rope_ext_hf.errors import LengthError
from rope_ext_hf.models.decoder_arguments import arguments, cache_argument, new_tokens, past_length
from rope_ext_hf.rotary.cache_memory import CachedRows, CacheMemory
from rope_ext_hf.rotary.forward_state import ForwardState, running

CALL_KWARG = "rope_ext_hf_call"
"""The keyword under which a decoder passes the call on to its attention functions, as it does with all others."""
HOLD_ONE_LENGTH = (
    "Hold one length for all calls: with rope_ext_hf.fixed_length(model, prompt_length + max_new_tokens): ..."
)
"""The last sentence of errors about a length or a cache that a length-dependent method cannot follow."""


@dataclass(eq=False, kw_only=True)
class ModuleCall(ForwardState):
    """A call of a decoder or of a module around it, while it is under way."""

    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any]

    def argument(self, name: str) -> Any:
        """Return the argument of this name; None: it was not given."""
        return arguments(self.module, self.args, self.kwargs).get(name)


@dataclass(eq=False, kw_only=True)
class ForwardCall(ModuleCall):
    """A call of a decoder.

    Attributes:
        kwargs: all arguments by name.
        new_tokens: ids (rows, tokens) or embeddings (rows, tokens, hidden size).
        cache: the cache of the decoder's own tokens; None: the call has none.
        compiled: whether torch.compile traces the call.
        past_length: the number of tokens in the cache; this and the next three attributes come from `read_values`.
        position_ids: (rows or 1, tokens), as the call gives them; None: the decoder counts on from the past length.
        padding_mask: (rows, past + tokens) bool, False where a key is padding; None: the call has none.
        prepared_mask: the call has a mask that does not tell which tokens are padding.
        token_positions: the positions of all tokens; this and the next four attributes are for remapping methods.
        static_step: the positions in a compiled forward of one token onto a static cache, in place of the former.
        packed: a row holds several inputs one after the other.
        layers: the attention modules by their index, by which compiled code names them.
        row_groups: the rows by the rule of their length, where a method has one for each length.
        masks: the masks of the unpatched attention, each made once in a forward.
        memory: what is remembered with the cache once the forward has ended.
        cached_rows: how the keys of each row are rotated once it has ended; under a length-dependent method.
        undo: a stack of functions that undo the changes that this forward has made to its cache.
    """

    new_tokens: Tensor
    cache: Any
    compiled: bool = False
    past_length: int = 0
    position_ids: Tensor | None = None
    padding_mask: Tensor | None = None
    prepared_mask: bool = False
    token_positions: TokenPositions | None = None
    static_step: StaticStep | None = None
    packed: bool = False
    layers: dict[int, nn.Module] = field(default_factory=dict)
    row_groups: tuple[RowGroup, ...] = ()
    masks: dict[Hashable, Any] = field(default_factory=dict)
    memory: CacheMemory | None = None
    cached_rows: CachedRows | None = None
    undo: ExitStack | None = None

    @classmethod
    def read(cls, decoder: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Self | None:
        """Read the arguments of a call, without a look at values on the device; None: it has no tokens."""
        by_name = arguments(decoder, args, kwargs)
        tokens = new_tokens(decoder, by_name)
        if tokens is None:
            return None
        cache, compiled = cache_argument(decoder, by_name), torch.compiler.is_compiling()
        return cls(module=decoder, kwargs=by_name, new_tokens=tokens, cache=cache, compiled=compiled)

    def read_values(self, axes: int) -> None:
        """Read the arguments whose values may be looked at: past length, positions and padding.

        `axes`: how many axes the positions of the model may have.
        """
        self.past_length = past_length(self.module, self.cache, self.kwargs)
        positions, mask = self.kwargs.get("position_ids"), self.kwargs.get("attention_mask")
        if positions is not None and positions.is_floating_point():
            positions = _whole_numbers(positions)
        if positions is not None and axes > 1 and positions.ndim == 3:
            positions = _one_per_token(positions, axes)
        self.position_ids = positions
        self.padding_mask = _padding_mask(mask)
        if mask is not None and self.padding_mask is None:
            self.prepared_mask, self.padding_mask = self._mask_of_modules_around()

    @property
    def positions_filled_in(self) -> bool:
        """True if a module around the decoder has filled in the positions; it may not have looked at the mask."""
        around = list(self._around())
        return bool(around) and around[-1].argument("position_ids") is None  # the outermost is what the user calls

    def _around(self) -> Iterator[ModuleCall]:
        """Yield the calls of the modules around this decoder, innermost first.

        Those around another decoder that it may run inside of are left out.
        """
        for state in running():
            if isinstance(state, ForwardCall) and state is not self:
                return
            if isinstance(state, ModuleCall) and state is not self:
                yield state

    def _mask_of_modules_around(self) -> tuple[bool, Tensor | None]:
        """Return whether the user prepared the decoder's mask, and else the padding mask that it was prepared from.

        Where a module around the decoder was given a padding mask, or none, it was that module that prepared the
        decoder's mask. Gemma 3 with images does so; in its mask of four dims, padding looks like any other place that
        is not seen.
        """
        for call in self._around():
            mask = call.argument("attention_mask")
            padding = _padding_mask(mask)
            if padding is not None or mask is None:
                return False, padding
        return True, None

    def close(self) -> None:
        """Undo what this forward has changed in its cache, and free what one layer has computed for the next ones.

        Rotations are as large as (tokens, head_dim) each; kept between forwards they would add up with every length.
        """
        if self.undo is not None:
            self.undo.close()
        if self.token_positions is not None:
            self.token_positions.forget()
        for group in self.row_groups:
            group.positions.forget()
        self.masks.clear()


def _padding_mask(mask: Any) -> Tensor | None:
    """Return the mask (rows, tokens) in a mask argument, bool, True for every token that is not padding.

    None: the argument has no such mask. It may be a dict by layer type. A mask may number the inputs that are packed
    into a row (1, 1, 2, 2, 0); as in transformers, every value other than 0 stands for a token.
    """
    for candidate in mask.values() if isinstance(mask, Mapping) else (mask,):
        if isinstance(candidate, Tensor) and candidate.ndim == 2:
            return candidate.bool()
    return None


def _one_per_token(positions: Tensor, axes: int) -> Tensor:
    """Return positions (rows, tokens), from those for several axes, (axes, rows, tokens).

    Some decoders take the positions in the text as one more axis before the others, which is left out.

    Raises:
        LengthError: the axes of a token differ, as those of an image do.
    """
    last = positions[-axes:]
    if not bool((last == last[:1]).all()):
        raise LengthError(
            "the positions of this input differ from axis to axis, as those of images and video do. Length-dependent "
            "and remapping methods need one position per token: use a static method (yarn, ntk, linear, ...), or hold "
            "a length-dependent one with rope_ext_hf.fixed_length(model, prompt_length + max_new_tokens)"
        )
    return last[0]


def _whole_numbers(positions: Tensor) -> Tensor:
    """Return positions of a floating-point dtype (Qwen3-Omni) as integers.

    Raises:
        LengthError: one of them is not a whole number.
    """
    whole = positions.to(torch.int64)
    if not bool((whole == positions).all()):
        raise LengthError(
            "positions of this input are not whole numbers, and length-dependent and remapping methods count tokens by "
            "them: give integers, use a static method (yarn, ntk, linear, ...), or hold a length-dependent one with "
            "rope_ext_hf.fixed_length(model, prompt_length + max_new_tokens)"
        )
    return whole


def current_call() -> ForwardCall | None:
    """Return the innermost call of a decoder that is under way in this thread; None outside of a forward."""
    return next((state for state in running() if isinstance(state, ForwardCall)), None)
