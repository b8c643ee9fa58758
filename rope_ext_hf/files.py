"""Atomic files and folders: written beside their destination, fsynced, renamed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rope_ext_hf.errors import CheckpointError

__all__ = [
    "BLOCK",
    "CANNOT_COPY",
    "KEPT",
    "MOST_HEADER",
    "PAUSE",
    "PLAN",
    "SKIPPED",
    "Progress",
    "check_destination",
    "copy_range",
    "disk_errors",
    "files_of",
    "inside",
    "new_folder",
    "read_json",
    "stamps",
    "sync_folder",
    "whole",
    "write_all",
    "write_json",
]
PLAN = "rope-ext-plan.json"
KEPT = (".safetensors", ".pth")  # of an interrupted attempt
MOST_HEADER = 100_000_000  # bytes of a header or index, as safetensors itself allows
SKIPPED = frozenset({".git", ".cache", "__pycache__"})  # folders that are no part of a model
BLOCK = 16 * 2**20  # bytes copied at a time
PAUSE = 0.05  # seconds between looks for what could go to the disk
CANNOT_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)  # inside the kernel


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


def stamps(paths: Iterable[Path]) -> dict[str, tuple[int, int]]:
    """Size in bytes and modification time in nanoseconds of each file, by its resolved path."""
    return {str(path.resolve()): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths}


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
