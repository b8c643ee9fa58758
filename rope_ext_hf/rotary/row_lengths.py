"""The length of each row of a forward, and of each input where a row holds several, one after the other (packing)."""

from __future__ import annotations

import torch
from torch import Tensor


def row_lengths(positions: Tensor, padding_mask: Tensor | None = None, past_length: int = 0) -> Tensor:
    """Return how many tokens, padding aside, each row has, or the input that each token belongs to.

    Args:
        positions: (rows, tokens), of the new tokens; integers or floating-point numbers.
        padding_mask: (rows, past + tokens) bool, False where a token is padding; None: no token is known to be.
        past_length: tokens in the cache.

    Returns:
        (rows,) where there are tokens in the cache, which only a row of one input may have; else (rows, tokens). int64
        for integers.
    """
    by_position = positions.amax(-1) + 1 if past_length else _input_lengths(positions)
    if padding_mask is None:
        return by_position
    count = padding_mask.sum(-1).to(by_position.device, by_position.dtype)
    # A position that was counted over padding is too large; a count over several inputs is too large for each.
    return torch.minimum(count if past_length else count[:, None], by_position).clamp(min=1)


def _input_lengths(positions: Tensor) -> Tensor:
    """Return the largest position + 1 of the input that each token belongs to, (rows, tokens).

    Where positions do not ascend, another input begins.
    """
    begins = torch.nn.functional.pad(positions.diff(dim=-1) <= 0, (1, 0), value=True)
    number = begins.cumsum(-1) - 1
    lengths = (positions if positions.is_floating_point() else positions.to(torch.int64)) + 1
    return torch.zeros_like(lengths).scatter_reduce(-1, number, lengths, "amax").gather(-1, number)


def lengths_over_axes(positions: Tensor) -> Tensor:
    """Return the length of the input that each token belongs to, for positions with several axes (multimodal models).

    `positions`: (axes, rows, tokens). A row whose axes differ has an image or a video in it, and counts as one input;
    other rows are treated as in `row_lengths`. The result is (rows, tokens).
    """
    text = (positions == positions[:1]).all(0).all(-1, keepdim=True)
    largest = positions.amax(0)
    return torch.where(text, _input_lengths(largest), largest.amax(-1, keepdim=True) + 1)


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
