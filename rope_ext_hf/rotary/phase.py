"""Rotation angles in 64-bit fixed point: one cycle is 2^64 units, so that whole cycles vanish by overflow."""

from __future__ import annotations

import torch
from torch import Tensor

from rope_ext_hf.methods.base import TWO_PI

_UNITS_PER_CYCLE = 2.0**64
_MOST_UNITS = 2**63 - 1024  # half a cycle, 2^63, does not fit into int64; this is the double below it


def fixed_point(inv_freq: Tensor) -> Tensor:
    """Convert inverse frequencies to fixed point: int64 numbers of 2^-64 cycles per position.

    `inv_freq`: float64, in radians per position. Whole cycles are dropped.
    """
    cycles = inv_freq / TWO_PI
    fraction = cycles - cycles.round()
    return (fraction * _UNITS_PER_CYCLE).clamp(max=float(_MOST_UNITS)).to(torch.int64)


def fixed_point_number(radians: float) -> int:
    """Convert one inverse frequency in radians per position to an integer number of 2^-64 cycles per position."""
    cycles = radians / TWO_PI
    return int(min((cycles - round(cycles)) * _UNITS_PER_CYCLE, _MOST_UNITS))


def angles(position_ids: Tensor, frequency: Tensor) -> Tensor:
    """Return the angle of each pair at each position.

    Args:
        position_ids: (..., length).
        frequency: (dim // 2,) fixed point, or a shape that broadcasts against (..., length, dim // 2).

    Returns:
        (..., length, dim // 2) float32, radians in [-pi, pi].
    """
    return phase_to_radians(phase_at(position_ids[..., None], frequency))


def phase_at(positions: Tensor, frequency: Tensor) -> Tensor:
    """Return the fixed-point angles at positions, int64 units of 2^-64 cycles.

    A position of a floating-point dtype may lie between two tokens. Its whole part is multiplied in integers, as
    exactly as an integer is; the angle of its fraction is added, which a float32 product gives to 2^-24 cycles.

    Args:
        positions: integers or floating-point numbers that broadcast against `frequency`.
        frequency: fixed point. At fractions of a position it stands for less than half a cycle per position, because
            whole cycles are dropped from it.
    """
    if not positions.is_floating_point():
        return positions.to(torch.int64) * frequency
    whole = positions.floor()
    fraction = (positions - whole).to(torch.float32)
    return whole.to(torch.int64) * frequency + (fraction * frequency.to(torch.float32)).to(torch.int64)


def phase_to_radians(phase: Tensor) -> Tensor:
    """Convert fixed-point angles, int64 units of 2^-64 cycles, to radians, float32 in [-pi, pi]."""
    return phase.to(torch.float32) * (TWO_PI / _UNITS_PER_CYCLE)
