"""Losses from the output of a decoder, computed for a part of the vocabulary or for a few tokens at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["HeadLosses", "LogitScaling", "RunningSoftmax", "is_linear_head"]

_CPU_CACHE = 8 * 2**20
"""Bytes of logits at a time on a CPU, which stay in its cache; the speed hardly differs from 2 MB to 26 MB."""


class LogitScaling(NamedTuple):
    """The steps from the numbers that a head gives to the logits, in this order; None: there is no such step.

    Attributes:
        factor: the numbers are multiplied by it.
        divisor: they are divided by it.
        cap: they are softly capped at it: cap * tanh(number / cap).
    """

    factor: float | None = None
    divisor: float | None = None
    cap: float | None = None

    @classmethod
    def from_config(cls, config: Any) -> LogitScaling:
        """Return the steps that common model classes take, by the config of the text model."""
        factor = getattr(config, "logit_scale", None)  # Cohere
        if factor is None:
            factor = getattr(config, "output_multiplier", None)  # Muse
        divisor = getattr(config, "logits_scaling", None)  # Granite
        return cls(factor, divisor, getattr(config, "final_logit_softcapping", None))  # Gemma

    def logits(self, numbers: Tensor) -> Tensor:
        """Return the logits, float32, of the numbers that a head gives, in any shape."""
        logits = numbers.float()
        if self.factor is not None:
            logits = logits * self.factor
        if self.divisor is not None:
            logits = logits / self.divisor
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits


@dataclass
class HeadLosses:
    """The head of a language model, run separately from its decoder to compute logits and losses in little memory.

    Attributes:
        head: the head, as a module.
        scaling: the steps from the numbers that the head gives to the logits.
        vocabulary: the number of logits for each token.
        dtype: the dtype of the model.
        head_bytes: the memory in bytes for the logits that exist at a time.
    """

    head: Any
    scaling: LogitScaling
    vocabulary: int
    dtype: torch.dtype
    head_bytes: int

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the negative log-likelihood of the token that follows each position.

        A plain head is taken apart along the vocabulary, so that each of its weights is read once per chunk of tokens.
        Any other head runs whole, on a few tokens at a time.

        Args:
            hidden: the decoder's output, (tokens, hidden).
            targets: the tokens that follow, (tokens,) int64.

        Returns:
            (tokens,) float32, in nats.
        """
        if self.is_plain:
            return negative_log_likelihoods_(self.parts(hidden, self.width(hidden)), targets)
        few = self.few_tokens()
        losses = []
        for states, following in zip(torch.split(hidden, few), torch.split(targets, few), strict=True):
            losses.append(negative_log_likelihoods_([self.logits(states)], following.to(hidden.device)))
        return torch.cat(losses)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, (tokens, vocabulary) float32, of the decoder's output (tokens, hidden)."""
        return self.scaling.logits(self.head(hidden))

    @property
    def is_plain(self) -> bool:
        """True if the head is only a weight and a bias, without hooks; a quantised head counts as not plain."""
        return is_linear_head(self.head) and not hasattr(self.head, "_hf_hook")  # accelerate's hook

    def width(self, hidden: Tensor, tensors: int = 1) -> int:
        """Return for how many entries of the vocabulary there is room, a power of two of at least 1,024.

        Args:
            hidden: the decoder's output, (tokens, hidden).
            tensors: the number of tensors of the size of the logits that are there at a time.
        """
        # on a CPU, logits that do not fit into its cache are written to memory and read again several times
        room = min(self.head_bytes, _CPU_CACHE) if hidden.device.type == "cpu" else self.head_bytes
        width = room // (tensors * len(hidden) * _bytes_per_logit(self.dtype))
        return 1 << max(10, width.bit_length() - 1)

    def few_tokens(self, tensors: int = 1) -> int:
        """Return for how many tokens there is room for the logits of the whole vocabulary; see `width`."""
        return power_of_two(self.head_bytes // (tensors * self.vocabulary * _bytes_per_logit(self.dtype)))

    def parts(self, hidden: Tensor, width: int) -> Iterator[Tensor]:
        """Yield the logits of `width` entries of the vocabulary at a time, (tokens, width) float32; the head is plain.

        `hidden`: the decoder's output, (tokens, hidden).
        """
        weight, bias = self.head.weight, self.head.bias
        for begin in range(0, len(weight), width):
            part = slice(begin, begin + width)
            numbers = nn.functional.linear(hidden.to(weight.device), weight[part], None if bias is None else bias[part])
            yield self.scaling.logits(numbers)


def is_linear_head(head: Any) -> bool:
    """Return whether a head computes what its weight and bias say, wherever accelerate keeps them.

    A quantised head, one with an adapter and one with hooks of a user do not.
    """
    is_linear = type(head) is nn.Linear and not head._forward_pre_hooks and not head._forward_hooks
    # quantised weights are of a class of their own
    return is_linear and type(head.weight) is nn.Parameter and head.weight.is_floating_point()


def power_of_two(most: int) -> int:
    """Return the largest power of two that is at most `most`, but at least 16 and at most 4096."""
    return 1 << max(4, min(12, most.bit_length() - 1))


def _bytes_per_logit(dtype: torch.dtype) -> int:
    """Return the bytes that one logit takes in float32 and, at the same time, in the dtype that the head runs in."""
    return 4 if dtype == torch.float32 else 4 + torch.finfo(dtype).bits // 8


class RunningSoftmax:
    """The softmax of logits that come one part of the vocabulary at a time, in the order of the vocabulary.

    Args:
        targets: the tokens that the logits predict, (tokens,) int64.

    Attributes:
        largest: the largest logit so far, (tokens, 1) float32.
        total: the sum of the exponentials of the logits relative to the largest one, (tokens, 1) float32.
        target_logits: the logits of the targets, (tokens, 1) float32; any number for a target in a part to come.
        begin: the first entry of the vocabulary in the next part.
    """

    def __init__(self, targets: Tensor) -> None:
        self.targets = targets
        self.largest = self.total = self.target_logits = torch.empty(0)
        self.begin = 0

    def add_(self, logits: Tensor, largest: Tensor | None = None) -> Tensor | None:
        """Add a part, (tokens, part of the vocabulary) float32, which becomes the exponentials relative to `largest`.

        Args:
            logits: the logits; they are modified in place.
            largest: the largest of them by row, (tokens, 1); default: it is computed.

        Returns:
            The factors by which sums over earlier parts, relative to the largest logit, shrink, (tokens, 1); None for
            the first part.
        """
        targets = self.targets = self.targets.to(logits.device)
        inside = (targets - self.begin).clamp(0, logits.shape[-1] - 1)[:, None]
        logits_inside = logits.gather(-1, inside)  # of a target in a later part: any number, which is replaced there
        new_largest = logits.amax(-1, keepdim=True) if largest is None else largest
        if self.begin:
            new_largest = torch.maximum(self.largest, new_largest)
        sums = logits.sub_(new_largest).exp_().sum(-1, keepdim=True)
        factors = None
        if self.begin:
            factors = (self.largest - new_largest).exp_()
            self.total = self.total * factors + sums
            self.target_logits = torch.where((targets >= self.begin)[:, None], logits_inside, self.target_logits)
        else:
            self.total, self.target_logits = sums, logits_inside
        self.largest = new_largest
        self.begin += logits.shape[-1]
        return factors

    def negative_log_likelihoods(self) -> Tensor:
        """Return the negative log-likelihoods of the targets after the last part, (tokens,) float32, in nats."""
        return (self.largest + self.total.log() - self.target_logits)[:, 0]


def negative_log_likelihoods_(parts: Iterable[Tensor], targets: Tensor) -> Tensor:
    """Return the negative log-likelihoods of tokens from logits that come one part of the vocabulary at a time.

    Args:
        parts: the logits of each part, (tokens, part of the vocabulary) float32, in the order of the vocabulary; they
            are modified in place.
        targets: the tokens that the logits predict, (tokens,) int64.

    Returns:
        (tokens,) float32, in nats.
    """
    softmax = RunningSoftmax(targets)
    for logits in parts:
        softmax.add_(logits)
    return softmax.negative_log_likelihoods()
