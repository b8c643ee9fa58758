"""Formulas for RoPE frequencies that several serving engines share; symbols as in methods/base.py.

Each function returns a list of float64 frequencies in radians per position, one for each of the dim / 2 rotated pairs.
The engines' own code computes them in float32.

methods/ has most of these formulas too. They are written a second time here, so that comparing an engine with a method
compares two implementations, and not one formula with itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rope_ext_hf.bounds import NO_ROTATION
from rope_ext_hf.errors import ServingError


def plain(theta: float, dim: int) -> list[float]:
    """Return the unscaled frequencies theta_i = b^(-2i/d)."""
    return [float(theta) ** (-index / dim) for index in range(0, dim, 2)]


def linear(theta: float, dim: int, factor: float) -> list[float]:
    """Return the frequencies of position interpolation: each one divided by the factor."""
    return [float(theta) ** (-index / dim) / factor for index in range(0, dim, 2)]


def alpha_theta(theta: float, dim: int, alpha: float) -> float:
    """Return the RoPE base under HunYuan's scaling by `alpha`: b alpha^(d / (d - 2))."""
    return theta * float(alpha ** (dim / (dim - 2)))


def divided(theta: float, dim: int, divisors: Sequence[float]) -> list[float]:
    """Return the frequencies of LongRoPE: the frequency of each pair is divided by that pair's own divisor."""
    return quotients([float(theta) ** (-2 * pair / dim) for pair in range(len(divisors))], divisors)


def quotients(inv_freq: Sequence[float], divisors: Sequence[float]) -> list[float]:
    """Return each frequency over its divisor, and 0 for a divisor that stands for no rotation (`NO_ROTATION`)."""
    pairs = zip(inv_freq, divisors, strict=True)
    return [value / divisor if divisor < NO_ROTATION else 0.0 for value, divisor in pairs]


def yarn(
    theta: float,
    dim: int,
    factor: float,
    original: float,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
) -> list[float]:
    """Return YaRN's frequencies: fast pairs keep theirs, slow pairs are interpolated, and a ramp leads between them.

    `original` is the original context length in tokens. With `truncate` the ends of the ramp are rounded to whole
    pairs.
    """
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
    """Return Llama 3.1's frequencies: slow pairs are interpolated, fast pairs keep theirs, with a ramp between them.

    The ramp runs over the number of turns that a pair makes within the original length, from `low` to `high`.
    """
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
    """Return the magnitude of LongRoPE, sqrt(1 + ln s / ln L0); 1 for a scale s of up to 1.

    Raises:
        ServingError: the original length L0 is not above 1.
    """
    if not original > 1:
        raise ServingError(f"longrope needs an original length above 1 token, got {original:g}")
    return 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
