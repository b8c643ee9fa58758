"""Documents from Python values: texts, token ids, rows, data sets, files as `pathlib.Path`, and documents."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import CorpusError, short
from rope_ext_hf.reading.text.documents import Document, Tokens, plain, read_rows, token_ids
from rope_ext_hf.reading.text.text_files import find_files, read_files


def documents_in(data: Any, column: str | None, left_out: Callable[[str], None]) -> Iterator[Document | Tokens]:
    """Yield the documents in a Python value; `rope_ext_hf.reading.text.load.load` lists the values that are allowed.

    `left_out` is called with a sentence about what is left out of a folder, if anything is.
    """
    if hasattr(data, "column_names") and not isinstance(data, Mapping):  # a datasets.Dataset, streamed or not
        yield from _documents_of_rows(data, column)
        return
    items = list(_items(data))
    if items and all(isinstance(item, Mapping) for item in items):
        yield from _documents_of_rows(items, column)
    elif items and all(isinstance(item, Path) for item in items):
        yield from _documents_of_paths(items, column, left_out)
    elif column is not None:
        raise CorpusError(
            f"the texts were given without columns, so there is no column {column!r}; leave out the column, or give "
            "rows: dicts, or a datasets.Dataset"
        )
    else:
        for number, item in enumerate(items, 1):
            yield _document(item, f"text {number}")


def _documents_of_rows(rows: Iterable[object], column: str | None) -> Iterator[Document]:
    single = chain.from_iterable(map(_single_rows, rows))
    for place, content in read_rows(enumerate(single, 1), "row", column):
        yield Document.from_content(f"row{place}", content)


def _single_rows(row: object) -> Iterable[object]:
    """Return the rows in a row that holds the token ids of several texts, as tokenizers return; else the row itself."""
    if not isinstance(row, Mapping):
        return [row]
    ids, mask = plain(row.get("input_ids")), plain(row.get("attention_mask"))
    if not _is_nested(ids) or any(isinstance(value, str) for value in row.values()):
        return [dict(row)]
    if mask is None:
        return [{"input_ids": each} for each in ids]
    if not _is_nested(mask) or len(mask) != len(ids):
        raise CorpusError("input_ids and attention_mask must have the same shape")
    return [{"input_ids": each, "attention_mask": its_mask} for each, its_mask in zip(ids, mask, strict=True)]


def _is_nested(value: object) -> bool:
    """Return whether a value is a list of lists (or of tensors), as the token ids of several texts are."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(isinstance(item, (list, tuple)) or hasattr(item, "tolist") for item in value)


def _documents_of_paths(
    paths: Sequence[Path], column: str | None, left_out: Callable[[str], None]
) -> Iterator[Document]:
    roots, files = [], []
    for path in paths:
        # absolute, because relative and absolute paths have no common path
        texts = find_files(str(path.expanduser().absolute()))
        if texts.left_out:
            left_out(texts.left_out)
        roots.append(texts.root)
        files += texts.files
    yield from read_files(str(paths[0]), Path(os.path.commonpath(roots)), files, column)


def _items(data: Any) -> Iterable[Any]:
    """Return the items of a value, each of which becomes one document; arrays and tensors become lists."""
    if isinstance(data, (Document, Tokens, Path)) or (isinstance(data, Mapping) and "input_ids" in data):
        return [data]
    values = plain(data)
    if not isinstance(values, Sequence) or isinstance(values, (str, bytes, bytearray)):
        raise _refusal(data)
    items = [innermost for item in values for innermost in _innermost(plain(item))]
    is_one_document = bool(items) and all(type(item) is int for item in items)
    return [items] if is_one_document else items


def _innermost(item: Any) -> Iterator[Any]:
    """Yield the innermost lists of a list of lists, such as the token ids of each text in a batch; else the item."""
    if not _is_nested(item):
        yield item
        return
    for inner in item:
        yield from _innermost(plain(inner))


def _document(item: Any, name: str) -> Document | Tokens:
    """Return the document for one item of a corpus: a document already, a text, or token ids."""
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
    raise _refusal(item)


def _refusal(data: object) -> CorpusError:
    """Return the error for a value that is not a corpus."""
    entries = f"; give one of its entries: {short(', '.join(map(str, data)))}" if isinstance(data, Mapping) else ""
    return CorpusError(
        "a corpus is a name, a list of texts, token ids (lists, tensors, what a tokenizer returns), a "
        f"datasets.Dataset, pathlib.Path of files, or documents, got {type(data).__name__}{entries}"
    )
