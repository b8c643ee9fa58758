"""LongCE: weights of tokens by how much a long context helps to predict them.

    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    loss = (losses * longce_weights(model, ids, losses, short_length=4096)).mean()

LongCE (Fang et al. 2024, arXiv 2410.23771, sec. 4) multiplies the loss of a token by exp(loss with a short context -
loss with the whole one), at most 5: tokens that need the far context count more, and no other model is asked for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError


@torch.no_grad()
def longce_weights(
    model: Any, input_ids: Tensor, losses: Tensor, *, short_length: int, stride: int = 1024, most: float = 5.0
) -> Tensor:
    """The weight of each token's loss.

    The definition is that of its code (PKU-ML/LongPPL, finetune/finetune.py, `loss_weight`): `stride` tokens at a time
    are predicted from `short_length` tokens before the first of them and those between; the first `short_length` tokens
    of a row, whose context is short anyway, have the weight 1.

    Args:
        model: the causal language model that is trained, in its present mode.
        input_ids: (rows, tokens), without padding: every row one document.
        losses: (rows, tokens - 1) nats of every token but the first, given all tokens before; its gradient is not used.
        short_length: tokens of a short context. The paper: 4,096 for rows of 32,768.
        stride: tokens predicted in one short pass.
        most: the largest weight.

    Returns:
        (rows, tokens - 1), in the dtype of the losses, without a gradient.

    Raises:
        MethodError: a length or stride below 1, or losses of another shape.
    """
    rows, tokens = input_ids.shape
    if short_length < 1 or stride < 1:
        raise MethodError(f"short_length and stride must be at least 1 token, got {short_length} and {stride}")
    if losses.shape != (rows, tokens - 1):
        raise MethodError(
            f"losses must have the shape {(rows, tokens - 1)}, one for every token but the first, got "
            f"{tuple(losses.shape)}"
        )
    weights = torch.ones_like(losses)
    for first in range(short_length, tokens, stride):  # the first token that this pass predicts
        window = input_ids[:, first - short_length : first + stride]
        predicted = window[:, short_length:]
        logits = model(input_ids=window, use_cache=False, logits_to_keep=predicted.shape[1] + 1).logits[:, :-1]
        short = torch.nn.functional.cross_entropy(logits.float().mT, predicted, reduction="none")
        ahead = slice(first - 1, first - 1 + predicted.shape[1])
        weights[:, ahead] = torch.exp(short - losses[:, ahead].float()).clamp(max=most).to(weights.dtype)
    return weights
