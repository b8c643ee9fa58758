"""Tables of comma- or tab-separated values, whose first row names the columns."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from itertools import chain
from typing import IO, Any

from rope_ext_hf.errors import CorpusError, short

_LONGEST_NAME = 200  # characters of a column's name; a longer one is a text, so that the table has no header
_DELIMITERS = ",;\t|"
_LONGEST_FIELD = 2**31 - 1  # the csv module's own limit is 131,072 characters, less than a book has


def csv_rows(lines: IO[str], where: str, *, tabs: bool) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield for each row its number, from 1, and its values by column, all as they are written.

    Args:
        lines: the lines of the file, with their line ends as they are.
        where: the name of the file, for messages.
        tabs: whether tabs separate the columns; else commas do, or semicolons, tabs or bars if the header has these and
            no comma.

    Raises:
        CorpusError: the header is missing, a row has more or fewer values than the header, or its quotes are wrong.
    """
    first = lines.readline()
    delimiter = "\t" if tabs else next((each for each in _DELIMITERS if each in first), ",")
    rows = _filled_rows(csv.reader(chain([first], lines), delimiter=delimiter, strict=True), where)
    header = next(rows, [])
    if any(len(name) > _LONGEST_NAME or "\n" in name for name in header) or len({*header}) < len(header):
        raise CorpusError(
            f"{where}: the first row must name the columns, each once; it begins with {short(repr(header[0]))}"
        )
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise CorpusError(
                f"{where}:{number}: {len(row)} values for {len(header)} columns ({short(', '.join(header))})"
            )
        yield number, dict(zip(header, row, strict=True))


def is_number(value: str) -> bool:
    """Return whether a value of such a table is a number."""
    return re.fullmatch(r"\s*[-+]?[\d.]+(e[-+]?\d+)?\s*", value, re.IGNORECASE) is not None


def is_list(value: str) -> bool:
    """Return whether a value of such a table is a list of whole numbers, such as token ids."""
    return re.fullmatch(r"\s*\[[\d\s,]*\]\s*", value) is not None


def _filled_rows(reader: Any, where: str) -> Iterator[list[str]]:
    """Yield the rows of a table that are not blank lines."""
    row: list[str] | None = []
    while row is not None:
        limit = csv.field_size_limit(_LONGEST_FIELD)  # one limit for the whole process, so that it is put back at once
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise CorpusError(
                f"{where}: the quotes of a field are wrong near line {reader.line_num} ({error}); a field "
                "with quotes, separators or line ends stands in quotes, with its own quotes doubled. Or give JSON lines"
            ) from error
        finally:
            csv.field_size_limit(limit)
        if row:
            yield row
