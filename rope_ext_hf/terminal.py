"""Text as wide as the terminal, in a pipe up to 160 columns: tables, and sentences on several lines."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_IN_A_PIPE = 160


def terminal_width() -> int:
    """Columns of the terminal, or of COLUMNS where that is set; 160 in a pipe."""
    return shutil.get_terminal_size((_IN_A_PIPE, 24)).columns


def wrapped(text: str, first: str = "", then: str | None = None, *, width: int | None = None) -> str:
    """Sentences on lines of at most 160 columns; words such as paths stay whole.

    Args:
        first: stands before the text.
        then: stands before its further lines; None: blanks.
        width: columns; None: those of the terminal.
    """
    return textwrap.fill(
        text,
        max(width or min(terminal_width(), _IN_A_PIPE), len(first) + 20),
        initial_indent=first,
        subsequent_indent=" " * len(first) if then is None else then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def text_table(rows: Iterable[Sequence[str]], align: str = "l", *, width: int | None = None) -> str:
    """Rows in columns; where these are wider than the terminal, cells take several lines.

    Args:
        rows: as many cells each.
        align: "l" or "r" for each column; the last one holds for all further columns.
        width: as `wrapped` takes it.
    """
    table = Table.grid(padding=(0, 2))
    for row in rows:
        for column in range(len(table.columns), len(row)):
            right = align[min(column, len(align) - 1)] == "r"
            table.add_column(justify="right" if right else "left", overflow="fold")
        table.add_row(*map(Text, row))
    console = Console(width=width or terminal_width(), color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
