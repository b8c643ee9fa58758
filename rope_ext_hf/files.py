"""Atomic files and folders, locks, and file names that are checked before they are opened.

    with atomic_file(Path("results.json")) as part:              # renamed to results.json once it is on disk
        part.write_text("{}")

Every failure is a FileError of one line. Nothing here depends on models.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import socket
import stat
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from filelock import FileLock, Timeout

from rope_ext_hf.bounds import advice, limit
from rope_ext_hf.errors import FileError, printable, short, size_text

_PLAN_FILE = "rope-ext-plan.json"  # in a staging folder: what a resumed run must agree with
_RESUMABLE_SUFFIXES = (".safetensors", ".pth")  # files of an interrupted run that a resumed one may keep
_IGNORED_FOLDERS = frozenset({".git", ".cache", "__pycache__"})  # no part of a model
COPY_BLOCK = 16 * 2**20  # bytes copied at a time
PART_AGE = 3600  # seconds since the last write, after which a temporary file is nobody's
_FSYNC_INTERVAL = 0.05  # seconds between two background passes of fsync
# What copy_file_range answers where it cannot copy between these two files.
_COPY_UNSUPPORTED = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)
_SIGNED = "process "
"""How the text in a lock file begins; another beginning is that of filelock, where the disk has no locks."""
_RETRY = "make room and try again, or choose another place"  # after a full disk, where nothing can be resumed


def resolve_inside(folder: Path, name: str) -> Path:
    """Return the path of a plain file in a folder, given by a relative name; links are followed first.

    A snapshot in the Hub's cache may link to the blobs of its own repository, and nothing else may leave the folder.
    """
    path = folder / name
    root = folder.resolve()
    repository = root.parent.parent  # of models--OWNER--NAME/snapshots/COMMIT, with `blobs` beside snapshots
    of_hub = repository.name.startswith(("models--", "datasets--", "spaces--")) and (repository / "blobs").is_dir()
    if root.parent.name == "snapshots" and of_hub:
        root = repository
    try:
        leaves = Path(name).is_absolute() or ".." in Path(name).parts or not path.resolve().is_relative_to(root)
        exists, plain = os.path.lexists(path), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, links in a circle
        raise FileError(f"{name!r} is not a valid file name in {str(folder)!r}: {error}") from error
    if leaves:
        raise FileError(f"{name!r} leads out of the folder {str(folder)!r}, which is not allowed")
    if not plain:
        raise FileError(f"{name!r} is {'not a plain file' if exists else 'missing'} in {str(folder)!r}")
    return path


def list_files(folder: Path) -> list[str]:
    """The relative names of all files in a folder and below, sorted, without caches and .git; no link leads out."""
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if _IGNORED_FOLDERS.isdisjoint(name.parts) and (path.is_symlink() or not path.is_dir()):
            resolve_inside(folder, str(name))
            names.append(str(name))
    return names


FileStamps = dict[str, tuple[str, int, int]]
"""By the path of a file: the file after links are followed, its size in bytes, its last change in nanoseconds."""


def file_stamps(paths: Iterable[Path]) -> FileStamps:
    """The stamp of each file, by which a replaced one is noticed."""
    stamps = {}
    for path in paths:
        with disk_errors(path):
            status = path.stat()
            stamps[str(path)] = (str(path.resolve()), status.st_size, status.st_mtime_ns)
    return stamps


def check_destination(dst: Path, source: Path | None = None) -> None:
    """Check that nothing exists at `dst`, and that it does not lie inside the source folder."""
    if os.path.lexists(dst):
        raise FileError(f"{str(dst)!r} exists already; give a new folder")
    if source is not None and dst.resolve().is_relative_to(source.resolve()):
        raise FileError(
            f"{str(dst)!r} lies inside the source {str(source)!r}, which is never written to; "
            "give a folder outside of it"
        )


def package_table(package: str, name: str) -> dict[str, Any]:
    """A TOML file that comes with a package."""
    return tomllib.loads(resources.files(package).joinpath(name).read_text(encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object without repeated keys from a regular file that is not too large."""
    try:
        if path.exists() and not path.is_file():  # a device may have no end, a pipe may never begin
            raise ValueError("it is no regular file")
        if path.stat().st_size > (most := limit("json_bytes")):
            raise ValueError(f"more than {most:,} bytes; {advice('json_bytes')}")
        return parse_json_object(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{str(path)!r} cannot be read: {error}") from error


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Parse UTF-8 JSON that must be one object without repeated keys; ValueError or RecursionError where it is not."""

    def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) != len(pairs):
            names = [name for name, _ in pairs]
            raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} occurs twice")
        return unique

    value = json.loads(data.decode("utf-8"), object_pairs_hook=refuse_repeats)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


class PlainLoader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """PyYAML's safe loader without aliases, by which a few lines stand for a value without end."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.composer.ComposerError(problem="an alias stands here; write the value out", problem_mark=mark)
        return super().compose_node(parent, index)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object in the form that transformers gives its configs; not atomic by itself."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_text(path: Path, text: str) -> Path:
    """Write a text whole or not at all, whatever names it holds; the path."""
    with atomic_file(path) as part:
        part.write_bytes(text.encode("utf-8", errors="backslashreplace"))
    return path


def json_digest(value: Any) -> str:
    """SHA-256 of a value as JSON, in hexadecimal; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def check_regular(folder: Path) -> None:
    """Refuse a device, which may have no end, and a pipe, which may never begin, in a folder, if there is one."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise FileError(f"{str(path)!r} is no regular file but a device or a pipe; remove it")


def json_text(value: Any) -> str:
    """A value as JSON that every reader takes: a number that is not finite becomes null, an unknown object its text."""
    text = json.dumps(value, default=lambda other: dict(other) if isinstance(other, Mapping) else str(other))
    return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=1)


def copy_files(source: Path, names: Iterable[str], target: Path) -> None:
    """Copy files of one folder, given by relative name, into another; links are followed, permissions kept."""
    for name in names:
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(resolve_inside(source, name), copy)
        copy_mode(source / name, copy)


def copy_mode(source: Path, target: Path) -> None:
    """Give a file the permissions of another, and its owner the right to change it."""
    target.chmod(stat.S_IMODE(source.stat().st_mode) | stat.S_IWUSR)


def copy_range(source: BinaryIO, target: BinaryIO, begin: int, end: int, advance: Callable[[int], None]) -> None:
    """Append bytes begin..end of one open file to another, inside the kernel where it supports that, block by block."""
    at = begin
    while at < end:
        count = min(COPY_BLOCK, end - at)
        target.flush()  # the kernel appends to what is in the file
        try:
            copied = os.copy_file_range(source.fileno(), target.fileno(), count, offset_src=at)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _COPY_UNSUPPORTED:
                raise
            source.seek(at)
            copied = target.write(source.read(count))
        if not copied:
            raise FileError(f"a file ended at byte {at} while it was being copied; it was expected to have {end}")
        at += copied
        advance(copied)


@contextmanager
def disk_errors(path: Path, advice: str = _RETRY) -> Iterator[None]:
    """Convert OSError to FileError; `path` is named where the error names no file, `advice` for a full disk."""
    try:
        yield
    except OSError as error:
        check_full(error, path, advice)
        where = str(error.filename or path)
        raise FileError(f"{where!r} could not be read or written: {error.strerror or error}") from error


def check_full(error: OSError, path: Path | None, advice: str = _RETRY) -> None:
    """Raise FileError where an error means that the disk of `path` is full; None: an unknown one."""
    if path is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise FileError(f"a disk is full; {advice}") from error
    if error.errno == errno.EDQUOT:
        raise FileError(f"the disk quota for {str(path)!r} is used up; {advice}") from error
    if error.errno == errno.ENOSPC and path is not None:
        there = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
        free = size_text(shutil.disk_usage(there).free)
        raise FileError(f"the disk of {str(path)!r} is full ({free} free); {advice}") from error


def fsync_path(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path, *, fsync: bool = True) -> Iterator[Path]:
    """Yield a path to write to, which is renamed to `path` at the end; after an exception `path` is as it was.

    A link at `path` is replaced, not followed. A file that is replaced passes its permissions on. `fsync` is False
    inside `atomic_folder`, which waits for the disk, and names the disk's errors, for everything in it.
    """
    stem = path.name[:60]  # of a name as long as the disk allows
    part = path.with_name(f"{stem}.{secrets.token_hex(4)}.part")  # two processes may write the same file
    with disk_errors(path) if fsync else nullcontext():
        if path.exists() and not (path.is_file() or path.is_dir()):  # whoever may write there could replace /dev/null
            raise FileError(f"{str(path)!r} is no regular file but a device or a pipe; give the name of a file")
        for left in path.parent.glob(f"{glob.escape(stem)}.*.part"):
            with suppress(FileNotFoundError):
                if time.time() - left.lstat().st_mtime > PART_AGE:  # of a process that was killed
                    left.unlink()
        try:
            yield part
            if path.is_file() and not path.is_symlink():
                copy_mode(path, part)
            if fsync:
                fsync_path(part)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        if fsync:
            fsync_path(path.parent)


@contextmanager
def atomic_folder(
    dst: Path,
    *,
    source: Path | None = None,
    inputs: FileStamps | None = None,
    size: int = 0,
    plan: Mapping[str, Any] | None = None,
    resume: bool = False,
) -> Iterator[Path]:
    """Yield a hidden staging folder beside `dst`, which is fsynced and renamed to `dst` at the end.

    A lock keeps other processes away from the same destination. After an exception `dst` does not exist.

    Args:
        source: the folder that is read; `dst` must not lie inside it.
        inputs: stamps of the files that are read, taken before they were. A change during the writing is an error.
        size: bytes that will be written, for a check of the free space.
        plan: JSON-ready settings of a run that may be resumed, whose staging folder outlives an exception; else None.
        resume: continue in the staging folder of an interrupted run with the same plan and inputs.
    """
    staging = dst.with_name(f".{dst.name}.unfinished")
    with disk_errors(dst, "make room and go on with resume, or choose another place" if plan else _RETRY):
        check_destination(dst, source)
        dst.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(dst, staging):
            check_destination(dst, source)
            _check_room(staging, dst, size)
            _open_staging(staging, json.loads(json.dumps({**(plan or {}), "inputs": inputs or {}})), resume)
            try:
                with _background_fsync(staging):
                    yield staging
                _check_unchanged(inputs or {})
                (staging / _PLAN_FILE).unlink()
                for path in staging.rglob("*"):
                    fsync_path(path)
                fsync_path(staging)
                staging.rename(dst)
                fsync_path(dst.parent)
            except BaseException:
                if plan is None:
                    shutil.rmtree(staging, ignore_errors=True)
                raise


@contextmanager
def locked(path: Path, folder: Path) -> Iterator[None]:
    """Hold a lock file for a folder, which states the process that holds it; a FileError where another process does.

    The kernel releases it however the process ends.
    """
    lock, holder = FileLock(path), _holder(path)  # read before: an older filelock empties the file when it tries
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        who = f" ({holder})" if holder else ""
        raise FileError(
            f"another process is writing {str(folder)!r}{who}; wait for it, or choose another folder"
        ) from error
    try:
        with suppress(OSError):  # a disk that refuses costs the statement only
            if not path.stat().st_size or _holder(path):
                path.write_text(f"{_SIGNED}{os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield
    finally:
        lock.release()


def _holder(path: Path) -> str:
    """The process that a lock file states; empty: none."""
    with suppress(OSError), path.open("rb") as file:
        text = file.read(200).decode(errors="replace")
        return short(printable(text.strip())) if text.startswith(_SIGNED) else ""
    return ""


@contextmanager
def _exclusive(dst: Path, staging: Path) -> Iterator[None]:
    """Hold the lock of a destination; its file goes once there is no staging folder left to protect."""
    lock = dst.with_name(f".{dst.name}.lock")
    with locked(lock, dst):
        try:
            yield
        finally:
            if not staging.exists():
                lock.unlink(missing_ok=True)  # while it is held: no other process may hold the old file


def _check_unchanged(inputs: FileStamps) -> None:
    now = file_stamps(map(Path, inputs))
    if changed := next((path for path, stamp in inputs.items() if now[path] != stamp), None):
        raise FileError(
            f"{changed!r} changed while it was being read, so the result would mix old and new; nothing was written "
            "under the new name. Start again without resume once the source is complete"
        )


@contextmanager
def _background_fsync(folder: Path) -> Iterator[None]:
    """Send files to the disk while more is being written, so that the wait at the end is short."""
    errors: list[OSError] = []  # the kernel reports a failed write to one caller alone
    ended = threading.Event()

    def sync() -> None:
        while not ended.wait(_FSYNC_INTERVAL) and not errors:
            for path in folder.iterdir():
                try:
                    fsync_path(path)
                except FileNotFoundError:  # renamed meanwhile
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


def _check_room(staging: Path, dst: Path, size: int) -> None:
    """Check the free space; what an interrupted run left is either kept or removed, so it counts as free."""
    room = shutil.disk_usage(dst.parent).free
    if staging.is_dir():
        room += sum(file.stat().st_size for file in staging.iterdir())
    if size > room:
        raise FileError(
            f"{size_text(size)} are to be written to {str(dst)!r}, where {size_text(room)} are free; {_RETRY}"
        )


def _open_staging(staging: Path, plan: dict[str, Any], resume: bool) -> None:
    """Make the staging folder, or keep the finished weight files of an interrupted run with the same plan."""
    if staging.is_symlink():
        staging.unlink()
    begun = None
    if resume and (staging / _PLAN_FILE).is_file():
        with suppress(FileError):  # interrupted while it was written
            begun = read_json(staging / _PLAN_FILE)
    if begun is None:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()
        write_json(staging / _PLAN_FILE, plan)
    elif begun != plan:
        raise FileError(
            f"the source or the settings that {str(staging)!r} was begun with have changed; start anew without resume"
        )
    for path in staging.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.suffix not in _RESUMABLE_SUFFIXES and path.name != _PLAN_FILE:
            path.unlink()
