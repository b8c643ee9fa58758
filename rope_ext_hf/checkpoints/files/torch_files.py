"""Files of torch.save, read and written one tensor at a time, without unpickling any object.

Such a file is a zip archive of the storages and of data.pkl, in which every tensor names its storage. Before torch 1.6
it was a sequence of pickles (a magic number, a version, the machine, the object, the names of the storages), followed
by the length and the numbers of each storage (torch/serialization.py, _legacy_save). Globals and calls in a pickle are
kept as data; only the calls that rebuild tensors are interpreted.

torch.load(map_location="meta", weights_only=True) with the _checkpoint_offset of each storage (torch 2.9 to 2.13) is no
substitute. It gives no offsets for files from before torch 1.6, many of which are still in use. It does not check
offsets and sizes against the file. A hostile pickle of 1 kB (nested tuples as a key) or of 20 MB (one opcode) keeps it
busy for more than 30 seconds. And the attribute is private.
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

import numpy as np
import torch
from numpy.typing import NDArray

from rope_ext_hf.bounds import advice, limit
from rope_ext_hf.checkpoints.files.numbers import MAX_DIMS, TORCH_NAMES, Bits, TensorInfo, read_bytes, tensor_bytes
from rope_ext_hf.errors import CheckpointError, one_line

__all__ = ["DTYPE_NAMES", "TORCH_DTYPES"]

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, own) for name, own in TORCH_NAMES.items()}
"""The dtypes by their names in safetensors."""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

_MAGIC, _VERSION = 0x1950A86A20F9469CFC6C, 1001  # of the format before torch 1.6
_STORAGE_ALIGNMENT = 64  # bytes, as torch.save aligns storages for files that are memory-mapped

_DTYPES: dict[str, torch.dtype] = {
    **{"Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16},
    **{"Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8},
    **{"Bool": torch.bool, "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128},
}
_STORAGES = {f"torch.{name}Storage": dtype for name, dtype in _DTYPES.items()}
_STORAGES["torch.storage.UntypedStorage"] = torch.uint8  # of dtypes too new for a storage of their own
_TENSORS = tuple(f"torch._utils._rebuild_tensor{version}" for version in ("", "_v2", "_v3"))
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
_CLASSES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


@dataclass(frozen=True)
class _TensorLocation:
    """The place of a tensor in its file.

    Attributes:
        dtype, shape: the dtype and the shape of the tensor.
        stride: its strides, counted in elements; elements of other tensors may lie between its own.
        begin, end: the first byte of its first element, and the byte after its last element.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    end: int


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
            self._locations = _locate_tensors(path)
        except Exception as error:  # damaged bytes lead to errors of every kind
            raise CheckpointError(
                f"{str(path)!r} cannot be read as tensors alone (weights_only): {one_line(error)}"
            ) from error
        self.tensors = {}
        for name, location in self._locations.items():
            if location.dtype not in DTYPE_NAMES:
                raise CheckpointError(f"{name!r} is {location.dtype}, which safetensors has no name for")
            self.tensors[name] = TensorInfo.from_shape(DTYPE_NAMES[location.dtype], location.shape)

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor, with the strides that it was saved with, into memory of its own."""
        location = self._locations[name]
        data = read_bytes(self.path, location.begin, location.end)
        numbers = torch.from_numpy(data).view(location.dtype) if len(data) else torch.empty(0, dtype=location.dtype)
        return numbers.as_strided(location.shape, location.stride)

    def read_bits(self, name: str) -> Bits:
        """Read the numbers of one tensor, as unsigned integers, into memory of their own."""
        return tensor_bits(self.read(name))

    def read_float32(self, name: str) -> NDArray[np.float32]:
        """Read the numbers of one tensor as float32."""
        numbers: NDArray[np.float32] = self.read(name).float().numpy()
        return numbers


def as_tensor(bits: Bits, dtype: str) -> torch.Tensor:
    """Return a tensor over bits that were read from a file, given the name that safetensors has for its dtype."""
    shape, own = bits.shape, TORCH_DTYPES[dtype]
    if not bits.size:
        return torch.empty(shape, dtype=own)
    return torch.from_numpy(bits.reshape(-1).view("u1")).view(own).view(shape)


def tensor_bits(tensor: torch.Tensor) -> Bits:
    """Return the numbers of a tensor on the CPU as unsigned integers, in an array of numpy."""
    return np.asarray(tensor_bytes(tensor)).view(f"u{tensor.element_size()}").reshape(tensor.shape)


def _locate_tensors(path: Path) -> dict[str, _TensorLocation]:
    """Return the place of every tensor in a file, by its name.

    Raises:
        ValueError: the file holds anything else.
        Exception: of any kind, for damaged bytes.
    """
    storages: dict[str, _Storage] = {}
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\3\4"
        file.seek(0)
        value = _load_archive(file, storages) if is_zip else _load_pickles(file, storages)
        size = file.seek(0, os.SEEK_END)
    if any(storage.begin + storage.size > size for storage in storages.values()):
        raise ValueError(f"the file ends at byte {size}, in the middle of its tensors")
    if type(value) is not dict or not all(map(_is_tensor_by_name, value.items())):
        raise ValueError("the file does not hold tensors by name")
    return {name: _locate(name, call) for name, call in value.items()}


def _is_tensor_by_name(item: tuple[Any, Any]) -> bool:
    name, call = item
    return type(name) is str and isinstance(call, _ReduceCall) and "_rebuild_" in call.name


class _GlobalName(str):
    """The name of a global (a class or function) in a pickle; the global itself is never looked up."""


class _ReduceCall(NamedTuple):
    """A call that a pickle asks for, kept as data; it is never made."""

    name: str
    arguments: tuple[Any, ...]


@dataclass
class _Storage:
    """A storage in a file of torch.save: the numbers that tensors are views of.

    Attributes:
        dtype: the dtype of its numbers.
        count: the number of its numbers.
        begin: the position of its first byte in the file.
    """

    dtype: torch.dtype
    count: int
    begin: int = 0

    @property
    def size(self) -> int:
        """The size of the storage in bytes."""
        return self.count * self.dtype.itemsize


def _load_archive(file: IO[bytes], storages: dict[str, _Storage]) -> Any:
    """Return the object in a zip archive as plain data, and add its storages by their keys."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        duplicates = len(entries) != len(archive.infolist())

    def begin(name: str, size: int) -> int:
        """Return the first byte of the content of an entry, which must have this size."""
        entry = entries.get(name)
        if entry is None or not entry.file_size == entry.compress_size == size:
            raise ValueError(f"the archive has no {name} of {size} bytes")
        # The central directory gives the offset of an entry's own header alone. That header is 30 bytes, a name and an
        # extra field of any length, by which torch aligns the numbers.
        file.seek(entry.header_offset + 26)  # the lengths of the rest of the header
        name_size, extra_size = struct.unpack("<HH", file.read(4))
        return int(entry.header_offset + 30 + name_size + extra_size)

    def content(name: str) -> bytes:
        """Return the content of an entry; zipfile would verify a checksum, which torch does not always write."""
        size, most = entries[name].file_size, limit("pickle_bytes")
        if size > most:
            raise ValueError(f"its {name} has more than {most:,} bytes; {advice('pickle_bytes')}")
        file.seek(begin(name, size))
        return file.read(size)

    roots = [name.removesuffix("data.pkl") for name in entries if name.endswith("/data.pkl")]
    if len(roots) != 1 or duplicates:
        raise ValueError("it is not an archive of torch.save")
    if any(entry.compress_type or entry.flag_bits & 1 for entry in entries.values()):
        raise ValueError("it is compressed, which torch.save never does")
    if f"{roots[0]}byteorder" in entries and content(f"{roots[0]}byteorder") != b"little":
        raise ValueError("its numbers are big-endian")
    value = _unpickle(BytesIO(content(f"{roots[0]}data.pkl")), storages)
    for key, storage in storages.items():
        storage.begin = begin(f"{roots[0]}data/{key}", storage.size)
    return value


def _load_pickles(file: IO[bytes], storages: dict[str, _Storage]) -> Any:
    """Return the object in a file from before torch 1.6 as plain data, and add its storages by their keys."""
    size = file.seek(0, os.SEEK_END)
    most = min(limit("pickle_bytes"), size)
    with mmap.mmap(file.fileno(), most, access=mmap.ACCESS_READ) as data:
        try:
            if _unpickle(data, storages) != _MAGIC or _unpickle(data, storages) != _VERSION:
                raise ValueError("it does not begin like a file of torch.save")
            if _expect(_unpickle(data, storages), dict).get("little_endian") is not True:
                raise ValueError("its numbers are big-endian")
            value, keys, at = _unpickle(data, storages), _unpickle(data, storages), data.tell()
        except ValueError as error:
            if data.tell() < most or most == size:
                raise
            raise ValueError(f"its pickles have more than {most:,} bytes; {advice('pickle_bytes')}") from error
    if any(type(key) is not str for key in _expect(keys, list)) or sorted(keys) != sorted(storages):
        raise ValueError("the storages in the file are not those that its tensors name")
    # The storages follow the pickles in the order of `keys`: a count of 8 bytes each, then the numbers.
    for key in keys:
        file.seek(at)
        storage, count = storages[key], int.from_bytes(file.read(8), "little")
        if count != storage.count:
            raise ValueError(f"storage {key} should have {storage.count} numbers, and has {count}")
        storage.begin = at + 8
        at = storage.begin + storage.size
    return value


def _unpickle(data: BytesIO | mmap.mmap, storages: dict[str, _Storage]) -> Any:
    """Return the next pickle as plain data, and add the storages that it names.

    It knows only the opcodes that files of weights need, a part of those in torch's weights_only unpickler.
    """
    # A machine with a stack, as pickle's own, that builds numbers, texts and containers alone. A global stays a name
    # and a call stays a record of itself, so that nothing that a file names is ever imported or run.
    stack: list[Any] = []
    marks: list[int] = []  # heights of the stack at each MARK
    memo: dict[int, Any] = {}

    def pop_from(start: int) -> list[Any]:
        """Remove all entries of the stack from this height on, and return them."""
        removed = stack[start:]
        del stack[start:]
        return removed

    argument: Any
    most = limit("pickle_opcodes")
    for count, (opcode, argument, _) in enumerate(pickletools.genops(cast("IO[bytes]", data))):
        if count >= most:
            raise ValueError(f"its pickle has more than {most:,} opcodes; {advice('pickle_opcodes')}")
        match opcode.name:
            case "PROTO":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "NONE":
                stack.append(argument)
            case "BINUNICODE":
                argument.encode()  # fails for half of a surrogate pair
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
                stack.append(tuple(pop_from(-int(opcode.name[-1]))))
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(pop_from(marks.pop())))
            case "APPEND" | "APPENDS":
                items = pop_from(marks.pop() if opcode.name == "APPENDS" else -1)
                _expect(stack[-1], list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = pop_from(marks.pop() if opcode.name == "SETITEMS" else -2)
                for key in items[::2]:
                    if type(key) not in (str, int):  # hashing nested tuples may take forever
                        raise ValueError(
                            f"its pickle has a dict key of type {type(key).__name__}; only texts and whole numbers are "
                            "read"
                        )
                _expect(stack[-1], dict).update(zip(items[::2], items[1::2], strict=True))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "GLOBAL":
                name = _GlobalName(argument.replace(" ", "."))
                if not name.startswith("torch.") and name != "collections.OrderedDict":
                    raise ValueError(f"its pickle names {name}")
                stack.append(name)
            case "REDUCE":
                name, arguments = pop_from(-2)
                call = _ReduceCall(_expect(name, _GlobalName), _expect(arguments, tuple))
                stack.append({} if call == ("collections.OrderedDict", ()) else call)
            case "BUILD":  # sets attributes of a dict, as those of state_dict: the versions of modules
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
    """Return a value that must be of this type; raise a ValueError if it is not."""
    if type(value) is not kind:
        raise ValueError(f"its pickle has a {type(value).__name__} where a {kind.__name__} must be")
    return value


def _storage(persistent_id: Any, storages: dict[str, _Storage]) -> _Storage:
    """Return the storage that a pickle refers to by its persistent id; add it if it is new."""
    kind, name, key, _, count, *view = _expect(persistent_id, tuple)
    if kind != "storage" or any(part is not None for part in view) or type(count) is not int or count < 0:
        raise ValueError("its pickle refers to something other than a storage")
    if _expect(name, _GlobalName) not in _STORAGES:
        raise ValueError(f"one of its storages is a {name}")
    storage = storages.setdefault(_expect(key, str), _Storage(_STORAGES[name], count))
    if (storage.dtype, storage.count) != (_STORAGES[name], count):
        raise ValueError(f"storage {key} is described in two ways")
    return storage


def _locate(name: str, call: _ReduceCall) -> _TensorLocation:
    """Return the place in the file of a tensor, from the call in the pickle that would rebuild it.

    Raises:
        ValueError: it is not a plain tensor, or does not lie within its storage.
    """
    plain = True
    # The call of a parameter, or of a tensor with attributes, has that of the tensor as an argument.
    while call.name in (*_PARAMETERS, _WITH_ATTRIBUTES):
        if call.name in _PARAMETERS:
            call = _expect(call.arguments[0], _ReduceCall)
        else:
            function, kind, arguments, _ = call.arguments
            plain = plain and _expect(kind, _GlobalName) in _CLASSES
            call = _ReduceCall(_expect(function, _GlobalName), _expect(arguments, tuple))
    if call.name not in _TENSORS or not plain:
        raise ValueError(f"{name!r} is not a plain tensor")
    storage, offset, shape, stride, *others = call.arguments
    dtype: Any = _expect(storage, _Storage).dtype
    if call.name.endswith("_v3"):
        dtype = _expect(vars(torch).get(_expect(others.pop(2), _GlobalName).removeprefix("torch.")), torch.dtype)
    numbers = [offset, *_expect(shape, tuple), *_expect(stride, tuple)]
    # A pickle may have whole numbers of any size; those beyond int64 overflow here and in torch itself.
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or not len(shape) == len(stride) <= MAX_DIMS:
        raise ValueError(f"{name!r} has no valid shape")
    count, possible = math.prod(shape), math.prod(size or 1 for size in shape) < 2**63
    if any(others[2:]) or count * dtype.itemsize > storage.size or not possible:
        raise ValueError(f"{name!r} is not a plain tensor")  # conjugate or negative bit set, or expanded
    # The last number that a strided view reaches, from its first one: views may skip numbers and overlap others.
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    begin = storage.begin + offset * dtype.itemsize
    end = begin + (last + 1) * dtype.itemsize if count else begin
    if end > storage.begin + storage.size:
        raise ValueError(f"{name!r} extends past the end of its storage")
    return _TensorLocation(dtype, shape, stride, begin, end)


@contextmanager
def open_writer(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], same: Mapping[str, str]
) -> Iterator[Callable[[str, memoryview], None]]:
    """Write a new file inside the with block; yield a function that writes the bytes of a tensor, given its name.

    Args:
        path: the file.
        tensors: the dtype and shape of each tensor, by name; they may be written in any order.
        same: further names, each with the name in `tensors` whose storage it shares.
    """
    keys = {name: str(i) for i, name in enumerate(tensors)}
    new = {name: _NewTensor(keys[name], *tensor) for name, tensor in tensors.items()}
    pickled = BytesIO()
    _Pickler(pickled, 2).dump(new | {name: new[other] for name, other in same.items()})
    with path.open("wb") as file, zipfile.ZipFile(file, "w") as archive:

        def write(name: str, data: bytes | memoryview) -> None:
            """Write one entry of the archive."""
            entry = zipfile.ZipInfo(f"archive/{name}")
            # torch maps numbers at multiples of STORAGE_ALIGNMENT; a padding field in the header moves them there.
            begin = file.tell() + 30 + len(entry.filename) + 20 + 4  # header, name, zip64 sizes, padding header
            entry.extra = struct.pack("<2sH", b"FB", -begin % _STORAGE_ALIGNMENT) + bytes(-begin % _STORAGE_ALIGNMENT)
            with archive.open(entry, "w", force_zip64=True) as target:
                target.write(data)

        write("data.pkl", pickled.getvalue())
        write("byteorder", b"little")
        yield lambda name, data: write(f"data/{keys[name]}", data)
        write("version", b"3\n")


class _NewTensor(NamedTuple):
    """A tensor to be pickled as torch.save would."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class _StorageId(tuple[Any, ...]):
    """The persistent id by which a pickle refers to a storage, in the form that torch.save uses."""


class _Pickler(pickle.Pickler):
    """A pickler that writes a `_NewTensor` as torch.save writes a tensor."""

    def persistent_id(self, value: Any) -> Any:
        return tuple(value) if isinstance(value, _StorageId) else None

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _NewTensor):
            return NotImplemented
        name = next(name for name, dtype in _DTYPES.items() if dtype == value.dtype)
        storage = _StorageId(("storage", getattr(torch, f"{name}Storage"), value.key, "cpu", math.prod(value.shape)))
        strides = torch.empty(value.shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (storage, 0, value.shape, strides, False, OrderedDict())
