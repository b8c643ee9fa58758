"""Weight files, read one tensor at a time: safetensors, and the files of torch.save.

A file format is a class with the members of `SafetensorsFile`, which is listed in `WeightFile` and in `FORMATS`; the
names of its files are in `downloads.WEIGHT_FILES`. `torch_files` has the other one.

A safetensors file (https://huggingface.co/docs/safetensors) begins with the length of its header in 8 bytes and the
header in JSON; the tensors follow without gaps. The safetensors library checks the header against itself and the size
of the file. It is parsed here as well, because the library gives neither the offsets, by which files are copied inside
the kernel, nor a read that is not memory-mapped. torch is imported where a tensor of it is asked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from rope_ext_hf.checkpoints.files.numbers import (
    MAX_DIMS,
    TORCH_NAMES,
    Bits,
    TensorInfo,
    equal_bytes,
    read_bits,
    read_bytes,
    read_float32,
    tensor_bytes,
)
from rope_ext_hf.errors import CheckpointError, one_line
from rope_ext_hf.files.whole import parse_json_object

if TYPE_CHECKING:
    from torch import Tensor

    from rope_ext_hf.checkpoints.files.torch_files import TorchFile

__all__ = ["SafetensorsFile", "safetensors_header"]

_ROWS_BYTES = 2**20  # of rows that are moved at a time: they stay in the cache of the processor


@dataclass(frozen=True)
class TensorView:
    """Tensors by name, wherever they are stored.

    Attributes:
        tensors: the description of each tensor.
        read: returns a tensor, given its name, in memory of its own.
        read_float32: returns its numbers as float32, in an array of numpy.
    """

    tensors: Mapping[str, TensorInfo]
    read: Callable[[str], Tensor]
    read_float32: Callable[[str], NDArray[np.float32]]

    @classmethod
    def from_files(cls, files: Iterable[WeightFile]) -> TensorView:
        """Return a view of the tensors in several files."""
        holders = {name: file for file in files for name in file.tensors}
        tensors = {name: file.tensors[name] for name, file in holders.items()}
        return cls(tensors, lambda name: holders[name].read(name), lambda name: holders[name].read_float32(name))


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
            with safe_open(path, "np"), path.open("rb") as file:  # refuses what its header does not describe
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

    def read_bits(self, name: str) -> Bits:
        """Read the numbers of one tensor, as unsigned integers, into memory of their own."""
        return read_bits(self.path, self._readable(name))

    def read_float32(self, name: str) -> NDArray[np.float32]:
        """Read the numbers of one tensor as float32."""
        return read_float32(self.path, self._readable(name))

    def read(self, name: str) -> Tensor:
        """Read one tensor into memory of its own."""
        from rope_ext_hf.checkpoints.files.torch_files import as_tensor

        return as_tensor(self.read_bits(name), self.tensors[name].dtype)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read the rows of a matrix from `start` to `stop` - 1 into memory of their own."""
        from rope_ext_hf.checkpoints.files.torch_files import as_tensor

        info = self._readable(name)
        rows, columns = info.shape
        start, stop = min(start, rows), min(stop, rows)
        width = info.size // rows if rows else 0
        part = TensorInfo(info.dtype, (stop - start, columns), info.begin + start * width, info.begin + stop * width)
        return as_tensor(read_bits(self.path, part), info.dtype)

    def moved_rows(self, name: str, order: NDArray[np.int64]) -> Iterator[memoryview]:
        """Yield the bytes of a tensor with its rows in another order, some rows at a time.

        Args:
            name: the name of the tensor, whose size is that of all rows.
            order: for each row, the number of the row in the file that comes there. Rows move inside their head, so
                that a few heads are in memory at a time.
        """
        begin = self.tensors[name].begin
        width = self.tensors[name].size // len(order)
        # Between two rows of which none passes the other, the tensor can be divided.
        ends = np.flatnonzero(np.maximum.accumulate(order) == np.arange(len(order))) + 1
        first = 0
        for end, following in zip(ends.tolist(), [*ends[1:].tolist(), None], strict=True):
            if following is not None and (following - first) * width <= _ROWS_BYTES:
                continue
            rows = read_bytes(self.path, begin + first * width, begin + end * width).reshape(end - first, width)
            yield tensor_bytes(rows.take(order[first:end] - first, axis=0))
            first = end

    def _readable(self, name: str) -> TensorInfo:
        """Return the description of a tensor; raise CheckpointError if torch has no dtype for its numbers."""
        info = self.tensors[name]
        if info.dtype not in TORCH_NAMES:
            raise CheckpointError(f"{name!r} in {str(self.path)!r} is {info.dtype}, which torch has no dtype for")
        return info


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
    path: Path, tensors: Mapping[str, TensorInfo], read: Callable[[str], Any], advance: Callable[[int], None]
) -> None:
    """Write tensors into a new safetensors file, in their order, with one of them in memory at a time.

    Args:
        path: the file.
        tensors: the description of each tensor.
        read: returns a tensor or its bits, given its name.
        advance: called with the number of bytes of each tensor that was written.
    """
    with path.open("wb") as file:
        file.write(safetensors_header(tensors, {"format": "pt"}))
        for name in tensors:
            data = tensor_bytes(read(name))
            file.write(data)
            advance(len(data))


WeightFile: TypeAlias = "SafetensorsFile | TorchFile"
"""A file that holds tensors by name; none of them is in memory before it is read."""


def _open_torch_file(path: Path) -> TorchFile:
    """Open a file of torch.save."""
    from rope_ext_hf.checkpoints.files.torch_files import TorchFile

    return TorchFile(path)


FORMATS: dict[str, Callable[[Path], WeightFile]] = {".safetensors": SafetensorsFile, ".bin": _open_torch_file}
"""The class of each format, by the suffix of its files."""


def file_matches(
    path: Path,
    tensors: Mapping[str, TensorInfo],
    read: Callable[[str], Any],
    *,
    open_file: Callable[[Path], WeightFile] = SafetensorsFile,
    header: bytes | None = None,
) -> bool:
    """Return whether a file exists, is valid, and holds exactly these tensors, bit for bit.

    Args:
        path: the file.
        tensors: the description of each tensor.
        read: returns a tensor or its bits, given its name.
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
    return all(equal_bytes(read(name), file.read_bits(name)) for name in tensors)
