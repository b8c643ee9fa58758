"""The numbers of tensors in files: where they lie, their bits as arrays of numpy, and their values as float32.

Nothing here needs torch. A tensor is read as unsigned integers of the size of its numbers (`TensorInfo.read_bits`),
which is all that is needed to copy it or to move its rows.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rope_ext_hf.errors import CheckpointError

__all__ = ["TensorInfo", "tensor_bytes"]

Bits = NDArray[Any]
"""A tensor as unsigned integers: its shape, and the bits of its numbers."""

MAX_DIMS = 64
_PART = 2**18  # numbers that are converted at a time
TORCH_NAMES: dict[str, str] = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32"},
    **{"U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E4M3FNUZ": "float8_e4m3fnuz"},
    **{"F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64"},
}
"""The names of dtypes in torch, by their names in safetensors (Dtype in https://github.com/huggingface/safetensors)."""
_SIZES: dict[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
"""The bytes of one number of each dtype."""


@dataclass(frozen=True)
class TensorInfo:
    """The description of one tensor in the header of a weight file.

    Attributes:
        dtype: the dtype, as safetensors names it. If torch has none of that name, the tensor can be copied, not read.
        shape: the shape.
        begin, end: the first byte of the tensor in the file, and the one after the last.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def from_shape(cls, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        """Return the description of a tensor that is in no file, given its dtype and shape."""
        return cls(dtype, shape, 0, math.prod(shape) * _SIZES[dtype])

    @property
    def size(self) -> int:
        """The size of the tensor in bytes."""
        return self.end - self.begin


def size_of(tensors: Mapping[str, TensorInfo]) -> int:
    """Return the size of all these tensors together, in bytes."""
    return sum(info.size for info in tensors.values())


def read_bytes(path: Path, begin: int, end: int) -> NDArray[np.uint8]:
    """Read the bytes of a file from `begin` to `end` into memory of their own.

    Raises:
        CheckpointError: the file has become shorter meanwhile.
    """
    data = np.fromfile(path, np.uint8, end - begin, offset=begin)
    if len(data) < end - begin:
        raise CheckpointError(f"{str(path)!r} ended at byte {begin + len(data)} while it was being read")
    return data


def read_bits(path: Path, info: TensorInfo) -> Bits:
    """Read a tensor from a file, as unsigned integers of the size of its numbers."""
    size = _SIZES[info.dtype]
    return read_bytes(path, info.begin, info.end).view(f"u{size}").reshape(info.shape)


def read_float32(path: Path, info: TensorInfo) -> NDArray[np.float32]:
    """Read a tensor from a file as float32, a part at a time, so that its bits are not in memory beside them."""
    numbers = np.empty(info.shape, np.float32)
    flat, size = numbers.reshape(-1), _SIZES[info.dtype]
    for first in range(0, len(flat), _PART):
        count = min(_PART, len(flat) - first)
        begin = info.begin + first * size
        part = TensorInfo(info.dtype, (count,), begin, begin + count * size)
        flat[first : first + count] = to_float32(read_bits(path, part), info.dtype)
    return numbers


def is_floating_point(dtype: str) -> bool:
    """Return whether the numbers of a dtype have an exponent, given its name in safetensors."""
    return dtype in TORCH_NAMES and TORCH_NAMES[dtype].startswith(("float", "bfloat"))


def to_float32(bits: Bits, dtype: str) -> NDArray[np.float32]:
    """Return the numbers of a tensor as float32, given its bits and the name that safetensors has for its dtype.

    Numbers of 32 bits or more may be rounded. The dtype is any but C64.
    """
    if dtype == "BF16":  # the upper half of a float32
        wide: NDArray[np.uint32] = np.left_shift(bits, 16, dtype=np.uint32)
        return wide.view(np.float32)
    if dtype.startswith("F8"):
        values: NDArray[np.float32] = _float8_values(dtype)[bits]
        return values
    plain = "u1" if dtype == "BOOL" else f"{dtype[0].lower()}{_SIZES[dtype]}"
    with np.errstate(over="ignore"):  # beyond float32 lies infinity
        numbers: NDArray[np.float32] = bits.view(plain).astype(np.float32)
    return numbers


@cache
def _float8_values(dtype: str) -> NDArray[np.float32]:
    """Return the number that each byte stands for in a dtype of 8 bits.

    They are those of the OCP formats (F8_E4M3 without infinities), of AMD's and Graphcore's (FNUZ: the bits of a
    negative zero mean NaN, and the bias is larger by 1), and the powers of two that scale blocks (F8_E8M0).
    """
    codes = np.arange(256)
    if dtype == "F8_E8M0":
        powers: NDArray[np.float32] = np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127)).astype(np.float32)
        return powers
    mantissa_bits = 3 if "E4M3" in dtype else 2
    unsigned = codes & 127
    exponent, mantissa = unsigned >> mantissa_bits, unsigned & (2**mantissa_bits - 1)
    bias = (7 if mantissa_bits == 3 else 15) + dtype.endswith("FNUZ")
    normal = np.ldexp(1 + mantissa / 2**mantissa_bits, exponent - bias)
    subnormal = np.ldexp(mantissa / 2**mantissa_bits, 1 - bias)
    values = np.where(exponent == 0, subnormal, normal)
    if dtype.endswith("FNUZ"):
        values[128] = np.nan
    elif mantissa_bits == 3:
        values[unsigned == 127] = np.nan
    else:
        values[unsigned == 124] = np.inf
        values[unsigned > 124] = np.nan
    values[codes > 127] *= -1
    signed: NDArray[np.float32] = values.astype(np.float32)
    return signed


def tensor_bytes(tensor: Any) -> memoryview:
    """Return the bytes of a tensor, or of an array of numpy, with its elements in the order of its shape."""
    return memoryview(_as_bytes(tensor).data)


def equal_bytes(tensor: Any, other: Any) -> bool:
    """Return whether two tensors, or arrays of numpy, hold the same bytes, NaN included."""
    return np.array_equal(_as_bytes(tensor), _as_bytes(other))


def _as_bytes(tensor: Any) -> NDArray[np.uint8]:
    """Return the bytes of a tensor, or of an array of numpy, as a one-dimensional array."""
    if isinstance(tensor, np.ndarray):
        return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    flat = tensor.detach().contiguous().reshape(-1)
    uint8 = sys.modules["torch"].uint8  # torch has been imported where there are tensors
    array: NDArray[np.uint8] = flat.view(uint8).numpy()
    return array
