"""The length of each row of a forward, by which a length-dependent method chooses its frequencies."""

from __future__ import annotations

import torch
from torch import Tensor

from rope_ext_hf.errors import LengthError
from rope_ext_hf.patches.forward.forward_call import HOLD_ONE_LENGTH, ForwardCall
from rope_ext_hf.rotary.embedding import segment_lengths


def positions_of_new_tokens(call: ForwardCall) -> Tensor:
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


def row_lengths(positions: Tensor, padding_mask: Tensor | None, past_length: int) -> Tensor:
    """Return how many tokens, padding aside, each row has, or the input that each token belongs to.

    A row may hold several inputs one after the other; positions that start anew begin the next one.

    Args:
        positions: (rows, tokens), of the new tokens.
        padding_mask: (rows, past + tokens) bool, False where a token is padding; None: no token is known to be.
        past_length: tokens in the cache.

    Returns:
        (rows,) where there are tokens in the cache, which only a row of one input may have; else (rows, tokens).
    """
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
