"""Files of torch.save, one tensor at a time: torch.load has all of a file in memory, or mapped, which counts as much.

    load(path)["lm_head.weight"]              # where its numbers stand; none of them is read
    with writing(path, {"a": (torch.float32, (2, 3))}, {}) as write:
        write("a", data)

Such a file is a zip archive of data.pkl, whose tensors name storages, and of each storage. Before torch 1.6 it was a
row of pickles: a number, a version, the machine, the object, the storages in order; then came of each storage how many
numbers it has, and these (torch/serialization.py, _legacy_save).

Nothing that a pickle names is looked up or run. Names stay names and calls stay calls; those of tensors are understood.
"""

from __future__ import annotations

import math
import mmap
import os
import pickle
import pickletools
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

__all__ = ["MOST_DIMS", "Placed", "load", "writing"]

MAGIC, VERSION = 0x1950A86A20F9469CFC6C, 1001  # of the format before torch 1.6
MOST = 100_000_000  # bytes of pickles
MOST_DIMS = 64
ALIGNED = 64  # bytes; so that a mapped file can be computed with

_DTYPES: dict[str, torch.dtype] = {
    **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16},
    **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
    **{"Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
}
STORAGES = {f"torch.{name}Storage": dtype for name, dtype in _DTYPES.items()}
STORAGES["torch.storage.UntypedStorage"] = torch.uint8  # of dtypes too new for a storage of their own
TENSORS = tuple(f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3"))
PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


@dataclass(frozen=True)
class Placed:
    """A tensor's place in its file.

    Attributes:
        begin, end: the bytes that its numbers stand in; those of others may stand between them.
        stride: in numbers from `begin`.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    end: int


def load(path: Path) -> dict[str, Placed]:
    """The tensors of a file.

    Raises:
        ValueError: it holds anything else. Damaged bytes lead to other errors too.
    """
    storages: dict[str, _Storage] = {}
    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\3\4"
        file.seek(0)
        found = (_load_archive if zipped else _load_pickles)(file, storages)
        size = file.seek(0, os.SEEK_END)
    if any(storage.begin + storage.size > size for storage in storages.values()):
        raise ValueError(f"it ends at byte {size}, in the middle of its tensors")
    if type(found) is not dict or not all(
        type(name) is str and isinstance(call, _Call) and "_rebuild_" in call.name for name, call in found.items()
    ):
        raise ValueError("it does not hold tensors by name")
    return {name: _placed(name, call) for name, call in found.items()}


class _Name(str):
    """What a pickle calls a thing by."""


class _Call(NamedTuple):
    name: str
    arguments: tuple[Any, ...]


@dataclass
class _Storage:
    dtype: torch.dtype
    count: int
    begin: int = 0

    @property
    def size(self) -> int:
        return self.count * self.dtype.itemsize


def _load_archive(file: IO[bytes], storages: dict[str, _Storage]) -> Any:
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        several = len(entries) != len(archive.infolist())

    def begin(name: str, size: int) -> int:
        if (entry := entries.get(name)) is None or not entry.file_size == entry.compress_size == size:
            raise ValueError(f"it has no {name} of {size} bytes")
        file.seek(entry.header_offset + 26)  # what the header says of its own length
        name_size, extra_size = struct.unpack("<HH", file.read(4))
        return int(entry.header_offset + 30 + name_size + extra_size)

    def content(name: str) -> bytes:  # without its checksum, which torch does not always write
        file.seek(begin(name, min(MOST, entries[name].file_size)))
        return file.read(entries[name].file_size)

    roots = [name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl")]
    if len(roots) != 1 or several:
        raise ValueError("it is no archive of torch's")
    if any(entry.compress_type or entry.flag_bits & 1 for entry in entries.values()):
        raise ValueError("it is compressed, which torch never does")
    if f"{roots[0]}byteorder" in entries and content(f"{roots[0]}byteorder") != b"little":
        raise ValueError("its numbers have their high bytes first")
    found = _unpickle(BytesIO(content(f"{roots[0]}data.pkl")), storages)
    for key, storage in storages.items():
        storage.begin = begin(f"{roots[0]}data/{key}", storage.size)
    return found


def _load_pickles(file: IO[bytes], storages: dict[str, _Storage]) -> Any:
    with mmap.mmap(file.fileno(), min(MOST, file.seek(0, os.SEEK_END)), access=mmap.ACCESS_READ) as data:
        if _unpickle(data, storages) != MAGIC or _unpickle(data, storages) != VERSION:
            raise ValueError("it does not begin as torch's files do")
        if _expect(_unpickle(data, storages), dict).get("little_endian") is not True:
            raise ValueError("its numbers have their high bytes first")
        found, keys, at = _unpickle(data, storages), _unpickle(data, storages), data.tell()
    if any(type(key) is not str for key in _expect(keys, list)) or sorted(keys) != sorted(storages):
        raise ValueError("its storages are not those that its tensors name")
    for key in keys:
        file.seek(at)
        storage, count = storages[key], int.from_bytes(file.read(8), "little")
        if count != storage.count:
            raise ValueError(f"storage {key} should have {storage.count} numbers, and has {count}")
        storage.begin = at + 8
        at = storage.begin + storage.size
    return found


def _unpickle(data: BytesIO | mmap.mmap, storages: dict[str, _Storage]) -> Any:
    """The next pickle; understands what torch's own unpickler for weights alone does, as far as weights need it."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def above(start: int) -> list[Any]:
        taken = stack[start:]
        del stack[start:]
        return taken

    argument: Any
    for opcode, argument, _ in pickletools.genops(cast("IO[bytes]", data)):
        match opcode.name:
            case "PROTO":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "NONE":
                stack.append(argument)
            case "BINUNICODE":
                argument.encode()  # half a surrogate pair is no text
                stack.append(argument)
            case "NEWTRUE" | "NEWFALSE":
                stack.append(opcode.name == "NEWTRUE")
            case "EMPTY_DICT":
                stack.append({})
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(above(-int(opcode.name[-1]))))
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(above(marks.pop())))
            case "APPEND" | "APPENDS":
                items = above(marks.pop() if opcode.name == "APPENDS" else -1)
                _expect(stack[-1], list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = above(marks.pop() if opcode.name == "SETITEMS" else -2)
                for key in items[::2]:
                    if type(key) not in (str, int):  # to hash a tuple of tuples may take forever
                        raise ValueError(f"its pickle has a key of type {type(key).__name__}")
                _expect(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                name = _Name(argument.replace(" ", "."))
                if not name.startswith("torch.") and name != "collections.OrderedDict":
                    raise ValueError(f"its pickle names {name}")
                stack.append(name)
            case "REDUCE":
                name, arguments = above(-2)
                call = _Call(_expect(name, _Name), _expect(arguments, tuple))
                stack.append({} if call == ("collections.OrderedDict", ()) else call)
            case "BUILD":  # attributes of a dict: versions of modules
                stack.pop()
                _expect(stack[-1], dict)
            case "BINPERSID":
                stack.append(_storage(stack.pop(), storages))
            case "STOP":
                return stack.pop()
            case other:
                raise ValueError(f"its pickle has {other}")
    raise ValueError("its pickle does not end")


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"its pickle has a {type(value).__name__} in place of a {kind.__name__}")
    return value


def _storage(said: Any, storages: dict[str, _Storage]) -> _Storage:
    kind, name, key, _, count, *view = _expect(said, tuple)
    if kind != "storage" or any(part is not None for part in view) or type(count) is not int or count < 0:
        raise ValueError("something in it is no storage")
    if _expect(name, _Name) not in STORAGES:
        raise ValueError(f"a storage in it is {name}")
    found = storages.setdefault(_expect(key, str), _Storage(STORAGES[name], count))
    if (found.dtype, found.count) != (STORAGES[name], count):
        raise ValueError(f"storage {key} is described in two ways")
    return found


def _placed(name: str, call: _Call) -> Placed:
    plain = True
    while call.name in (*PARAMETERS, WITH_ATTRIBUTES):
        if call.name in PARAMETERS:
            call = _expect(call.arguments[0], _Call)
        else:
            function, kind, arguments, _ = call.arguments
            plain = plain and _expect(kind, _Name) in CLASSES
            call = _Call(_expect(function, _Name), _expect(arguments, tuple))
    if call.name not in TENSORS or not plain:
        raise ValueError(f"{name!r} is not a plain tensor")
    storage, offset, shape, stride, *others = call.arguments
    dtype: Any = _expect(storage, _Storage).dtype
    if call.name.endswith("_v3"):
        dtype = _expect(vars(torch).get(_expect(others.pop(2), _Name).removeprefix("torch.")), torch.dtype)
    numbers = [offset, *_expect(shape, tuple), *_expect(stride, tuple)]
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or not len(shape) == len(stride) <= MOST_DIMS:
        raise ValueError(f"{name!r} has no shape")
    count, possible = math.prod(shape), math.prod(size or 1 for size in shape) < 2**63
    if any(others[2:]) or count * dtype.itemsize > storage.size or not possible:
        raise ValueError(f"{name!r} is not a plain tensor")  # conjugate or negative; one number that looks like many
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    begin = storage.begin + offset * dtype.itemsize
    end = begin + (last + 1) * dtype.itemsize if count else begin
    if end > storage.begin + storage.size:
        raise ValueError(f"{name!r} goes on behind its storage")
    return Placed(dtype, shape, stride, begin, end)


@contextmanager
def writing(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], same: Mapping[str, str]
) -> Iterator[Callable[[str, memoryview], None]]:
    """A new file, whole at the end, and what is to be called with the bytes of each tensor.

    Args:
        same: further names of tensors, each with the one of `tensors` that it is.
    """
    keys = {name: str(i) for i, name in enumerate(tensors)}
    stored = {name: _Stored(keys[name], *tensor) for name, tensor in tensors.items()}
    pickled = BytesIO()
    _Pickler(pickled, 2).dump(stored | {name: stored[other] for name, other in same.items()})
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:

        def write(name: str, data: bytes | memoryview) -> None:
            entry = zipfile.ZipInfo(f"archive/{name}")
            begin = file.tell() + 30 + len(entry.filename) + 20 + 4  # header, name, sizes of 64 bits, the padding's own
            entry.extra = struct.pack("<2sH", b"FB", -begin % ALIGNED) + bytes(-begin % ALIGNED)
            with archive.open(entry, "w", force_zip64=True) as target:
                target.write(data)

        write("data.pkl", pickled.getvalue())
        write("byteorder", b"little")
        yield lambda name, data: write(f"data/{keys[name]}", data)
        write("version", b"3\n")


class _Stored(NamedTuple):
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class _StorageId(NamedTuple):
    said: tuple[Any, ...]


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.said if isinstance(value, _StorageId) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Stored):
            return NotImplemented
        name = next(name for name, dtype in _DTYPES.items() if dtype == value.dtype)
        storage = _StorageId(("storage", getattr(torch, f"{name}Storage"), value.key, "cpu", math.prod(value.shape)))
        strides = torch.empty(value.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (storage, 0, value.shape, strides, False, OrderedDict())
