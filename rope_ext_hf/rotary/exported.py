"""cos and sin in a graph that leaves PyTorch: traced by torch.jit.trace, or made by torch.export or torch.onnx.export.

The program that runs such a graph need not have the arithmetic of PyTorch. On CPUs, OpenVINO computes int64 products in
32 bits, without a word, so the fixed point of `rotary.phase` overflows there. It also computes float32 in bfloat16 on
CPUs with AMX, as others do in float16, and these hold whole numbers up to 256 and 2048 only. So a graph of ours looks
cos and sin up in tables, which are computed here from the exact frequencies. A position below 2^24 has three digits of
8 bits, and its rotation is the product of one rotation for each digit. No position meets a fraction, and a shorter
dtype rounds the tables as it rounds weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.methods.base import TWO_PI, constant

_BASE = 256
_LAST_DIGITS = 2 * _BASE
"""Number of values of the highest digit; the upper half of them stands for negative positions."""


def is_exporting() -> bool:
    """Return whether the forward under way is being turned into a graph that another program may run.

    It is under torch.jit.trace and torch.export, and in torch.onnx.export, which builds on either; torch.compile runs
    its graphs itself.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    return torch._C._get_tracing_state() is not None


@contextmanager
def outside_trace() -> Iterator[None]:
    """Compute inside the with block without a record in the graph of torch.jit.trace."""
    state, resume = torch._C._get_tracing_state(), torch._C._set_tracing_state  # type: ignore[attr-defined]
    resume(None)
    try:
        yield
    finally:
        resume(state)


class CosSin(NamedTuple):
    """Rotations of pairs of dims, as their cos and sin, two tensors of one shape."""

    cos: Tensor
    sin: Tensor

    def then(self, other: CosSin) -> CosSin:
        """Return the rotation by the sum of both angles."""
        return CosSin(self.cos * other.cos - self.sin * other.sin, self.sin * other.cos + self.cos * other.sin)

    def inverse(self) -> CosSin:
        """Return the rotation by the opposite angle."""
        return CosSin(self.cos, -self.sin)


def rotation_at(positions: Tensor, frequency: tuple[int, ...]) -> CosSin:
    """Return the rotation of each pair at each position, without a product of positions.

    Args:
        positions: (..., 1), or (..., pairs) where pairs rotate by positions of their own; from -2^24 to 2^24 - 1.
            Numbers of a floating-point dtype need not be whole.
        frequency: the frequency of each pair in fixed point, see `rotary.phase`.

    Returns:
        cos and sin, (..., pairs) float32.
    """
    if positions.is_floating_point():
        whole = positions.floor()
        radians = constant(tuple(map(_radians, frequency)), positions.device, torch.float32)
        angle = (positions - whole).to(torch.float32) * radians
        return rotation_at(whole.to(torch.int64), frequency).then(CosSin(angle.cos(), angle.sin()))
    pairs, positions = len(frequency), positions.to(torch.int64)
    # One table after the other, each with a row for every value of its digit. One dimension, because tools that
    # quantise weights take a lookup in a matrix for that of token embeddings.
    cos_table, sin_table = (table.to(positions.device) for table in _tables(frequency))
    pair = torch.arange(pairs, device=positions.device)
    digits = (
        positions % _BASE,
        positions // _BASE % _BASE + _BASE,
        positions // _BASE**2 % _LAST_DIGITS + 2 * _BASE,
    )
    low, middle, high = (CosSin(cos_table[at], sin_table[at]) for at in (digit * pairs + pair for digit in digits))
    return low.then(middle).then(high)


def rotation_by(angle: tuple[int, ...], device: torch.device) -> CosSin:
    """Return the rotation of each pair by an angle in fixed point, (pairs,) float32."""
    in_radians = [_radians(units) for units in angle]
    cos, sin = (tuple(map(function, in_radians)) for function in (math.cos, math.sin))
    return CosSin(constant(cos, device, torch.float32), constant(sin, device, torch.float32))


def _tables(frequency: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return cos and sin of each pair at every value of the low, the middle and the high digit of a position, flat."""
    positions = [
        *range(_BASE),
        *range(0, _BASE**2, _BASE),
        *(_BASE**2 * (digit - _LAST_DIGITS if digit >= _BASE else digit) for digit in range(_LAST_DIGITS)),
    ]
    angles = [_radians(position * units) for position in positions for units in frequency]
    cos, sin = ([function(angle) for angle in angles] for function in (math.cos, math.sin))
    return torch.tensor(cos, dtype=torch.float32, device="cpu"), torch.tensor(sin, dtype=torch.float32, device="cpu")


# torch.export(strict=True) calls the function and keeps its result, instead of looking at a hundred thousand numbers.
# `torch.compiler.assume_constant_result` says the same, and imports torch's compiler.
_tables._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _radians(units: int) -> float:
    """Convert an angle in fixed point, units of 2^-64 cycles, to radians in [-pi, pi]; whole cycles are dropped."""
    return ((units + 2**63) % 2**64 - 2**63) / 2.0**64 * TWO_PI
