"""Documents, the texts that an evaluation reads, and the files that hold them, however they are packed.

Files are untrusted: nothing in them is executed or unpickled, and what is damaged is refused with file and line.
"""

from __future__ import annotations

import glob
import gzip
import importlib
import io
import json
import os
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from rope_ext_hf.errors import CorpusError, did_you_mean, short
from rope_ext_hf.installing import install_command

if TYPE_CHECKING:
    from torch import Tensor

_Content = str | Sequence[int]
NAMES = (
    "a string names text: 'stdlib', the path of a UTF-8 text, JSON lines or parquet file, a folder, a pattern such as "
    "'books/*.txt', or hf:OWNER/NAME. In Python, a text itself is given in a list: [text]"
)
"""The names of texts, for the end of an error message."""

_MAX_TOKEN_ID = 2**31 - 1
_FREE_EXPANSION = 64 * 2**20  # bytes
_PARQUET_ROWS = 16  # decoded at a time; a row may be a whole book
_PROSE = (".txt", ".md", ".rst", ".py")  # what counts as text in a folder; named alone, a file may be called anything
_TEXT: dict[str, Any] = {"encoding": "utf-8-sig", "newline": ""}
"""How files of text are opened: line ends stay as they are, and a byte-order mark is no part of the text."""
_TEXT_TYPES = ("string", "large_string", "string_view")


@dataclass(frozen=True)
class Document:
    """One text, measured on its own: a span never crosses from one document to the next.

    Attributes:
        name: of the document, in results and messages.
        text: empty where token ids are given.
        ids: token ids of a text that was tokenised before.
    """

    name: str
    text: str
    ids: Sequence[int] | None = None

    @classmethod
    def from_content(cls, name: str, content: _Content) -> Document:
        return cls(name, content) if isinstance(content, str) else cls(name, "", content)


@dataclass(frozen=True)
class Tokens:
    """A tokenised document."""

    name: str
    ids: Tensor  # (tokens,) int64
    ends: tuple[int, ...]  # where each token ends in the text, in UTF-8 bytes; empty where no tokenizer was given
    text: str = field(default="", repr=False)  # empty where the document came as token ids

    def bytes_between(self, start: int, stop: int) -> int:
        """Return the UTF-8 bytes of tokens start..stop; 0 where they are not known."""
        return 0 if not self.ends else self.ends[stop - 1] - (self.ends[start - 1] if start else 0)


def utf8_bytes(name: str, text: str) -> int:
    """The UTF-8 bytes of a document's text; CorpusError for half a surrogate pair, which JSON can spell."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise CorpusError(f"{name}: not text: {error.reason} at character {error.start}") from error


class Documents(list[Document | Tokens]):
    """A list of documents."""

    source = "documents"  # the name of the text, in results
    left_out = 0  # how many were shorter than `min_bytes`


def corpus_name(corpus: Corpus | None) -> str | None:
    """The name of a text in results: the one it is given by, or that of `Documents`; None for None."""
    return str(corpus) if isinstance(corpus, (str, Path)) else None if corpus is None else Documents.source


Corpus: TypeAlias = (
    "str | Path | Document | Tensor | Iterable[object]"  # everything that `rope_ext_hf.reading.corpora.load` takes
)


def find_files(source: str) -> tuple[Path, list[Path]]:
    """The files that `source` names, and the folder their names are relative to."""
    path = Path(source)
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        files = [file for file in path.rglob("*") if _belongs(file, path)]
        if not files:
            kinds = ", ".join((*_PROSE, *TABLES))
            raise CorpusError(f"the folder {source!r} has no files of text; looked for {kinds} (also .gz, .zst)")
        return path, sorted(files, key=lambda file: file.relative_to(path).parts)
    files = sorted(file for match in glob.glob(source, recursive=True) if (file := Path(match)).is_file())  # noqa: PTH207
    if not files:
        raise CorpusError(f"no such text file, folder or pattern: {short(source)!r}; {NAMES}")
    return Path(os.path.commonpath([file.parent for file in files])), files


def _belongs(file: Path, folder: Path) -> bool:
    """Whether this file of `folder` is part of its text."""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    if hidden or not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
        return False
    return file_kind(file) in _PROSE or file_kind(file) in TABLES


def file_kind(file: Path) -> str:
    """The suffix of the content, compression aside: ".jsonl" for a.jsonl.gz."""
    inner = file.stem if file.suffix.lower() in _OPENERS else file.name
    return Path(inner).suffix.lower()


def read_file(file: Path, name: str, column: str | None, expansion: int) -> Iterator[Document]:
    """The documents in one file, called `name`, with the line or row where there are several.

    A compressed file may expand to so many times its size. Without a column, see `read_rows`.
    """
    reader = TABLES.get(file_kind(file), _prose)
    last = ""
    try:
        with _open(file, expansion) as stream:
            for where, text in reader(stream, str(file), column):
                yield Document.from_content(name + where, text)
                last = f" after {file}{where}"
    except CorpusError:
        raise
    # What gzip, zlib, json, the codecs and pyarrow (whose errors derive from these) raise on damaged files.
    except (OSError, EOFError, ValueError, RecursionError, NotImplementedError, zlib.error) as error:
        raise CorpusError(f"{str(file)!r} cannot be read{last}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Why a file or a stream could not be read, in one line."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text: {error.reason} at byte {error.start}"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos + 1}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return short((str(error).strip() or type(error).__name__).splitlines()[0], 300)


@contextmanager
def _open(file: Path, expansion: int) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed up to the bound."""
    opener = _OPENERS.get(file.suffix.lower(), Path.open)
    with opener(file, "rb") as stream:
        most = max(_FREE_EXPANSION, expansion * file.stat().st_size)
        yield stream if opener is Path.open else io.BufferedReader(_Bounded(stream, str(file), most))


class _Bounded(io.RawIOBase):
    """A stream that raises CorpusError where it holds more bytes than allowed."""

    def __init__(self, stream: io.BufferedIOBase, where: str, most: int) -> None:
        super().__init__()
        self._stream, self._where, self._most, self._seen = stream, where, most, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read1(len(buffer))
        self._seen += len(data)
        if self._seen > self._most:
            raise CorpusError(
                f"{self._where!r} expands to more than {self._most:,} bytes; if that is right, decompress it, or raise "
                "the bound: ?max_expansion=NUMBER times its size"
            )
        buffer[: len(data)] = data
        return len(data)


def _open_zstd(file: Path, mode: str) -> BinaryIO:
    return io.BufferedReader(optional_package("pyarrow", "files in .zst").input_stream(str(file), compression="zstd"))


def optional_package(module: str, purpose: str) -> Any:
    """A module of a package that is installed for some kinds of text only; `purpose` names these, in the plural."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise CorpusError(f"{purpose} need the package {package}: {install_command('eval')}") from error


@contextmanager
def set_to(module: Any, **values: Any) -> Iterator[None]:
    """With attributes of another package's module set to these values, and set back at the end."""
    before = {name: getattr(module, name) for name in values}
    try:
        vars(module).update(values)
        yield
    finally:
        vars(module).update(before)


# -- readers: an open file, its path for messages, the column asked for -> (":" and line, or nothing; text) ------------


def _prose(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, _Content]]:
    with io.TextIOWrapper(stream, **_TEXT) as decoded:
        yield "", decoded.read()


def read_beginning(file: Path, characters: int) -> str:
    """The first characters of a file of text."""
    with file.open(**_TEXT) as stream:
        return str(stream.read(characters))


def _json_lines(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, _Content]]:
    yield from read_rows(_parsed(stream, where), where, column)


def _parsed(stream: BinaryIO, where: str) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{where}:{number}: {reason(error)}") from error
        yield number, row


def _json_list(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, _Content]]:
    rows = json.loads(stream.read().decode("utf-8-sig"))
    if not isinstance(rows, list):
        raise CorpusError(f"{where}: not a list of objects; JSON with one object per line is named .jsonl")
    yield from read_rows(enumerate(rows, 1), where, column)


def _parquet(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, _Content]]:
    table = optional_package("pyarrow.parquet", "files in .parquet").ParquetFile(stream)
    chosen = _choose_column({field.name: str(field.type) in _TEXT_TYPES for field in table.schema_arrow}, where, column)
    batches = table.iter_batches(_PARQUET_ROWS, columns=[chosen])
    yield from read_rows(enumerate((row for batch in batches for row in batch.to_pylist()), 1), where, chosen)


def read_rows(rows: Iterable[tuple[int, object]], where: str, column: str | None) -> Iterator[tuple[str, _Content]]:
    """The text of every row; which column that is, the first row decides."""
    chosen = None
    for number, row in rows:
        if not isinstance(row, dict):
            raise CorpusError(f"{where}:{number}: not an object with columns but {type(row).__name__}")
        if chosen is None:
            columns = {name: isinstance(value, str) for name, value in row.items()}
            chosen = _choose_column(columns, f"{where}:{number}", column)
        if chosen not in row:
            raise CorpusError(f"{where}:{number}: no column {chosen!r}; its columns: {', '.join(row) or 'none'}")
        text = row[chosen]
        if isinstance(text, list) and text and all(type(item) is int for item in text):
            text = token_ids(text, f"{where}:{number}")
        if not isinstance(text, (str, array)):
            raise CorpusError(f"{where}:{number}: the column {chosen!r} holds {type(text).__name__}, not text")
        yield f":{number}", text


def token_ids(ids: Sequence[Any], where: str) -> array[int]:
    """Token ids as 64-bit integers; CorpusError, which says where, for anything else."""
    for item in ids:
        if type(item) is not int or not 0 <= item < _MAX_TOKEN_ID:
            raise CorpusError(f"{where}: {short(repr(item))} is not a token id; they are whole numbers from 0 on")
    return array("q", ids)  # a fifth of the memory of a list


def _choose_column(columns: Mapping[str, bool], where: str, asked: str | None) -> str:
    """The column of the text, among columns that are text or not."""
    listed = ", ".join(columns) or "none"
    if asked is not None:
        if asked not in columns:
            raise CorpusError(f"{where}: no column {asked!r}.{did_you_mean(asked, columns)} Its columns: {listed}")
        return asked
    texts = [name for name, is_text in columns.items() if is_text]
    if "text" in columns:
        return "text"
    if len(texts) != 1:
        raise CorpusError(
            f"{where}: no column 'text', and {len(texts)} others are text; "
            f"choose one with ?column=NAME. Its columns: {listed}"
        )
    return texts[0]


_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".zst": _open_zstd}
TABLES: dict[str, Callable[[BinaryIO, str, str | None], Iterator[tuple[str, _Content]]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet,
}
