"""Weight files, read one tensor at a time: safetensors, and the files of torch.save.

A file format is a class with the members of `SafetensorsFile`, which is listed in `WeightFile` and in `FORMATS`; the
names of its files are in `downloads.WEIGHT_FILES`.

A safetensors file (https://huggingface.co/docs/safetensors) begins with the length of its header in 8 bytes and the
header in JSON; the tensors follow without gaps. The safetensors library checks the header against itself and the size
of the file. It is parsed here as well, because the library gives neither the offsets, by which files are copied inside
the kernel, nor a read that is not memory-mapped.
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

from rope_ext_hf.checkpoints.files.torch_files import MAX_DIMS, locate_tensors
from rope_ext_hf.errors import CheckpointError, one_line
from rope_ext_hf.files.whole import parse_json_object

__all__ = ["DTYPE_NAMES", "TORCH_DTYPES", "SafetensorsFile", "TensorInfo", "safetensors_header", "tensor_bytes"]

# By their names in safetensors, see Dtype in https://github.com/huggingface/safetensors.
TORCH_DTYPES: dict[str, torch.dtype] = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16},
    **{"U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64},
    **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu},
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


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
        return cls(dtype, shape, 0, math.prod(shape) * TORCH_DTYPES[dtype].itemsize)

    @property
    def size(self) -> int:
        """The size of the tensor in bytes."""
        return self.end - self.begin


def size_of(tensors: Mapping[str, TensorInfo]) -> int:
    """Return the size of all these tensors together, in bytes."""
    return sum(info.size for info in tensors.values())


@dataclass(frozen=True)
class TensorView:
    """Tensors by name, wherever they are stored.

    Attributes:
        tensors: the description of each tensor.
        read: returns a tensor, given its name, in memory of its own.
    """

    tensors: Mapping[str, TensorInfo]
    read: Callable[[str], Tensor]

    @classmethod
    def from_files(cls, files: Iterable[WeightFile]) -> TensorView:
        """Return a view of the tensors in several files."""
        holders = {name: file for file in files for name in file.tensors}
        tensors = {name: file.tensors[name] for name, file in holders.items()}
        return cls(tensors, lambda name: holders[name].read(name))


class SafetensorsFile:
    """A safetensors file, opened: its header is read, its tensors are read when they are asked for.

    Attributes:
        path: the path of the file.
        header: the first bytes of the file, which hold the length of the header and the header. The tensors follow
            without gaps, so that the file can be copied by ranges of bytes.
        metadata: the metadata in the header.
        tensors: the description of each tensor, in the order of the file.

    Raises:
        CheckpointError: the file is not a valid safetensors file.
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
        """Read one tensor into memory of its own."""
        info = self.tensors[name]
        if info.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{name!r} in {str(self.path)!r} is {info.dtype}, which torch has no dtype for")
        return _read_numbers(self.path, info.begin, info.end, TORCH_DTYPES[info.dtype]).view(info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read the rows of a matrix from `start` to `stop` - 1 into memory of their own."""
        info = self.tensors[name]
        dtype, (rows, columns) = TORCH_DTYPES[info.dtype], info.shape
        start, stop = min(start, rows), min(stop, rows)
        begin, end = (info.begin + row * columns * dtype.itemsize for row in (start, stop))
        return _read_numbers(self.path, begin, end, dtype).view(stop - start, columns)


def safetensors_header(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a safetensors file, up to the first of its tensors, which follow without gaps.

    Args:
        tensors: the description of each tensor; where it is in a file does not matter.
        metadata: texts by name.
    """
    begin, fields = 0, {}
    for name, info in tensors.items():
        end = begin + info.size
        fields[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begin, end]}
        begin = end
    header = json.dumps({"__metadata__": dict(metadata)} | fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def write_safetensors(
    path: Path, tensors: Mapping[str, TensorInfo], read: Callable[[str], Tensor], advance: Callable[[int], None]
) -> None:
    """Write tensors into a new safetensors file, in their order, with one of them in memory at a time.

    Args:
        path: the file.
        tensors: the description of each tensor.
        read: returns a tensor, given its name.
        advance: called with the number of bytes of each tensor that was written.
    """
    with path.open("wb") as file:
        file.write(safetensors_header(tensors, {"format": "pt"}))
        for name in tensors:
            data = tensor_bytes(read(name))
            file.write(data)
            advance(len(data))


class TorchFile:
    """A file of `torch.save` (.bin, .pth, .pt) that holds plain tensors by name; no code in it is run.

    It has no header: a conversion writes it anew as safetensors.

    Raises:
        CheckpointError: the file is damaged, or holds anything else.
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
        for name, location in self._locations.items():
            if location.dtype not in DTYPE_NAMES:
                raise CheckpointError(f"{name!r} is {location.dtype}, which safetensors has no name for")
            self.tensors[name] = TensorInfo.from_shape(DTYPE_NAMES[location.dtype], location.shape)

    def read(self, name: str) -> Tensor:
        """Read one tensor, with the strides that it was saved with, into memory of its own."""
        location = self._locations[name]
        numbers = _read_numbers(self.path, location.begin, location.end, location.dtype)
        return numbers.as_strided(location.shape, location.stride)


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
    """Return whether a file exists, is valid, and holds exactly these tensors, bit for bit.

    Args:
        path: the file.
        tensors: the description of each tensor.
        read: returns a tensor, given its name.
        open_file: opens the file in its format.
        header: the header that the file must have; None: any.
    """
    try:
        file = open_file(path)
    except CheckpointError:
        return False
    if header is not None and file.header != header:
        return False
    if {name: (info.dtype, info.shape) for name, info in file.tensors.items()} != {
        name: (info.dtype, info.shape) for name, info in tensors.items()
    }:
        return False
    return all(equal_bytes(read(name), file.read(name)) for name in tensors)


def equal_bytes(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors hold the same bytes, NaN included."""
    return torch.equal(_as_bytes(tensor), _as_bytes(other))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor, with its elements in the order of its shape."""
    return memoryview(_as_bytes(tensor).numpy().data)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a one-dimensional uint8 tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _read_numbers(path: Path, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Read the bytes of a file from `begin` to `end` as a flat tensor of this dtype, in memory of its own."""
    data = np.fromfile(path, np.uint8, end - begin, offset=begin)
    if len(data) < end - begin:
        raise CheckpointError(f"{str(path)!r} ended at byte {begin + len(data)} while it was being read")
    return torch.from_numpy(data).view(dtype) if len(data) else torch.empty(0, dtype=dtype)
