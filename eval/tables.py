"""What the tables of results have in common, for a terminal and for a page.

Names come from files and models and may hold anything: they go into tables as text, never as markup, with control
characters escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import multiple_text
from rope_ext_hf.eval.results import MethodResult, labels, method_key

__all__ = ["add_lengths", "by_method", "empty_table"]

R = TypeVar("R", bound=MethodResult)


def by_method(results: Sequence[R]) -> dict[str, list[R]]:
    """Results by the label of their method, in the order they came."""
    names = labels(result.method for result in results)
    rows: dict[str, list[R]] = {name: [] for name in names.values()}
    for result in results:
        rows[names[method_key(result.method)]].append(result)
    return rows


def empty_table(title: str, caption: str) -> Table:
    """A table without columns."""
    return Table(title=Text(title), caption=Text(caption), box=SIMPLE_HEAD, pad_edge=False)


def add_lengths(view: Table, lengths: Sequence[int], context_length: int) -> None:
    """A column per context length, under its number of tokens and of context lengths of the model."""
    for length in lengths:
        view.add_column(f"{length:,}\n{multiple_text(length, context_length)}", justify="right", overflow="fold")
