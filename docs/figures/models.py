"""Tables of what a patch does to every model class of transformers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from docs.figures.registry import figure, made_by, markdown_table, read_result

COLUMNS = ("static", "length-dependent", "remapping", "conversion", "measured")
KINDS = {
    "causal": "causal language models",
    "vision": "models of text and images",
    "multimodal": "models of text and speech",
    "masked": "encoders",
    "encoder-decoder": "encoder-decoders",
    "base": "embedding models",
}


def _rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = read_result("coverage")["rows"]
    return rows


def _rotating() -> list[dict[str, Any]]:
    """Classes with a rotary embedding in layers that attend to everything."""
    return [row for row in _rows() if row["rope"] and (not row.get("rotating") or row["rotating"][0])]


def _works(row: dict[str, Any], column: str) -> bool:
    works: bool = row[column]["works"]
    return works


def _share(rows: list[dict[str, Any]], column: str) -> str:
    return f"{sum(_works(row, column) for row in rows)}/{len(rows)}"


@figure
def coverage_counts() -> str:
    result = read_result("coverage")
    by_kind = {kind: [row for row in _rotating() if row["kind"] == kind] for kind in KINDS}
    totals = Counter(row["kind"] for row in _rows())
    rows = [
        [KINDS[kind], str(totals[kind]), *(_share(some, column) for column in COLUMNS)]
        for kind, some in by_kind.items()
        if some
    ]
    rows.append(["all", str(len(_rows())), *(_share(_rotating(), column) for column in COLUMNS)])
    note = f"*Of the classes with a rotary embedding in layers that attend to everything. {made_by(result)}*"
    return markdown_table(["classes of transformers", "in all", *COLUMNS], rows, note)


def _names(rows: list[dict[str, Any]]) -> str:
    return ", ".join(sorted({f"`{row['model_type']}`" for row in rows}))


def _mark(row: dict[str, Any], column: str) -> str:
    if not _works(row, column):
        return "–"
    return "yes" if column != "measured" else "whole" if "because" in row[column] else "in chunks"


@figure
def coverage_models() -> str:
    """One line for every combination of what works."""
    order = ("yes", "in chunks", "whole", "–")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in _rotating():
        groups.setdefault(tuple(_mark(row, column) for column in COLUMNS), []).append(row)
    rows = (
        [*marks, str(len(some)), _names(some)]
        for marks, some in sorted(groups.items(), key=lambda item: [order.index(mark) for mark in item[0]])
    )
    return markdown_table([*COLUMNS, "classes", "`model_type`"], rows)


@figure
def coverage_reading() -> str:
    """Why a class that takes a patch is read whole, or cannot be measured."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in _rotating():
        if _works(row, "static") and (reason := row["measured"].get("because")):
            groups.setdefault((_mark(row, "measured"), reason), []).append(row)
    rows = (
        [mark, reason, _names(some)]
        for (mark, reason), some in sorted(groups.items(), key=lambda item: (item[0][0] != "whole", -len(item[1])))
    )
    return markdown_table(["measured", "because", "`model_type`"], rows)


def _refusals(head: str, rows: list[dict[str, Any]], column: str) -> str:
    """Why classes take no method of a kind, the commonest reason first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if not _works(row, column):
            groups.setdefault(row[column]["because"], []).append(row)
    table = ([reason, _names(some)] for reason, some in sorted(groups.items(), key=lambda item: -len(item[1])))
    return markdown_table([head, "`model_type`"], table)


@figure
def coverage_refusals() -> str:
    """Of classes that compute rotary embeddings, those that take no static method."""
    return _refusals("refused because", [row for row in _rows() if row["rope"]], "static")


@figure
def coverage_remapping_refusals() -> str:
    rows = [row for row in _rotating() if _works(row, "static")]
    return _refusals("no remapping method because", rows, "remapping")


@figure
def coverage_without_rope() -> str:
    return str(sum(not row["rope"] for row in _rows()))
