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
from rope_ext_hf.methods.base import TWO_PI, RopeMethod, Rotary, constant, divide
from rope_ext_hf.methods.registry import register_method


@register_method("default")
@dataclass(frozen=True, kw_only=True)
class Default(RopeMethod):
    """RoPE as the model was trained with it: theta_i = b^(-2i/d) (Su et al. 2021, arXiv 2104.09864, sec. 3.2.2).

    In a model with a scaling of its own, that scaling stays.
    """

    changes_frequencies = False

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(length.device), 1.0

    def rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        if rotary.own is not None:
            return rotary.own.method.rope_parameters(rotary.own.rotary)
        return _theta_parameters(rotary, rotary.theta)

    def extended_length(self, rotary: Rotary) -> int | None:
        return rotary.context_length


@register_method("linear", aliases=["position-interpolation", "linear-interpolation", "pi"])
@dataclass(frozen=True, kw_only=True)
class Linear(RopeMethod):
    """Position Interpolation (Chen et al. 2023, arXiv 2306.15595, sec. 2.3): positions divided by the factor.

    All frequencies become w_i / s, which is the same as positions m / s.
    """

    factor: float

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(length.device) / self.factor, 1.0

    def rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        factor = self.factor
        if rotary.own is not None:
            if not isinstance(rotary.own.method, Linear) or rotary.own.rotary.own is not None:
                return super().rope_parameters(rotary)
            factor *= rotary.own.method.factor  # linear over linear is linear by the product of both factors
        rope_type = "linear" if rotary.rotated_pairs is None else "proportional"
        return {"rope_type": rope_type, "rope_theta": rotary.theta, "factor": factor}


@register_method("theta", aliases=["adjusted-base-frequency", "abf"])
@dataclass(frozen=True, kw_only=True)
class Theta(RopeMethod):
    """Adjusted base frequency (Code Llama, Roziere et al. 2023, arXiv 2308.12950, sec. 2.4): another base b.

    Frequencies become theta^(-2i/d). `theta`: the new base, such as 1e6 for Code Llama.
    """

    theta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.theta <= 1:
            raise MethodError(f"theta: theta must be above 1, got {self.theta:g}")

    def check(self, rotary: Rotary) -> None:
        if rotary.own is not None:
            raise MethodError(
                f"theta: this model was trained under {rotary.own.method.name}, and another base cannot be put "
                "underneath it; use ntk, which goes over it, or replace the scaling with over='original'"
            )

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.theta_inv_freq(self.theta, length.device), 1.0

    def rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        return _theta_parameters(rotary, self.theta)


def _theta_parameters(rotary: Rotary, theta: float) -> dict[str, Any]:
    """Return the `rope_parameters` for plain RoPE with the base `theta`."""
    return {"rope_type": "default" if rotary.rotated_pairs is None else "proportional", "rope_theta": theta}


def ntk_theta(rotary: Rotary, alpha: Any) -> Any:
    """Return the base of NTK-aware scaling: b' = b alpha^(d/(d-2)).

    With it the highest frequency stays as it is, and the lowest is divided by exactly alpha.
    """
    return rotary.theta * alpha ** (rotary.dim / (rotary.dim - 2))


def ntk_inv_freq(rotary: Rotary, alpha: Any, device: torch.device) -> Tensor:
    """Return the inverse frequencies of NTK-aware scaling, (..., dim // 2): theta_i with the base b' of `ntk_theta`.

    If the model has a scaling of its own, pair i gets w_i alpha^(-2i/(d-2)), which is the same where w_i = theta_i.

    Args:
        rotary: the rotary embedding of the model.
        alpha: one number, or a tensor (..., 1).
        device: the device of the result.
    """
    if rotary.own is None:
        return rotary.theta_inv_freq(ntk_theta(rotary, alpha), device)
    dims = torch.arange(0, rotary.dim, 2, dtype=torch.float64, device=device)
    divisors: Tensor = alpha ** (dims / (rotary.dim - 2))
    return rotary.inv_freq(device) / divisors


def check_at_least_four_dims(name: str, rotary: Rotary) -> None:
    """Raise MethodError if only two dims rotate: the exponent d/(d-2) of NTK-aware scaling would be infinite."""
    if rotary.dim < 4:
        raise MethodError(f"{name} needs at least 4 rotated dims (its exponent is d/(d-2)), got {rotary.dim}")


@register_method("ntk", aliases=["ntk-aware"])
@dataclass(frozen=True, kw_only=True)
class NTK(RopeMethod):
    """NTK-aware scaling (bloc97 2023; YaRN paper, arXiv 2309.00071, sec. 3.1): the base b' = b s^(d/(d-2)).

    The fastest pair keeps its frequency, the slowest is divided by s.
    """

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
    """Return the index i, a fraction in general, of the pair that completes `cycles` cycles over the context length.

    It solves C b^(-2i/d) / 2 pi = cycles (find_correction_dim in the code of the YaRN authors). Without a scaling of
    its own, the context length C of a model is its trained length.
    """
    if rotary.own is not None:
        return _index_over_scaling(rotary, cycles)
    return rotary.dim * math.log(rotary.trained_length / (TWO_PI * cycles)) / (2 * math.log(rotary.theta))


def _index_over_scaling(rotary: Rotary, cycles: float) -> float:
    """Return the index as `_index_of_cycles` does, in a model with a scaling of its own.

    It is where ln(C w_i / 2 pi), taken as piecewise linear in i, first falls to ln(cycles). Before the first and after
    the last pair it falls as in a plain model, by 2 ln(b) / d from one pair to the next.
    """
    slope = 2 * math.log(rotary.theta) / rotary.dim
    excess = []  # ln(C w_i / 2 pi) - ln(cycles) of each pair
    for w in rotary.own_frequencies[: rotary.rotated_pairs]:
        completed = rotary.context_length * w / TWO_PI
        excess.append(math.log(completed / cycles) if completed > 0 else -math.inf)
    if excess[0] <= 0:
        return excess[0] / slope
    for index, (before, after) in enumerate(pairwise(excess)):
        if after <= 0:
            return index + before / (before - after)
    return len(excess) - 1 + excess[-1] / slope


def _ramp_by_cycles(rotary: Rotary, beta_fast: float, beta_slow: float, inv_freq: Tensor) -> Tensor:
    """Return how much of each pair is interpolated, (dim // 2,), linear in its cycles over the context length.

    It is 1 - gamma(r) with the ramp gamma of the YaRN paper (arXiv 2309.00071, Def. 2): 0 from `beta_fast` cycles up, 1
    from `beta_slow` cycles down.
    """
    cycles = rotary.context_length * inv_freq / TWO_PI
    if beta_fast == beta_slow:  # a step
        return (cycles < beta_fast).to(torch.float64)
    return ((beta_fast - cycles) / (beta_fast - beta_slow)).clamp(0, 1)


def _check_descending(method: RopeMethod, high: str, low: str) -> None:
    """Raise MethodError unless the parameter named `high` is at least as large as the one named `low`.

    Both must be above 0.
    """
    higher, lower = getattr(method, high), getattr(method, low)
    if not higher >= lower > 0:
        raise MethodError(
            f"{method.name}: {high} must be at least {low} and both above 0, got {high}={higher:g}, {low}={lower:g}"
        )


_MANY_CYCLES = 8
"""Cycles over the context length of a pair that is usually kept: with enough pairs, YaRN's ramp from 32 to 1 cycles
interpolates less than half of it."""


@dataclass(frozen=True, kw_only=True)
class RampedMethod(RopeMethod):
    """Base of by-parts, yarn and dynamic-yarn, which slow down pairs of few cycles over the context length.

    Pair i completes C w_i / 2 pi cycles. A pair of `beta_fast` cycles or more keeps its frequency, a pair of
    `beta_slow` cycles or fewer gets w_i / s, and a pair between them w_i (1 - r_i) + (w_i / s) r_i. `ramp` says what
    r_i is linear in: the index of the pair ("dimension", the YaRN authors' code and transformers; `truncate` rounds the
    ends of the ramp to whole indices), or its number of cycles ("cycles", the text of the paper). Equal betas make a
    step (Kimi K2).
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ramp: Literal["dimension", "cycles"] = "dimension"
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_descending(self, "beta_fast", "beta_slow")

    def interpolate(self, rotary: Rotary, factor: float | Tensor, device: torch.device) -> Tensor:
        """Return the inverse frequencies w_i (1 - r_i) + (w_i / s) r_i, (..., dim // 2) (YaRN paper, Def. 2).

        `factor`: the divisor s of slow pairs, one number or a tensor (..., 1).
        """
        inv_freq = rotary.inv_freq(device)
        share = self._share(rotary, inv_freq)
        return inv_freq * (1 - share) + inv_freq / factor * share

    def _share(self, rotary: Rotary, inv_freq: Tensor) -> Tensor:
        """Return how much each pair is interpolated, from 0 (not at all) to 1 (fully): r_i, a tensor (dim // 2,)."""
        if self.ramp == "cycles":
            return _ramp_by_cycles(rotary, self.beta_fast, self.beta_slow, inv_freq)
        low, high = _index_of_cycles(rotary, self.beta_fast), _index_of_cycles(rotary, self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary.dim - 1)
        if low == high:  # as in the authors' code, so that the ramp has a slope
            high += 0.001
        index = torch.arange(rotary.dim // 2, dtype=torch.float64, device=inv_freq.device)
        return ((index - low) / (high - low)).clamp(0, 1)

    def cautions(self, rotary: Rotary) -> tuple[str, ...]:
        inv_freq = rotary.inv_freq()
        cycles = rotary.context_length * inv_freq / TWO_PI
        slowed = (self._share(rotary, inv_freq) >= 0.5) & (cycles >= _MANY_CYCLES)
        if not slowed.any():
            return ()
        return (
            f"{int(slowed.sum())} of {len(cycles)} pairs complete {_MANY_CYCLES} cycles or more within the context "
            "length, and are interpolated by at least half all the same; a smaller beta_fast leaves them as they are. "
            "Models differ in whether that helps: compare the two on your own text.",
        )


@register_method("by-parts", aliases=["ntk-by-parts"])
@dataclass(frozen=True, kw_only=True)
class ByParts(RampedMethod):
    """NTK-by-parts (bloc97 2023; YaRN paper, arXiv 2309.00071, sec. 3.2): interpolate slow pairs, keep fast ones.

    Pair i gets w_i (1 - r_i) + (w_i / s) r_i, with the ramp r_i of `RampedMethod`.
    """

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

    Pair i gets w_i (1 - r_i) + (w_i / s) r_i, with the ramp r_i of `RampedMethod`. The temperature t of the softmax
    goes into cos and sin, which are multiplied by sqrt(1/t). That factor is

    - `attention_factor` where it is set;
    - g(s, mscale) / g(s, mscale_all_dim) where both are set (DeepSeek);
    - else g(s, 1) = 0.1 ln s + 1, as in the paper,

    with g(s, m) = 0.1 m ln s + 1. In a model that was trained under a scaling, it multiplies the attention factor of
    that scaling.
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
        # transformers works out the same attention factor from these, so that it is stated only if it was given
        return _counted_parameters("yarn", rotary, self)


def _yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return g(s, m) = 0.1 m ln s + 1, which YaRN multiplies cos and sin by."""
    return 0.1 * mscale * math.log(factor) + 1


def _counted_parameters(rope_type: str, rotary: Rotary, method: RopeMethod, **rest: float) -> dict[str, Any]:
    """Return the `rope_parameters` for a rope type of transformers that has the same parameters as the method.

    `rest`: further parameters that the rope type needs.
    """
    own = method.to_dict() | rest
    parameters = {"rope_type": rope_type, "rope_theta": rotary.theta, "factor": float(own.pop("factor"))}
    for key, value in own.items():
        if key not in ("method", "ramp"):
            parameters[key] = value if isinstance(value, bool) else float(value)
    return parameters | {"original_max_position_embeddings": rotary.trained_length}


@register_method("llama3")
@dataclass(frozen=True, kw_only=True)
class Llama3(RopeMethod):
    """Llama 3.1's scaling (Dubey et al. 2024, arXiv 2407.21783, and its code): by-parts with a ramp from 1 to 4 cycles.

    Pair i gets w_i (1 - r_i) + (w_i / s) r_i. With c_i = C w_i / 2 pi cycles over the context length, r_i is 0 for
    c_i >= `high_freq_factor`, 1 for c_i <= `low_freq_factor`, and linear in c_i between them.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_descending(self, "high_freq_factor", "low_freq_factor")  # Llama 4 Scout has 1 and 1: a step

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        inv_freq = rotary.inv_freq(length.device)
        ramp = _ramp_by_cycles(rotary, self.high_freq_factor, self.low_freq_factor, inv_freq)
        return inv_freq * (1 - ramp) + inv_freq / self.factor * ramp, 1.0

    def plain_rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        return _counted_parameters("llama3", rotary, self)


@register_method("mrrope")
@dataclass(frozen=True, kw_only=True)
class MrRoPE(RopeMethod):
    """MrRoPE (arXiv 2601.22181, ICLR 2026, eq. 13-16): divisors that grow by a factor from each pair to the next.

    Let lo be the last pair of more than `beta_fast` cycles over the context length, hi the first pair of fewer than
    `beta_slow`, N = hi - lo, and t = i - lo, limited to 0 ... N. Then the frequency of pair i is w_i divided by

    - s^(t/N) with the radix "uniform": each divisor is the same multiple of the one before;
    - s^(t(t+1)/(N(N+1))) with the radix "progressive": the multiples grow as well.

    cos and sin are multiplied by `attention_factor`; default: YaRN's 0.1 ln s + 1.
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    factor: float
    radix: Literal["progressive", "uniform"] = "progressive"
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_descending(self, "beta_fast", "beta_slow")

    def check(self, rotary: Rotary) -> None:
        self._band(rotary)

    def _band(self, rotary: Rotary) -> tuple[int, int]:
        """Return the first and the last pair of the range in which divisors grow.

        They are the last pair that completes more than `beta_fast` cycles, and the first that completes fewer than
        `beta_slow`.
        """
        cycles = (rotary.context_length * rotary.inv_freq()[: rotary.rotated_pairs] / TWO_PI).tolist()
        fast = [index for index, completed in enumerate(cycles) if completed > self.beta_fast]
        slow = [index for index, completed in enumerate(cycles) if completed < self.beta_slow]
        if fast and slow and fast[-1] < slow[0]:
            return fast[-1], slow[0]
        raise MethodError(
            f"{self.name} needs pairs that complete more than beta_fast={self.beta_fast:g} cycles over the context "
            f"length and, after them, pairs that complete fewer than beta_slow={self.beta_slow:g}. The {len(cycles)} "
            f"pairs of this model complete {max(cycles, default=0):.4g} to {min(cycles, default=0):.4g}: give other "
            "betas, or use yarn"
        )

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        low, high = self._band(rotary)
        count = high - low
        pairs = torch.arange(rotary.dim // 2, dtype=torch.float64, device=length.device)
        step = (pairs - low).clamp(0, count)
        share = step / count if self.radix == "uniform" else step * (step + 1) / (count * (count + 1))
        attention_factor = self.attention_factor or _yarn_magnitude(self.factor)
        return rotary.inv_freq(length.device) / self.factor**share, attention_factor


def check_divisors(method: RopeMethod, *keys: str, rotary: Rotary | None = None) -> None:
    """Raise MethodError unless each of these fields is a list of positive numbers.

    With `rotary`, each list must also have one number for each pair of rotated dims.
    """
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
    """Any static scaling, written out: the inverse frequency of pair i divided by factors[i].

    Pair i gets w_i / factors[i]. `attention_factor`: the factor of cos and sin.
    """

    factors: tuple[float, ...]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_divisors(self, "factors")

    def check(self, rotary: Rotary) -> None:
        check_divisors(self, "factors", rotary=rotary)

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return divide(rotary.inv_freq(length.device), self.factors), self.attention_factor


@register_method("learnable")
@dataclass(frozen=True, kw_only=True)
class Learnable(RopeMethod):
    """Frequencies that are trained with the model: w_i exp(a_i), a_i = 0 at first (Su 2021, kexue.fm/archives/8265).

    In a rotary module the a_i are a `torch.nn.Parameter`, one number for each pair. `log_scales`: their values before
    training; empty: all 0, which changes nothing.
    """

    trainable = "log_scales"
    log_scales: tuple[float, ...] = ()

    def check(self, rotary: Rotary) -> None:
        if self.log_scales and len(self.log_scales) != rotary.dim // 2:
            raise MethodError(
                f"{self.name}: log_scales needs one number for each of the {rotary.dim // 2} pairs of this model, got "
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
