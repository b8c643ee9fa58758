"""Rows with columns, as in JSON lines, parquet files and data sets, and the choice of the column with the text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rope_ext_hf.errors import CorpusError, did_you_mean
from rope_ext_hf.reading.text.documents import token_ids


def read_rows(
    rows: Iterable[tuple[int, object]], where: str, column: str | None
) -> Iterator[tuple[str, str | array[int]]]:
    """Yield for every row its place within the file, such as ":7", and its text or token ids.

    Args:
        rows: the number of each row and the row itself, in order.
        where: the name of the file or data set, for messages.
        column: the name of the column that holds the text. None: the first row decides, see `choose_column`.

    Raises:
        CorpusError: a row is not a mapping, lacks the column, has something else than text or token ids in it, or an
            attention mask that does not fit the token ids.
    """
    chosen = None
    for number, row in rows:
        place = f"{where}:{number}"
        if not isinstance(row, dict):
            raise CorpusError(f"{place}: not an object with columns but {type(row).__name__}")
        if chosen is None:
            chosen = choose_column({name: isinstance(value, str) for name, value in row.items()}, place, column)
        if chosen not in row:
            raise CorpusError(f"{place}: no column {chosen!r}; its columns: {', '.join(row) or 'none'}")
        content = plain(row[chosen])
        if isinstance(content, list) and content and all(type(item) is int for item in content):
            content = token_ids(_unpadded(content, plain(row.get(mask_column(chosen))), place), place)
        if not isinstance(content, (str, array)):
            raise CorpusError(f"{place}: the column {chosen!r} holds {type(content).__name__}, not text")
        yield f":{number}", content


def choose_column(columns: Mapping[str, bool], where: str, column: str | None) -> str:
    """Return the column that holds the text.

    It is `column` if one is named, else the column "text", else the only column with text, else "input_ids".

    Args:
        columns: for each column, whether it holds text.
        where: the name of the file or data set, for messages.
        column: the column that the caller names, if any.
    """
    listed = ", ".join(columns) or "none"
    if column is not None:
        if column not in columns:
            raise CorpusError(f"{where}: no column {column!r}.{did_you_mean(column, columns)} Its columns: {listed}")
        return column
    if "text" in columns:
        return "text"
    with_text = [name for name, is_text in columns.items() if is_text]
    if not with_text and "input_ids" in columns:
        return "input_ids"
    if len(with_text) != 1:
        raise CorpusError(
            f"{where}: no column 'text', and {len(with_text)} others are text; "
            f"choose one with ?column=NAME. Its columns: {listed}"
        )
    return with_text[0]


def mask_column(column: str) -> str:
    """Return the name of the column with the attention mask of the token ids in a column, as tokenizers call it."""
    return column.replace("input_ids", "attention_mask") if "input_ids" in column else "attention_mask"


def plain(value: Any) -> Any:
    """Return a tensor or array as a list, and any other value as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _unpadded(ids: Sequence[int], mask: Any, where: str) -> Sequence[int]:
    """Return token ids without the padding before and after the text.

    Args:
        ids: the token ids.
        mask: their attention mask, in which padding is 0; None: there is no padding.
        where: the place of the ids, for messages.

    Raises:
        CorpusError: the mask is not one of zeros and ones for these ids, or has zeros between the tokens of the text.
    """
    if mask is None:
        return ids
    if not isinstance(mask, Sequence) or len(mask) != len(ids) or not all(value in (0, 1) for value in mask):
        raise CorpusError(f"{where}: the attention mask must be a 0 or 1 for each of the {len(ids):,} token ids")
    start, count = list(mask).index(1) if any(mask) else 0, sum(mask)
    if not all(mask[start : start + count]):
        raise CorpusError(
            f"{where}: the attention mask has zeros between tokens, and text is read without gaps; give the token ids "
            "without those that are masked"
        )
    return ids[start : start + count]
