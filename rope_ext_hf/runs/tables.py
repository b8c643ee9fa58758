"""Tables of results, for a terminal and for a page.

Names come from files and models and may hold anything: they go into tables as text, never as markup, with control
characters escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import capital, multiple_text
from rope_ext_hf.runs.conclusions.findings import Findings
from rope_ext_hf.runs.conclusions.measures import Measure, perplexity_text
from rope_ext_hf.runs.run import Run

__all__ = ["BEST_NOTE", "BEYOND", "beyond_mark", "length_table", "two_column_table"]

BEYOND = "\u2020"
"""The mark (a dagger) of a value at a length beyond the one that the method was set for."""
BEYOND_NOTE = f"{BEYOND} beyond the length that this method was set for"
BEST_NOTE = "* best, or no significant difference from the best"


def results_table(title: str, caption: str, *heads: str) -> Table:
    """Return an empty table with the given column heads; the first column is aligned left, the others right."""
    table = Table(title=Text(title), caption=Text(caption), box=SIMPLE_HEAD, pad_edge=False)
    for index, head in enumerate(heads):
        first = index == 0
        table.add_column(head, justify="left" if first else "right", overflow="fold", no_wrap=first)
    return table


def length_table(run: Run[Any], title: str, caption: str, *heads: str) -> Table:
    """Return an empty table with the given column heads, followed by a column for each context length of the run.

    The head of such a column has the length in tokens, and as a multiple of the model's context length. If a result is
    marked with a dagger (see `beyond_mark`), the caption explains it.
    """
    if _any_beyond(run):
        caption += f"\n{BEYOND_NOTE}"
    columns = [f"{length:,}\n{multiple_text(length, run.context_length)}" for length in run.lengths]
    return results_table(title, caption, *heads, *columns)


def two_column_table(
    run: Run[Any], title: str, caption: str, second: str, text: Callable[[float], str], cell: Callable[[Any], Text]
) -> Table:
    """Return a table with a row for each method and each value of one more attribute, and a column for each length.

    Args:
        run: the run with the results.
        title, caption: the texts above and below the table.
        second: the attribute of the results that the second column shows, such as "depth".
        text: makes the text of the second column from its value.
        cell: makes the text for the cell of one result.
    """
    view = length_table(run, title, caption, "method", second)
    for name, results in run.by_label.items():
        cells = {(getattr(result, second), result.length): cell(result) for result in results}
        values = sorted({value for value, _ in cells})
        for value in values:
            method = Text(name if value == values[0] else "")
            row = [cells.get((value, length), "") for length in run.lengths]
            view.add_row(method, text(value), *row, end_section=value == values[-1])
    return view


def beyond_mark(run: Run[Any], result: Any) -> str:
    """Return the mark after a result: a dagger if its input is longer than its method was set for.

    A result without the dagger gets a blank where another result of the run has it, so that numbers are aligned.
    """
    if run.beyond(result):
        return BEYOND
    return " " if _any_beyond(run) else ""


def _any_beyond(run: Run[Any]) -> bool:
    """Return whether any result in a run is for a length beyond the one that its method was set for."""
    return any(run.beyond(result) for result in run.results)


def differences_tables(findings: Findings) -> list[Table]:
    """Return, for each measure with stars, a table of the differences from the best value of each length."""
    return [table for measure in findings.measures if (table := _differences_table(findings, measure)) is not None]


def _differences_table(findings: Findings, measure: Measure) -> Table | None:
    """Return the table of differences for one measure; None if it has no star at any length."""
    stars = {length: starred for length in measure.all_lengths if (starred := findings.starred(measure, length))}
    if not stars:
        return None

    def text(number: float) -> str:
        if not math.isfinite(number):
            return "not finite"
        if measure.exponential:
            return f"{number:.3f}" if number < 10 else perplexity_text(number)
        return f"{100 * number:+.1f}" if measure.shares else f"{number:+{measure.digits}}"

    heads = [f"{length:,}\n{multiple_text(length, findings.context_length)}" for length in stars]
    unit = "divided by" if measure.exponential else "minus"
    of_unit = "" if measure.exponential else " in points" if measure.shares else f" in {measure.unit}"
    caption = f"the mean difference over {measure.kind_of_item}s, paired, with its 95% confidence interval\n{BEST_NOTE}"
    view = results_table(
        f"{capital(measure.name)} {unit} that of the best method of each length{of_unit}", caption, "method", *heads
    )
    for key, name in findings.names.items():
        if key not in measure.items:
            continue
        cells = []
        for length, (best, *others) in stars.items():
            change = measure.change((key, length), (best, length))
            if key == best:
                cells.append("best*")
            elif change is None:
                cells.append("")
            else:
                shown, star = measure.as_read(change), "*" if key in others else " "
                cells.append(f"{text(shown.value)}{star}{shown.line_below(text)}")
        view.add_row(Text(name), *map(Text, cells))
    return view
