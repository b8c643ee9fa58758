"""The journal of a run: one line per finished piece of work, on disk before it is reported.

A run's folder may come from somebody else. Links, FIFOs and devices in it are refused, never followed; every record is
validated once, and an error names file and line.
"""

from __future__ import annotations

import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, ParamSpec, Protocol, TypeVar

from rope_ext_hf.bounds import limit
from rope_ext_hf.errors import FileError, one_line, short
from rope_ext_hf.files import disk_errors, fsync_path, locked, parse_json_object, write_text
from rope_ext_hf.reading.scorer import Cost
from rope_ext_hf.runs.labels import method_key

P = ParamSpec("P")
T = TypeVar("T")
Cell = tuple[float, ...]  # a context length in tokens; with a depth from 0 to 1, a distance or the index of a task


class Value(Protocol):
    """What one item gives in one cell, such as the loss of a document."""

    def to_record(self) -> list[Any]:
        """As a journal holds it."""


_JOURNALS = "records.*.jsonl"
_CHUNKS = "chunks.json"
_GO_ON = "make room, and the same command goes on where this one stopped"


class Record(NamedTuple):
    """One line of a journal: a value as the run's `RunKind` parses it; method None is the model as loaded."""

    method: dict[str, Any] | None
    item: int
    cell: Cell
    value: Value
    cost: Cost


@dataclass(frozen=True)
class RunContents:
    """What a complete run holds: names of documents or trials, and per cell how many of them have a value."""

    items: tuple[str, ...]
    counts: dict[Cell, int]

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> RunContents:
        """Read `items`, `cells` and `per_cell`; ValueError where one is missing, or of another shape."""
        for key in ("items", "cells", "per_cell"):
            if not isinstance(value := settings.get(key), list):
                raise ValueError(f"{key!r} must be a list, got {short(repr(value))}")
        items, cells, counts = settings["items"], settings["cells"], settings["per_cell"]
        if not items or not all(isinstance(name, str) for name in items):
            raise ValueError("'items' must be a list of names")
        if len(cells) != len(counts) or not cells:
            raise ValueError("'cells' and 'per_cell' must be lists of the same length")
        if not all(type(count) is int and 1 <= count <= len(items) for count in counts):
            raise ValueError(f"'per_cell' must hold numbers from 1 to {len(items)}")
        return cls(tuple(items), dict(zip(map(_cell, cells), counts, strict=True)))


def _cell(value: Any) -> Cell:
    match value:
        case [int(length)] if 1 <= length < 2**63:
            return (length,)
        case [int(length), int() | float() as place] if 1 <= length < 2**63 and 0 <= place < 2**20:
            return (length, float(place))
    raise ValueError(f"expected a cell [length] or [length, depth or task], got {short(repr(value))}")


# --- reading a folder that may be somebody else's ---------------------------------------------------------------------


def plain_files(folder: Path, pattern: str) -> list[Path]:
    """The regular files of a folder that match a pattern, sorted; links, FIFOs and devices are left out."""
    with disk_errors(folder):
        return sorted(path for path in folder.glob(pattern) if stat.S_ISREG(path.lstat().st_mode))


def read_plain(path: Path, most: int | None = None) -> bytes:
    """The bytes of a regular file, at most `most`, by default the limit `json_bytes`; FileError for anything else."""
    most = most or limit("json_bytes")
    with disk_errors(path), _open_plain(path, os.O_RDONLY) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise FileError(f"{str(path)!r} has more than {most:,} bytes")
        return file.read()


def _open_plain(path: Path, flags: int) -> BinaryIO:
    """Open a regular file; a link is not followed, a FIFO not waited for."""
    if path.is_symlink():
        raise FileError(f"{str(path)!r} is a link; a run's folder holds plain files")
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError(f"{str(path)!r} is not a plain file")
    # Unbuffered where it is written, so that nothing is left to write when it is closed.
    return os.fdopen(descriptor, "rb") if flags == os.O_RDONLY else os.fdopen(descriptor, "a+b", buffering=0)


def read_records(folder: Path, contents: RunContents, parse: Callable[[str, Any], Value]) -> list[Record]:
    """Every record of a run, each once, its value made by `parse`; FileError: a damaged one, or two that disagree."""
    places: dict[tuple[str, int, Cell], tuple[str, Record]] = {}
    for path in plain_files(folder, _JOURNALS):
        for number, line in enumerate(read_plain(path).split(b"\n")[:-1], 1):  # after the last newline: half a line
            where = f"{path}:{number}"
            try:
                record = _parse_record(line, contents, parse)
            except (ValueError, OverflowError, RecursionError) as error:
                raise FileError(f"{where}: {one_line(error)}; delete the line to have it measured again") from error
            first, earlier = places.setdefault((method_key(record.method), record.item, record.cell), (where, record))
            if repr(earlier.value) != repr(record.value):  # by repr, since NaN differs from itself
                raise FileError(f"{where} contradicts {first}: different values for the same place; delete one of them")
    return [record for _, record in places.values()]


def _parse_record(line: bytes, contents: RunContents, parse: Callable[[str, Any], Value]) -> Record:
    raw = parse_json_object(line)
    written = raw.pop("crc", None)  # an earlier version wrote none
    if set(raw) != set(Record._fields):
        raise ValueError(f"expected the keys {', '.join(Record._fields)}, got {short(', '.join(map(str, raw)))}")
    method, item, cell = raw["method"], raw["item"], _cell(raw["cell"])
    if method is not None and not (isinstance(method, dict) and isinstance(method.get("method"), str)):
        raise ValueError(f"expected a method with its name, or null, got {short(repr(method))}")
    if type(item) is not int or not 0 <= item < len(contents.items):
        raise ValueError(f"expected an item from 0 to {len(contents.items) - 1}, got {short(repr(item))}")
    if cell not in contents.counts:
        raise ValueError(f"the run has no cell {list(cell)}")
    value = parse(contents.items[item], raw["value"])
    match raw["cost"]:
        case [int(tokens), int() | float() as seconds, int(peak)] if (
            0 <= tokens < 2**63 and 0 <= seconds < math.inf and 0 <= peak < 2**63
        ):
            cost = Cost(tokens, float(seconds), peak)
        case _:
            raise ValueError(f"expected a cost [tokens, seconds, bytes], got {short(repr(raw['cost']))}")
    if written not in (None, _checksum(raw)):
        raise ValueError("the line is not as it was written")
    return Record(method, item, cell, value, cost)


def _checksum(line: Mapping[str, Any]) -> int:
    """Of a line without its checksum: a digit that changed is a number, too."""
    return zlib.crc32(json.dumps(line).encode())


# --- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def exclusive(folder: Path, rank: int) -> Iterator[None]:
    """Lock a run's folder for one process of this rank until the process ends; FileError: another one holds it."""
    path = folder / f"run.{rank}.lock"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise FileError(f"{str(path)!r} is not a plain file")
    with ExitStack() as held:
        with disk_errors(path):
            held.enter_context(locked(path, folder))
        yield


def holds_folder(function: Callable[P, T]) -> Callable[P, T]:
    """Have a function of an argument `out`, a folder or None, make that folder and hold its lock to the end."""
    arguments = signature(function)

    @wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        out = arguments.bind(*args, **kwargs).arguments.get("out")
        if out is None:
            return function(*args, **kwargs)
        with disk_errors(Path(out)):
            Path(out).mkdir(parents=True, exist_ok=True)
        with exclusive(Path(out), 0):
            return function(*args, **kwargs)

    return alone


@contextmanager
def open_journal(folder: Path, rank: int) -> Iterator[Callable[[Record], None]]:
    """A function that appends a record and returns once it is on disk; half a line left by a kill is cut off first."""
    path = folder / f"records.{rank}.jsonl"
    with disk_errors(path):
        file = _open_plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def write(record: Record) -> None:
        value = record.value.to_record()
        line = record._asdict() | {"cell": list(record.cell), "value": value, "cost": list(record.cost)}
        with disk_errors(path, _GO_ON):
            left = memoryview(json.dumps(line | {"crc": _checksum(line)}).encode() + b"\n")
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())

    try:
        with disk_errors(path):
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            fsync_path(folder)
        yield write
    finally:
        with disk_errors(path, _GO_ON):  # a network's file system may find only now that it is full
            file.close()


def agree_on_chunks(folder: Path, chunk: int, head_bytes: int) -> tuple[int, int]:
    """Sizes that all processes of a run use, also those that resume it: the ones of whichever process was first."""
    # Results agree to the last digit only where all read in the same chunks, and the sizes follow the free memory.
    path = folder / _CHUNKS
    if not os.path.lexists(path):
        replace_chunks(folder, chunk, head_bytes)
    try:
        match json.loads(read_plain(path)):
            case [int(chunk), int(head_bytes)] if 1 <= chunk <= 2**31 and 1 <= head_bytes < 2**63:
                return chunk, head_bytes
    except (ValueError, RecursionError):
        pass
    raise FileError(f"{str(path)!r} does not hold two positive whole numbers; delete it")


def replace_chunks(folder: Path, chunk: int, head_bytes: int) -> None:
    """Have those who take up the run later use these sizes, where the agreed ones needed too much memory."""
    write_text(folder / _CHUNKS, json.dumps([chunk, head_bytes]))
