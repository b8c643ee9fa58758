"""The frequency formulas that serving engines share, on lists of float64; symbols as in methods/base.py.

The engines' own code computes them in float32. They are written out here a second time, apart from methods/, so that
what an engine computes and what a method means are compared, and not one formula with itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rope_ext_hf.errors import ServingError


def plain(theta: float, dim: int) -> list[float]:
    """theta_i = b^(-2i/d), (dim / 2,)."""
    return [float(theta) ** (-index / dim) for index in range(0, dim, 2)]


def linear(theta: float, dim: int, factor: float) -> list[float]:
    """Position interpolation: every frequency divided by the factor."""
    return [float(theta) ** (-index / dim) / factor for index in range(0, dim, 2)]


def alpha_theta(theta: float, dim: int, alpha: float) -> float:
    """The base under HunYuan's scaling by `alpha`: b alpha^(d / (d - 2))."""
    return theta * float(alpha ** (dim / (dim - 2)))


def divided(theta: float, dim: int, divisors: Sequence[float]) -> list[float]:
    """longrope: every frequency divided by its own number."""
    return [float(theta) ** (-2 * pair / dim) / divisor for pair, divisor in enumerate(divisors)]


def yarn(
    theta: float,
    dim: int,
    factor: float,
    original: float,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> list[float]:
    """YaRN's frequencies: a ramp in the dim index between kept and interpolated ones."""
    low = dim * math.log(original / (beta_fast * 2 * math.pi)) / (2 * math.log(theta))
    high = dim * math.log(original / (beta_slow * 2 * math.pi)) / (2 * math.log(theta))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    result = []
    for pair in range(dim // 2):
        value = float(theta) ** (-2 * pair / dim)
        ramp = min(1.0, max(0.0, (pair - low) / (high - low)))
        result.append(value / factor * ramp + value * (1 - ramp))
    return result


def llama3(theta: float, dim: int, factor: float, original: float, low: float, high: float) -> list[float]:
    """Llama 3.1's frequencies: a ramp in cycles over the original length."""
    result = []
    for value in plain(theta, dim):
        wavelength = 2 * math.pi / value
        if wavelength < original / high:
            result.append(value)
        elif wavelength > original / low:
            result.append(value / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            result.append((1 - smooth) * value / factor + smooth * value)
    return result


def longrope_magnitude(scale: float, original: float) -> float:
    """sqrt(1 + ln s / ln L0); 1 up to s = 1."""
    if not original > 1:
        raise ServingError(f"longrope needs an original length above 1, and it is {original:g}")
    return 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
