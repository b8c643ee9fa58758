"""Frequency methods whose frequencies depend on the length of the input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import SHORT_AND_LONG, UNBOUNDED, RopeMethod, Rotary, divide
from rope_ext_hf.methods.registry import register_method
from rope_ext_hf.methods.static import RampedMethod, check_at_least_four_dims, check_divisors, ntk_inv_freq

_Growth = Literal["paper", "hf", "even", "pow2"]


@register_method("dynamic-ntk", aliases={"dynamic": {"growth": "hf"}})
@dataclass(frozen=True, kw_only=True)
class DynamicNTK(RopeMethod):
    """NTK-aware scaling whose alpha grows with the length L of the input (emozilla 2023; YaRN paper, sec. 3.3).

    The base is b' = b alpha^(d/(d-2)), as in `ntk`. With ratio = L / C, `growth` is the rule for alpha:
        paper   max(1, ratio)                                     YaRN paper, arXiv 2309.00071, sec. 3.3
        hf      s ratio - (s - 1), and 1 while L <= C             transformers' "dynamic", s = factor
        even    `initial` while ratio <= initial, then the smallest even number k >= ratio
        pow2    max(1, 2^ceil(log2(ratio) + 1) - 1)               Qwen, lmdeploy

    `sticky`: under "even", the rotary module keeps the largest k that it has met until it is reset. Then cos and sin
    depend on earlier calls.
    """

    length_dependent = True

    growth: _Growth = "paper"
    factor: float | None = None
    initial: float = 1.0
    sticky: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(1, "initial")
        if self.growth == "hf" and self.factor is None:
            raise MethodError("dynamic-ntk: growth='hf' needs factor (or target_length)")
        if self.growth != "hf" and self.factor is not None:
            raise MethodError(f"dynamic-ntk: factor goes with growth='hf' only, got it with growth={self.growth!r}")
        if self.growth != "even" and (self.sticky or self.initial != 1):
            raise MethodError(f"dynamic-ntk: sticky and initial go with growth='even' only, got growth={self.growth!r}")

    @classmethod
    def takes_factor(cls, values: Mapping[str, Any]) -> bool:
        return values.get("growth") == "hf"

    @property
    def sticky_length(self) -> bool:
        return self.sticky

    def label(self) -> str:
        """Return the label with the rule of growth, even if it is the default rule."""
        rest = super().label().removeprefix(self.name).removeprefix(f" {self.growth}")
        return f"{self.name} {self.growth}{rest}"

    @property
    def piecewise_constant(self) -> bool:
        return self.growth in ("even", "pow2")

    def next_change(self, rotary: Rotary, length: int) -> int:
        ratio = length / rotary.context_length
        if self.growth == "even":
            k = self.initial if ratio <= self.initial else 2 * math.ceil(ratio / 2)
            return math.floor(k * rotary.context_length)
        if self.growth == "pow2":
            return int(rotary.context_length * 2 ** max(0, math.ceil(math.log2(ratio))))
        return super().next_change(rotary, length)

    def check(self, rotary: Rotary) -> None:
        check_at_least_four_dims(self.name, rotary)

    def alpha(self, rotary: Rotary, length: Tensor) -> Tensor:
        """Return alpha, the factor of NTK scaling, for inputs of these lengths: a tensor in the shape of `length`."""
        ratio = length / rotary.context_length
        grown = ratio.clamp(min=1)
        if self.growth == "hf":
            assert self.factor is not None
            return self.factor * grown - (self.factor - 1)
        if self.growth == "even":
            return torch.where(ratio <= self.initial, self.initial, 2 * torch.ceil(ratio / 2))
        if self.growth == "pow2":
            return torch.where(ratio > 1, 2 ** torch.ceil(torch.log2(grown) + 1) - 1, 1.0)
        return grown

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return ntk_inv_freq(rotary, self.alpha(rotary, length), length.device), 1.0

    def approximate_rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        """Return `rope_parameters` for transformers' "dynamic", which is similar to this method.

        It has the same rule, but it remembers the lengths of earlier calls, and uses one length for all rows of a
        batch.
        """
        if self.growth != "hf" or rotary.own is not None:
            return None
        return {"rope_type": "dynamic", "rope_theta": rotary.theta, "factor": self.factor}


@register_method("dynamic-yarn")
@dataclass(frozen=True, kw_only=True)
class DynamicYarn(RampedMethod):
    """YaRN whose factor is the length of the input over the context length (arXiv 2309.00071, sec. 3.3 and 3.4).

    With s = max(1, L / C), pair i gets w_i (1 - r_i) + (w_i / s) r_i, with the ramp r_i of `RampedMethod`; cos and sin
    are multiplied by 0.1 ln s + 1.
    """

    length_dependent = True

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        factor = (length / rotary.context_length).clamp(min=1)
        return self.interpolate(rotary, factor, length.device), 0.1 * factor.log() + 1


@register_method("longrope", aliases=["su"])
@dataclass(frozen=True, kw_only=True)
class LongRoPE(RopeMethod):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753, sec. 3): a divisor for each pair, which a search has found.

    The frequency of pair i is w_i / short_factor[i] for inputs of up to C tokens, and w_i / long_factor[i] for longer
    ones. At every length, cos and sin are multiplied by `attention_factor`; default: sqrt(1 + ln s / ln C) with
    s = `factor`. C is the context length of the unpatched model; for a plain model the trained length L0.
    """

    composable = True

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    factor: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_divisors(self, "short_factor", "long_factor")
        if self.factor is None and self.attention_factor is None:
            raise MethodError("longrope: give factor (or target_length), or attention_factor")

    @property
    def length_dependent(self) -> bool:
        return self.short_factor != self.long_factor

    @property
    def piecewise_constant(self) -> bool:
        return self.length_dependent

    def next_change(self, rotary: Rotary, length: int) -> int:
        return UNBOUNDED if length > rotary.context_length else super().next_change(rotary, length)

    def check(self, rotary: Rotary) -> None:
        check_divisors(self, "short_factor", "long_factor", rotary=rotary)
        if self.attention_factor is None and rotary.context_length == 1:
            raise MethodError("longrope: a trained length of 1 token has no attention factor (ln 1 = 0); give one")

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        own = rotary.inv_freq(length.device)
        inv_freq = divide(own, self.long_factor)
        if self.length_dependent:
            inv_freq = torch.where(length > rotary.context_length, inv_freq, divide(own, self.short_factor))
        attention_factor = self.attention_factor
        if attention_factor is None:
            attention_factor = math.sqrt(1 + math.log(self.factor or 1.0) / math.log(rotary.context_length))
        return inv_freq, attention_factor

    def rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        if not self.length_dependent:
            return super().rope_parameters(rotary)
        if rotary.rotated_pairs is not None:
            return None
        if rotary.length_dependent:  # over the model's own two lists there are three, and transformers has two
            return None
        if rotary.own is None:
            return self.plain_rope_parameters(rotary)
        whole = self.longrope_parameters(rotary, SHORT_AND_LONG)
        return whole | {"original_max_position_embeddings": rotary.context_length}

    def plain_rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        lists = {"short_factor": list(self.short_factor), "long_factor": list(self.long_factor)}
        return self.longrope_parameters(rotary) | lists
