"""Divergences of two heads, against torch.nn.functional.kl_div over the whole vocabulary in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rope_ext_hf.reading.through.head_losses import HeadLosses, LogitScaling
from rope_ext_hf.tools.divergence.divergences import divergences
from tests.support.dispatch import LargestTensor

VOCABULARY = 2600  # parts of 1,024 leave a rest
TOKENS, HIDDEN = 40, 24
SCALINGS = {
    "plain": LogitScaling(),
    "soft cap": LogitScaling(cap=2.0),
    "factor": LogitScaling(factor=0.25),
    "divisor": LogitScaling(divisor=3.0),
}


def linear(seed: int, *, bias: bool = False, vocabulary: int = VOCABULARY) -> nn.Linear:
    draws = torch.Generator().manual_seed(seed)
    head = nn.Linear(HIDDEN, vocabulary, bias=bias)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws))
    return head


def whole(head: nn.Module, scaling: LogitScaling = SCALINGS["plain"], head_bytes: int = 1) -> HeadLosses:
    """A head with so little memory that the smallest parts are taken, by default."""
    return HeadLosses(head, scaling, VOCABULARY, torch.float32, head_bytes)


def states(seed: int) -> Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(seed))


def log_probabilities(head: HeadLosses, outputs: Tensor) -> Tensor:
    """By the formulas of the model classes, in float64."""
    module: Any = head.head
    logits = outputs.double() @ module.weight.double().T
    if module.bias is not None:
        logits = logits + module.bias.double()
    factor, divisor, cap = head.scaling
    logits = logits * (factor or 1.0) / (divisor or 1.0)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    probabilities: Tensor = logits.log_softmax(-1)
    return probabilities


def expected(p: Tensor, q: Tensor, targets: Tensor) -> Tensor:
    kl = nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    same = (p.argmax(-1) == q.argmax(-1)).double()
    nats = [-x.gather(-1, targets[:, None])[:, 0] for x in (p, q)]
    return torch.stack([kl, same, *nats], -1)


TARGETS = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("head_bytes", [1, 10**9])
@torch.inference_mode()
def test_parts_of_the_vocabulary_give_what_the_whole_gives(scaling: str, bias: bool, head_bytes: int) -> None:
    p = whole(linear(1, bias=bias), SCALINGS[scaling], head_bytes)
    q = whole(linear(2, bias=bias), SCALINGS[scaling], head_bytes)
    found = divergences(p, states(3), q, states(4), TARGETS)
    right = expected(log_probabilities(p, states(3)), log_probabilities(q, states(4)), TARGETS)
    torch.testing.assert_close(found.double(), right, atol=2e-5, rtol=2e-6)
    assert found.dtype == torch.float32


class Scaled(nn.Module):
    """A head that is more than a linear layer."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        numbers: Tensor = 2 * self.linear(x)
        return numbers


@torch.inference_mode()
def test_a_head_that_is_more_than_a_layer_runs_whole() -> None:
    p, doubled = whole(linear(1)), linear(2)
    q = whole(Scaled(doubled))
    found = divergences(p, states(3), q, states(4), TARGETS)
    right = expected(
        log_probabilities(p, states(3)), log_probabilities(whole(doubled, LogitScaling(factor=2.0)), states(4)), TARGETS
    )
    torch.testing.assert_close(found.double(), right, atol=3e-5, rtol=2e-6)


@torch.inference_mode()
def test_a_distribution_has_no_divergence_from_itself() -> None:
    p, q = whole(linear(1)), whole(linear(1))
    found = divergences(p, states(3), q, states(3), TARGETS)
    assert torch.equal(found[:, 0], torch.zeros(TOKENS))
    assert torch.equal(found[:, 1], torch.ones(TOKENS))


@torch.inference_mode()
def test_tiny_divergences_keep_their_digits() -> None:
    """Logits of hundreds that differ by thousandths, of which a difference of two large numbers would leave noise."""
    p, outputs = whole(linear(1)), 20 * states(3)
    other = outputs + 1e-4 * states(4)
    found = divergences(p, outputs, p, other, TARGETS)[:, 0].double()
    right = expected(log_probabilities(p, outputs), log_probabilities(p, other), TARGETS)[:, 0]
    assert 1e-10 < right.mean() < 1e-6
    assert (found - right).abs().max() < 2e-6  # logits of 300 have steps of 3e-5


@torch.inference_mode()
def test_an_entry_that_neither_model_gives_counts_nothing() -> None:
    heads = [linear(seed, bias=True) for seed in (1, 2)]
    for head in heads:
        assert head.bias is not None
        head.bias[2000:] = -math.inf
    targets = TARGETS % 2000
    p, q = map(whole, heads)
    found = divergences(p, states(3), q, states(4), targets)
    logs, other_logs = (log_probabilities(head, x)[:, :2000] for head, x in ((p, states(3)), (q, states(4))))
    torch.testing.assert_close(found.double(), expected(logs, other_logs, targets), atol=2e-5, rtol=2e-6)


@torch.inference_mode()
def test_of_equally_likely_tokens_the_first_counts_in_whatever_part() -> None:
    head = linear(1)
    head.weight[2500] = head.weight[1500] = head.weight[3] = 9 * head.weight[3].sign()
    outputs = head.weight[3].sign().expand(TOKENS, HIDDEN).contiguous()
    other = linear(1)
    other.weight.copy_(head.weight)
    other.weight[1500] = other.weight[2500] = 0  # here the token 3 alone is the likeliest
    assert divergences(whole(head), outputs, whole(other), outputs, TARGETS)[:, 1].all()
    other.weight[3] = 0
    other.weight[1500] = head.weight[1500]
    assert not divergences(whole(head), outputs, whole(other), outputs, TARGETS)[:, 1].any()


@torch.inference_mode()
def test_numbers_that_are_not_finite_stay_so() -> None:
    head = linear(1)
    head.weight[2500, 0] = math.nan
    assert divergences(whole(linear(1)), states(3), whole(head), states(3), TARGETS)[:, 0].isnan().all()


@torch.inference_mode()
def test_no_tensor_has_the_size_of_tokens_times_vocabulary() -> None:
    p, q = whole(linear(1)), whole(linear(2))
    outputs, others = states(3).repeat(100, 1), states(4).repeat(100, 1)
    with LargestTensor() as seen:
        divergences(p, outputs, q, others, TARGETS.repeat(100))
    assert seen.elements == 100 * TOKENS * 1024
