"""Texts to measure with and to train on: every function that takes a text reads it by `load`.

    documents = load("books/*.txt")                 # one document per file
    documents = load("reports.jsonl?column=body")   # one document per line; see `load` for all other names
    documents = load([text, another])               # texts themselves are given in a list: a string is always a name

Real text that needs no download: every Python installation has several megabytes of English documentation and source
code, of which 'stdlib' is a part.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from rope_ext_hf.errors import CorpusError, did_you_mean, short, warn_caller
from rope_ext_hf.models.temporary import set_to
from rope_ext_hf.reading.text.documents import Corpus, Document, Documents, Tokens, corpus_name, read_rows, utf8_bytes
from rope_ext_hf.reading.text.in_memory import documents_in
from rope_ext_hf.reading.text.text_files import NAME_HELP, find_files, optional_package, read_files, reason
from rope_ext_hf.reading.text.text_folders import default_split

__all__ = ["check_name", "load", "stdlib_held_out"]

T = TypeVar("T")

HELD_OUT = ("_pydecimal", "argparse", "inspect", "mailbox", "pydoc_data/topics", "tarfile", "turtle", "typing")
"""Modules of Python's standard library that no training of the reference model ever reads."""
_STDLIB = "stdlib"
_HUB = "hf:"


def load(
    data: Corpus, *, column: str | None = None, join: int | None = None, max_documents: int | None = None
) -> Documents:
    """Return the documents of a corpus, which every function that takes a text reads in this way.

    A string is a name and never a text, so that a misspelt name cannot be measured as if it were the text:

    | string | documents |
    |---|---|
    | `stdlib` | the held-out modules of Python's standard library, one each |
    | `FILE` | a UTF-8 text file of any name is one document, with its line ends as they are; also `.gz`, `.zst` |
    | `FILE.jsonl`, `.ndjson`, `.json` | one per line, or one per item of the list; also `.gz`, `.zst` |
    | `FILE.csv`, `.tsv` | one per row; the first row names the columns; also `.gz`, `.zst` |
    | `FILE.parquet`, `.arrow` | one per row; needs the package `pyarrow` |
    | `FOLDER` | those of all these files in it and below (plain text: .txt .md .rst .py), sorted by path; hidden files are left out, and with a warning links that lead out of the folder |
    | `FOLDER` of a data set | the clone of a data set repository, its folder in the Hub's cache, or what `datasets` has saved: one split, as for `hf:OWNER/NAME`; a warning names what is left out |
    | `PATTERN` | those of all files that match, sorted: `books/*.txt`, `data/**/*.jsonl` |
    | `hf:OWNER/NAME` | one per row of a data set of the Hugging Face Hub, streamed; needs the package `datasets` |

    Options follow a question mark, with `&` between them, as in `hf:OWNER/NAME?split=validation&column=body`. These are
    all:

    | option | meaning |
    |---|---|
    | `column=NAME` | the column of a table that holds the text, or lists of token ids (padded ones beside a column `attention_mask`); default: `text`, else the only column with text, else `input_ids` |
    | `join=CHARACTERS` | join documents that follow each other, with an empty line between them, until each has so many characters |
    | `max_documents=N` | read the first N documents and no further; without it, a data set of the Hub is read to its end |
    | `config=NAME` | the configuration of a data set of the Hub, or of a clone of it |
    | `split=NAME` | its split; default: `test`, else the only one |

    In a value, `%26` stands for `&` and `%25` for `%`.

    Other values are the text itself, or say what they are:

    | value | documents |
    |---|---|
    | `[text, ...]` | one per string |
    | `[1, 2, ...]`, `[[1, 2, ...], ...]`, tensors, arrays | one per list, or per row, of token ids |
    | what a tokenizer returns, or a list of that | one per row of `input_ids`, without the padding that `attention_mask` has as 0 |
    | a `datasets.Dataset`, a list of its rows | one per row |
    | `pathlib.Path`, a list of them | those of the files or folders |
    | `Document`, a list of them | the documents as they are |

    To shuffle, select or filter rows, or to read another revision, load the data set by `datasets` and give that.

    Args:
        data: the corpus, see above.
        column: as the option above.
        join: as the option above; it joins the documents that were read.
        max_documents: as the option above.

    Returns:
        Documents with distinct names: the path below the folder, and for one of several in a file `:` and its line or
        row.

    Raises:
        CorpusError: the name is that of no text, the text cannot be read, is damaged or empty or not UTF-8, or has no
            such column (the message names file and line); or the value is not a corpus.
    """  # noqa: E501 - rows of tables
    if isinstance(data, Documents) and column is None and join is None and max_documents is None:
        return data
    documents = Documents()
    documents.source = corpus_name(data) or documents.source

    def left_out(note: str) -> None:
        documents.note = note
        warn_caller(note)

    try:
        if isinstance(data, str):
            name = _Name.parse(data)
            column = _agreed(data, "column", name.column, column)
            join = _agreed(data, "join", name.join, join)
            max_documents = _agreed(data, "max_documents", name.max_documents, max_documents)
            read: Iterable[Document | Tokens] = _named_documents(name, column, left_out)
        else:
            read = documents_in(data, column, left_out)
        if max_documents is not None and max_documents < 1:
            raise CorpusError(f"max_documents must be at least 1, got {max_documents}")
        documents += islice(read, max_documents)
    except OSError as error:  # such as a name too long for the file system, or a folder that may not be entered
        hint = f"; {NAME_HELP}" if isinstance(data, str) else ""
        raise CorpusError(f"{short(str(data), 200)!r} cannot be read: {reason(error)}{hint}") from error
    for document in documents:
        utf8_bytes(document.name, document.text)  # refuses text that UTF-8 cannot spell
    if all(_is_empty(document) for document in documents):
        raise CorpusError(f"{documents.source!r} is empty: no document has any text")
    if join is not None:
        documents[:] = _joined(documents, join, documents.source)
    return documents


def check_name(data: Corpus | None) -> None:
    """Raise a CorpusError if `data` is a string that does not name a text.

    No text is read, and the Hub is not asked.
    """
    if isinstance(data, str):
        name = _Name.parse(data)
        if name.source != _STDLIB and not name.source.startswith(_HUB):
            find_files(name.source, config=name.config, split=name.split)


def stdlib_held_out() -> list[Document]:
    """Return the modules of Python's standard library that are listed in `HELD_OUT`, one document each.

    Some distributions of Python leave a few of them out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {name: root / f"{name}.py" for name in HELD_OUT}
    # Line ends become \n on every platform, so that everybody measures the same text.
    documents = [Document(name, file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()]
    if not documents:
        raise CorpusError(f"no source of the standard library found in {root}; give a text file with --data FILE")
    return documents


# --- names ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Name:
    """The name of a corpus, divided into its parts: `SOURCE?OPTION=VALUE&OPTION=VALUE`."""

    source: str  # 'stdlib', 'hf:OWNER/NAME', or a path or pattern
    column: str | None = None
    join: int | None = None
    max_documents: int | None = None
    config: str | None = None
    split: str | None = None

    @classmethod
    def parse(cls, text: str) -> _Name:
        """Divide the name of a corpus into its parts.

        If the whole text is the path of a file or folder, a question mark in it is a part of that path.
        """
        if not text.strip() or "\n" in text or "\0" in text:
            raise CorpusError(f"{short(text)!r} does not name a text; {NAME_HELP}")
        # The question mark of a pattern such as part?.txt is not followed by OPTION=.
        match = re.fullmatch(r"(.*?)\?(\w+=.*)", text)
        if match is None or Path(text).exists():
            return cls(text)
        source = match[1]
        of_data_set = ("config", "split") if source.startswith(_HUB) or Path(source).is_dir() else ()
        allowed = ("column", "join", "max_documents", *of_data_set)
        options: dict[str, Any] = {}
        for part in match[2].split("&"):
            option, _, value = part.partition("=")
            if option not in allowed:
                known = f"Known: {', '.join(allowed)}"
                raise CorpusError(f"{text!r}: unknown option {option!r}.{did_you_mean(option, allowed)} {known}")
            example = f"as in {option}={_EXAMPLES[option]}"
            if option in options or not value:
                raise CorpusError(f"{text!r}: the option {option!r} takes one value, {example}")
            options[option] = unquote(value)
            if option in ("join", "max_documents"):
                if not options[option].isdecimal():
                    raise CorpusError(f"{text!r}: {option} takes a whole number, {example}")
                options[option] = int(options[option])
        return cls(source, **options)


_EXAMPLES = {"column": "text", "join": "100000", "max_documents": "20", "config": "en", "split": "test"}
"""A value of each option, for error messages."""


def _agreed(data: str, option: str, in_name: T | None, argument: T | None) -> T | None:
    """Return the value of an option, which may stand in the name of a corpus, be an argument, or both.

    Raises:
        CorpusError: the two values differ.
    """
    if in_name is not None and argument is not None and in_name != argument:
        raise CorpusError(f"{data!r} has {option}={in_name!r}, but {option}={argument!r} is given")
    return argument if in_name is None else in_name


def _named_documents(name: _Name, column: str | None, left_out: Callable[[str], None]) -> Iterable[Document]:
    """Return the documents of the corpus with this name.

    Args:
        name: the name.
        column: the column of a table that holds their text.
        left_out: called with a sentence about what is left out of a folder, if anything is.
    """
    if name.source == _STDLIB:
        if column is not None:
            raise CorpusError(f"{name.source!r} is plain text, which has no column {column!r}")
        return stdlib_held_out()
    if name.source.startswith(_HUB):
        return _read_hub_dataset(name.source.removeprefix(_HUB), config=name.config, split=name.split, column=column)
    texts = find_files(name.source, config=name.config, split=name.split)
    if texts.left_out:
        left_out(texts.left_out)
    return read_files(name.source, texts.root, texts.files, column)


def _is_empty(document: Document | Tokens) -> bool:
    return not document.text.strip() if document.ids is None else not len(document.ids)


# --- joining ----------------------------------------------------------------------------------------------------------


def _joined(documents: Sequence[Document | Tokens], characters: int, source: str) -> Iterator[Document]:
    """Yield documents made by joining the given ones in their order.

    Each has at least `characters` characters, if all given documents together have as many.
    """
    if characters < 1:
        raise CorpusError(f"join must be at least 1 character, got {characters}")
    if any(document.ids is not None for document in documents):
        raise CorpusError(f"{source!r} holds token ids, which are not joined; leave out join")
    groups: list[list[Document | Tokens]] = []
    size = characters
    for document in documents:
        if size >= characters:
            groups.append([])
            size = 0
        groups[-1].append(document)
        size += len(document.text)
    if len(groups) > 1 and size < characters:  # the rest is too short to be a document of its own
        rest = groups.pop()
        groups[-1] += rest
    for group in groups:
        name = group[0].name
        if len(group) > 1:
            name += f" and {len(group) - 1} more"
        yield Document(name, "\n\n".join([document.text for document in group]))


# --- data sets of the Hub -----------------------------------------------------------------------------------------


_HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")
_STREAM_RETRIES = 2
"""Retries of a read. Each lasts half a minute within huggingface_hub, and its default of 20 looks like a hang."""


def _read_hub_dataset(name: str, *, config: str | None, split: str | None, column: str | None) -> Iterator[Document]:
    """Yield the documents in a data set on the Hub, one per row, as they are downloaded.

    Args:
        name: OWNER/NAME.
        config: the configuration; None: the default one.
        split: the split; None: "test", or the only one.
        column: the column of the text; None: see `rope_ext_hf.reading.text.documents.choose_column`.

    Raises:
        CorpusError: the name is not OWNER/NAME, or the data set cannot be read.
    """
    # `datasets` takes a bare name or an existing folder for local files, and some of its readers unpickle these.
    if not _HUB_ID.fullmatch(name) or Path(name).exists():
        raise CorpusError(
            f"hf:{name} is not a dataset of the Hub: write hf:OWNER/NAME?config=...&split=...&column=..., "
            "and a folder of your own without hf:"
        )
    datasets = optional_package("datasets", "datasets of the Hub")
    retries = {
        setting: min(getattr(datasets.config, setting), _STREAM_RETRIES)
        for setting in ("STREAMING_READ_MAX_RETRIES", "STREAMING_OPEN_MAX_RETRIES")
    }
    try:
        with set_to(datasets.config, **retries):
            rows = datasets.load_dataset(
                name,
                name=config,
                split=split,
                streaming=True,
                trust_remote_code=False,  # even if an environment variable allows it
            )
            if isinstance(rows, dict):
                rows = rows[default_split(rows, f"hf:{name}")]
            for place, content in read_rows(enumerate(rows, 1), f"hf:{name}", column):
                yield Document.from_content(name + place, content)
    except CorpusError:
        raise
    except Exception as error:  # of any kind: not found, not reachable, no such configuration, a damaged remote file
        raise CorpusError(f"the Hub dataset {name!r} cannot be read: {reason(error)}") from error
