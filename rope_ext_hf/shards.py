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

import errno
import json
import math
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor

from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.torchfiles import MOST_DIMS, load

__all__ = [
    "DTYPES",
    "TORCH_DTYPES",
    "Entry",
    "Progress",
    "SafetensorsFile",
    "TorchFile",
    "View",
    "check_destination",
    "disk_errors",
    "files_of",
    "holds",
    "inside",
    "new_folder",
    "read_json",
    "size_of",
    "stamps",
    "whole",
    "write_json",
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
PLAN = "rope-ext-plan.json"
KEPT = (".safetensors", ".pth")  # of an interrupted attempt
MOST_HEADER = 100_000_000  # bytes of a header or index, as safetensors itself allows
SKIPPED = frozenset({".git", ".cache", "__pycache__"})  # folders that are no part of a model
BLOCK = 16 * 2**20  # bytes copied at a time
PAUSE = 0.05  # seconds between looks for what could go to the disk
CANNOT_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)  # inside the kernel


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


def inside(folder: Path, name: str) -> Path:
    """The file of that name in a folder, if that is where it is; the Hub's cache keeps its files beside its folders.

    Raises:
        CheckpointError: a path that leaves the folder, or no file.
    """
    path = folder / name
    root = folder.resolve()
    if root.parent.name == "snapshots":  # of the Hub's cache: a snapshot's files are links into ../../blobs
        root = root.parent.parent
    try:
        leaves = Path(name).is_absolute() or ".." in Path(name).parts or not path.resolve().is_relative_to(root)
        there, plain = os.path.lexists(path), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, links in a circle
        raise CheckpointError(f"{name!r} is no name of a file in {str(folder)!r}: {error}") from error
    if leaves:
        raise CheckpointError(f"{name!r} leads out of the folder {str(folder)!r}: refused")
    if not plain:
        raise CheckpointError(f"{name!r} is {'no plain file' if there else 'missing'} in {str(folder)!r}")
    return path


def files_of(folder: Path) -> list[str]:
    """The names of all files in a folder and below it.

    Raises:
        CheckpointError: one that leads out of the folder, or is not a file.
    """
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if SKIPPED.isdisjoint(name.parts) and (path.is_symlink() or not path.is_dir()):
            inside(folder, str(name))
            names.append(str(name))
    return names


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: not one, or one that names a key twice.
    """
    try:
        if path.stat().st_size > MOST_HEADER:
            raise ValueError(f"more than {MOST_HEADER:,} bytes")
        return _object(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """As transformers writes it."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _object(data: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands there twice")
        return found

    value = json.loads(data.decode("utf-8"), object_pairs_hook=once)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


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
                if size < 8 or not 2 <= length <= min(size - 8, MOST_HEADER):
                    raise ValueError(f"a header of {length} bytes in a file of {size}")
                file.seek(0)
                self.header = file.read(8 + length)
            if self.header[8:9] != b"{":
                raise ValueError("the header is no JSON object")
            fields = _object(self.header[8:])
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


def copy_range(source: int, target: int, begin: int, end: int, progress: Callable[[int], None]) -> None:
    """Bytes begin..end of one open file to the end of another; inside the kernel where it can."""
    at = begin
    while at < end:
        count = min(BLOCK, end - at)
        try:
            done = os.copy_file_range(source, target, count, offset_src=at)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in CANNOT_COPY:
                raise
            data = os.pread(source, count, at)
            done = len(data)
            write_all(target, memoryview(data))
        if not done:
            raise CheckpointError(f"a weight file ended at byte {at} while it was being copied")
        at += done
        progress(done)


def write_all(target: int, data: memoryview) -> None:
    at = 0
    while at < len(data):
        at += os.write(target, data[at : at + BLOCK])


@dataclass
class Progress:
    """Bytes written and bytes in all, told to who asked for it."""

    total: int
    tell: Callable[[int, int], None] | None
    done: int = 0

    def advance(self, count: int) -> None:
        self.done += count
        if self.tell is not None:
            self.tell(self.done, self.total)


def stamps(files: Iterable[SafetensorsFile | TorchFile]) -> dict[str, tuple[int, int]]:
    """Of each file size and time; with other ones an interrupted attempt is not gone on with."""
    return {str(file.path.resolve()): (file.path.stat().st_size, file.path.stat().st_mtime_ns) for file in files}


def check_destination(dst: Path, source: Path | None = None) -> None:
    """Refuse a new folder where something is already, and one inside the source."""
    if os.path.lexists(dst):
        raise CheckpointError(f"{str(dst)!r} exists already; give a new folder")
    if source is not None and dst.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{str(dst)!r} lies in the source, which stays as it is; give a folder elsewhere")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Where to write a file that gets its name when it is whole."""
    part = path.with_name(f"{path.name}.part")
    yield part
    part.replace(path)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Whatever the disk refuses, as one clear error."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"the disk of {str(path)!r} is full; make room and go on with resume, or choose another place"
            ) from error
        where = str(error.filename or path)
        raise CheckpointError(f"{where!r} could not be read or written: {error.strerror or error}") from error


@contextmanager
def new_folder(dst: Path, plan: Mapping[str, Any], size: int, *, resume: bool = False) -> Iterator[Path]:
    """An unfinished folder beside `dst`; it becomes `dst` at the end, on disk, and is all there is until then.

    Args:
        plan: JSON-ready; what an interrupted attempt must agree in to be gone on with.
        size: bytes that will be written.
        resume: go on with what an interrupted attempt left.

    Raises:
        CheckpointError: another process at it, a changed plan, no room; whatever the disk refuses later.
    """
    unfinished = dst.with_name(f".{dst.name}.unfinished")
    with disk_errors(dst):
        dst.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(dst.with_name(f".{dst.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise CheckpointError(f"another process is writing {str(dst)!r}") from error
        try:
            check_destination(dst)
            _check_room(unfinished, dst, size)
            _begin(unfinished, json.loads(json.dumps(plan)), resume)
            with _towards_disk(unfinished):
                yield unfinished
            (unfinished / PLAN).unlink()
            for path in unfinished.rglob("*"):
                sync_folder(path)
            sync_folder(unfinished)
            unfinished.rename(dst)
            sync_folder(dst.parent)
        finally:
            if not unfinished.exists():
                Path(lock.lock_file).unlink(missing_ok=True)  # while it is held: another process must not be given it
            lock.release()


@contextmanager
def _towards_disk(folder: Path) -> Iterator[None]:
    """Have files go to the disk while more is being written, so that little is left to wait for at the end."""
    errors: list[OSError] = []  # an error is told to one caller alone
    ended = threading.Event()

    def sync() -> None:
        while not ended.wait(PAUSE) and not errors:
            for path in folder.iterdir():
                try:
                    sync_folder(path)
                except FileNotFoundError:  # it has got its name meanwhile
                    continue
                except OSError as error:
                    errors.append(error)

    thread = threading.Thread(target=sync, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    for error in errors:
        raise error


def _check_room(unfinished: Path, dst: Path, size: int) -> None:
    """Before anything is made; what an interrupted attempt left is gone on with, or makes room."""
    room = shutil.disk_usage(dst.parent).free
    if unfinished.is_dir():
        room += sum(file.stat().st_size for file in unfinished.iterdir())
    if size > room:
        raise CheckpointError(
            f"{size / 1e9:.1f} GB are to be written to {str(dst)!r}, where {room / 1e9:.1f} GB are free"
        )


def _begin(unfinished: Path, plan: dict[str, Any], resume: bool) -> None:
    begun = None
    if resume and (unfinished / PLAN).is_file():
        try:
            begun = read_json(unfinished / PLAN)
        except CheckpointError:  # interrupted while it was written
            begun = None
    if begun is None:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        (unfinished / PLAN).write_text(json.dumps(plan), encoding="utf-8")
    elif begun != plan:
        raise CheckpointError(f"what {str(unfinished)!r} was begun with has changed; start anew without resume")
    for path in unfinished.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix not in KEPT and path.name != PLAN:
            path.unlink()


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
