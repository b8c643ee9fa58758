"""Losses from the output of a decoder, computed for a part of the vocabulary or for a few tokens at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_CPU_CACHE = 8 * 2**20
"""Bytes of logits at a time on a CPU, which stay in its cache; the speed hardly differs from 2 MB to 26 MB."""


@dataclass
class HeadLosses:
    """The head of a language model, run separately from its decoder to compute logits and losses in little memory.

    Attributes:
        head: the head, as a module.
        config: the config of the text model.
        dtype: the dtype of the model.
        head_bytes: the memory in bytes for the logits that exist at a time.
        finish: whether to scale or cap logits as the config says.
    """

    head: Any
    config: Any
    dtype: torch.dtype
    head_bytes: int
    finish: bool = True

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
        if self._is_plain:
            # on a CPU, logits that do not fit into its cache are written to memory and read again several times
            room = min(self.head_bytes, _CPU_CACHE) if hidden.device.type == "cpu" else self.head_bytes
            width = room // (len(hidden) * _bytes_per_logit(self.dtype))
            return negative_log_likelihoods_(self._parts(hidden, 1 << max(10, width.bit_length() - 1)), targets)
        few = power_of_two(self.head_bytes // (self.config.vocab_size * _bytes_per_logit(self.dtype)))
        losses = []
        for states, following in zip(torch.split(hidden, few), torch.split(targets, few), strict=True):
            losses.append(negative_log_likelihoods_([self.logits(states)], following.to(hidden.device)))
        return torch.cat(losses)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits, (tokens, vocabulary) float32, of the decoder's output (tokens, hidden)."""
        return self._finished(self.head(hidden))

    @property
    def _is_plain(self) -> bool:
        """True if the head is only a weight and a bias, without hooks; a quantised head counts as not plain."""
        is_linear = type(self.head) is nn.Linear and not hasattr(self.head, "_hf_hook")  # accelerate's hook
        return is_linear and not self.head._forward_pre_hooks and not self.head._forward_hooks

    def _parts(self, hidden: Tensor, width: int) -> Iterator[Tensor]:
        """Yield the logits of `width` entries of the vocabulary at a time, (tokens, width)."""
        weight, bias = self.head.weight, self.head.bias
        for begin in range(0, len(weight), width):
            part = slice(begin, begin + width)
            logits = nn.functional.linear(hidden.to(weight.device), weight[part], None if bias is None else bias[part])
            yield self._finished(logits)

    def _finished(self, logits: Tensor) -> Tensor:
        """Return logits as float32, scaled or softly capped as common model classes do after the head."""
        logits = logits.float()
        if not self.finish:
            return logits
        if (scale := getattr(self.config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (multiplier := getattr(self.config, "output_multiplier", None)) is not None:  # Muse
            logits = logits * multiplier
        if (divisor := getattr(self.config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / divisor
        if (cap := getattr(self.config, "final_logit_softcapping", None)) is not None:  # Gemma
            logits = torch.tanh(logits / cap) * cap
        return logits


def power_of_two(most: int) -> int:
    """Return the largest power of two that is at most `most`, but at least 16 and at most 4096."""
    return 1 << max(4, min(12, most.bit_length() - 1))


def _bytes_per_logit(dtype: torch.dtype) -> int:
    """Return the bytes that one logit takes in float32 and, at the same time, in the dtype that the head runs in."""
    return 4 if dtype == torch.float32 else 4 + torch.finfo(dtype).bits // 8


def negative_log_likelihoods_(parts: Iterable[Tensor], targets: Tensor) -> Tensor:
    """Return the negative log-likelihoods of tokens from logits that come one part of the vocabulary at a time.

    Args:
        parts: the logits of each part, (tokens, part of the vocabulary) float32, in the order of the vocabulary; they
            are modified in place.
        targets: the tokens that the logits predict, (tokens,) int64.

    Returns:
        (tokens,) float32, in nats.
    """
    # The sum of exponentials is kept relative to the largest logit so far, as in an online softmax.
    largest = total = target_logits = torch.empty(0)
    begin = 0  # of the part, in the vocabulary
    for logits in parts:
        targets = targets.to(logits.device)
        inside = (targets - begin).clamp(0, logits.shape[-1] - 1)[:, None]
        logits_inside = logits.gather(-1, inside)  # of a target in a later part: any number, which is replaced there
        new_largest = logits.amax(-1, keepdim=True)
        if begin:
            new_largest = torch.maximum(largest, new_largest)
        sums = logits.sub_(new_largest).exp_().sum(-1, keepdim=True)
        if begin:
            total = total * (largest - new_largest).exp_() + sums
            target_logits = torch.where((targets >= begin)[:, None], logits_inside, target_logits)
        else:
            total, target_logits = sums, logits_inside
        largest = new_largest
        begin += logits.shape[-1]
    return (largest + total.log() - target_logits)[:, 0]
