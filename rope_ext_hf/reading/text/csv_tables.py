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


def csv_rows(lines: IO[str], where: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield for each row its number, from 1, and its values by column, all as they are written.

    Columns are separated by commas, or by semicolons, tabs or bars if the header has these and no comma.

    Args:
        lines: the lines of the file, with their line ends as they are.
        where: the name of the file, for messages.

    Raises:
        CorpusError: the header is missing, a row has more or fewer values than the header, or its quotes are wrong.
    """
    first = lines.readline()
    delimiter = next((each for each in _DELIMITERS if each in first), ",")
    if where.lower().removesuffix(".gz").removesuffix(".zst").endswith(".tsv"):
        delimiter = "\t"
    reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    number = 0
    while (row := _next_row(reader, where)) is not None:
        if not row:  # a blank line
            continue
        if header is None:
            header = row
            if any(len(name) > _LONGEST_NAME or "\n" in name for name in row) or len({*row}) < len(row):
                raise CorpusError(
                    f"{where}: the first row must name the columns, each once; it begins with {short(repr(row[0]))}"
                )
            continue
        number += 1
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


def _next_row(reader: Any, where: str) -> list[str] | None:
    """Return the next row; None at the end of the table."""
    limit = csv.field_size_limit(_LONGEST_FIELD)  # one limit for the whole process, so that it is put back at once
    try:
        row: list[str] | None = next(reader, None)
        return row
    except csv.Error as error:
        raise CorpusError(
            f"{where}: the quotes of a field are wrong near line {reader.line_num} ({error}); a field "
            "with quotes, separators or line ends stands in quotes, with its own quotes doubled. Or give JSON lines"
        ) from error
    finally:
        csv.field_size_limit(limit)
