"""What a method costs, what was measured of it here, what papers report of it: for its section of methods.md."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING

from docs.figures.measurements import NAMES, factor_lines, rows_by_setting
from docs.figures.reference_model import retrieval_cells
from docs.figures.registry import FIGURES, ROOT, markdown_table, rows_of

if TYPE_CHECKING:
    from rope_ext_hf.methods.guidance import Guidance

__all__ = ["evidence"]

LONG = 16_384
"""Tokens at which the cost of attention is stated."""


def evidence(name: str) -> str:
    """What is known of a method: a list, and a table by length of what was measured."""
    from rope_ext_hf import list_methods

    guidance = list_methods()[name].guidance
    assert guidance is not None
    items = [f"**Cost:** {_cost(name, guidance)}."]
    if guidance.unmeasured:
        items.append(f"**Measured here:** not by itself; {guidance.unmeasured}.")
    items += [f"**Reported:** {text}." for text in _reported(name)]
    table = "" if guidance.unmeasured else _measured(name)
    return "\n\n" + "\n".join(f"- {item}" for item in items) + (table or "\n\n")


def _cost(name: str, guidance: Guidance) -> str:
    from rope_ext_hf.methods.guidance import NOTHING

    cost = "a token takes as long as before" if guidance.decode == NOTHING else guidance.decode
    rows = {what: row for (what,), row in rows_of("attention", "what", way=name, tokens=LONG).items()}
    if not rows:
        return cost
    prefill, decode = rows["prefill"], rows["decode"]
    return (
        f"{cost}. One layer's attention to {LONG:,} tokens takes {prefill['time']:.2f} times as long as plain "
        f"attention for a prompt, with {prefill['memory']:.2f} times the memory, and {decode['time']:.2f} times as "
        "long for a [decoding step](remapping.md#cost)"
    )


def _measured(name: str) -> str:
    """The rise of the loss on every model, and the bundled model's answers, by length."""
    rows: dict[str, dict[int, str]] = {}
    for model, line in factor_lines().items():
        for (method, factor, scale), row in rows_by_setting(line).items():
            if method == name and factor in (None, scale) and scale > 1:
                rows.setdefault(f"rise of the loss, {NAMES[model]}", {})[scale] = f"{row['increase']:+.2f}"
            if method == name and factor and scale == 1:
                title = f"at 1x with the factor for this length, {NAMES[model]}"
                rows.setdefault(title, {})[int(factor)] = f"{row['increase']:+.2f}"
    cells, _, line = retrieval_cells()
    for (method, keys, length), row in cells.items():
        if (method, keys) == (name, 1):
            rows.setdefault("key-value answered, bundled model", {})[length // line["context_length"]] = (
                f"{row['exact']:.0%}"
            )
    if not rows:
        return ""
    scales = sorted({scale for values in rows.values() for scale in values})
    table = ([title, *(values.get(scale, "–") for scale in scales)] for title, values in rows.items())
    note = (
        "Losses in bits per byte, [with intervals](choosing.md#without-training); answers [with theirs](retrieval.md), "
        "where a method with a factor has the factor 8."
    )
    return markdown_table(["measured here, without training", *(f"{scale}x" for scale in scales)], table, note)


def _reported(name: str) -> list[str]:
    from rope_ext_hf.advice.reported import reported

    return [
        f"{table.model}, {table.benchmark} at {' / '.join(table.lengths)}: {table.numbers(name)} "
        f"({table.unit}; [{table.source}]({table.url}), {table.place})"
        for table in reported()
        if name in table.values
    ]


def _in_page() -> list[str]:
    """The methods whose section in the page somebody wrote."""
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    return re.findall(r"<!-- figure: evidence-([a-z0-9-]+) -->", page)


FIGURES |= {f"evidence-{name}": partial(evidence, name) for name in _in_page()}
