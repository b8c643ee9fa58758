"""Texts to train on and to measure with.

    from rope_ext_hf.eval.corpora import load
    documents = load("stdlib")                                   # held-out modules of Python's own standard library
    documents = load("war-and-peace.txt")                        # one file, one document
    documents = load("books/*.txt", min_bytes=100_000)           # a pattern; or a folder, read recursively
    documents = load("reports.jsonl.zst?column=body", join=True)  # one document per line; see `load` for the kinds
    documents = load("hf:emozilla/pg19?split=test", max_documents=10)  # streamed from the Hugging Face Hub

Real text that needs no download: every Python installation carries several megabytes of English documentation and
source code. The bundled reference model was trained on it, less the modules in `HELD_OUT`, which are what `stdlib`
measures with.

Files are untrusted: nothing in them is executed or unpickled, and what is damaged is refused with file and line.
"""

from __future__ import annotations

import glob
import gzip
import importlib
import io
import json
import os
import random
import re
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote

from rope_ext_hf.errors import CorpusError, did_you_mean, short
from rope_ext_hf.eval.documents import MAX_TOKEN_ID, Content, Document, Documents
from rope_ext_hf.eval.stdlib_corpus import stdlib_held_out

__all__ = ["load"]

SHUFFLE_BUFFER = 256
"""Documents of a stream held in memory to shuffle among: books of half a megabyte take some 128 MB."""

MAX_EXPANSION = 100
"""A compressed file may expand to this many times its size (text: 3 to 5 times), and in any case to 64 MiB."""

_FREE_EXPANSION = 64 * 2**20  # bytes
_STREAM_RETRIES = (
    2  # of a read, each of them half a minute of retries of huggingface_hub; its default of 20 seems to hang
)
_PARQUET_ROWS = 16  # decoded at a time; a row may be a whole book
_PROSE = (".txt", ".md", ".rst", ".py")  # what counts as text in a folder; named alone, a file may be called anything
_TEXT_TYPES = ("string", "large_string", "string_view")
_OPTIONS = re.compile(r"(?s)(.*?)\?(\w+=.*)")  # a pattern such as part?.txt has no NAME= after its question mark
_HUB_OPTIONS = ("config", "split", "revision")
_ANY_OPTIONS: dict[str, Callable[[str], Any]] = {
    "column": str,
    "join": lambda text: {"true": True, "false": False}[text] if text in ("true", "false") else int(text),
    "min_bytes": int,
    "max_documents": int,
    "seed": int,
    "max_expansion": int,
}


def load(
    data: str,
    *,
    column: str | None = None,
    join: bool | int | None = None,
    min_bytes: int | None = None,
    max_documents: int | None = None,
    seed: int | None = None,
    max_expansion: int | None = None,
) -> Documents:
    """The documents named by `data`.

    | data | documents |
    |---|---|
    | `stdlib` | the held-out modules of Python's standard library |
    | `FILE` | a UTF-8 text file, whatever its name: one; also `.gz`, `.zst` |
    | `FILE.jsonl`, `.ndjson`, `.json` | one per line, or per item of the one list; also `.gz`, `.zst` |
    | `FILE.parquet` | one per row, read by the package `pyarrow` |
    | `FOLDER` | of all such files under it (text: .txt .md .rst .py), sorted; not hidden ones nor links out of it |
    | `PATTERN` | of the files that match, sorted: `books/*.txt`, `data/**/*.jsonl` |
    | `hf:OWNER/NAME` | one per row of a dataset of the Hugging Face Hub, streamed |

    The text of a row is its column `text`, else its only column of text; a column that is named may also hold lists of
    token ids, for models with the tokenizer they were made with. Options follow a question mark, as in
    `books/*.txt?min_bytes=100000&max_documents=20` or `hf:OWNER/NAME?config=en&split=validation&column=body`. A `%` in
    a value is written `%25`, an `&` `%26`.

    Args:
        data: see above.
        column: where the text of a row is. This and what follows may stand in `data` as well, as long as it agrees;
            there a Hub dataset also takes config, revision and split (`test` if there is one, else the only one).
        join: all documents as one, two newlines between them; or a number of characters: documents that follow one
            another are joined until each has so many, so that several long ones come of many short ones.
        min_bytes: leave out documents shorter than this many UTF-8 bytes (token ids, where those are given).
        max_documents: keep at most this many, and read no further; a Hub dataset without it is read to its end.
        seed: shuffle the documents: all of them, or those of a Hub dataset within a buffer of `SHUFFLE_BUFFER`.
        max_expansion: how many times its size a compressed file may expand to; default `MAX_EXPANSION`.

    Returns:
        Documents with distinct names: the path below the folder, then `:` and the line or row, if it is one of many.

    Raises:
        CorpusError: nothing of that name, not reachable, damaged, not UTF-8, no such column, no text; it names file
            and line.
    """
    try:
        given = {"column": column, "join": join, "min_bytes": min_bytes, "max_documents": max_documents, "seed": seed}
        given["max_expansion"] = max_expansion
        source, options = _parse(data, given)
        seed, least, most = options.get("seed"), options.get("min_bytes", 0), options.get("max_documents")
        expansion = options.get("max_expansion", MAX_EXPANSION)
        if least < 0 or (most is not None and most < 1):
            raise CorpusError(f"min_bytes must be at least 0 and max_documents at least 1, got {least} and {most}")
        if (least_joined := int(options.get("join", 0))) < 0:
            raise CorpusError(f"join must be at least 1 character, or true or false, got {least_joined}")
        if expansion < 1:
            raise CorpusError(f"max_expansion must be at least 1, got {expansion}")
        if source.startswith("hf:"):
            given_documents = _hub(source.removeprefix("hf:"), options, seed)
        else:
            given_documents = _local(source, options.get("column"), seed, expansion)
    except OSError as error:  # a name too long to be one, a folder that may not be entered
        raise CorpusError(f"{short(data, 200)!r} cannot be read: {_why(error)}") from error

    documents = Documents()
    for document in given_documents:
        if _size(document) < least:
            documents.left_out += 1
            continue
        documents.append(document)
        if len(documents) == most:
            break
    if documents.left_out and not documents:
        raise CorpusError(f"{source!r} has no document of {least} bytes: all {documents.left_out} are shorter")
    if not any(document.ids or document.text.strip() for document in documents):
        raise CorpusError(f"{source!r} is empty")
    if join := options.get("join", False):
        if any(document.ids is not None for document in documents):
            raise CorpusError(f"{source!r} holds token ids, which are not joined; leave out join=true")
        documents[:] = [Document(source, _joined(documents))] if join is True else _in_groups(documents, join)
    return documents


def _joined(documents: Iterable[Document]) -> str:
    return "\n\n".join(document.text for document in documents)


def _in_groups(documents: Sequence[Document], least: int) -> list[Document]:
    """Documents joined in order, each with at least so many characters where all have them together."""
    groups: list[list[Document]] = []
    size = least
    for document in documents:
        if size >= least:
            groups.append([])
            size = 0
        groups[-1].append(document)
        size += len(document.text)
    if len(groups) > 1 and size < least:
        groups[-2:] = [groups[-2] + groups[-1]]
    names = (group[0].name + (f" and {len(group) - 1} more" if len(group) > 1 else "") for group in groups)
    return [Document(name, _joined(group)) for name, group in zip(names, groups, strict=True)]


def _parse(data: str, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """`SOURCE?key=value&...` as source and options, those given apart among them; a file of that name is that file."""
    source, text = data, ""
    match = _OPTIONS.fullmatch(data)
    if match is not None and not Path(data).exists():
        source, text = match[1], match[2]
    known = (*_ANY_OPTIONS, *(_HUB_OPTIONS if source.startswith("hf:") else ()))
    options: dict[str, Any] = {}
    for part in text.split("&") if text else ():
        key, _, value = part.partition("=")
        if key not in known:
            raise CorpusError(f"{data!r}: unknown option {key!r}.{did_you_mean(key, known)} Known: {', '.join(known)}")
        try:
            if not value or key in options:
                raise ValueError(value)
            options[key] = _ANY_OPTIONS.get(key, str)(unquote(value))
        except (ValueError, KeyError) as error:
            wanted = {"join": "true", "column": "NAME"}.get(key, "NAME" if key in _HUB_OPTIONS else "NUMBER")
            raise CorpusError(f"{data!r}: the option {key!r} takes one value, as in {key}={wanted}") from error
    for key, value in given.items():
        if value is not None and options.setdefault(key, value) != value:
            raise CorpusError(f"{data!r} has {key}={options[key]!r}, but {key}={value!r} is given")
    return source, options


def _size(document: Document) -> int:
    if document.ids is not None:
        return len(document.ids)
    try:
        return len(document.text.encode("utf-8"))
    except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair, which no tokenizer takes
        raise CorpusError(f"{document.name}: not text: {error.reason} at character {error.start}") from error


# -- files -------------------------------------------------------------------------------------------------------------


def _local(source: str, column: str | None, seed: int | None, expansion: int) -> Iterator[Document]:
    if source == "stdlib":
        tables, documents = False, iter(stdlib_held_out())
    else:
        root, files = _files(source)
        tables = any(_kind(file) in _TABLES for file in files)
        documents = (
            document for file in files for document in _read(file, file.relative_to(root).as_posix(), column, expansion)
        )
    if column is not None and not tables:
        raise CorpusError(f"{source!r} is plain text, which has no column {column!r}")
    if seed is None:
        return documents
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    return iter(shuffled)


def _files(source: str) -> tuple[Path, list[Path]]:
    """The files that `source` names, and the folder their names are relative to."""
    path = Path(source)
    if path.is_file():
        return path.parent, [path]
    if path.is_dir():
        files = [file for file in path.rglob("*") if _belongs(file, path)]
        if not files:
            kinds = ", ".join((*_PROSE, *_TABLES))
            raise CorpusError(f"the folder {source!r} has no files of text; looked for {kinds} (also .gz, .zst)")
        return path, sorted(files, key=lambda file: file.relative_to(path).parts)
    files = sorted(file for match in glob.glob(source, recursive=True) if (file := Path(match)).is_file())  # noqa: PTH207
    if not files:
        raise CorpusError(
            f"no such text file, folder or pattern: {source!r}; --data takes 'stdlib', the path of a UTF-8 text, "
            "JSON lines or parquet file, a folder, a pattern such as 'books/*.txt', or hf:OWNER/NAME"
        )
    return Path(os.path.commonpath([file.parent for file in files])), files


def _belongs(file: Path, folder: Path) -> bool:
    """Is this file of `folder` part of its text?"""
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    if hidden or not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
        return False
    return _kind(file) in _PROSE or _kind(file) in _TABLES


def _kind(file: Path) -> str:
    """The suffix of the content, compression aside: ".jsonl" for a.jsonl.gz."""
    inner = file.stem if file.suffix.lower() in _OPENERS else file.name
    return Path(inner).suffix.lower()


def _read(file: Path, name: str, column: str | None, expansion: int) -> Iterator[Document]:
    reader = _TABLES.get(_kind(file), _prose)
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
        raise CorpusError(f"{str(file)!r} cannot be read{last}: {_why(error)}") from error


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text: {error.reason} at byte {error.start}"
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON: {error.msg} at character {error.pos + 1}"
    return short((str(error).strip() or type(error).__name__).splitlines()[0], 300)


@contextmanager
def _open(file: Path, expansion: int) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed up to the bound."""
    opener = _OPENERS.get(file.suffix.lower())
    if opener is None:
        with file.open("rb") as plain:
            yield plain
        return
    with opener(file, "rb") as stream:
        most = max(_FREE_EXPANSION, expansion * file.stat().st_size)
        yield io.BufferedReader(_Bounded(stream, str(file), most))


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
    return io.BufferedReader(_optional("pyarrow", "files in .zst").input_stream(str(file), compression="zstd"))


def _optional(module: str, purpose: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise CorpusError(
            f"{purpose} need the package {package}: install this package with its extra [eval]"
        ) from error


# -- readers: an open file, its path for messages, the column asked for -> (":" and line, or nothing; text) ------------


def _prose(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, Content]]:
    with io.TextIOWrapper(stream, encoding="utf-8-sig") as decoded:  # a byte-order mark is no part of the text
        yield "", decoded.read()


def _json_lines(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, Content]]:
    yield from _texts(_parsed(stream, where), where, column)


def _parsed(stream: BinaryIO, where: str) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(stream, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{where}:{number}: {_why(error)}") from error
        yield number, row


def _json_list(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, Content]]:
    rows = json.loads(stream.read().decode("utf-8-sig"))
    if not isinstance(rows, list):
        raise CorpusError(f"{where}: not a list of objects; JSON with one object per line is named .jsonl")
    yield from _texts(enumerate(rows, 1), where, column)


def _parquet(stream: BinaryIO, where: str, column: str | None) -> Iterator[tuple[str, Content]]:
    table = _optional("pyarrow.parquet", "files in .parquet").ParquetFile(stream)
    chosen = _choose_column({field.name: str(field.type) in _TEXT_TYPES for field in table.schema_arrow}, where, column)
    batches = table.iter_batches(_PARQUET_ROWS, columns=[chosen])
    yield from _texts(enumerate((row for batch in batches for row in batch.to_pylist()), 1), where, chosen)


@contextmanager
def _few_retries(datasets: Any) -> Iterator[None]:
    """With a connection given up after a minute or two without an answer, not after ten."""
    names = ("STREAMING_READ_MAX_RETRIES", "STREAMING_OPEN_MAX_RETRIES")
    before = {name: getattr(datasets.config, name) for name in names}
    try:
        for name in names:
            setattr(datasets.config, name, min(before[name], _STREAM_RETRIES))
        yield
    finally:
        for name, value in before.items():
            setattr(datasets.config, name, value)


def _texts(rows: Iterable[tuple[int, object]], where: str, column: str | None) -> Iterator[tuple[str, Content]]:
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
            if not all(0 <= item < MAX_TOKEN_ID for item in text):
                wrong = next(item for item in text if not 0 <= item < MAX_TOKEN_ID)
                raise CorpusError(f"{where}:{number}: {short(str(wrong))} is not a token id")
            text = array("q", text)  # a fifth of the memory of a list
        if not isinstance(text, (str, array)):
            raise CorpusError(f"{where}:{number}: the column {chosen!r} holds {type(text).__name__}, not text")
        yield f":{number}", text


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
_TABLES: dict[str, Callable[[BinaryIO, str, str | None], Iterator[tuple[str, Content]]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_list,
    ".parquet": _parquet,
}


# -- the Hugging Face Hub ----------------------------------------------------------------------------------------------


def _hub(name: str, options: Mapping[str, str], seed: int | None) -> Iterator[Document]:
    # Bare names and existing folders would have `datasets` read local files, by builders that may unpickle them.
    if not re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", name) or Path(name).exists():
        raise CorpusError(
            f"hf:{name} is not a dataset of the Hub: write hf:OWNER/NAME?config=...&split=...&column=..., "
            "and a folder of your own without hf:"
        )
    datasets = _optional("datasets", "datasets of the Hub")
    try:
        with _few_retries(datasets):
            rows = datasets.load_dataset(
                name,
                name=options.get("config"),
                split=options.get("split"),
                revision=options.get("revision"),
                streaming=True,
                trust_remote_code=False,  # also where an environment variable allows it
            )
            if isinstance(rows, dict):
                rows = rows[_choose_split(list(rows), name)]
            if seed is not None:
                rows = rows.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
            for where, text in _texts(enumerate(rows, 1), f"hf:{name}", options.get("column")):
                yield Document.from_content(name + where, text)
    except CorpusError:
        raise
    except Exception as error:  # not found, not reachable, no such config, a remote file's reader: all kinds
        raise CorpusError(f"the Hub dataset {name!r} cannot be read: {_why(error)}") from error


def _choose_split(splits: Sequence[str], name: str) -> str:
    if "test" in splits:
        return "test"
    if len(splits) != 1:
        raise CorpusError(f"hf:{name} has no split 'test'; choose one with ?split=NAME: {', '.join(splits)}")
    return splits[0]
