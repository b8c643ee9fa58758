"""Atomic writing of files and folders, locks, and file names that are checked before they are opened.

    with atomic_file(Path("results.json")) as part:              # renamed to results.json once it is on disk
        part.write_text("{}")

Every failure is a FileError with a message of one line.
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
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO

import psutil
from filelock import FileLock, Timeout

from rope_ext_hf.bounds import advice, limit
from rope_ext_hf.errors import CheckpointError, FileError, RopeExtError, one_line, printable, short, size_text

__all__ = [
    "atomic_file",
    "atomic_folder",
    "check_destination",
    "check_room",
    "disk_errors",
    "disk_folder",
    "file_stamps",
    "foreign_errors",
    "free_on_disk",
    "fsync_path",
    "json_digest",
    "json_text",
    "layer_folders",
    "list_files",
    "mistral_format_files",
    "package_table",
    "parse_json_object",
    "read_json",
    "resolve_inside",
    "with_tilde",
    "write_json",
    "write_text",
]

_PLAN_FILE = "rope-ext-plan.json"  # in a staging folder: the settings and inputs that a resumed run must have, too
_RESUMABLE_SUFFIXES = (".safetensors", ".pth")  # files of an interrupted run that a resumed one may keep
_IGNORED_FOLDERS = frozenset({".git", ".cache", "__pycache__"})  # they are no part of a model
MISTRAL_FORMAT = ("params.json", "consolidated*.safetensors", "consolidated*.safetensors.index.json")
"""Patterns of the files of a model in Mistral's own format."""
_VALUES = {
    **dict.fromkeys(("config.json", "generation_config.json", "adapter_config.json"), "config_values"),
    **dict.fromkeys(("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"), "tokenizer_values"),
}
"""The files that transformers and PEFT read, with the limit on the number of their values."""
COPY_BLOCK = 16 * 2**20  # bytes copied at a time
PART_AGE = 3600  # seconds since the last write, after which a temporary file is taken as left by a killed process
_FSYNC_INTERVAL = 0.05  # seconds between two background passes of fsync
_COPY_UNSUPPORTED = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)
"""The errors of copy_file_range where it cannot copy between two files."""
_SIGNED = "process "
"""The beginning of the text in a lock file. On a disk without locks, filelock writes a text of its own."""
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})  # file systems that keep files in main memory
_RETRY = "make room and try again, or choose another place"  # the advice after a full disk, where no run can be resumed


def resolve_inside(folder: Path, name: str) -> Path:
    """Return the path of the plain file that has this relative name inside a folder.

    Raises:
        FileError: the file is missing, is not a plain file, or lies outside the folder after links are followed. A
            snapshot in the Hub's cache may link to the blobs of its own repository.
    """
    path = folder / name
    root = folder.resolve()
    # A snapshot in the Hub's cache is models--OWNER--NAME/snapshots/COMMIT, with `blobs` beside `snapshots`.
    repository = root.parent.parent
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
    """Return the sorted relative names of all files in a folder and its subfolders, except caches and .git.

    Raises:
        FileError: a link leads out of the folder.
    """
    names = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if _IGNORED_FOLDERS.isdisjoint(name.parts) and (path.is_symlink() or not path.is_dir()):
            resolve_inside(folder, str(name))
            names.append(str(name))
    return names


def mistral_format_files(folder: Path) -> list[str]:
    """Return the names of a folder's files in Mistral's own format, which some programs prefer to config.json."""
    return sorted({file.name for pattern in MISTRAL_FORMAT for file in folder.glob(pattern)})


def layer_folders(folder: Path) -> set[str]:
    """Return the subfolders with the layers that sentence-transformers puts on top of a model: pooling, dense, norms.

    The model itself is at the top of the folder, which is why modules.json names it with an empty path.
    """
    modules: list[Any] = []
    with suppress(FileError):  # missing, or another program's file of this name
        modules = _read_json_list(folder / "modules.json")
    paths = [module.get("path") for module in modules if isinstance(module, dict)]
    return {str(Path(path)) for path in paths if isinstance(path, str) and Path(path).parts}


FileStamps = dict[str, tuple[str, int, int]]
"""By the path of a file: its path after links are followed, its size in bytes, its last change in nanoseconds."""


def file_stamps(paths: Iterable[Path]) -> FileStamps:
    """Return the stamp of each file, which changes when the file is replaced or written to."""
    stamps = {}
    for path in paths:
        with disk_errors(path):
            status = path.stat()
            stamps[str(path)] = (str(path.resolve()), status.st_size, status.st_mtime_ns)
    return stamps


def check_destination(dst: Path, source: Path | None = None) -> None:
    """Raise FileError if `dst` exists already, or if it lies inside the source folder."""
    if os.path.lexists(dst):
        raise FileError(f"{str(dst)!r} exists already; give a new folder")
    if source is not None and dst.resolve().is_relative_to(source.resolve()):
        raise FileError(
            f"{str(dst)!r} lies inside the source {str(source)!r}, which is never written to; give a folder outside it"
        )


def with_tilde(text: str) -> str:
    """Return a path or another text with `~` in place of the user's home folder, for files that are given away."""
    home = str(Path.home())
    return text if home == os.sep else text.replace(home + os.sep, f"~{os.sep}")


def package_table(package: str, name: str) -> dict[str, Any]:
    """Return the contents of the TOML file with this name that is part of a Python package."""
    return tomllib.loads(resources.files(package).joinpath(name).read_text(encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises:
        FileError: the file is missing, is not a regular file, is larger than the limit `json_bytes`, or does not hold
            one object without repeated keys.
    """
    with _json_errors(path):
        return parse_json_object(_json_bytes(path))


def _read_json_list(path: Path) -> list[Any]:
    """Return the JSON list in a file; the errors are those of `read_json`."""
    with _json_errors(path):
        value = json.loads(_json_bytes(path).decode("utf-8"))
        if not isinstance(value, list):
            raise ValueError("not a JSON list")
        return value


@contextmanager
def _json_errors(path: Path) -> Iterator[None]:
    """Turn the errors of reading JSON, in a `with` block, into a FileError that names the file."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{str(path)!r} cannot be read: {error}") from error


def _json_bytes(path: Path) -> bytes:
    """Return the content of a JSON file; raise ValueError or OSError for one that must not be read."""
    if path.exists() and not path.is_file():  # a device may have no end, a pipe may never begin
        raise ValueError("it is not a regular file")
    most = limit("json_bytes")
    if path.stat().st_size > most:
        raise ValueError(f"more than {most:,} bytes; {advice('json_bytes')}")
    return path.read_bytes()


def parse_json_object(data: bytes) -> dict[str, Any]:
    """Return the JSON object in UTF-8 text; raise ValueError or RecursionError for anything else or a repeated key."""

    def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        unique = dict(pairs)
        if len(unique) != len(pairs):
            names = [name for name, _ in pairs]
            repeated = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {repeated!r} occurs twice")
        return unique

    value = json.loads(data.decode("utf-8"), object_pairs_hook=refuse_repeats)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, formatted as transformers formats its configs; the write by itself is not atomic."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_text(path: Path, text: str) -> Path:
    """Write a text to a file, completely or not at all, and return the path; lone surrogates are written as escapes."""
    with atomic_file(path) as part:
        part.write_bytes(text.encode("utf-8", errors="backslashreplace"))
    return path


def json_digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON, in hexadecimal; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def check_folder(folder: Path) -> None:
    """Raise FileError for a file in a model folder that must not reach transformers; do nothing without the folder.

    Reading a device may never end, and reading a pipe may never begin. A config with very many values takes minutes.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise FileError(f"{str(path)!r} is not a regular file but a device or a pipe; remove it from the folder")
        if path.name in _VALUES and path.exists():
            with _json_errors(path):
                _check_values(_json_bytes(path), _VALUES[path.name])


def _check_values(data: bytes, name: str) -> None:
    """Raise ValueError if a JSON text may hold more values than the limit `name`; commas in texts count as well."""
    count, most = 1 + sum(map(data.count, (b",", b"[", b"{"))), limit(name)
    if count > most:
        raise ValueError(f"about {count:,} values are more than {most:,}; {advice(name)}")


def json_text(value: Any) -> str:
    """Return a value as JSON that every reader accepts.

    A number that is not finite becomes null, and an object that JSON does not know becomes its text.
    """
    text = json.dumps(value, default=lambda other: dict(other) if isinstance(other, Mapping) else str(other))
    return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=1)


def copy_files(source: Path, names: Iterable[str], target: Path) -> None:
    """Copy files, given by names relative to `source`, into another folder; links are followed, permissions kept."""
    for name in names:
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(resolve_inside(source, name), copy)
        copy_mode(source / name, copy)


def copy_mode(source: Path, target: Path) -> None:
    """Give `target` the permissions of `source`, and let the owner of `target` change it."""
    target.chmod(stat.S_IMODE(source.stat().st_mode) | stat.S_IWUSR)


def copy_range(source: BinaryIO, target: BinaryIO, begin: int, end: int, advance: Callable[[int], None]) -> None:
    """Append the bytes from `begin` to `end` of one open file to another, inside the kernel where it supports that.

    `advance` is called with the number of bytes after each block.
    """
    at = begin
    while at < end:
        count = min(COPY_BLOCK, end - at)
        target.flush()  # the kernel does not see what Python has buffered
        try:
            copied = os.copy_file_range(source.fileno(), target.fileno(), count, offset_src=at)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _COPY_UNSUPPORTED:
                raise
            source.seek(at)
            copied = target.write(source.read(count))
        if not copied:
            raise FileError(f"a file ended at byte {at} while it was being copied; it was expected to have {end}")
        _begin_writing_to_disk(target, copied)
        at += copied
        advance(copied)


def _begin_writing_to_disk(file: BinaryIO, count: int) -> None:
    """Let the system begin to write the last `count` bytes of an open file to the disk, without waiting for the end.

    A later fsync has little left to do then. The system is told that the bytes are not needed soon, after which Linux
    begins at once. It keeps them in memory until they are on the disk.
    """
    with suppress(AttributeError, OSError):  # macOS has no such call; without it the bytes are written later
        begin = os.lseek(file.fileno(), 0, os.SEEK_CUR) - count
        os.posix_fadvise(file.fileno(), begin, count, os.POSIX_FADV_DONTNEED)


@contextmanager
def disk_errors(path: Path, advice: str = _RETRY) -> Iterator[None]:
    """Convert an OSError inside the block to a FileError.

    `path` is named where the error names no file; `advice` ends the message about a full disk.
    """
    try:
        yield
    except OSError as error:
        _check_full(error, path, advice)
        name = str(error.filename or path)
        raise FileError(f"{name!r} could not be read or written: {error.strerror or error}") from error


def _check_full(error: OSError, path: Path | None, advice: str = _RETRY) -> None:
    """Raise FileError if an error means a full disk, that of `path`; None means that the path is not known."""
    if path is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise FileError(f"a disk is full; {advice}") from error
    if error.errno == errno.EDQUOT:
        raise FileError(f"the disk quota for {str(path)!r} is used up; {advice}") from error
    if error.errno == errno.ENOSPC and path is not None:
        existing = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
        free = size_text(shutil.disk_usage(existing).free)
        raise FileError(f"the disk of {str(path)!r} is full ({free} free); {advice}") from error


def fsync_path(path: Path) -> None:
    """Wait until a file, or the list of files in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path, *, fsync: bool = True) -> Iterator[Path]:
    """Yield a path to write to, which is renamed to `path` at the end; after an exception `path` is as it was.

    A link at `path` is replaced, not followed. The new file gets the permissions of a file that it replaces.

    Args:
        path: the file to write.
        fsync: wait for the disk, and convert its errors; False inside `atomic_folder`, which does both for all files.
    """
    stem = path.name[:60]  # leaves room for the suffix where the name is as long as the disk allows
    part = path.with_name(f"{stem}.{secrets.token_hex(4)}.part")  # two processes may write the same file
    with disk_errors(path) if fsync else nullcontext():
        if path.exists() and not (path.is_file() or path.is_dir()):  # root could replace /dev/null
            raise FileError(f"{str(path)!r} is not a regular file but a device or a pipe; give the name of a file")
        for leftover in path.parent.glob(f"{glob.escape(stem)}.*.part"):
            with suppress(FileNotFoundError):  # another process may remove it first
                if time.time() - leftover.lstat().st_mtime > PART_AGE:
                    leftover.unlink()
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
    """Yield a hidden staging folder beside `dst`, which becomes `dst` at the end, when all of its files are on disk.

    A lock keeps other processes from writing to the same destination. After an exception `dst` does not exist.

    Args:
        dst: the folder to write, which must not exist.
        source: the folder that is read; `dst` must not lie inside it.
        inputs: stamps of the files that are read (`file_stamps`), taken before reading. A file that changes in the
            meantime is an error.
        size: bytes that will be written, for a check of the free space.
        plan: the settings of this run as JSON values. With them the run can be resumed, so its staging folder is kept
            after an exception, except for an error in the source, which a resumed run would meet again. None: the run
            cannot be resumed.
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
            except BaseException as error:
                in_source = isinstance(error, RopeExtError) and not isinstance(error, FileError)
                if plan is None or in_source:
                    shutil.rmtree(staging, ignore_errors=True)
                raise


LOCKED: list[Path] = []
"""The folders that this process has locked so far, to write in them: the same command can go on in these."""


@contextmanager
def locked(path: Path, folder: Path) -> Iterator[None]:
    """Hold the lock file `path` of a folder inside the `with` block; the lock file names this process.

    The kernel releases the lock however the process ends.

    Raises:
        FileError: another process holds the lock; the message names it.
    """
    holder = _holder(path)  # read first: an older filelock empties the file when it tries to lock it
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        who = f" ({holder})" if holder else ""
        raise FileError(
            f"another process is writing {str(folder)!r}{who}; wait for it, or choose another folder"
        ) from error
    LOCKED.append(folder)
    try:
        with suppress(OSError):  # without the name of the process the lock holds all the same
            if not path.stat().st_size or _holder(path):
                path.write_text(f"{_SIGNED}{os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield
    finally:
        lock.release()


def _holder(path: Path) -> str:
    """Return a text for the process that a lock file names, "process 123 on HOST"; empty if it names none."""
    with suppress(OSError), path.open("rb") as file:
        text = file.read(200).decode(errors="replace")
        return short(printable(text.strip())) if text.startswith(_SIGNED) else ""
    return ""


@contextmanager
def _exclusive(dst: Path, staging: Path) -> Iterator[None]:
    """Hold the lock for a destination inside the `with` block; delete the lock file if no staging folder is left."""
    lock = dst.with_name(f".{dst.name}.lock")
    with locked(lock, dst):
        try:
            yield
        finally:
            if not staging.exists():
                lock.unlink(missing_ok=True)  # while it is held, so that no other process can hold the removed file


def _check_unchanged(inputs: FileStamps) -> None:
    """Raise FileError if one of the files has changed since its stamp was taken."""
    now = file_stamps(map(Path, inputs))
    for path, stamp in inputs.items():
        if now[path] != stamp:
            raise FileError(
                f"{path!r} changed while it was being read, so the result would mix old and new; nothing was written "
                "under the new name. Start again without resume once the source is complete"
            )


@contextmanager
def _background_fsync(folder: Path) -> Iterator[None]:
    """Send the files of a folder to the disk while the block writes more, so that the wait at the end is short."""
    errors: list[OSError] = []  # kept and raised at the end: the kernel reports a failed write to one caller only
    ended = threading.Event()

    def sync() -> None:
        while not ended.wait(_FSYNC_INTERVAL) and not errors:
            for path in folder.iterdir():
                try:
                    fsync_path(path)
                except FileNotFoundError:  # renamed in the meantime
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
    """Raise FileError if the disk has no room for `size` bytes.

    Files that an interrupted run left in the staging folder are reused or removed, so their space counts as free.
    """
    present = sum(file.stat().st_size for file in staging.iterdir()) if staging.is_dir() else 0
    check_room(dst, size, present=present)


def check_room(path: Path, size: int, advice: str = _RETRY, *, present: int = 0) -> None:
    """Raise FileError if the disk of a file or folder, which need not exist, has no room for `size` bytes.

    Args:
        path: the file or folder that the message names; the folder around it exists.
        size: the bytes that are to be written.
        advice: the end of the message.
        present: bytes of these that are on the disk already.
    """
    room = shutil.disk_usage(path.parent).free + present
    if size > room:
        raise FileError(
            f"{size_text(size)} are to be written to {str(path)!r}, where {size_text(room)} are free; {advice}"
        )


def _open_staging(staging: Path, plan: dict[str, Any], resume: bool) -> None:
    """Create the staging folder; keep finished weight files in it that are from an interrupted run of the same plan."""
    if staging.is_symlink():
        staging.unlink()
    begun = None
    if resume and (staging / _PLAN_FILE).is_file():
        with suppress(FileError):  # the run may have been interrupted while it wrote the plan
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


def disk_folder() -> Path:
    """Return the folder for temporary files (see `tempfile.gettempdir`), or /var/tmp if that one is in main memory."""
    folder = Path(tempfile.gettempdir())
    other = Path("/var/tmp")  # for large files, on Linux and macOS
    return other if _is_in_memory(folder) and other.is_dir() and os.access(other, os.W_OK) else folder


def free_on_disk() -> int:
    """Return the free bytes of the disk with the folder for temporary files."""
    return shutil.disk_usage(disk_folder()).free


def _is_in_memory(folder: Path) -> bool:
    """Return whether the file system of a folder keeps its files in main memory."""
    above = [str(path) for path in (folder.resolve(), *folder.resolve().parents)]
    mounted = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    return next((mounted[path] in _IN_MEMORY for path in above if path in mounted), False)


@contextmanager
def foreign_errors(failure: str) -> Iterator[None]:
    """Turn every exception that other packages raise in a `with` block into a one-line CheckpointError.

    For code that reads files which others made: readers of configs, tokenizers and weights, and model classes, raise
    any exception on damaged files. The message begins with `failure`, which says what failed. This package's own
    exceptions pass through.
    """
    try:
        yield
    except (RopeExtError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in Rust code, such as tokenizers, is not an Exception
        if isinstance(error, OSError):
            _check_full(error, Path(error.filename) if error.filename else None)
        reason = one_line(error)
        # Messages of other types, a KeyError for one, mean little without the name of the type.
        if str(error) and not isinstance(error, (OSError, ValueError, RuntimeError)):
            reason = f"{type(error).__name__}: {reason}"
        raise CheckpointError(f"{failure}: {reason}") from error
