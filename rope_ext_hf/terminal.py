"""Sentences and tables that fit the width of the terminal, and reports that notebooks show as tables of HTML."""

from __future__ import annotations

import html
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import printable

__all__ = ["Report", "Rows", "ShownAsTables", "as_wide_as", "broken_command", "text_table", "wrapped"]

Rows = Sequence[Sequence[str]]
"""The rows of a table: a name and its value in each; or, with more than two columns, the heads and the rows below."""
_LINE = 110  # the most columns of sentences and commands, as longer lines are hard to read
_fixed: list[int] = []  # widths of the blocks of `as_wide_as` under way; the last one is in force


@contextmanager
def as_wide_as(columns: int) -> Iterator[None]:
    """Format text for `columns` columns inside the `with` block, whatever the terminal is; for files and pages."""
    _fixed.append(columns)
    try:
        yield
    finally:
        _fixed.pop()


def terminal_width(most: int = sys.maxsize) -> int:
    """Return the number of columns of the terminal, at most `most`.

    The environment variable COLUMNS overrides it. In a pipe, it is 160.
    """
    return min(most, _fixed[-1] if _fixed else shutil.get_terminal_size((160, 24)).columns)


def wrapped(text: str, first: str = "", then: str | None = None) -> str:
    """Return sentences broken into lines of at most `_LINE` columns; long words stay whole.

    `first` is put before the first line. `then` is put before each other line; default: as many blanks as `first` has
    characters.
    """
    return textwrap.fill(
        text,
        max(terminal_width(_LINE), len(first) + 20),
        initial_indent=first,
        subsequent_indent=" " * len(first) if then is None else then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def broken_command(command: str) -> str:
    """Return a command line; if it is long, its options continue on further lines."""
    lines, room = [""], terminal_width(_LINE) - 3
    for part in command.replace(" --", "\n--").split("\n"):
        if lines[-1] and len(lines[-1]) + len(part) > room:
            lines.append("  " + part)
        else:
            lines[-1] += (" " if lines[-1] else "") + part
    return " \\\n".join(lines)


def text_table(rows: Iterable[Sequence[str]], align: str = "l") -> str:
    """Return rows as text in aligned columns; where the text is wider than the terminal, cells take several lines.

    `align`: "l" (left) or "r" (right) for each column; the last letter is that of all further columns.
    """
    table = Table.grid(padding=(0, 2))
    for row in rows:
        for column in range(len(table.columns), len(row)):
            right = align[min(column, len(align) - 1)] == "r"
            table.add_column(justify="right" if right else "left", overflow="fold")
        table.add_row(*map(Text, row))
    return _printed(table)


def table_text(table: Table) -> str:
    """Return a table of the package rich as text, as wide as the terminal, with title and caption as lines of text."""
    title, caption = table.title, table.caption
    table.title = table.caption = None
    notes = map(wrapped, str(caption or "").splitlines())
    lines = [str(title or ""), _printed(table), *notes]
    return "\n".join(line for line in lines if line)


def _printed(table: Table) -> str:
    console = Console(width=terminal_width(), color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join([line.rstrip() for line in captured.get().splitlines()])


class Report:
    """Base class for dataclasses that hold results and can be saved as JSON."""

    also: ClassVar[tuple[str, ...]] = ()  # properties that are saved with the fields

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, and the properties that `also` names, as values for JSON."""
        values: dict[str, Any] = asdict(self)  # type: ignore[call-overload]
        return values | {name: getattr(self, name) for name in self.also}


class ShownAsTables(Report):
    """A report that a notebook shows as tables, and whose repr is one line."""

    def tables(self) -> Iterable[Rows]:
        """Return the tables that a notebook shows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        first = str(self).partition("\n")[0].removeprefix("# ")
        return f"<{type(self).__name__}: {printable(first)}>"

    def _repr_html_(self) -> str:
        return "\n".join(_html_table(rows) for rows in self.tables() if rows)


_CELL = "text-align: left; vertical-align: top; overflow-wrap: break-word; white-space: normal"
_LINES = "margin: 0; white-space: pre-wrap; overflow-wrap: anywhere"


def _html_table(rows: Rows) -> str:
    lines = []
    for number, row in enumerate(rows):
        names = len(row) if len(row) > 2 and not number else 1
        tags = ["th"] * names + ["td"] * (len(row) - names)
        cells = (f'<{tag} style="{_CELL}">{_html_text(text)}</{tag}>' for tag, text in zip(tags, row, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div style="overflow-x: auto"><table>{"".join(lines)}</table></div>'


def _html_text(text: str) -> str:
    escaped = html.escape(printable(text))
    return f'<pre style="{_LINES}">{escaped}</pre>' if "\n" in text else escaped
