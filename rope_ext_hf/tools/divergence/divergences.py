"""Divergences of the next-token distributions of two models, a part of the vocabulary or a few tokens at a time.

Each distribution is given by the output of a decoder and the head of its model, so that no tensor of the size length x
vocabulary is made.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rope_ext_hf.reading.through.head_losses import HeadLosses, RunningSoftmax

_TENSORS = 3  # of the size of the logits that are there at a time: two logits, and their difference


def divergences(
    reference: HeadLosses, reference_outputs: Tensor, other: HeadLosses, outputs: Tensor, targets: Tensor
) -> Tensor:
    """Return how far the distribution of the next token by one model, Q, is from that by a reference, P.

    Plain heads are taken apart along the vocabulary, so that each of their weights is read once. Where one of them is
    not plain, both run whole, on a few tokens at a time.

    Args:
        reference: the head of the reference.
        reference_outputs: the output of its decoder, (tokens, hidden), in the dtype of its head.
        other: the head of the other model.
        outputs: the output of its decoder, (tokens, hidden of this model).
        targets: the tokens that follow, (tokens,) int64.

    Returns:
        (tokens, 4) float32: KL(P || Q) in nats; 1 where both have the same likeliest token, else 0; and the negative
        log-likelihood of the target in nats, by the reference and by the other model.
    """
    if reference.is_plain and other.is_plain:
        width = min(reference.width(outputs, _TENSORS), other.width(outputs, _TENSORS))
        parts = zip(reference.parts(reference_outputs, width), other.parts(outputs, width), strict=True)
        return _divergences_(parts, targets)
    few = min(reference.few_tokens(_TENSORS), other.few_tokens(_TENSORS))
    results = []
    for states, other_states, following in zip(
        torch.split(reference_outputs, few), torch.split(outputs, few), torch.split(targets, few), strict=True
    ):
        results.append(_divergences_([(reference.logits(states), other.logits(other_states))], following))
    return torch.cat(results)


def _divergences_(parts: Iterable[tuple[Tensor, Tensor]], targets: Tensor) -> Tensor:
    """Return the columns of `divergences` from logits that come one part of the vocabulary at a time.

    `parts`: the logits of the reference and of the other model for each part, (tokens, part) float32, in the order of
    the vocabulary; they are modified in place.
    """
    # With logits p and q: KL(P || Q) = sum of P (p - q), less log of sum of exp(p), plus log of sum of exp(q).
    first, second = RunningSoftmax(targets), RunningSoftmax(targets)
    weighted = likeliest = other_likeliest = torch.empty(0)
    for logits, other_logits in parts:
        other_logits = other_logits.to(logits.device)
        differences = logits - other_logits
        largest, place = logits.max(-1, keepdim=True)
        other_largest, other_place = other_logits.max(-1, keepdim=True)
        place, other_place = place + first.begin, other_place + first.begin
        if first.begin:
            # an equal logit in an earlier part stays the likeliest, as in an argmax over the whole vocabulary
            place = torch.where(largest > first.largest, place, likeliest)
            other_place = torch.where(other_largest > second.largest, other_place, other_likeliest)
        likeliest, other_likeliest = place, other_place
        factors = first.add_(logits, largest)
        second.add_(other_logits, other_largest)
        # what P never gives counts nothing, also where both logits are minus infinity and their difference is NaN
        products = differences.masked_fill_(logits == 0, 0).mul_(logits).sum(-1, keepdim=True)
        weighted = products if factors is None else weighted * factors + products
    # The difference of the two logarithms is taken in two parts. Each is 0 for equal distributions, and small for
    # similar ones, where the difference of two large numbers would lose digits.
    normalisation = (first.largest - second.largest) + (first.total / second.total).log()
    columns = [weighted / first.total - normalisation, (likeliest == other_likeliest).float()]
    columns += [softmax.negative_log_likelihoods()[:, None] for softmax in (first, second)]
    return torch.cat(columns, -1)
