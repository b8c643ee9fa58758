"""Losses from the hidden states of a decoder, a part of the vocabulary or a few tokens at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class HeadLosses:
    """The head of a language model, run apart from its decoder."""

    head: Any
    config: Any  # of the text
    dtype: torch.dtype  # of the model
    room: int  # bytes for logits at a time
    finish: bool = True  # logits are scaled or capped as the config says

    def losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihoods, (tokens,) float32, of what follows each hidden state; (tokens, hidden).

        A plain head is taken apart along the vocabulary, so that each of its weights is read once per chunk of tokens;
        another one runs whole, over a few tokens at a time.
        """
        plain = type(self.head) is nn.Linear and not hasattr(self.head, "_hf_hook")
        if plain and not self.head._forward_pre_hooks and not self.head._forward_hooks:
            width = self.room // (len(hidden) * _bytes_of_a_logit(self.dtype))
            return negative_log_likelihoods_(self._parts(hidden, 1 << max(10, width.bit_length() - 1)), targets)
        # a quantised or wrapped head has other shapes than its vocabulary
        few = power_of_two(self.room // (self.config.vocab_size * _bytes_of_a_logit(self.dtype)))
        pieces = zip(torch.split(hidden, few), torch.split(targets, few), strict=True)
        return torch.cat(
            [negative_log_likelihoods_([self.logits(some)], theirs.to(hidden.device)) for some, theirs in pieces]
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return self._finished(self.head(hidden))

    def _parts(self, hidden: Tensor, width: int) -> Iterator[Tensor]:
        """Logits of so much of the vocabulary at a time, (tokens, width)."""
        weight, bias = self.head.weight, self.head.bias
        for at in range(0, len(weight), width):
            part = None if bias is None else bias[at : at + width]
            yield self._finished(nn.functional.linear(hidden.to(weight.device), weight[at : at + width], part))

    def _finished(self, logits: Tensor) -> Tensor:
        """Logits as the common families finish them after the head, by a scale or a soft cap; float32."""
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


def power_of_two(fitting: int) -> int:
    """The largest power of two that fits, from 16 to 4096."""
    return 1 << max(4, min(12, fitting.bit_length() - 1))


def _bytes_of_a_logit(dtype: torch.dtype) -> int:
    """In float32, beside what the head makes it from."""
    return 4 if dtype == torch.float32 else 4 + torch.finfo(dtype).bits // 8


def negative_log_likelihoods_(parts: Iterable[Tensor], targets: Tensor) -> Tensor:
    """Negative log-likelihoods, (tokens,) float32, from logits (tokens, part of the vocabulary), part after part."""
    top = total = chosen = torch.empty(0)
    at = 0
    for logits in parts:  # float32, in the order of the vocabulary; modified in place
        targets = targets.to(logits.device)
        inside = (targets - at).clamp(0, logits.shape[-1] - 1)[:, None]
        here = logits.gather(-1, inside)
        higher = logits.amax(-1, keepdim=True)
        if at:
            higher = torch.maximum(top, higher)
        sums = logits.sub_(higher).exp_().sum(-1, keepdim=True)
        if at:
            total = total * (top - higher).exp_() + sums
            chosen = torch.where((targets >= at)[:, None], here, chosen)
        else:
            total, chosen = sums, here
        top = higher
        at += logits.shape[-1]
    return (top + total.log() - chosen)[:, 0]
