"""Text in files: which files a path or pattern names, and the documents in each of them.

Files are untrusted: nothing in them is executed or unpickled, and a damaged file is refused with its name and line.
"""

from __future__ import annotations

import glob
import gzip
import importlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from rope_ext_hf.errors import CorpusError, short
from rope_ext_hf.installing import install_command
from rope_ext_hf.reading.text.csv_tables import csv_rows, is_list, is_number
from rope_ext_hf.reading.text.documents import Document, choose_column, mask_column, read_rows
from rope_ext_hf.reading.text.text_folders import TextFiles, texts_of_folder

NAME_HELP = (
    "a string names text: 'stdlib', the path of a UTF-8 text, JSON lines, CSV or parquet file, a folder, a pattern "
    "such as 'books/*.txt', or hf:OWNER/NAME. In Python, a text itself is given in a list: [text]"
)
"""What a string may name, for the end of an error message."""

_PROSE = (".txt", ".md", ".rst", ".py")
"""Suffixes of the files that are read as text in a folder. A file that is named alone may have any other."""
_TEXT_MODE: dict[str, Any] = {"encoding": "utf-8-sig", "newline": ""}
"""The arguments of `open` for text: line ends stay as they are, and a byte-order mark is not part of the text."""
_TEXT_TYPES = ("string", "large_string", "string_view")  # of parquet columns
_ROWS_AT_ONCE = 16  # decoded at a time; a row may be a whole book
_MAX_EXPANSION = 100
"""Times its size that a compressed file may expand to; text expands to 3 to 5 times its size."""
_GIT_LFS = b"version https://git-lfs.github.com/spec/"
"""The beginning of the file that stands for a large one in a clone, until `git lfs pull` fetches it."""
_FREE_EXPANSION = 64 * 2**20  # bytes to which any compressed file may expand

_Content = str | Sequence[int]


def find_files(source: str, *, config: str | None = None, split: str | None = None) -> TextFiles:
    """Return the files of text that a path or pattern names, sorted.

    Args:
        source: the path or pattern.
        config, split: those of a folder that is a data set repository; default: as for hf:OWNER/NAME.

    Raises:
        CorpusError: the file does not exist, or the folder has no files of text, or lacks the split or configuration.
    """
    path = Path(source)
    if path.is_file():
        return TextFiles(path.parent, [path])
    if path.is_dir():
        texts = texts_of_folder(path, _kind, config=config, split=split)
        if not texts.files:
            suffixes = ", ".join((*_PROSE, *_TABLE_READERS))
            raise CorpusError(
                f"the folder {source!r} has no files of text; looked for {suffixes} (also .gz, .zst)"
                f"{f'. {texts.left_out}' if texts.left_out else ''}"
            )
        return texts
    matches = map(Path, glob.glob(source, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute patterns
    files = sorted(match for match in matches if match.is_file())
    if not files:
        raise CorpusError(f"no such text file, folder or pattern: {short(source)!r}; {NAME_HELP}")
    return TextFiles(Path(os.path.commonpath([file.parent for file in files])), files)


def _kind(file: Path) -> str | None:
    """Return how a file in a folder is read, by its suffix: "table" or "prose"; None: it is not read."""
    suffix = _suffix(file)
    return "table" if suffix in _TABLE_READERS else "prose" if suffix in _PROSE else None


def _suffix(file: Path) -> str:
    """Return the suffix that states the kind of content, in lower case and without a suffix for compression.

    It is ".jsonl" for a.jsonl.gz.
    """
    inner = file.stem if file.suffix.lower() in _OPENERS else file.name
    return Path(inner).suffix.lower()


def read_files(source: str, root: Path, files: Sequence[Path], column: str | None) -> Iterator[Document]:
    """Yield the documents in files, named by their path below `root`.

    Args:
        source: the name by which the user gave the files, for messages.
        root: the folder that names are relative to.
        files: the files, in order.
        column: the name of the column that holds the text, in tables; None: see
            `rope_ext_hf.reading.text.documents.choose_column`.

    Raises:
        CorpusError: a column is named, and all files are plain text; or a file cannot be read.
    """
    if column is not None and not any(_suffix(file) in _TABLE_READERS for file in files):
        raise CorpusError(f"{source!r} is plain text, which has no column {column!r}")
    for file in files:
        yield from _read_file(file, file.relative_to(root).as_posix(), column)


def _read_file(file: Path, name: str, column: str | None) -> Iterator[Document]:
    """Yield the documents in a file.

    They are called `name`; in a table, `name` is followed by ":" and the line or row.
    """
    reader = _TABLE_READERS.get(_suffix(file), _read_prose)
    last = ""
    try:
        with file.open("rb") as begin:
            if begin.read(len(_GIT_LFS)) == _GIT_LFS:
                raise CorpusError(f"{str(file)!r} is a pointer of Git LFS without the text; run `git lfs pull` there")
        with _open(file) as stream:
            for place, content in reader(stream, str(file), column):
                yield Document.from_content(name + place, content)
                last = f" after {file}{place}"
    except CorpusError:
        raise
    # gzip, zlib, json, the codecs and pyarrow raise one of these, or an error derived from it, on a damaged file.
    except (OSError, EOFError, ValueError, RecursionError, NotImplementedError, zlib.error) as error:
        raise CorpusError(f"{str(file)!r} cannot be read{last}: {reason(error)}") from error


def read_beginning(file: Path, characters: int) -> str:
    """Return the first `characters` characters of a text file."""
    with file.open(**_TEXT_MODE) as stream:
        return str(stream.read(characters))


def reason(error: Exception) -> str:
    """Return one line that says why a file or a stream could not be read."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text: {error.reason} at byte {error.start}"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos + 1}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return short((str(error).strip() or type(error).__name__).splitlines()[0], 300)


def optional_package(module: str, purpose: str) -> Any:
    """Return a module of a package that only some kinds of text need.

    Raises:
        CorpusError: the package is not installed; the message has the command that installs it, and begins with
            `purpose`, a plural such as "files in .parquet".
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise CorpusError(f"{purpose} need the package {package}: {install_command('eval')}") from error


# --- compression ------------------------------------------------------------------------------------------------------


@contextmanager
def _open(file: Path) -> Iterator[BinaryIO]:
    """Open a file for reading its bytes, decompressed if it is compressed.

    There is a bound on how many bytes are decompressed.
    """
    opener = _OPENERS.get(file.suffix.lower())
    if opener is None:
        with file.open("rb") as plain:
            yield plain
    else:
        most = max(_FREE_EXPANSION, _MAX_EXPANSION * file.stat().st_size)
        with opener(file, "rb") as stream:
            yield io.BufferedReader(_Bounded(stream, str(file), most))


def _open_zstd(file: Path, mode: str) -> BinaryIO:
    return io.BufferedReader(optional_package("pyarrow", "files in .zst").input_stream(str(file), compression="zstd"))


_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".zst": _open_zstd}
"""Functions that open a compressed file, by suffix."""


class _Bounded(io.RawIOBase):
    """A stream that raises a CorpusError once more than `most` bytes were read, before they fill the memory."""

    def __init__(self, stream: io.BufferedIOBase, file: str, most: int) -> None:
        super().__init__()
        self._stream, self._file, self._most, self._count = stream, file, most, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read1(len(buffer))
        self._count += len(data)
        if self._count > self._most:
            raise CorpusError(
                f"{self._file!r} expands to more than {self._most:,} bytes, far more than text does; if that is right, "
                "decompress it and give the decompressed file"
            )
        buffer[: len(data)] = data
        return len(data)


# --- readers: each takes an open file, its path for messages and the column, and yields place and content -------------


def _read_prose(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, _Content]]:
    with io.TextIOWrapper(stream, **_TEXT_MODE) as decoded:
        yield "", decoded.read()


def _read_json_lines(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, _Content]]:
    yield from read_rows(_parse_lines(stream, where), where, column)


def _parse_lines(stream: BinaryIO, where: str) -> Iterator[tuple[int, object]]:
    """Yield for each line that is not blank its number and its parsed JSON value."""
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{where}:{number}: {reason(error)}") from error
        yield number, row


def _read_json_list(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, _Content]]:
    rows = json.loads(stream.read().decode("utf-8-sig"))
    if not isinstance(rows, list):
        raise CorpusError(f"{where}: not a list of objects; JSON with one object per line is named .jsonl")
    yield from read_rows(enumerate(rows, 1), where, column)


def _read_csv(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, _Content]]:
    with io.TextIOWrapper(stream, **_TEXT_MODE) as lines:
        rows = csv_rows(lines, where, tabs=_suffix(Path(where)) == ".tsv")
        first = next(rows, None)
        if first is None:
            return
        chosen = choose_column({name: not is_number(value) for name, value in first[1].items()}, where, column)
        if is_list(first[1][chosen]):
            raise CorpusError(
                f"{where}: the column {chosen!r} holds lists, which are text in such a file; give token ids as JSON "
                "lines or parquet"
            )
        yield from read_rows(chain([first], rows), where, chosen)


def _read_parquet(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, _Content]]:
    table = optional_package("pyarrow.parquet", "files in .parquet").ParquetFile(stream)
    chosen, needed = _arrow_columns(table.schema_arrow, where, column)
    batches = table.iter_batches(_ROWS_AT_ONCE, columns=needed)
    yield from read_rows(enumerate(_arrow_rows(batches), 1), where, chosen)


def _read_arrow(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, _Content]]:
    """Read a file of Arrow's stream format, as `Dataset.save_to_disk` writes it."""
    table = optional_package("pyarrow", "files in .arrow").ipc.open_stream(stream)
    chosen, needed = _arrow_columns(table.schema, where, column)
    yield from read_rows(enumerate(_arrow_rows(batch.select(needed) for batch in table), 1), where, chosen)


def _arrow_columns(schema: Any, where: str, column: str | None) -> tuple[str, list[str]]:
    """Return the column that holds the text or token ids, and all columns that are needed to read it."""
    columns = {field.name: str(field.type) in _TEXT_TYPES for field in schema}
    chosen = choose_column(columns, where, column)
    return chosen, [name for name in (chosen, mask_column(chosen)) if name in columns]


def _arrow_rows(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        for start in range(0, len(batch), _ROWS_AT_ONCE):
            yield from batch.slice(start, _ROWS_AT_ONCE).to_pylist()


_TABLE_READERS: dict[str, Callable[[BinaryIO, str, str | None], Iterator[tuple[str, _Content]]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json_list,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".csv": _read_csv,
    ".tsv": _read_csv,
}
"""Readers of files whose rows are documents, by suffix."""
