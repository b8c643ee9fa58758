"""Changes of a model's log-probabilities when its weights, keys or values are rounded to a coarser dtype.

They show which differences between a server and the model here are due to rounding alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError

_BLOCK = 32  # weights that share a scale


@dataclass(frozen=True)
class StatedBits:
    """Number formats of the weights, keys and values that a server is said to use.

    Attributes:
        weights: bits of a weight, 2 to 32; rounding to coarser weights is not allowed for. Above 16, only the rounding
            of float16 is allowed for.
        keys: bits of keys and values: 16, 8 (float8 with four bits of exponent, or coarser than Q8_0) or 4.
    """

    weights: int = 8
    keys: int = 16

    def __post_init__(self) -> None:
        if not 2 <= self.weights <= 32:
            raise MethodError(f"weight_bits must be from 2 to 32, got {self.weights}")
        if self.keys not in (4, 8, 16):
            raise MethodError(f"kv_bits must be 4, 8 or 16, got {self.keys}")


class Rounding(NamedTuple):
    """The changes of log-probabilities that rounding to one dtype makes."""

    dtype: str  # its name in reports
    allowed: bool  # whether the server is stated to use it, or may use it anyway
    changes: list[Tensor]  # of log-probabilities in nats, (answers,) float64 for each length


class _Change(Protocol):
    """A function that computes how far the model's log-probabilities have changed from those before any rounding.

    It uses the weights that the model has at the time of the call. Keys and values are rounded to `key_bits` bits. The
    result is one tensor for each length.
    """

    def __call__(self, key_bits: int | None = None) -> list[Tensor]: ...


def roundings(model: Any, change: _Change, bits: StatedBits) -> Iterator[list[Rounding]]:
    """Round a model to one dtype after another, and yield how its log-probabilities change.

    They come in batches, the finest dtypes first. The dtypes of a batch are equally likely, so once one of them fits,
    the next batch is not needed. `change` computes the changes. The model's weights are overwritten.
    """
    by_keys = change(bits.keys) if bits.keys < 16 else None

    def rounding(dtype: str, allowed: bool, changes: list[Tensor]) -> Rounding:
        if by_keys is None:
            return Rounding(dtype, allowed, changes)
        return Rounding(f"{dtype}, {_keys_name(bits.keys)}", allowed, _sums(changes, by_keys))

    by_bfloat16: list[Tensor] = []
    if model.dtype == torch.float32:
        model.to(torch.bfloat16)
        by_bfloat16 = change()
        model.to(torch.float32)
        by_float16 = [changes / 8 for changes in by_bfloat16]  # float16 has three bits more
        yield [
            rounding("float32 or float16", True, by_float16),
            rounding("bfloat16", bits.weights <= 16, by_bfloat16),
        ]
    by_8_bit_keys = change(8) if by_keys is None else []
    allowed_bits = sorted({8, bits.weights}, reverse=True) if bits.weights <= 8 else []
    coarser_bits = [weight_bits for weight_bits in (8, 4) if weight_bits < bits.weights]
    for weight_bits in (*allowed_bits, *(coarse for coarse in coarser_bits if coarse not in allowed_bits)):
        _round_weights(model, weight_bits)
        yield [rounding(f"{weight_bits}-bit weights", weight_bits in allowed_bits, change())]
    if by_8_bit_keys:
        changes = _sums(by_8_bit_keys, by_bfloat16) if by_bfloat16 else by_8_bit_keys
        yield [Rounding(_keys_name(8), False, changes)]


def _keys_name(bits: int) -> str:
    return f"{bits}-bit keys and values"


def _sums(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    return [a + b for a, b in zip(first, second, strict=True)]


@torch.no_grad()
def _round_weights(model: Any, bits: int) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1 and parameter.shape[-1] % _BLOCK == 0:
            parameter.copy_(rounded_to_bits(parameter.contiguous(), bits, _BLOCK))


def rounded_keys(x: Tensor, bits: int) -> Tensor:
    """Return keys or values rounded to this number of bits.

    8 bits are float8 with four bits of exponent; with fewer bits, each block of numbers has a scale.
    """
    if bits < 8:
        return rounded_to_bits(x.contiguous(), bits, math.gcd(_BLOCK, x.shape[-1])).to(x.dtype)
    most = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-most, most).to(torch.float8_e4m3fn).to(x.dtype)


def rounded_to_bits(x: Tensor, bits: int, block: int) -> Tensor:
    """Return numbers as float32 after rounding to this number of bits, with a float16 scale for every block of numbers.

    8 bits in blocks of 32 are llama.cpp's Q8_0.
    """
    blocks = x.float().reshape(-1, block)
    scale = blocks.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    whole = (blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)).round()
    rounded: Tensor = whole * scale.half().float()
    return rounded.view_as(x)
