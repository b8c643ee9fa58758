"""LongCE: weights for the loss, by how much a long context helps to predict each token.

    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = torch.nn.functional.cross_entropy(logits.mT, ids[:, 1:], reduction="none")
    loss = (losses * longce_weights(model, ids, losses, short_length=4096)).mean()

LongCE (Fang et al. 2024, arXiv 2410.23771, sec. 4) multiplies the loss of a token by exp(loss with a short context -
loss with the whole context), but by 5 at most. Tokens that need the far context thus count more. The model itself gives
the weights, without an evaluator model.
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
    """Return a weight for each token's loss, by how much the long context helps to predict the token.

    As in the authors' code (PKU-ML/LongPPL, finetune/finetune.py, `loss_weight`), `stride` tokens at a time are
    predicted from a short context: the `short_length` tokens before the first of them, and the tokens between. The
    first `short_length` tokens of a row, whose context is short anyway, have the weight 1.

    Args:
        model: the causal language model that is trained, in its present mode.
        input_ids: (rows, tokens) int64, without padding; every row is one document.
        losses: (rows, tokens - 1), the loss in nats of every token except the first, given all tokens before it; no
            gradient flows through the weights.
        short_length: tokens of a short context. The paper takes 4,096 for rows of 32,768 tokens.
        stride: tokens that are predicted in one short pass.
        most: the largest weight.

    Returns:
        The weights, (rows, tokens - 1), in the dtype of the losses, without a gradient.

    Raises:
        MethodError: a length or stride is below 1, or the losses have another shape.
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
        short_losses = torch.nn.functional.cross_entropy(logits.float().mT, predicted, reduction="none")
        columns = slice(first - 1, first - 1 + predicted.shape[1])  # a token's loss stands one column before it
        weights[:, columns] = torch.exp(short_losses - losses[:, columns].float()).clamp(max=most).to(weights.dtype)
    return weights
