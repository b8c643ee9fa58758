"""`longce_weights` against the definition of LongCE, one token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError
from rope_ext_hf.tools.training import longce_weights
from tests.support.models import build, logits, tokens


def token_losses(model: Any, ids: Tensor) -> Tensor:
    scores = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(scores.mT, ids[:, 1:], reduction="none")


def weights_by_definition(model: Any, ids: Tensor, short: int, stride: int, most: float) -> Tensor:
    """Of PKU-ML/LongPPL, finetune/finetune.py: exp(short loss - whole loss), at most `most`; 1 for the first tokens."""
    weights = torch.ones(ids.shape[0], ids.shape[1] - 1)
    whole = logits(model, ids).log_softmax(-1)
    for row in range(ids.shape[0]):
        for token in range(short, ids.shape[1]):
            start = (token - short) // stride * stride  # the short context begins here
            window = logits(model, ids[row : row + 1, start : start + short + stride])
            near = window.log_softmax(-1)[0, token - 1 - start, ids[row, token]]
            weights[row, token - 1] = torch.exp(whole[row, token - 1, ids[row, token]] - near).clamp(max=most)
    return weights


@pytest.mark.parametrize(("short", "stride", "most"), [(16, 8, 5.0), (20, 7, 1.05), (39, 1, 5.0), (60, 8, 5.0)])
@pytest.mark.parametrize("method", [None, "dynamic-yarn"])
def test_against_the_definition(short: int, stride: int, most: float, method: str | None) -> None:
    model = build("llama", max_position_embeddings=24)
    if method:
        rope.patch(model, method)
    ids = tokens(41, batch=2)
    with torch.no_grad():
        losses = token_losses(model, ids)
    weights = longce_weights(model, ids, losses, short_length=short, stride=stride, most=most)
    torch.testing.assert_close(weights, weights_by_definition(model, ids, short, stride, most), atol=1e-4, rtol=1e-4)
    assert bool((weights[:, : short - 1] == 1).all())
    if short < 39:
        assert float(weights.std()) > 1e-3


def test_weights_have_no_gradient_and_the_loss_has_that_of_its_tokens() -> None:
    model, ids = build("llama"), tokens(40)
    losses = token_losses(model, ids)
    weights = longce_weights(model, ids, losses, short_length=16, stride=8)
    assert not weights.requires_grad
    gradient = torch.autograd.grad((losses * weights).mean(), model.lm_head.weight)[0]
    each = torch.eye(39)
    by_token = torch.autograd.grad(token_losses(model, ids)[0], model.lm_head.weight, each, is_grads_batched=True)[0]
    torch.testing.assert_close(gradient, (weights[0, :, None, None] * by_token).mean(0), atol=1e-6, rtol=1e-4)


def test_refused() -> None:
    model, ids = build("llama"), tokens(40)
    with pytest.raises(MethodError, match=r"shape \(1, 39\).*got \(1, 40\)"):
        longce_weights(model, ids, torch.zeros(1, 40), short_length=16)
    with pytest.raises(MethodError, match="at least 1 token, got 0 and 1024"):
        longce_weights(model, ids, torch.zeros(1, 39), short_length=0)
