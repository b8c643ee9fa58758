"""Frequency methods whose frequencies do not depend on the length of the input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import TWO_PI, RopeMethod, Rotary
from rope_ext_hf.methods.constants import device_constant
from rope_ext_hf.methods.registry import register_method

__all__ = ["NTK", "ByParts", "Default", "Factors", "Linear", "Llama3", "Theta", "Yarn", "ntk_theta"]


@register_method("default")
@dataclass(frozen=True, kw_only=True)
class Default(RopeMethod):
    """RoPE as trained (Su et al. 2021, arXiv 2104.09864)."""

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(device=length.device), 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        return _theta_parameters(rotary, rotary.theta)

    def extended_length(self, rotary: Rotary) -> int | None:
        return rotary.trained_length


@register_method("linear")
@dataclass(frozen=True, kw_only=True)
class Linear(RopeMethod):
    """Position Interpolation (Chen et al. 2023, arXiv 2306.15595): positions divided by the factor."""

    factor: float

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(device=length.device) / self.factor, 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        return {
            "rope_type": "linear" if rotary.rotated_pairs is None else "proportional",
            "rope_theta": rotary.theta,
            "factor": self.factor,
        }


@register_method("theta")
@dataclass(frozen=True, kw_only=True)
class Theta(RopeMethod):
    """Adjusted base frequency (Code Llama, Roziere et al. 2023, arXiv 2308.12950, sec. 2.4): another base, given."""

    theta: float

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.theta <= 1:
            raise MethodError(f"theta: theta must be above 1, got {self.theta:g}")

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(self.theta, length.device), 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        return _theta_parameters(rotary, self.theta)


def _theta_parameters(rotary: Rotary, theta: float) -> dict[str, Any]:
    return {"rope_type": "default" if rotary.rotated_pairs is None else "proportional", "rope_theta": theta}


def ntk_theta(rotary: Rotary, alpha: Any) -> Any:
    """b' = b alpha^(d/(d-2)): leaves the highest frequency alone and divides the lowest by exactly alpha."""
    return rotary.theta * alpha ** (rotary.dim / (rotary.dim - 2))


def _check_at_least_four_dims(name: str, rotary: Rotary) -> None:
    if rotary.dim < 4:
        raise MethodError(f"{name} needs at least 4 rotated dims (its exponent is d/(d-2)), got {rotary.dim}")


@register_method("ntk")
@dataclass(frozen=True, kw_only=True)
class NTK(RopeMethod):
    """NTK-aware scaling (bloc97 2023; YaRN paper, arXiv 2309.00071, sec. 3.1): a larger base, alpha = factor."""

    factor: float

    def check(self, rotary: Rotary) -> None:
        _check_at_least_four_dims(self.name, rotary)

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(ntk_theta(rotary, self.factor), length.device), 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        return _theta_parameters(rotary, ntk_theta(rotary, self.factor))


def _ramp_by_dimension(rotary: Rotary, beta_fast: float, beta_slow: float, truncate: bool, inv_freq: Tensor) -> Tensor:
    """0 (keep) to 1 (interpolate), linear in the dim index, as in the YaRN authors' code; (dim // 2,)."""

    def dimension(turns: float) -> float:
        return rotary.dim * math.log(rotary.trained_length / (TWO_PI * turns)) / (2 * math.log(rotary.theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary.dim - 1)
    if low == high:
        high += 0.001
    index = torch.arange(rotary.dim // 2, dtype=torch.float64, device=inv_freq.device)
    return ((index - low) / (high - low)).clamp(0, 1)


def _ramp_by_cycles(rotary: Rotary, beta_fast: float, beta_slow: float, inv_freq: Tensor) -> Tensor:
    """0 (keep) to 1 (interpolate), linear in the turns over the trained length (YaRN paper, Def. 2); (dim // 2,)."""
    turns = rotary.trained_length * inv_freq / TWO_PI
    return ((beta_fast - turns) / (beta_fast - beta_slow)).clamp(0, 1)


def _interpolate(inv_freq: Tensor, factor: float | Tensor, ramp: Tensor) -> Tensor:
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp


@dataclass(frozen=True, kw_only=True)
class _Ramped(RopeMethod):
    """What by-parts, yarn and dynamic-yarn share: which dims are interpolated.

    A dim that makes `beta_fast` turns or more over the trained length keeps its frequency, one that makes `beta_slow`
    or fewer is interpolated. `ramp` says what is linear in between: the "dimension" index (the authors' code and
    transformers; `truncate` rounds its ends to whole dims) or the number of "turns" (the paper's text).
    """

    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ramp: Literal["dimension", "turns"] = "dimension"
    truncate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ramp not in ("dimension", "turns"):
            raise MethodError(f"{self.name}: ramp must be 'dimension' or 'turns', got {self.ramp!r}")
        if not self.beta_fast > self.beta_slow > 0:
            raise MethodError(
                f"{self.name}: beta_fast must be above beta_slow and both above 0, "
                f"got beta_fast={self.beta_fast:g}, beta_slow={self.beta_slow:g}"
            )

    def interpolate(self, rotary: Rotary, factor: float | Tensor, device: torch.device) -> Tensor:
        inv_freq = rotary.inv_freq(device=device)
        if self.ramp == "turns":
            return _interpolate(inv_freq, factor, _ramp_by_cycles(rotary, self.beta_fast, self.beta_slow, inv_freq))
        ramp = _ramp_by_dimension(rotary, self.beta_fast, self.beta_slow, self.truncate, inv_freq)
        return _interpolate(inv_freq, factor, ramp)


@register_method("by-parts")
@dataclass(frozen=True, kw_only=True)
class ByParts(_Ramped):
    """NTK-by-parts (YaRN paper, arXiv 2309.00071, sec. 3.2): interpolate slow dims, keep fast ones."""

    factor: float

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return self.interpolate(rotary, self.factor, length.device), 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        if self.ramp == "turns":
            return _native_llama3(rotary, self.factor, self.beta_slow, self.beta_fast)
        return _native_yarn(self, rotary, self.factor, attention_factor=1.0)


@register_method("yarn")
@dataclass(frozen=True, kw_only=True)
class Yarn(_Ramped):
    """YaRN (Peng et al. 2023, arXiv 2309.00071, sec. 3.4): by-parts interpolation with a warmer softmax.

    cos and sin are multiplied by `attention_factor` if given; else by g(s, mscale) / g(s, mscale_all_dim) if both are
    set (DeepSeek); else by g(s, 1), where g(s, m) = 0.1 m ln s + 1.
    """

    factor: float
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_attention_factor(self.name, self.attention_factor)

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return self.interpolate(rotary, self.factor, length.device), self._attention_factor()

    def _attention_factor(self) -> float:
        def g(m: float) -> float:
            return 0.1 * m * math.log(self.factor) + 1

        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:  # 0 means "not set" in every published config
            return g(self.mscale) / g(self.mscale_all_dim)
        return g(1)

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        if self.ramp == "turns":
            return super().native(rotary)
        optional = {
            "mscale": self.mscale,
            "mscale_all_dim": self.mscale_all_dim,
            "attention_factor": self.attention_factor,
        }
        return _native_yarn(
            self, rotary, self.factor, **{key: float(value) for key, value in optional.items() if value is not None}
        )


def _native_yarn(method: _Ramped, rotary: Rotary, factor: float, **optional: float) -> dict[str, Any] | None:
    if rotary.rotated_pairs is not None:
        return None
    return {
        "rope_type": "yarn",
        "rope_theta": rotary.theta,
        "factor": factor,
        "beta_fast": method.beta_fast,
        "beta_slow": method.beta_slow,
        "truncate": method.truncate,
        "original_max_position_embeddings": rotary.trained_length,
        **optional,
    }


def _native_llama3(rotary: Rotary, factor: float, low: float, high: float) -> dict[str, Any] | None:
    if rotary.rotated_pairs is not None:
        return None
    return {
        "rope_type": "llama3",
        "rope_theta": rotary.theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": rotary.trained_length,
    }


@register_method("llama3")
@dataclass(frozen=True, kw_only=True)
class Llama3(RopeMethod):
    """Llama 3.1's scaling (Dubey et al. 2024, arXiv 2407.21783): by-parts with the ramp in turns, 1 to 4."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.high_freq_factor > self.low_freq_factor > 0:
            raise MethodError(
                "llama3: high_freq_factor must be above low_freq_factor and both above 0, "
                f"got high_freq_factor={self.high_freq_factor:g}, low_freq_factor={self.low_freq_factor:g}"
            )

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        inv_freq = rotary.inv_freq(device=length.device)
        return _interpolate(
            inv_freq, self.factor, _ramp_by_cycles(rotary, self.high_freq_factor, self.low_freq_factor, inv_freq)
        ), 1.0

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        return _native_llama3(rotary, self.factor, self.low_freq_factor, self.high_freq_factor)


def _check_divisors(name: str, key: str, divisors: Sequence[float], rotary: Rotary | None = None) -> None:
    if rotary is not None and len(divisors) != rotary.dim // 2:
        raise MethodError(
            f"{name}: {key} needs one number per pair of rotated dims, {rotary.dim // 2} for this model; "
            f"got {len(divisors)}"
        )
    if any(divisor <= 0 for divisor in divisors):
        raise MethodError(f"{name}: every number in {key} must be above 0, got {min(divisors):g}")


def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return device_constant(numbers, torch.float64, device)


def _check_attention_factor(name: str, attention_factor: float | None) -> None:
    if attention_factor is not None and attention_factor <= 0:
        raise MethodError(f"{name}: attention_factor must be above 0, got {attention_factor:g}")


@register_method("factors")
@dataclass(frozen=True, kw_only=True)
class Factors(RopeMethod):
    """Any static scaling, spelled out: inverse frequency i divided by factors[i]."""

    factors: tuple[float, ...]
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_divisors(self.name, "factors", self.factors)
        _check_attention_factor(self.name, self.attention_factor)

    def check(self, rotary: Rotary) -> None:
        _check_divisors(self.name, "factors", self.factors, rotary)

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return rotary.inv_freq(device=length.device) / _on_device(self.factors, length.device), self.attention_factor
