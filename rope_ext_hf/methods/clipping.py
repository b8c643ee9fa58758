"""CoPE: the frequencies of the slowest pairs fade out to 0.

>>> from rope_ext_hf.methods.base import Rotary
>>> method = Cope(clip=3)
>>> inv_freq, _ = method.frequencies(Rotary(dim=8, theta=10000.0, trained_length=4096))
>>> [round(number, 6) for number in inv_freq.tolist()]
[1.0, 0.1, 0.005, 0.0]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import TWO_PI, RopeMethod, Rotary, constant
from rope_ext_hf.methods.registry import register_method


@register_method("cope", aliases=["clipped-rope"])
@dataclass(frozen=True, kw_only=True)
class Cope(RopeMethod):
    """CoPE, clipped RoPE (Li et al. 2026, arXiv 2602.05258): the slowest pairs fade out, the others stay.

    Of the pairs that rotate, the last c get the frequency w_i (1 + cos(pi k / (c - 1))) / 2 with k = 0 ... c - 1: the
    first of them keeps its frequency, and the last does not rotate any more. Nothing depends on a factor.

    `clip`: c; default: the pairs whose period 2 pi / w_i exceeds the context length C, of which the model has never
    seen a whole turn. The paper has 20 of 64. `hard`: all c get the frequency 0, HardClip in the paper's code.
    """

    clip: int | None = None
    hard: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(1, "clip")

    def check(self, rotary: Rotary) -> None:
        frequencies = _rotating(rotary)
        pairs, clip = len(frequencies), self._clipped(rotary, frequencies)
        least = 1 if self.hard else 2  # of two or more, the first keeps its frequency and the last loses it
        if pairs < least:
            raise MethodError(f"cope fades the last of at least {least} pairs, and in this model {pairs} rotates")
        if clip > pairs:
            raise MethodError(f"cope: clip must be at most {pairs}, the pairs that rotate; got {clip}")
        if clip < least:
            turning = f"{pairs - clip} of {pairs} pairs turn around within the context length"
            reason = f"clip={clip}" if self.clip else f"{turning}, {rotary.context_length:,} tokens"
            raise MethodError(
                f"cope would change nothing ({reason}); give clip, the number of pairs to clip, {least} to {pairs}"
            )

    def _clipped(self, rotary: Rotary, frequencies: Sequence[float]) -> int:
        """Return c, the number of pairs that are clipped, of those that rotate with these frequencies."""
        if self.clip is not None:
            return self.clip
        return sum([rotary.context_length * w < TWO_PI for w in frequencies])

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        frequencies = _rotating(rotary)
        clip = self._clipped(rotary, frequencies)
        fading = [0.0 if self.hard else (1 + math.cos(math.pi * k / (clip - 1))) / 2 for k in range(clip)]
        scales = [1.0] * (len(frequencies) - clip) + fading + [0.0] * (rotary.dim // 2 - len(frequencies))
        return rotary.inv_freq(length.device) * constant(tuple(scales), length.device), 1.0


def _rotating(rotary: Rotary) -> Sequence[float]:
    """Return the frequencies of the pairs that rotate, which come first, as Python numbers."""
    if rotary.own is not None:
        return [w for w in rotary.own_frequencies if w > 0]
    return [w for w in rotary.inv_freq().tolist() if w > 0]
