"""Rotation angles in 64-bit fixed point."""

from __future__ import annotations

import torch
from torch import Tensor

from rope_ext_hf.methods.base import TWO_PI

__all__ = ["angles", "fixed_point", "phase_to_radians"]

_UNITS_PER_CYCLE = 2.0**64


def fixed_point(inv_freq: Tensor) -> Tensor:
    """Radians per position (float64) -> int64 units of 2^-64 turns per position, whole turns dropped."""
    turns = inv_freq / TWO_PI
    fraction = turns - turns.round()
    # At exactly half a turn 2^63 does not fit; 2^63 - 2^10 is the double below it.
    return (fraction * _UNITS_PER_CYCLE).clamp(max=2.0**63 - 1024).to(torch.int64)


def angles(position_ids: Tensor, frequency: Tensor) -> Tensor:
    """Angles modulo a turn, float32 in [-pi, pi], (..., length, dim // 2), from integer positions and `fixed_point`."""
    return phase_to_radians(position_ids[..., None].to(torch.int64) * frequency)


def phase_to_radians(phase: Tensor) -> Tensor:
    """Fixed-point angles, int64 units of 2^-64 turns, as float32 in [-pi, pi]."""
    return phase.to(torch.float32) * (TWO_PI / _UNITS_PER_CYCLE)
