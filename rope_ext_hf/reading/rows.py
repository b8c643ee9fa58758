"""Rows with columns, as in JSON lines, parquet files and data sets, and the choice of the column with the text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping

from rope_ext_hf.errors import CorpusError, did_you_mean
from rope_ext_hf.reading.documents import token_ids


def read_rows(
    rows: Iterable[tuple[int, object]], where: str, column: str | None
) -> Iterator[tuple[str, str | array[int]]]:
    """Yield for every row its place within the file, such as ":7", and its text or token ids.

    Args:
        rows: the number of each row and the row itself, in order.
        where: the name of the file or data set, for messages.
        column: the name of the column that holds the text. None: the first row decides, see `choose_column`.

    Raises:
        CorpusError: a row is not a mapping, lacks the column, or has something else than text or token ids in it.
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
        content = row[chosen]
        if isinstance(content, list) and content and all(type(item) is int for item in content):
            content = token_ids(content, place)
        if not isinstance(content, (str, array)):
            raise CorpusError(f"{place}: the column {chosen!r} holds {type(content).__name__}, not text")
        yield f":{number}", content


def choose_column(columns: Mapping[str, bool], where: str, column: str | None) -> str:
    """Return the column that holds the text.

    It is `column` if one is named, else the column "text", else the only column with text.

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
    if len(with_text) != 1:
        raise CorpusError(
            f"{where}: no column 'text', and {len(with_text)} others are text; "
            f"choose one with ?column=NAME. Its columns: {listed}"
        )
    return with_text[0]
