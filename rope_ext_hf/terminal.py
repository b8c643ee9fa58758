"""Text as wide as the terminal: tables, and sentences on several lines."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text


def terminal_width() -> int:
    """Columns of the terminal, or of COLUMNS where that is set; 160 in a pipe."""
    return shutil.get_terminal_size((160, 24)).columns


def line_width() -> int:
    """Columns of sentences and commands: those of the terminal, at most 110, as longer lines are hard to read."""
    return min(terminal_width(), 110)


def wrapped(text: str, first: str = "", then: str | None = None) -> str:
    """Sentences on lines of `line_width`; words such as paths stay whole.

    Args:
        first: stands before the text.
        then: stands before its further lines; None: blanks.
    """
    return textwrap.fill(
        text,
        max(line_width(), len(first) + 20),
        initial_indent=first,
        subsequent_indent=" " * len(first) if then is None else then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def text_table(rows: Iterable[Sequence[str]], align: str = "l") -> str:
    """Rows in columns; where these are wider than the terminal, cells take several lines.

    Args:
        rows: as many cells each.
        align: "l" or "r" for each column; the last one holds for all further columns.
    """
    table = Table.grid(padding=(0, 2))
    for row in rows:
        for column in range(len(table.columns), len(row)):
            right = align[min(column, len(align) - 1)] == "r"
            table.add_column(justify="right" if right else "left", overflow="fold")
        table.add_row(*map(Text, row))
    return _printed(table)


def table_text(table: Table) -> str:
    """A table of rich as text, as wide as the terminal; its title and caption are lines of text."""
    title, caption = table.title, table.caption
    table.title = table.caption = None
    lines = [str(title or ""), _printed(table), wrapped(str(caption or ""))]
    return "\n".join(line for line in lines if line)


def _printed(table: Table) -> str:
    console = Console(width=terminal_width(), color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
