"""One forward of a decoder: the arguments of its call, and the values that its hooks derive from them.

A rotary module or an attention function is called deep inside the decoder, with few arguments. What it needs to know
beyond them (which tokens are padding, how long each row is) is in the `ForwardContext` of the forward under way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rope_ext_hf.attention.rules import RowGroup, TokenPositions
from rope_ext_hf.errors import LengthError
from rope_ext_hf.models.decoder_arguments import cache_argument, new_tokens, past_length
from rope_ext_hf.rotary.cache_state import CacheState, RowState
from rope_ext_hf.rotary.embedding import lengths_over_axes, segment_lengths
from rope_ext_hf.rotary.forward_state import ForwardState, pop, push, running

CONTEXT_KWARG = "rope_ext_hf_context"
"""The keyword under which a decoder passes the context on to its attention functions, as it does with all others."""
HOLD_ONE_LENGTH = (
    "Hold one length for all calls: with rope_ext_hf.fixed_length(model, prompt_length + max_new_tokens): ..."
)
"""The last sentence of errors about a length or a cache that a length-dependent method cannot follow."""
_NOT_CONTINUED = (
    "position_ids do not continue the positions of the keys in the cache: pass those of the new tokens, each one more "
    "than the one before"
)


@dataclass(eq=False, kw_only=True)
class GivenMask(ForwardState):
    """A record of one call of a module that contains the decoder, with the mask that the module was given.

    The module may give the decoder another mask.

    Gemma 3 with images, for example, prepares a mask of four dims, in which padding looks like any other place that is
    not seen.
    """

    attention_mask: Any = None  # the mask of that call; None: the call has none
    with_positions: bool = False  # the call has position_ids; without them, that module may fill some in


@dataclass(eq=False, kw_only=True)
class ForwardContext(ForwardState):
    """One forward of a decoder, whose arguments are read once, when it begins.

    Attributes:
        new_tokens: ids (rows, tokens) or embeddings (rows, tokens, hidden size).
        past_length: the number of tokens in the cache.
        position_ids: (rows or 1, tokens), as the call gives them; None: the decoder counts on from the past length.
        filled_in: a module around the decoder has filled in the positions, and may not have looked at the mask.
        padding_mask: (rows, past + tokens) bool, False where a key is padding; None: the call has none.
        prepared_mask: the call has a mask that does not tell which tokens are padding.
        cache: the cache of the decoder's own tokens; None: the call has none.
        token_positions: the positions of all tokens; this and the next four attributes are for remapping methods.
        layers: the attention modules by their index, by which compiled code names them.
        row_groups: the rows by the rule of their length, where a method has one for each length.
        masks: the masks of the unpatched attention, each made once in a forward.
        packed: a row holds several inputs one after the other.
        cache_state: the record that is kept with the cache.
        cache_rows: how the keys of each row are rotated after this forward; under a length-dependent method.
        undo: a stack of functions that undo the changes that this forward has made to its cache.
    """

    new_tokens: Tensor
    past_length: int
    position_ids: Tensor | None
    filled_in: bool
    padding_mask: Tensor | None
    prepared_mask: bool
    cache: Any
    token_positions: TokenPositions | None = None
    layers: dict[int, nn.Module] = field(default_factory=dict)
    row_groups: tuple[RowGroup, ...] = ()
    masks: dict[Hashable, Any] = field(default_factory=dict)
    packed: bool = False
    cache_state: CacheState | None = None
    cache_rows: RowState | None = None
    undo: ExitStack | None = None

    @classmethod
    def from_call(cls, decoder: nn.Module, call: Mapping[str, Any], axes: int) -> ForwardContext | None:
        """Return the context of a call of a decoder; None where the call has no tokens.

        `call`: its arguments by name; `axes`: how many axes the positions of the model may have.
        """
        tokens = new_tokens(decoder, call)
        if tokens is None:
            return None
        cache, mask = cache_argument(decoder, call), call.get("attention_mask")
        # The modules around this decoder, but not those around another decoder that it may run inside of.
        inside = takewhile(lambda state: not isinstance(state, ForwardContext), running())
        around = [state for state in inside if isinstance(state, GivenMask)]  # innermost first
        padding = _padding_mask(mask)
        prepared = mask is not None and padding is None
        if prepared:
            prepared, padding = _mask_of_modules_around(around)
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

    def forget_rotations(self) -> None:
        """Free the rotations and masks that one layer has computed for the next ones.

        Rotations are as large as (tokens, head_dim) each; kept between forwards they would add up with every length.
        """
        for positions in (self.token_positions, *(group.positions for group in self.row_groups)):
            if positions is not None:
                positions.rotations.clear()
                positions.query_scales.clear()
        self.masks.clear()

    def close(self) -> None:
        """Undo what this forward has changed in its cache until it ends."""
        if self.undo is not None:
            self.undo.close()


def _one_per_token(positions: Tensor | None, axes: int) -> Tensor | None:
    """Return positions (rows, tokens) of a call that may have them for several axes, (axes, rows, tokens), in integers.

    Some decoders take the positions in the text as one more axis before the others, which is left out. One axis stands
    for all of them. Some decoders count positions in floating-point numbers (Qwen3-Omni).

    Raises:
        LengthError: the axes of a token differ, as those of an image do; or a position is not a whole number.
    """
    if positions is None:
        return None
    if positions.is_floating_point():
        positions = _whole_numbers(positions)
    if axes == 1 or positions.ndim != 3:
        return positions
    last = positions[-axes:]
    if not bool((last == last[:1]).all()):
        raise LengthError(
            "the positions of this input differ from axis to axis, as those of images and video do. Length-dependent "
            "and remapping methods need one position per token: use a static method (yarn, ntk, linear, ...), or hold "
            "a length-dependent one with rope_ext_hf.fixed_length(model, prompt_length + max_new_tokens)"
        )
    return last[0]


def _whole_numbers(positions: Tensor) -> Tensor:
    """Return positions of a floating-point dtype as integers; raise LengthError where one is not a whole number."""
    whole = positions.to(torch.int64)
    if not bool((whole == positions).all()):
        raise LengthError(
            "positions of this input are not whole numbers, and length-dependent and remapping methods count tokens by "
            "them: give integers, use a static method (yarn, ntk, linear, ...), or hold a length-dependent one with "
            "rope_ext_hf.fixed_length(model, prompt_length + max_new_tokens)"
        )
    return whole


def _padding_mask(mask: Any) -> Tensor | None:
    """Return the mask (rows, tokens) in a mask argument, bool, True for every token that is not padding.

    None: the argument has no such mask. It may be a dict by layer type. A mask may number the inputs that are packed
    into a row (1, 1, 2, 2, 0); as in transformers, every value other than 0 stands for a token.
    """
    for candidate in mask.values() if isinstance(mask, Mapping) else (mask,):
        if isinstance(candidate, Tensor) and candidate.ndim == 2:
            return candidate.bool()
    return None


def _mask_of_modules_around(around: Sequence[GivenMask]) -> tuple[bool, Tensor | None]:
    """Return whether the user prepared the decoder's mask, and else the padding mask that it was prepared from.

    `around`: the calls of the modules around the decoder, innermost first. Where one of them had a padding mask, or
    none, it was that module that prepared the decoder's mask.
    """
    for state in around:
        padding = _padding_mask(state.attention_mask)
        if padding is not None or state.attention_mask is None:
            return False, padding
    return True, None


def current_context() -> ForwardContext | None:
    """Return the context of the innermost forward under way in this thread; None outside of a forward."""
    return next((state for state in running() if isinstance(state, ForwardContext)), None)


@contextmanager
def inside_of(context: ForwardContext | None) -> Iterator[None]:
    """Run a layer inside the with block as in the forward that a context describes, though it has ended.

    None: the forward has no context, and nothing is done.
    """
    if context is None:
        yield
        return
    push(context)
    try:
        yield
    finally:
        pop(context.owner)
        context.forget_rotations()


def row_lengths(positions: Tensor, padding_mask: Tensor | None, past_length: int) -> Tensor:
    """Return how many tokens, padding aside, each row has, or the input that each token belongs to.

    A row may hold several inputs one after the other; positions that start anew begin the next one.

    Args:
        positions: (rows, tokens) or (axes, rows, tokens), of the new tokens.
        padding_mask: (rows, past + tokens) bool, False where a token is padding; None: no token is known to be.
        past_length: tokens in the cache.

    Returns:
        (rows,) where there are tokens in the cache, which only a row of one input may have; else (rows, tokens).
    """
    if positions.ndim == 3:
        by_position = positions.amax((0, -1)) + 1 if past_length else lengths_over_axes(positions)
    else:
        by_position = positions.amax(-1) + 1 if past_length else segment_lengths(positions)
    if padding_mask is None:
        return by_position
    count = padding_mask.sum(-1).to(by_position.device, by_position.dtype)
    # A position that was counted over padding is too large; a count over several inputs is too large for each.
    return torch.minimum(count if past_length else count[:, None], by_position).clamp(min=1)


def several_inputs(positions: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Return whether a row holds several inputs one after the other, a bool scalar.

    A row of one input has no more tokens than its largest position allows. Without a mask, padding is recognised by
    positions that do not ascend, and only steps upward are counted. `positions`: (rows or 1, tokens).
    """
    largest = positions.amax(-1)
    if padding_mask is not None:
        count = padding_mask[:, : positions.shape[1]].sum(-1).to(positions.device) - 1
    else:
        count = ((positions.diff(dim=-1) > 0) & (positions[:, :-1] >= 0)).sum(-1)
    return (count > largest).any()


def _is_true(flag: Tensor, expected: bool, message: str) -> bool:
    """Return whether a bool scalar is True.

    Where that is `expected`, a CUDA device checks it by itself, later, so that the host need not wait for the value.
    """
    if expected and flag.device.type == "cuda" and torch.version.hip is None:  # ROCm leaves such checks out
        torch._assert_async(flag, message)
        return True
    return bool(flag)


class _CountedKeys(NamedTuple):
    """Positions and padding of all keys in a forward, by a count of the tokens; see `TokenPositions`.

    They hold if each row is one input, so that its positions count its tokens.
    """

    positions: Tensor  # (rows or 1, past + tokens)
    key_mask: Tensor | None
    left_padding: tuple[int, ...] | None
    counted: tuple[int, ...]
    agree: bool  # the position_ids of the call, if it has any, are these positions


def place_tokens(context: ForwardContext) -> TokenPositions:
    """Return positions and padding of all tokens of a forward.

    Positions are usually counted from the mask: [0 0 1 1 1] gives two tokens of padding, then the positions 0, 1, 2.
    position_ids that differ from this count are used as they were given. The host looks at values on the device three
    times at most, and not at all while text is generated without padding on CUDA.

    Raises:
        LengthError: position_ids are not one number per token, or do not continue those in the cache.
    """
    tokens, past_length = context.new_tokens.shape[1], context.past_length
    positions, key_mask = _checked_positions(context), _key_mask(context)
    continues = key_mask is None and context.cache_state is not None and context.cache_state.in_order
    keys = _count_keys(context, positions, key_mask, continues=continues)
    if keys.agree or positions is None:
        return TokenPositions(
            query_positions=keys.positions[:, past_length:],
            key_positions=keys.positions,
            left_padding=keys.left_padding,
            key_mask=keys.key_mask,
            counted=keys.counted,
        )
    if past_length == 0:  # several inputs in a row, or positions that do not begin at 0
        context.packed = bool(several_inputs(positions, context.padding_mask))
        return TokenPositions(positions, positions, None, keys.key_mask)
    # The keys in the cache stand before the new tokens, one position apart, wherever those are.
    shifted = keys.positions + positions[:, -1:] - keys.positions[:, -1:]
    if continues or not bool(_agree(positions, shifted[:, -tokens:], keys.key_mask)):
        raise LengthError(_NOT_CONTINUED)
    if keys.key_mask is None and not bool((shifted[:, 0] > 0).any()):  # left padding, known from the positions alone
        padding = (-shifted[:, 0]).expand(len(context.new_tokens))
        padded = shifted >= 0 if bool(padding.any()) else None
        return TokenPositions(positions, shifted.clamp(min=0), tuple(padding.tolist()), padded)
    return TokenPositions(positions, shifted, None, keys.key_mask)


def _checked_positions(context: ForwardContext) -> Tensor | None:
    """Return the position_ids of a call on the device of its tokens; None where the call has none."""
    positions = context.position_ids
    if positions is None:
        return None
    if positions.ndim != 2:
        raise LengthError(
            f"remapping methods need one position per token, a tensor of shape (rows, tokens); got position_ids "
            f"of shape {tuple(positions.shape)}"
        )
    return positions.to(context.new_tokens.device)


def _key_mask(context: ForwardContext) -> Tensor | None:
    """Return the padding mask of all keys, (rows, past + tokens) bool; tokens beyond the given mask are no padding."""
    if context.padding_mask is None:
        return None
    total = context.past_length + context.new_tokens.shape[1]
    mask = context.padding_mask.to(context.new_tokens.device)
    return nn.functional.pad(mask, (0, max(0, total - mask.shape[1])), value=True)[:, :total]


def _agree(positions: Tensor | None, counted: Tensor, key_mask: Tensor | None) -> Tensor:
    """Return whether the positions of the new tokens equal the counted ones, padding aside; a bool scalar.

    `key_mask`: of all keys, of which the new tokens are the last.
    """
    if positions is None:
        return torch.ones((), dtype=torch.bool, device=counted.device)
    differ = counted != positions
    if key_mask is not None:
        differ = differ & key_mask[:, -counted.shape[1] :]
    return ~differ.any()


def _count_keys(
    context: ForwardContext, positions: Tensor | None, key_mask: Tensor | None, *, continues: bool
) -> _CountedKeys:
    """Return the keys of a forward by a count of its tokens, and whether its positions agree with that.

    `continues`: the keys in the cache are known to be in order and without padding, so that positions should agree.
    """
    new_tokens, past_length = context.new_tokens, context.past_length
    rows, tokens = new_tokens.shape[:2]
    total = past_length + tokens
    in_order = torch.arange(total, device=new_tokens.device)[None]
    no_padding = (0,) * rows
    if key_mask is None:
        agree = positions is None or _is_true(
            _agree(positions, in_order[:, past_length:], None), continues, _NOT_CONTINUED
        )
        return _CountedKeys(in_order, None, no_padding, (total,), agree)
    by_mask = (key_mask.cumsum(-1) - 1).clamp(min=0)
    first_real = key_mask.int().argmax(-1)
    one_run = key_mask.int().diff(dim=-1).clamp(min=0).sum(-1) + key_mask[:, 0] == 1
    # Padding on the right is behind every query of a first forward, and between queries and keys of later ones.
    to_the_end = (first_real + key_mask.sum(-1) == total) | (past_length == 0)
    flags = [
        _agree(positions, in_order[:, past_length:], None),
        _agree(positions, by_mask[:, past_length:], key_mask),
        key_mask.all(),
        (one_run & to_the_end).all(),
    ]
    values = torch.cat([torch.stack(flags), first_real, key_mask.sum(-1)]).tolist()  # one wait for the device
    agree_in_order, agree_by_mask, all_real, is_ordered = values[:4]
    left_padding, counted = tuple(values[4 : 4 + rows]), tuple(values[4 + rows :])
    if all_real:
        return _CountedKeys(in_order, None, no_padding, counted, bool(agree_in_order))
    # A module around the decoder that counts tokens, padding among them, leaves the positions to the mask.
    agree = bool(agree_by_mask) or (context.filled_in and bool(agree_in_order))
    return _CountedKeys(by_mask, key_mask, left_padding if is_ordered else None, counted, agree)
