"""What the tables of results have in common, for a terminal and for a page.

Names come from files and models and may hold anything: they go into tables as text, never as markup, with control
characters escaped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import multiple_text
from rope_ext_hf.runs.kinds import Run

BEYOND = "\u2020"  # the mark of a value at a length beyond the one that the model is for under its method


def beyond_mark(run: Run[Any], result: Any) -> str:
    """The mark of a result, or a blank where the other results of the run have it; empty where none has."""
    if run.beyond(result):
        return BEYOND
    return " " if run.any_beyond else ""


def length_table(run: Run[Any], title: str, caption: str, *heads: str) -> Table:
    """A table with these heads and a column per context length, in tokens and in context lengths of the model."""
    if run.any_beyond:
        caption += f"\n{BEYOND} beyond the length that this method was set for"
    columns = [f"{length:,}\n{multiple_text(length, run.context_length)}" for length in run.lengths]
    return results_table(title, caption, *heads, *columns)


def two_column_table(
    run: Run[Any], title: str, caption: str, second: str, text: Callable[[float], str], cell: Callable[[Any], Text]
) -> Table:
    """A row for each method and each value of the attribute `second`, which `text` writes, with a `cell` per length."""
    view = length_table(run, title, caption, "method", second)
    for name, row in run.by_label.items():
        at = {(getattr(result, second), result.length): cell(result) for result in row}
        values = sorted({value for value, _ in at})
        for value in values:
            head = Text(name if value == values[0] else "")
            cells = (at.get((value, length), "") for length in run.lengths)
            view.add_row(head, text(value), *cells, end_section=value == values[-1])
    return view


def results_table(title: str, caption: str, *heads: str) -> Table:
    """A table with these heads, numbers to the right of the first column."""
    table = Table(title=Text(title), caption=Text(caption), box=SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left", overflow="fold", no_wrap=not index)
    return table
