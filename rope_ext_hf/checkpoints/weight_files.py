"""Weight files as bytes: safetensors read and written without trusting or holding them, torch's own files as tensors.

    shard = SafetensorsFile(path)             # the header is read and checked, nothing else
    shard.tensors["lm_head.weight"].shape
    shard.read("lm_head.weight")              # this one tensor

The format: 8 bytes with the header's length, a JSON header, then the tensors without gaps
(https://huggingface.co/docs/safetensors). What a file says about itself is checked against its size before anything is
read; of torch's files no code is run (`rope_ext_hf.torchfiles`). Beside that, what writing takes: progress, and folders
and files that get their names when they are whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.checkpoints.torch_files import MOST_DIMS, load
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import MAX_JSON_BYTES, parse_json_object

__all__ = [
    "DTYPES",
    "TORCH_DTYPES",
    "Entry",
    "SafetensorsFile",
    "TorchFile",
    "View",
    "bytes_of",
    "holds",
    "size_of",
    "write_safetensors",
]

# https://github.com/huggingface/safetensors, Dtype; bits per number. torch has no name for some of them: those pass by.
DTYPES: dict[str, int] = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64},
    **{"F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64},
    **{"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8},
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
}
TORCH_DTYPES: dict[str, torch.dtype] = {
    **{"BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16},
    **{"U32": torch.uint32, "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64},
    **{"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64},
    **{"F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """What a file says of one tensor; `begin` and `end` are offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def of(cls, dtype: str, shape: tuple[int, ...]) -> Entry:
        """That of a tensor by itself."""
        return cls(dtype, shape, 0, math.prod(shape) * DTYPES[dtype] // 8)


@dataclass(frozen=True)
class View:
    """Tensors by name, wherever they are; looks like a weight file."""

    tensors: Mapping[str, Entry]
    read: Callable[[str], Tensor]

    @classmethod
    def of(cls, files: Iterable[SafetensorsFile | TorchFile]) -> View:
        """All that these files hold."""
        where = {name: file for file in files for name in file.tensors}
        return cls({name: file.tensors[name] for name, file in where.items()}, lambda name: where[name].read(name))


def size_of(tensors: Mapping[str, Entry]) -> int:
    """Bytes of these tensors."""
    return sum(entry.end - entry.begin for entry in tensors.values())


class SafetensorsFile:
    """A safetensors file whose header has been read and checked.

    Attributes:
        header: its bytes, length included, as they stand in the file.
        tensors: by name, in the order of their bytes.

    Raises:
        CheckpointError: a header that does not describe this file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if size < 8 or not 2 <= length <= min(size - 8, MAX_JSON_BYTES):
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                file.seek(0)
                self.header = file.read(8 + length)
            if self.header[8:9] != b"{":
                raise ValueError("the header is no JSON object")
            fields = parse_json_object(self.header[8:])
            self.metadata = fields.pop("__metadata__", {})
            if not isinstance(self.metadata, dict) or not all(isinstance(v, str) for v in self.metadata.values()):
                raise ValueError("__metadata__ does not hold words by name")
            entries = {name: _entry(name, field, 8 + length) for name, field in fields.items()}
            self.tensors = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
            at = 8 + length
            for name, entry in self.tensors.items():
                if entry.begin != at:
                    raise ValueError(f"{name!r} begins at byte {entry.begin}, the tensor before it ends at {at}")
                at = entry.end
            if at != size:
                raise ValueError(f"the tensors end at byte {at}, the file at {size}")
        except (OSError, ValueError, RecursionError, TypeError, KeyError) as error:
            raise CheckpointError(f"{str(path)!r} is no whole safetensors file: {error}") from error

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own.

        Raises:
            CheckpointError: a dtype that torch lacks.
        """
        entry = self.tensors[name]
        if entry.dtype not in TORCH_DTYPES:
            raise CheckpointError(f"{name!r} in {str(self.path)!r}: dtype {entry.dtype} cannot be read here")
        return _numbers(self.path, entry.begin, entry.end, TORCH_DTYPES[entry.dtype]).view(entry.shape)


def _numbers(path: Path, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """These bytes of a file, in memory of their own."""
    data = bytearray(end - begin)
    view, at = memoryview(data), 0
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while at < len(data):
            count = file.readinto(view[at:])
            if not count:
                raise CheckpointError(f"{str(path)!r} ended at byte {begin + at} while it was being read")
            at += count
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)


def _entry(name: str, field: Any, base: int) -> Entry:
    if not isinstance(field, dict) or set(field) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} has not dtype, shape and data_offsets")
    name.encode()  # half a surrogate pair is no name
    dtype, shape, offsets = field["dtype"], field["shape"], field["data_offsets"]
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(shape) <= MOST_DIMS and len(offsets) == 2
    if dtype not in DTYPES or not lists or not all(type(n) is int and 0 <= n < 2**63 for n in [*shape, *offsets]):
        raise ValueError(f"{name!r}: dtype {dtype!r}, shape {shape!r}, data_offsets {offsets!r}")
    bits = math.prod(shape) * DTYPES[dtype]
    if offsets[1] - offsets[0] != bits // 8 or bits % 8:
        raise ValueError(f"{name!r}: {offsets[1] - offsets[0]} bytes for shape {shape} of {dtype}")
    return Entry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


class TorchFile:
    """A file of `torch.save` (.bin, .pth, .pt) that holds tensors by name; none of them is in memory before it is read.

    Raises:
        CheckpointError: damaged, or anything else than tensors in it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._found = load(path)
        except Exception as error:  # whatever damaged bytes lead to
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(f"{str(path)!r} cannot be read as tensors alone (weights_only): {reason}") from error
        self.tensors = {name: Entry.of(_name_of(name, t.dtype), t.shape) for name, t in self._found.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, in memory of its own."""
        found = self._found[name]
        return _numbers(self.path, found.begin, found.end, found.dtype).as_strided(found.shape, found.stride)


def _name_of(name: str, dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise CheckpointError(f"{name!r}: safetensors has no name for {dtype}")
    return _NAMES[dtype]


def write_safetensors(
    path: Path,
    tensors: Mapping[str, Entry],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
    progress: Callable[[int], None],
) -> None:
    """A new file of these tensors, one of them in memory at a time."""
    at, fields = 0, {}
    for name, entry in tensors.items():
        size = math.prod(entry.shape) * DTYPES[entry.dtype] // 8
        fields[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps({"__metadata__": dict(metadata)} | fields, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in tensors:
            data = bytes_of(read(name))
            file.write(data)
            progress(len(data))


def holds(path: Path, tensors: Mapping[str, Entry], read: Callable[[str], Tensor], header: bytes | None = None) -> bool:
    """Whether a weight file is there and whole, and has these tensors and no others (and this very header)."""
    try:
        there = SafetensorsFile(path) if path.suffix == ".safetensors" else TorchFile(path)
    except CheckpointError:
        return False
    if header is not None and isinstance(there, SafetensorsFile) and there.header != header:
        return False
    described = {name: (entry.dtype, entry.shape) for name, entry in tensors.items()}
    if {name: (entry.dtype, entry.shape) for name, entry in there.tensors.items()} != described:
        return False
    return all(torch.equal(_as_bytes(read(name)), _as_bytes(there.read(name))) for name in tensors)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in the order of its shape."""
    return memoryview(_as_bytes(tensor).numpy().data)


def _as_bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
