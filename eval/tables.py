"""What the tables of results have in common, for a terminal and for a page.

Names come from files and models and may hold anything: they go into tables as text, never as markup, with control
characters escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import multiple_text
from rope_ext_hf.eval.results import MethodResult, labels, method_key
from rope_ext_hf.eval.runs import Run

__all__ = ["AS_LOADED", "by_method", "length_table", "length_text", "loaded_label"]

AS_LOADED = "the model as loaded"
R = TypeVar("R", bound=MethodResult)


def by_method(results: Sequence[R]) -> dict[str, list[R]]:
    """Results by the label of their method, in the order they came."""
    names = labels(result.method for result in results)
    rows: dict[str, list[R]] = {name: [] for name in names.values()}
    for result in results:
        rows[names[method_key(result.method)]].append(result)
    return rows


def loaded_label(run: Run[Any]) -> str:
    """The label of the model as loaded among the results of a run."""
    key = method_key(run.settings["loaded"])
    return labels([*(result.method for result in run.results), run.settings["loaded"]])[key]


def length_text(length: int, context_length: int) -> str:
    """A length in tokens and in context lengths of the model."""
    return f"{length:,} tokens ({multiple_text(length, context_length)})"


def length_table(run: Run[Any], title: str, caption: str, *heads: str) -> Table:
    """A table with these heads and a column per context length, in tokens and in context lengths of the model."""
    table = Table(title=Text(title), caption=Text(caption), box=SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(heads):
        table.add_column(head, justify="right" if index else "left", overflow="fold")
    for length in sorted({result.length for result in run.results}):
        head = f"{length:,}\n{multiple_text(length, run.context_length)}"
        table.add_column(head, justify="right", overflow="fold")
    return table
