"""Frequency methods whose frequencies do not depend on the length of the input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import TWO_PI, RopeMethod, Rotary, constant
from rope_ext_hf.methods.registry import register_method


@register_method("default")
@dataclass(frozen=True, kw_only=True)
class Default(RopeMethod):
    """RoPE as the model was trained with it (Su et al. 2021, arXiv 2104.09864)."""

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(length.device), 1.0

    def rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        if rotary.own is not None:  # the scaling underneath, as it was
            return rotary.own.method.rope_parameters(rotary.own.rotary)
        return _theta_parameters(rotary, rotary.theta)

    def extended_length(self, rotary: Rotary) -> int | None:
        return rotary.context_length


@register_method("linear", aliases=["position-interpolation", "linear-interpolation", "pi"])
@dataclass(frozen=True, kw_only=True)
class Linear(RopeMethod):
    """Position Interpolation (Chen et al. 2023, arXiv 2306.15595): positions divided by the factor."""

    factor: float

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(length.device) / self.factor, 1.0

    def rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        factor = self.factor
        if rotary.own is not None:
            if not isinstance(rotary.own.method, Linear) or rotary.own.rotary.own is not None:
                return super().rope_parameters(rotary)
            factor *= rotary.own.method.factor  # linear over linear
        rope_type = "linear" if rotary.rotated_pairs is None else "proportional"
        return {"rope_type": rope_type, "rope_theta": rotary.theta, "factor": factor}


@register_method("theta", aliases=["adjusted-base-frequency", "abf"])
@dataclass(frozen=True, kw_only=True)
class Theta(RopeMethod):
    """Adjusted base frequency (Code Llama, Roziere et al. 2023, arXiv 2308.12950, sec. 2.4): another base, given."""

    theta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.theta <= 1:
            raise MethodError(f"theta: theta must be above 1, got {self.theta:g}")

    def check(self, rotary: Rotary) -> None:
        if rotary.own is not None:
            raise MethodError(
                f"theta: this model was trained under {rotary.own.method.name}, and another base cannot be put "
                "underneath it; use ntk, or replace the scaling with over='original'"
            )

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.theta_inv_freq(self.theta, length.device), 1.0

    def rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        return _theta_parameters(rotary, self.theta)


def _theta_parameters(rotary: Rotary, theta: float) -> dict[str, Any]:
    return {"rope_type": "default" if rotary.rotated_pairs is None else "proportional", "rope_theta": theta}


def ntk_theta(rotary: Rotary, alpha: Any) -> Any:
    """b' = b alpha^(d/(d-2)): leaves the highest frequency alone and divides the lowest by exactly alpha."""
    return rotary.theta * alpha ** (rotary.dim / (rotary.dim - 2))


def ntk_inv_freq(rotary: Rotary, alpha: Any, device: torch.device) -> Tensor:
    """theta_i with the base b'; over a scaling w_i alpha^(-2i/(d-2)), which is the same where w_i = theta_i."""
    if rotary.own is None:
        return rotary.theta_inv_freq(ntk_theta(rotary, alpha), device)
    dims = torch.arange(0, rotary.dim, 2, dtype=torch.float64, device=device)
    divisors: Tensor = alpha ** (dims / (rotary.dim - 2))
    return rotary.inv_freq(device) / divisors


def check_at_least_four_dims(name: str, rotary: Rotary) -> None:
    if rotary.dim < 4:
        raise MethodError(f"{name} needs at least 4 rotated dims (its exponent is d/(d-2)), got {rotary.dim}")


@register_method("ntk", aliases=["ntk-aware"])
@dataclass(frozen=True, kw_only=True)
class NTK(RopeMethod):
    """NTK-aware scaling (bloc97 2023; YaRN paper, arXiv 2309.00071, sec. 3.1): a larger base, alpha = factor."""

    factor: float

    def check(self, rotary: Rotary) -> None:
        check_at_least_four_dims(self.name, rotary)

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return ntk_inv_freq(rotary, self.factor, length.device), 1.0

    def rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        if rotary.own is not None:
            return super().rope_parameters(rotary)
        return _theta_parameters(rotary, ntk_theta(rotary, self.factor))


def _index_of_cycles(rotary: Rotary, cycles: float) -> float:
    """The index, not a whole one, of the pair that rotates so many full cycles over the context length.

    Over a scaling: where ln(C w_i / 2 pi), piecewise linear in i, first falls to ln(cycles); outside the pairs there
    are, it falls as it does for a plain model, by 2 ln(b) / d from one pair to the next.
    """
    if rotary.own is None:
        return rotary.dim * math.log(rotary.trained_length / (TWO_PI * cycles)) / (2 * math.log(rotary.theta))
    slope = 2 * math.log(rotary.theta) / rotary.dim
    turns = [rotary.context_length * w / TWO_PI for w in rotary.own_frequencies[: rotary.rotated_pairs]]
    excess = [math.log(each / cycles) if each > 0 else -math.inf for each in turns]
    if excess[0] <= 0:
        return excess[0] / slope
    for index, (before, after) in enumerate(pairwise(excess)):
        if after <= 0:
            return index + before / (before - after)
    return len(excess) - 1 + excess[-1] / slope


def _ramp_by_cycles(rotary: Rotary, beta_fast: float, beta_slow: float, inv_freq: Tensor) -> Tensor:
    """0 (keep) to 1 (interpolate), linear in the cycles over the context length (YaRN paper, Def. 2); (dim // 2,)."""
    cycles = rotary.context_length * inv_freq / TWO_PI
    if beta_fast == beta_slow:  # a step
        return (cycles < beta_fast).to(torch.float64)
    return ((beta_fast - cycles) / (beta_fast - beta_slow)).clamp(0, 1)


def _check_descending(method: RopeMethod, high: str, low: str) -> None:
    a, b = getattr(method, high), getattr(method, low)
    if not a >= b > 0:
        raise MethodError(
            f"{method.name}: {high} must be at least {low} and both above 0, got {high}={a:g}, {low}={b:g}"
        )


def _interpolate(inv_freq: Tensor, factor: float | Tensor, ramp: Tensor) -> Tensor:
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp


_MANY_CYCLES = 8
"""Where pairs are dense, the ramp of YaRN (32 to 1 cycles) keeps more than half of such a pair's frequency."""


@dataclass(frozen=True, kw_only=True)
class BandedMethod(RopeMethod):
    """Base of the methods that treat fast, slow and other pairs apart, by their full cycles over the context length.

    A pair that completes `beta_fast` cycles or more keeps its frequency, a pair that completes `beta_slow` or fewer is
    interpolated.
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_descending(self, "beta_fast", "beta_slow")


@dataclass(frozen=True, kw_only=True)
class RampedMethod(BandedMethod):
    """Base of by-parts, yarn and dynamic-yarn: between the two kinds of pairs, a share is interpolated.

    `ramp` names what the share is linear in: the "dimension" index (the authors' code and transformers; `truncate`
    rounds its ends to whole indices) or the number of cycles ("cycles", the paper's text). Equal betas make a step
    (Kimi K2).
    """

    ramp: Literal["dimension", "cycles"] = "dimension"
    truncate: bool = True

    def interpolate(self, rotary: Rotary, factor: float | Tensor, device: torch.device) -> Tensor:
        inv_freq = rotary.inv_freq(device)
        return _interpolate(inv_freq, factor, self._ramp(rotary, inv_freq))

    def _ramp(self, rotary: Rotary, inv_freq: Tensor) -> Tensor:
        """0 (keep) to 1 (interpolate), (dim // 2,); linear in the dim index as in the YaRN authors' code."""
        if self.ramp == "cycles":
            return _ramp_by_cycles(rotary, self.beta_fast, self.beta_slow, inv_freq)
        low, high = _index_of_cycles(rotary, self.beta_fast), _index_of_cycles(rotary, self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary.dim - 1)
        if low == high:
            high += 0.001
        index = torch.arange(rotary.dim // 2, dtype=torch.float64, device=inv_freq.device)
        return ((index - low) / (high - low)).clamp(0, 1)

    def cautions(self, rotary: Rotary) -> tuple[str, ...]:
        inv_freq = rotary.inv_freq()
        cycles = rotary.context_length * inv_freq / TWO_PI
        slowed = (self._ramp(rotary, inv_freq) >= 0.5) & (cycles >= _MANY_CYCLES)
        if not slowed.any():
            return ()
        return (
            f"At least half of the interpolation falls on {int(slowed.sum())} of {len(cycles)} pairs that complete "
            f"{_MANY_CYCLES} cycles or more within the context length; a smaller beta_fast leaves them as they are. "
            "Models differ in whether that helps: compare the two on your own text.",
        )


@register_method("by-parts", aliases=["ntk-by-parts"])
@dataclass(frozen=True, kw_only=True)
class ByParts(RampedMethod):
    """NTK-by-parts (YaRN paper, arXiv 2309.00071, sec. 3.2): interpolate slow pairs, keep fast ones."""

    factor: float

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return self.interpolate(rotary, self.factor, length.device), 1.0

    def plain_rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        if self.ramp == "cycles":
            limits = {"low_freq_factor": self.beta_slow, "high_freq_factor": self.beta_fast}
            return Llama3(factor=self.factor, **limits).plain_rope_parameters(rotary)
        return _counted_parameters("yarn", rotary, self, attention_factor=1.0)


@register_method("yarn")
@dataclass(frozen=True, kw_only=True)
class Yarn(RampedMethod):
    """YaRN (Peng et al. 2023, arXiv 2309.00071, sec. 3.4): by-parts interpolation plus attention temperature scaling.

    The temperature t of the softmax is applied to cos and sin: they are multiplied by sqrt(1/t), which is
    `attention_factor` if given; else g(s, mscale) / g(s, mscale_all_dim) if both are set (DeepSeek); else g(s, 1),
    where g(s, m) = 0.1 m ln s + 1. Over a scaling the model was trained with, its attention factor is multiplied in.
    """

    factor: float
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return self.interpolate(rotary, self.factor, length.device), self._attention_factor()

    def _attention_factor(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:  # 0 means "not set" in every published config
            return _yarn_magnitude(self.factor, self.mscale) / _yarn_magnitude(self.factor, self.mscale_all_dim)
        return _yarn_magnitude(self.factor)

    def plain_rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        if self.ramp == "cycles":
            return super().plain_rope_parameters(rotary)
        return _counted_parameters("yarn", rotary, self)


def _yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1


def _counted_parameters(rope_type: str, rotary: Rotary, method: RopeMethod, **rest: float) -> dict[str, Any]:
    """Settings of a rope type that is counted from the original length, and has the parameters of a method."""
    given = {key: value for key, value in method.to_dict().items() if key not in ("method", "ramp")} | rest
    given = {key: value if isinstance(value, bool) else float(value) for key, value in given.items()}
    original = {"original_max_position_embeddings": rotary.trained_length}
    return {"rope_type": rope_type, "rope_theta": rotary.theta, "factor": given.pop("factor"), **given, **original}


@register_method("llama3")
@dataclass(frozen=True, kw_only=True)
class Llama3(RopeMethod):
    """Llama 3.1's scaling (Dubey et al. 2024, arXiv 2407.21783): by-parts with the ramp in cycles, 1 to 4."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_descending(self, "high_freq_factor", "low_freq_factor")  # Llama 4 Scout has 1 and 1: a step

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        inv_freq = rotary.inv_freq(length.device)
        ramp = _ramp_by_cycles(rotary, self.high_freq_factor, self.low_freq_factor, inv_freq)
        return _interpolate(inv_freq, self.factor, ramp), 1.0

    def plain_rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        return _counted_parameters("llama3", rotary, self)


@register_method("mrrope")
@dataclass(frozen=True, kw_only=True)
class MrRoPE(BandedMethod):
    """MrRoPE (arXiv 2601.22181, ICLR 2026, eq. 13-16): divisors that grow by a factor from each pair to the next.

    With lo the last pair of more than `beta_fast` cycles over the context length, hi the first of fewer than
    `beta_slow`, N = hi - lo, and t = i - lo within 0 and N: pair i is divided by s^(t/N) (radix "uniform"), or by
    s^(t(t+1)/(N(N+1))), so that the factors grow as well ("progressive"). cos and sin are multiplied by
    `attention_factor`, YaRN's 0.1 ln s + 1 unless given.
    """

    factor: float
    radix: Literal["progressive", "uniform"] = "progressive"
    attention_factor: float | None = None

    def check(self, rotary: Rotary) -> None:
        self._band(rotary)

    def _band(self, rotary: Rotary) -> tuple[int, int]:
        """lo and hi."""
        cycles = (rotary.context_length * rotary.inv_freq()[: rotary.rotated_pairs] / TWO_PI).tolist()
        fast = [index for index, each in enumerate(cycles) if each > self.beta_fast]
        slow = [index for index, each in enumerate(cycles) if each < self.beta_slow]
        if fast and slow and fast[-1] < slow[0]:
            return fast[-1], slow[0]
        raise MethodError(
            f"{self.name} needs pairs that complete more than beta_fast={self.beta_fast:g} cycles over the context "
            f"length and, after them, pairs of fewer than beta_slow={self.beta_slow:g}; the {len(cycles)} here "
            f"complete {max(cycles, default=0):.4g} to {min(cycles, default=0):.4g}; give other betas, or use yarn"
        )

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        first, last = self._band(rotary)
        count, pairs = last - first, torch.arange(rotary.dim // 2, dtype=torch.float64, device=length.device)
        step = (pairs - first).clamp(0, count)
        share = step / count if self.radix == "uniform" else step * (step + 1) / (count * (count + 1))
        attention_factor = self.attention_factor or _yarn_magnitude(self.factor)
        return rotary.inv_freq(length.device) / self.factor**share, attention_factor


def check_divisors(method: RopeMethod, *keys: str, rotary: Rotary | None = None) -> None:
    for key in keys:
        divisors: Sequence[float] = getattr(method, key)
        if rotary is not None and len(divisors) != rotary.dim // 2:
            raise MethodError(
                f"{method.name}: {key} needs one number per pair of rotated dims, {rotary.dim // 2} for this model; "
                f"got {len(divisors)}"
            )
        if any(divisor <= 0 for divisor in divisors):
            raise MethodError(f"{method.name}: every number in {key} must be above 0, got {min(divisors):g}")


@register_method("factors")
@dataclass(frozen=True, kw_only=True)
class Factors(RopeMethod):
    """Any static scaling, spelled out: the inverse frequency of pair i divided by factors[i]."""

    factors: tuple[float, ...]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_divisors(self, "factors")

    def check(self, rotary: Rotary) -> None:
        check_divisors(self, "factors", rotary=rotary)

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(length.device) / constant(self.factors, length.device), self.attention_factor


@register_method("learnable")
@dataclass(frozen=True, kw_only=True)
class Learnable(RopeMethod):
    """Frequencies that are trained with the model: theta_i exp(a_i), a = 0 at first (Su 2021, kexue.fm/archives/8265).

    In a rotary module the a_i are a `torch.nn.Parameter`, one number for each pair. `log_scales`: where they begin;
    none: all at 0, where nothing changes.
    """

    trainable = "log_scales"
    log_scales: tuple[float, ...] = ()

    def check(self, rotary: Rotary) -> None:
        if self.log_scales and len(self.log_scales) != rotary.dim // 2:
            raise MethodError(
                f"{self.name}: log_scales needs one number for each of {rotary.dim // 2} pairs, got "
                f"{len(self.log_scales)}"
            )
        if rotary.length_dependent:
            raise MethodError(
                f"{self.name} needs frequencies that do not depend on the length of the input, and those of this "
                "model's own scaling do; replace them with over='original'"
            )

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        scales = self.log_scales or (0.0,) * (rotary.dim // 2)
        return self.trained_inv_freq(rotary, constant(scales, length.device)), 1.0

    def trained_inv_freq(self, rotary: Rotary, values: Tensor) -> Tensor:
        return rotary.inv_freq(values.device).to(values.dtype) * values.exp()

    def extended_length(self, rotary: Rotary) -> int | None:
        return rotary.context_length
