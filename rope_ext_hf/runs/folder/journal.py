"""The journal of a run: one line for each value that was measured, on disk before progress is reported.

A run's folder may come from somebody else. Links, FIFOs and devices in it are refused and never followed; every record
is validated, and an error names the file and the line.
"""

from __future__ import annotations

import json
import math
import os
import stat
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rope_ext_hf.bounds import limit
from rope_ext_hf.errors import FileError, one_line, short
from rope_ext_hf.files.whole import disk_errors, fsync_path, parse_json_object, write_text
from rope_ext_hf.reading.scorer import Cost
from rope_ext_hf.runs.conclusions.labels import method_key
from rope_ext_hf.runs.measurement import Cell, Record, RunContents, Value, cell_from_json

__all__ = ["GO_ON", "read_plain", "read_records"]

_JOURNALS = "records.*.jsonl"
_CHUNKS = "chunks.json"
GO_ON = "make room, and the same command goes on where this one stopped"


# --- reading a folder that may come from somebody else ----------------------------------------------------------------


def plain_files(folder: Path, pattern: str) -> list[Path]:
    """Return the regular files of a folder that match a pattern, sorted; links, FIFOs and devices are left out."""
    with disk_errors(folder):
        return sorted(path for path in folder.glob(pattern) if stat.S_ISREG(path.lstat().st_mode))


def read_plain(path: Path, most: int | None = None) -> bytes:
    """Return the bytes of a regular file.

    Args:
        path: the file; a link is refused, not followed.
        most: the largest number of bytes; default: the limit `json_bytes`.

    Raises:
        FileError: the file is not a regular file, is larger than `most`, or cannot be read.
    """
    most = most or limit("json_bytes")
    with disk_errors(path), _open_plain(path, os.O_RDONLY) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise FileError(f"{str(path)!r} has more than {most:,} bytes, the most that is read")
        return file.read()


def _open_plain(path: Path, flags: int) -> BinaryIO:
    """Open a regular file, without following a link or waiting for a FIFO."""
    if path.is_symlink():
        raise FileError(f"{str(path)!r} is a link; a run's folder holds plain files, so replace it by the file")
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileError(f"{str(path)!r} is not a plain file")
    # A file that is written has no buffer, so that nothing is left to write when it is closed.
    return os.fdopen(descriptor, "rb") if flags == os.O_RDONLY else os.fdopen(descriptor, "a+b", buffering=0)


def read_records(folder: Path, contents: RunContents, parse: Callable[[str, Any], Value]) -> list[Record]:
    """Return all records (measured values) in the journals of a run, each once.

    Args:
        folder: the run's folder.
        contents: the items and cells that a record may have.
        parse: converts the name of an item and a JSON value to a value; it raises ValueError for anything else.

    Raises:
        FileError: a record is damaged, or two records have different values for the same method, item and cell.
    """
    places: dict[tuple[str, int, Cell], tuple[str, Record]] = {}
    for path in plain_files(folder, _JOURNALS):
        lines = read_plain(path).split(b"\n")[:-1]  # what stands after the last newline is half a line
        for number, line in enumerate(lines, 1):
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
    """Return the record that a journal's line holds; ValueError if the line is not a record, or was changed."""
    raw = parse_json_object(line)
    checksum = raw.pop("crc", None)  # earlier versions wrote none
    if set(raw) != set(Record._fields):
        raise ValueError(f"expected the keys {', '.join(Record._fields)}, got {short(', '.join(map(str, raw)))}")
    method, item, cell = raw["method"], raw["item"], cell_from_json(raw["cell"])
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
    if checksum not in (None, _checksum(raw)):
        raise ValueError("the line was changed after it was written")
    return Record(method, item, cell, value, cost)


def _checksum(line: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a journal's line without its own checksum.

    Without a checksum, a damaged digit would be read as another number.
    """
    return zlib.crc32(json.dumps(line).encode())


# --- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def open_journal(folder: Path, rank: int) -> Iterator[Callable[[Record], None]]:
    """Open the journal of the process with this rank, and yield a function that appends a record to it.

    The function returns once the record is on disk. An incomplete last line, which a killed process left, is removed
    first.
    """
    path = folder / f"records.{rank}.jsonl"
    with disk_errors(path):
        file = _open_plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def write(record: Record) -> None:
        """Append a record to the journal, and return once it is on disk."""
        value = record.value.to_record()
        line = record._asdict() | {"cell": list(record.cell), "value": value, "cost": list(record.cost)}
        with disk_errors(path, GO_ON):
            unwritten = memoryview(json.dumps(line | {"crc": _checksum(line)}).encode() + b"\n")
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
            os.fsync(file.fileno())

    try:
        with disk_errors(path):
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            fsync_path(folder)
        yield write
    finally:
        with disk_errors(path, GO_ON):  # a network file system may report only now that it is full
            file.close()


def agree_on_chunks(folder: Path, chunk: int, head_bytes: int) -> tuple[int, int]:
    """Return the chunk sizes that all processes of a run use: those that the first process wrote into its folder.

    Each process would choose other sizes by its free memory, but results are equal to the last digit only with equal
    sizes. Processes that continue the run later use them, too.

    Args:
        folder: the run's folder.
        chunk: the tokens per pass that this process would use.
        head_bytes: the bytes of logits that this process would make at a time.
    """
    path = folder / _CHUNKS
    if not os.path.lexists(path):
        replace_chunks(folder, chunk, head_bytes)
    try:
        match json.loads(read_plain(path)):
            case [int(chunk), int(head_bytes)] if 1 <= chunk <= 2**31 and 1 <= head_bytes < 2**63:
                return chunk, head_bytes
    except (ValueError, RecursionError):
        pass
    raise FileError(f"{str(path)!r} does not hold two positive whole numbers; delete it, and it is written anew")


def replace_chunks(folder: Path, chunk: int, head_bytes: int) -> None:
    """Replace the chunk sizes that later processes of a run use, because the earlier ones needed too much memory."""
    write_text(folder / _CHUNKS, json.dumps([chunk, head_bytes]))
