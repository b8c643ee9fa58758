"""Texts to train on and to measure with. What a corpus may be, every function that takes one reads here.

    from rope_ext_hf.reading.corpora import load
    documents = load([text, another])                            # texts themselves: a list; a string alone is a name
    documents = load("books/*.txt", min_bytes=100_000)           # files; see `load` for all that a name may be
    documents = load("reports.jsonl.zst?column=body", join=True)  # one document per line

Real text that needs no download: every Python installation carries several megabytes of English documentation and
source code.
"""

from __future__ import annotations

import os
import random
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from rope_ext_hf.errors import CorpusError, did_you_mean, short
from rope_ext_hf.reading.documents import (
    NAMES,
    TABLES,
    Corpus,
    Document,
    Documents,
    Tokens,
    corpus_name,
    file_kind,
    find_files,
    optional_package,
    read_file,
    read_rows,
    reason,
    set_to,
    token_ids,
    utf8_bytes,
)

D = TypeVar("D")
HELD_OUT = ("_pydecimal", "argparse", "inspect", "mailbox", "pydoc_data/topics", "tarfile", "turtle", "typing")
"""Modules of Python's standard library that no training of the reference model ever reads."""
_SHUFFLE_BUFFER = 256  # documents of a stream to shuffle among: books of half a megabyte take some 128 MB
_MAX_EXPANSION = 100  # times its size that a compressed file may expand to (text: 3 to 5), and to 64 MiB anyway
_STREAM_RETRIES = 2  # of a read, each half a minute of retries of huggingface_hub; its default of 20 seems to hang
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
    data: Corpus,
    *,
    column: str | None = None,
    join: bool | int | None = None,
    min_bytes: int | None = None,
    max_documents: int | None = None,
    seed: int | None = None,
    max_expansion: int | None = None,
) -> Documents:
    """The documents of a corpus, as every function that takes one reads it.

    A string is a name, never a text, so that a misspelt name cannot be measured as if it were one:

    | string | documents |
    |---|---|
    | `stdlib` | the held-out modules of Python's standard library |
    | `FILE` | a UTF-8 text file, whatever its name, line ends as they stand: one; also `.gz`, `.zst` |
    | `FILE.jsonl`, `.ndjson`, `.json` | one per line, or per item of the one list; also `.gz`, `.zst` |
    | `FILE.parquet` | one per row, read by the package `pyarrow` |
    | `FOLDER` | of all such files under it (text: .txt .md .rst .py), sorted; not hidden ones nor links out of it |
    | `PATTERN` | of the files that match, sorted: `books/*.txt`, `data/**/*.jsonl` |
    | `hf:OWNER/NAME` | one per row of a dataset of the Hugging Face Hub, streamed |

    Everything else is the text itself, or states what it is:

    | given | documents |
    |---|---|
    | `[text, ...]` | one per string |
    | `[1, 2, ...]`, `[[1, 2, ...], ...]`, tensors, arrays | one per list, or row, of token ids |
    | a `datasets.Dataset`, a list of its rows | one per row |
    | `pathlib.Path`, a list of them | of these files or folders |
    | `Document`, a list of them | as they are |

    The text of a row is its column `text`, else its only column of text; a column that is named may also hold lists of
    token ids, for models with the tokenizer they were made with. Options follow a question mark, as in
    `books/*.txt?min_bytes=100000&max_documents=20` or `hf:OWNER/NAME?config=en&split=validation&column=body`. A `%` in
    a value is written `%25`, an `&` `%26`.

    Args:
        data: see above.
        column: where the text of a row is. This and what follows may stand in a name as well, as long as it agrees;
            there a Hub dataset also takes config, revision and split (`test` if there is one, else the only one).
        join: all documents as one, two newlines between them; or a number of characters: documents that follow one
            another are joined until each has so many, so that several long ones come of many short ones.
        min_bytes: leave out documents shorter than this many UTF-8 bytes (token ids, where those are given).
        max_documents: keep at most this many, and read no further; a Hub dataset without it is read to its end.
        seed: shuffle the documents: all of them, or those of a Hub dataset within a buffer of `_SHUFFLE_BUFFER`.
        max_expansion: how many times its size a compressed file may expand to; default `_MAX_EXPANSION`.

    Returns:
        Documents with distinct names: the path below the folder, then `:` and the line or row, if it is one of many.

    Raises:
        CorpusError: nothing of that name, not reachable, damaged, not UTF-8, no such column, no text; it names file
            and line. Something else than a corpus.
    """
    given = {"column": column, "join": join, "min_bytes": min_bytes, "max_documents": max_documents, "seed": seed}
    given = {key: value for key, value in (given | {"max_expansion": max_expansion}).items() if value is not None}
    if isinstance(data, Documents) and not given:
        return data
    try:
        source, options = _parse(data, given)
        documents = Documents()
        documents.source = corpus_name(data) or documents.source
        seed, least, most = options.get("seed"), options.get("min_bytes", 0), options.get("max_documents")
        expansion = options.get("max_expansion", _MAX_EXPANSION)
        if least < 0 or (most is not None and most < 1):
            raise CorpusError(f"min_bytes must be at least 0 and max_documents at least 1, got {least} and {most}")
        if (least_joined := int(options.get("join", 0))) < 0:
            raise CorpusError(f"join must be at least 1 character, or true or false, got {least_joined}")
        if expansion < 1:
            raise CorpusError(f"max_expansion must be at least 1, got {expansion}")
        if not isinstance(data, str):
            given_documents = _shuffled(_given(data, options.get("column"), expansion), seed)
        elif source.startswith("hf:"):
            given_documents = _hub(source.removeprefix("hf:"), options, seed)
        else:
            given_documents = _local(source, options.get("column"), seed, expansion)
    except OSError as error:  # a name too long to be one, a folder that may not be entered
        hint = f"; {NAMES}" if isinstance(data, str) else ""
        raise CorpusError(f"{short(str(data), 200)!r} cannot be read: {reason(error)}{hint}") from error

    for document in given_documents:
        size = utf8_bytes(document.name, document.text) if document.ids is None else len(document.ids)
        if size < least:
            documents.left_out += 1
            continue
        documents.append(document)
        if len(documents) == most:
            break
    if documents.left_out and not documents:
        raise CorpusError(f"{source!r} has no document of {least} bytes: all {documents.left_out} are shorter")
    if not any(document.text.strip() if document.ids is None else len(document.ids) for document in documents):
        raise CorpusError(f"{source!r} is empty: no document has any text")
    if join := options.get("join", False):
        if any(document.ids is not None for document in documents):
            raise CorpusError(f"{source!r} holds token ids, which are not joined; leave out join")
        texts = [document for document in documents if isinstance(document, Document)]
        documents[:] = [Document(source, _joined(texts))] if join is True else _in_groups(texts, join)
    return documents


def _joined(documents: Iterable[Document | Tokens]) -> str:
    return "\n\n".join([document.text for document in documents])


def _in_groups(documents: Iterable[Document | Tokens], least: int) -> list[Document]:
    """Documents joined in order, each with at least so many characters where all have them together."""
    groups: list[list[Document | Tokens]] = []
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


def _parse(data: Corpus, given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """`SOURCE?key=value&...` as source and options, those given apart among them; a file of that name is that file."""
    if not isinstance(data, str):
        return Documents.source, dict(given)
    if not data.strip() or "\n" in data or "\0" in data:
        raise CorpusError(f"{short(data)!r} is no name; {NAMES}")
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
        if options.setdefault(key, value) != value:
            raise CorpusError(f"{data!r} has {key}={options[key]!r}, but {key}={value!r} is given")
    return source, options


# -- values in memory --------------------------------------------------------------------------------------------------


def _given(data: Any, column: str | None, expansion: int) -> Iterator[Document | Tokens]:
    """Documents that no string names: texts, token ids, rows, files, documents."""
    if hasattr(data, "column_names") and not isinstance(data, Mapping):  # a data set, streamed or not
        items, rows = [], data
    else:
        items = list(_items(data))
        rows = items if items and all(isinstance(item, dict) for item in items) else None
    if column is not None and rows is None:
        raise CorpusError(f"no rows with columns were given, so that there is no column {column!r}")
    if rows is not None:
        for where, text in read_rows(enumerate(rows, 1), "row", column):
            yield Document.from_content(f"row{where}", text)
    elif items and all(isinstance(item, Path) for item in items):
        roots, files = zip(*(find_files(str(path.expanduser().absolute())) for path in items), strict=True)
        root = Path(os.path.commonpath(roots))
        for file in (file for some in files for file in some):
            yield from read_file(file, file.relative_to(root).as_posix(), None, expansion)
    else:
        for number, item in enumerate(items, 1):
            yield _in_memory(item, f"text {number}")


def _items(data: Any) -> Iterable[Any]:
    """The documents of what was given, each still as it was given."""
    if isinstance(data, (Document, Tokens, Path)):
        return [data]
    values = data.tolist() if hasattr(data, "tolist") else data
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes, bytearray)):
        raise _refused(data)
    items = [item.tolist() if hasattr(item, "tolist") else item for item in values]
    return [items] if items and all(type(item) is int for item in items) else items


def _in_memory(item: Any, name: str) -> Document | Tokens:
    if isinstance(item, (Document, Tokens)):
        return item
    if isinstance(item, str):
        if "\n" not in item and os.path.isfile(item):  # noqa: PTH113 - Path.is_file raises on long texts
            raise CorpusError(
                f"strings in a list are texts, and {name}, {short(item)!r}, is the name of a file; to read the file, "
                f"give pathlib.Path({short(item)!r})"
            )
        return Document(name, item)
    if isinstance(item, Sequence) and not isinstance(item, (bytes, bytearray)):
        return Document(name, "", token_ids(item, name))
    raise _refused(item)


def _refused(data: object) -> CorpusError:
    keys = f"; give one of its entries: {short(', '.join(map(str, data)))}" if isinstance(data, Mapping) else ""
    return CorpusError(
        "a corpus is a name, a list of texts, token ids (lists, tensors), a datasets.Dataset, pathlib.Path of files, "
        f"or documents, got {type(data).__name__}{keys}"
    )


def stdlib_held_out() -> list[Document]:
    """The held-out modules this Python installation has (some distributions split a few off), in `HELD_OUT`'s order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {name: root / f"{name}.py" for name in HELD_OUT}
    # Line ends are \n on every platform, so that everybody measures the same text.
    documents = [Document(name, file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()]
    if not documents:
        raise CorpusError(f"no source of the standard library found in {root}; give a text file with --data FILE")
    return documents


def check_name(data: Corpus | None) -> None:
    """Raise CorpusError where a string names no text that is here; nothing is read, and the Hub is not asked."""
    if isinstance(data, str):
        source, _ = _parse(data, {})
        if source != "stdlib" and not source.startswith("hf:"):
            find_files(source)


def _local(source: str, column: str | None, seed: int | None, expansion: int) -> Iterator[Document]:
    if source == "stdlib":
        tables, documents = False, iter(stdlib_held_out())
    else:
        root, files = find_files(source)
        tables = any(file_kind(file) in TABLES for file in files)
        documents = (
            document
            for file in files
            for document in read_file(file, file.relative_to(root).as_posix(), column, expansion)
        )
    if column is not None and not tables:
        raise CorpusError(f"{source!r} is plain text, which has no column {column!r}")
    return _shuffled(documents, seed)


def _shuffled(documents: Iterable[D], seed: int | None) -> Iterator[D]:
    if seed is None:
        return iter(documents)
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    return iter(shuffled)


# -- the Hugging Face Hub ----------------------------------------------------------------------------------------------


def _hub(name: str, options: Mapping[str, str], seed: int | None) -> Iterator[Document]:
    # Bare names and existing folders would have `datasets` read local files, by builders that may unpickle them.
    if not re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", name) or Path(name).exists():
        raise CorpusError(
            f"hf:{name} is not a dataset of the Hub: write hf:OWNER/NAME?config=...&split=...&column=..., "
            "and a folder of your own without hf:"
        )
    datasets = optional_package("datasets", "datasets of the Hub")
    try:
        retries = ("STREAMING_READ_MAX_RETRIES", "STREAMING_OPEN_MAX_RETRIES")
        fewer = {name: min(getattr(datasets.config, name), _STREAM_RETRIES) for name in retries}
        with set_to(datasets.config, **fewer):
            rows = datasets.load_dataset(
                name,
                name=options.get("config"),
                split=options.get("split"),
                revision=options.get("revision"),
                streaming=True,
                trust_remote_code=False,  # also where an environment variable allows it
            )
            if isinstance(rows, dict):
                if "test" not in rows and len(rows) != 1:
                    raise CorpusError(f"hf:{name} has no split 'test'; choose one with ?split=NAME: {', '.join(rows)}")
                rows = rows["test" if "test" in rows else next(iter(rows))]
            if seed is not None:
                rows = rows.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER)
            for where, text in read_rows(enumerate(rows, 1), f"hf:{name}", options.get("column")):
                yield Document.from_content(name + where, text)
    except CorpusError:
        raise
    except Exception as error:  # not found, not reachable, no such config, a remote file's reader: all kinds
        raise CorpusError(f"the Hub dataset {name!r} cannot be read: {reason(error)}") from error
