"""One forward of a decoder: what it was called with, and what its hooks work out for the modules inside."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.rules import RowGroup, TokenPositions
from rope_ext_hf.errors import LengthError
from rope_ext_hf.patches.decoder_arguments import cache_argument, new_tokens, past_length
from rope_ext_hf.rotary.cache_state import CacheState, RowState
from rope_ext_hf.rotary.embedding import lengths_over_axes, segment_lengths
from rope_ext_hf.rotary.forward_state import ForwardState, running

CONTEXT_KWARG = "rope_ext_hf_context"
"""The keyword under which a decoder passes the context on to its attention functions, as it does with all others."""
_NOT_CONTINUED = (
    "position_ids do not continue the positions of the keys in the cache: pass those of the new tokens, each one more "
    "than the one before"
)


@dataclass(eq=False, kw_only=True)
class GivenMask(ForwardState):
    """The mask given to a module around the decoder, which may prepare another one from it."""

    attention_mask: Any = None  # as given; None: none was
    with_positions: bool = False  # whether position_ids were given, too; else this module may fill some in


@dataclass(eq=False, kw_only=True)
class ForwardContext(ForwardState):
    """One forward of a decoder, read from its arguments once."""

    new_tokens: Tensor  # ids (rows, tokens) or embeddings (rows, tokens, hidden size)
    past_length: int  # tokens in the cache
    position_ids: Tensor | None  # as given, (rows or 1, tokens); None: the decoder counts from the past length on
    filled_in: bool  # a module around the decoder has filled in the positions, and may not have looked at the mask
    padding_mask: Tensor | None  # (rows, past + tokens), 0 where a key is padding; None: none was given
    prepared_mask: bool  # a mask was given of which nothing follows for the padding
    cache: Any  # as given, of the decoder's own tokens
    token_positions: TokenPositions | None = None  # this and the next four are for remapping methods
    layers: dict[int, nn.Module] = field(default_factory=dict)  # attention modules by index, for compiled code
    row_groups: tuple[RowGroup, ...] = ()  # by the rule of their length, where a method has one for each
    masks: dict[Hashable, Any] = field(default_factory=dict)  # as loaded, made once in a forward
    packed: bool = False  # a row holds several inputs one after the other
    cache_state: CacheState | None = None  # what is stored with the cache
    cache_rows: RowState | None = None  # how keys are rotated once this forward has ended (length-dependent methods)
    undo: ExitStack | None = None  # what this forward has changed in its cache until it ends

    @classmethod
    def from_call(cls, decoder: nn.Module, call: Mapping[str, Any], axes: int) -> ForwardContext | None:
        """The context of a call with these arguments, whose positions have so many axes; None: it has no tokens."""
        tokens = new_tokens(decoder, call)
        if tokens is None:
            return None
        cache, mask = cache_argument(decoder, call), call.get("attention_mask")
        inside = takewhile(lambda state: not isinstance(state, ForwardContext), running())
        around = [state for state in inside if isinstance(state, GivenMask)]  # innermost first
        padding = _padding_mask(mask)
        prepared = mask is not None and padding is None
        if prepared:
            prepared, padding = _mask_given_outside(around)
        return cls(
            owner=decoder,
            new_tokens=tokens,
            past_length=past_length(decoder, call),
            position_ids=_one_per_token(call.get("position_ids"), axes),
            filled_in=bool(around) and not around[-1].with_positions,  # the outermost is what the user calls
            padding_mask=padding,
            prepared_mask=prepared,
            cache=cache,
        )

    def close(self) -> None:
        if self.undo is not None:
            self.undo.close()


def _one_per_token(positions: Tensor | None, axes: int) -> Tensor | None:
    """Positions (rows, tokens) of a call that may give them for several axes, (axes, rows, tokens).

    Some decoders take the positions in the text as one more axis, before the others.
    """
    if positions is None or axes == 1 or positions.ndim != 3:
        return positions
    last = positions[-axes:]
    if not bool((last == last[:1]).all()):
        raise LengthError(
            "the positions of this input differ from axis to axis, as those of images and video do. Length-dependent "
            "and remapping methods need one position per token: use a static method (yarn, ntk, linear, ...), or hold "
            "a length-dependent one with rope_ext_hf.fixed_length(model, prompt_length + max_new_tokens)"
        )
    return last[0]


def _padding_mask(mask: Any) -> Tensor | None:
    """The mask of shape (rows, tokens) in what was given, which may hold one per layer type."""
    masks = mask.values() if isinstance(mask, Mapping) else (mask,)
    return next((each for each in masks if isinstance(each, Tensor) and each.ndim == 2), None)


def _mask_given_outside(around: Sequence[GivenMask]) -> tuple[bool, Tensor | None]:
    """Whether a prepared mask comes from the user, and the padding mask that it was prepared from."""
    for state in around:
        padding = _padding_mask(state.attention_mask)
        if padding is not None or state.attention_mask is None:
            return False, padding
    return True, None


def current_context() -> ForwardContext | None:
    """The context of the innermost forward under way in this thread."""
    return next((state for state in running() if isinstance(state, ForwardContext)), None)


def row_lengths(positions: Tensor, padding_mask: Tensor | None, past_length: int) -> Tensor:
    """Real tokens so far: (rows, tokens) of the input that each token belongs to, or (rows,) onto a cache.

    A row may hold several inputs one after the other; positions that start anew begin the next one. They are (rows,
    tokens) or (axes, rows, tokens).
    """
    if positions.ndim == 3:
        by_position = positions.amax((0, -1)) + 1 if past_length else lengths_over_axes(positions)
    else:
        by_position = positions.amax(-1) + 1 if past_length else segment_lengths(positions)
    if padding_mask is None:
        return by_position
    count = padding_mask.sum(-1).to(by_position.device, by_position.dtype)
    return torch.minimum(count if past_length else count[:, None], by_position).clamp(min=1)


def several_inputs(positions: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Whether a row holds several inputs one after the other, a bool scalar; positions (rows or 1, tokens).

    A row of one input has no more tokens than its largest position allows. Without a mask, padding is known by
    positions that do not ascend, and only steps upward are counted.
    """
    largest = positions.amax(-1)
    if padding_mask is not None:
        count = padding_mask[:, : positions.shape[1]].sum(-1).to(positions.device) - 1
    else:
        count = ((positions.diff(dim=-1) > 0) & (positions[:, :-1] >= 0)).sum(-1)
    return (count > largest).any()


def _is_true(flag: Tensor, expected: bool, message: str) -> bool:
    """Whether a bool scalar is True; where that is expected, a CUDA device asserts it and the host does not wait."""
    if expected and flag.device.type == "cuda" and torch.version.hip is None:  # ROCm leaves such checks out
        torch._assert_async(flag, message)
        return True
    return bool(flag)


def place_tokens(context: ForwardContext) -> TokenPositions:
    """Positions and padding of a forward, with at most three looks at values from the host."""
    new_tokens, past_length, positions = context.new_tokens, context.past_length, context.position_ids
    rows, tokens = new_tokens.shape[:2]
    total = past_length + tokens
    device = new_tokens.device
    key_mask: Tensor | None = None
    if context.padding_mask is not None:
        given = context.padding_mask.bool().to(device)
        key_mask = nn.functional.pad(given, (0, max(0, total - given.shape[1])), value=True)[:, :total]
    in_order = torch.arange(total, device=device)[None]
    if positions is None and key_mask is None:
        return TokenPositions(in_order[:, past_length:], in_order, (0,) * rows, None, (total,))
    if positions is not None:
        if positions.ndim != 2:
            raise LengthError(
                f"remapping methods need one position per token, a tensor of shape (rows, tokens); got position_ids "
                f"of shape {tuple(positions.shape)}"
            )
        positions = positions.to(device)

    def agree(keys: Tensor, mask: Tensor | None) -> Tensor:
        """Whether the positions given, if any, are those of the last keys, padding aside; a scalar bool."""
        if positions is None:
            return torch.ones((), dtype=torch.bool, device=device)
        differ = keys[:, past_length:] != positions
        return ~(differ if mask is None else differ & mask[:, past_length:]).any()

    continues = key_mask is None and context.cache_state is not None and context.cache_state.in_order
    if key_mask is None:
        keys, agreed = in_order, _is_true(agree(in_order, None), continues, _NOT_CONTINUED)
        counted: tuple[int, ...] = (total,)
        ordered: tuple[int, ...] | None = (0,) * rows
    else:
        by_mask = (key_mask.cumsum(-1) - 1).clamp(min=0)
        first_real = key_mask.int().argmax(-1)
        one_run = key_mask.int().diff(dim=-1).clamp(min=0).sum(-1) + key_mask[:, 0] == 1
        # Padding on the right is behind every query of a first forward, and between queries and keys of later ones.
        to_the_end = (first_real + key_mask.sum(-1) == total) | (past_length == 0)
        facts = [agree(in_order, None), agree(by_mask, key_mask), key_mask.all(), (one_run & to_the_end).all()]
        values = torch.cat([torch.stack(facts), first_real, key_mask.sum(-1)]).tolist()
        (without_mask, with_mask, all_real, is_ordered), firsts = values[:4], values[4 : 4 + rows]
        counted = tuple(values[4 + rows :])
        if all_real:
            key_mask, keys, ordered, agreed = None, in_order, (0,) * rows, bool(without_mask)
        else:
            # A module around the decoder that counts tokens, padding among them, leaves the positions to the mask.
            agreed = bool(with_mask) or (context.filled_in and bool(without_mask))
            keys, ordered = by_mask, tuple(firsts) if is_ordered else None
    if agreed or positions is None:
        return TokenPositions(keys[:, past_length:], keys, ordered, key_mask, counted)
    if past_length == 0:  # several inputs in a row, or positions that do not begin at 0
        context.packed = bool(several_inputs(positions, context.padding_mask))
        return TokenPositions(positions, positions, None, key_mask)
    keys = keys + positions[:, -1:] - keys[:, -1:]
    if continues or not bool(agree(keys, key_mask)):
        raise LengthError(_NOT_CONTINUED)
    if key_mask is None and not bool((keys[:, 0] > 0).any()):  # left padding, known from the positions alone
        before = (-keys[:, 0]).expand(rows)
        padded = keys >= 0 if bool(before.any()) else None
        return TokenPositions(positions, keys.clamp(min=0), tuple(before.tolist()), padded)
    return TokenPositions(positions, keys, None, key_mask)
