"""Weight files, read one tensor at a time: safetensors, and the files of torch.save.

A file format is a class with the members of `SafetensorsFile`, in `WeightFile` and in `FORMATS`; the names of its files
stand in `downloads.WEIGHT_FILES`. The header of safetensors (https://huggingface.co/docs/safetensors: its length in 8
bytes, JSON, then the tensors without gaps) is checked by the safetensors library, against itself and the file's size,
and parsed here too, because the library gives neither the offsets, by which files are copied inside the kernel, nor a
read that is not memory-mapped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rope_ext_hf.checkpoints.torch_files import MAX_DIMS, locate_tensors
from rope_ext_hf.errors import CheckpointError, one_line
from rope_ext_hf.files import parse_json_object

# Names of https://github.com/huggingface/safetensors, Dtype.
TORCH_DTYPES: dict[str, torch.dtype] = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16},
    **{"U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64},
    **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu},
}
_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """What the header of a file states about one tensor."""

    dtype: str  # as safetensors names it; tensors of those that torch has no dtype for can be copied but not read
    shape: tuple[int, ...]
    begin: int  # the first byte of the file that holds it
    end: int

    @classmethod
    def from_shape(cls, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        """Describe a tensor outside any file."""
        return cls(dtype, shape, 0, math.prod(shape) * TORCH_DTYPES[dtype].itemsize)

    @property
    def size(self) -> int:
        return self.end - self.begin


def size_of(tensors: Mapping[str, TensorInfo]) -> int:
    return sum(info.size for info in tensors.values())


@dataclass(frozen=True)
class TensorView:
    """Tensors by name, wherever they are stored; `read` returns one of them, in memory of its own."""

    tensors: Mapping[str, TensorInfo]
    read: Callable[[str], Tensor]

    @classmethod
    def from_files(cls, files: Iterable[WeightFile]) -> TensorView:
        holders = {name: file for file in files for name in file.tensors}
        tensors = {name: file.tensors[name] for name, file in holders.items()}
        return cls(tensors, lambda name: holders[name].read(name))


class SafetensorsFile:
    """A safetensors file; a CheckpointError where it is none.

    `tensors` has what it holds, in the order of the file, `header` its first bytes, length included, which the tensors
    follow without gaps, so that the file can be copied by ranges of bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(path, "pt"), path.open("rb") as file:  # refuses what its header does not describe
                start = 8 + int.from_bytes(file.read(8), "little")
                file.seek(0)
                self.header = file.read(start)
            fields = parse_json_object(self.header[8:])
            self.metadata = fields.pop("__metadata__", None) or {}
            infos = dict[str, TensorInfo]()
            for name, entry in fields.items():
                shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
                if len(shape) > MAX_DIMS or math.prod(size or 1 for size in shape) >= 2**63:
                    raise ValueError(f"{name!r} has a shape that no tensor of torch can have")
                infos[name] = TensorInfo(entry["dtype"], shape, start + begin, start + end)
        except (OSError, ValueError, RecursionError, SafetensorError) as error:
            raise CheckpointError(f"{str(path)!r} is not a valid safetensors file: {one_line(error)}") from error
        self.tensors = dict(sorted(infos.items(), key=lambda item: (item[1].begin, item[1].end)))

    def read(self, name: str) -> Tensor:
        info = self.tensors[name]
        if info.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{name!r} in {str(self.path)!r} is {info.dtype}, which torch has no dtype for")
        return _read_numbers(self.path, info.begin, info.end, TORCH_DTYPES[info.dtype]).view(info.shape)


def write_safetensors(
    path: Path, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor], advance: Callable[[int], None]
) -> None:
    """Write a new file of these tensors, in their order, with one of them in memory at a time."""
    at, fields = 0, {}
    for name, info in tensors.items():
        fields[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [at, at + info.size]}
        at += info.size
    header = json.dumps({"__metadata__": {"format": "pt"}} | fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in tensors:
            data = tensor_bytes(read(name))
            file.write(data)
            advance(len(data))


class TorchFile:
    """A file of `torch.save` (.bin, .pth, .pt) that holds plain tensors by name; no code in it is run.

    Without a header: it is written anew as safetensors. A CheckpointError if it is damaged or holds anything else.
    """

    header: bytes | None = None

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._locations = locate_tensors(path)
        except Exception as error:  # damaged bytes lead to errors of every kind
            raise CheckpointError(
                f"{str(path)!r} cannot be read as tensors alone (weights_only): {one_line(error)}"
            ) from error
        self.tensors = {}
        for name, where in self._locations.items():
            if where.dtype not in _DTYPE_NAMES:
                raise CheckpointError(f"{name!r} is {where.dtype}, which safetensors has no name for")
            self.tensors[name] = TensorInfo.from_shape(_DTYPE_NAMES[where.dtype], where.shape)

    def read(self, name: str) -> Tensor:
        """Read one tensor, with the strides that it was saved with, into memory of its own."""
        where = self._locations[name]
        numbers = _read_numbers(self.path, where.begin, where.end, where.dtype)
        return numbers.as_strided(where.shape, where.stride)


WeightFile = SafetensorsFile | TorchFile
"""A file that holds tensors by name; none of them is in memory before it is read."""


FORMATS: dict[str, Callable[[Path], WeightFile]] = {".safetensors": SafetensorsFile, ".bin": TorchFile}
"""The class of each format, by the suffix of its files."""


def file_matches(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Tensor],
    *,
    open_file: Callable[[Path], WeightFile] = SafetensorsFile,
    header: bytes | None = None,
) -> bool:
    """Whether a file exists, is valid, and holds exactly these tensors, bit for bit, after this header where given."""
    try:
        file = open_file(path)
    except CheckpointError:
        return False
    there, wanted = ({n: (info.dtype, info.shape) for n, info in each.items()} for each in (file.tensors, tensors))
    if there != wanted or (header is not None and file.header != header):
        return False
    return all(equal_bytes(read(name), file.read(name)) for name in tensors)


def equal_bytes(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same bytes, NaN included."""
    return torch.equal(_as_bytes(one), _as_bytes(other))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in the order of its shape."""
    return memoryview(_as_bytes(tensor).numpy().data)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _read_numbers(path: Path, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Read bytes of a file as a vector of this dtype, in memory of its own."""
    data = np.fromfile(path, np.uint8, end - begin, offset=begin)
    if len(data) < end - begin:
        raise CheckpointError(f"{str(path)!r} ended at byte {begin + len(data)} while it was being read")
    return torch.from_numpy(data).view(dtype) if len(data) else torch.empty(0, dtype=dtype)
