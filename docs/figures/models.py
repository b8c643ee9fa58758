"""Tables of what a patch does to every model class of transformers."""

from __future__ import annotations

from collections import Counter
from typing import Any

from docs.figures.registry import figure, made_by, markdown_table, read_result

COLUMNS = ("static", "length-dependent", "remapping", "generate", "conversion", "measured")
_SHOWN_REASONS = 3
"""The number of reasons that stand beside a method."""
KINDS = {
    "causal language models": ("causal",),
    "with images or speech": ("vision", "multimodal"),
    "encoders and others": ("masked", "base", "encoder-decoder"),
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
    rows = []
    for title, kinds in KINDS.items():
        some = [row for row in _rotating() if row["kind"] in kinds]
        total = sum(row["kind"] in kinds for row in _rows())
        rows.append([f"{total} {title}", *(_share(some, column) for column in COLUMNS)])
    rows.append([f"all {len(_rows())}", *(_share(_rotating(), column) for column in COLUMNS)])
    note = f"*Of the classes with a rotary embedding in layers that attend to everything. {made_by(result)}*"
    return markdown_table(["classes of transformers", *COLUMNS], rows, note)


@figure
def coverage_methods() -> str:
    """Return for each method how many classes take it, and the commonest reasons of those that do not.

    Methods that the same classes refuse for the same reasons share a line.
    """
    classes = [row["methods"] for row in _rotating() if row["methods"]]
    groups: dict[tuple[str, ...], list[str]] = {}
    for method in classes[0]:
        groups.setdefault(tuple(said[method] for said in classes), []).append(method)
    rows = []
    for said, methods in groups.items():
        reasons = Counter(filter(None, said))
        commonest = reasons.most_common(_SHOWN_REASONS)
        shown = [f"{reason} ({count})" for reason, count in commonest]
        if others := reasons.total() - sum(count for _, count in commonest):
            shown.append(f"others ({others})")
        names = ", ".join(f"`{method}`" for method in methods)
        rows.append([names, str(len(said) - reasons.total()), str(reasons.total()), "; ".join(shown)])
    return markdown_table(["methods", "accepted", "refused", "because"], rows)


def _names(rows: list[dict[str, Any]]) -> str:
    return ", ".join(sorted({f"`{row['model_type']}`" for row in rows}))


def _mark(row: dict[str, Any], column: str) -> str:
    if not _works(row, column):
        return "–"
    if column == "generate":
        return "with images" if "image" in row[column]["with"] else "yes"
    return "yes" if column != "measured" else "whole" if "because" in row[column] else "in chunks"


@figure
def coverage_models() -> str:
    """One line for every combination of what works."""
    order = ("with images", "yes", "in chunks", "whole", "–")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in _rotating():
        groups.setdefault(tuple(_mark(row, column) for column in COLUMNS), []).append(row)
    rows = (
        [*marks, str(len(some)), _names(some)]
        for marks, some in sorted(groups.items(), key=lambda item: [order.index(mark) for mark in item[0]])
    )
    return markdown_table([*COLUMNS, "classes", "`model_type`"], rows)


@figure
def coverage_generate() -> str:
    """Return in how many classes chats were run with what, and why some classes do not run them."""
    chats = [row["generate"]["with"] for row in _rotating() if _works(row, "generate")]
    lines = [
        f"- with text: {len(chats)} classes; with an image as well: {sum('image' in chat for chat in chats)}",
        f"- with padding on the left: {sum('text padding' in chat for chat in chats)}; in one row, because the class "
        f"reads padding as something else without a patch, too: {sum('text padding' not in chat for chat in chats)}",
        f"- equal to forwards without a cache: {sum('text whole' in chat for chat in chats)}; not so without a patch, "
        f"either: {sum('text whole' not in chat for chat in chats)}",
    ]
    reasons = Counter(row["generate"]["because"] for row in _rotating() if not _works(row, "generate"))
    lines.append(f"- not run: {'; '.join(f'{reason} ({count})' for reason, count in reasons.most_common())}")
    return "\n\n" + "\n".join(lines) + "\n\n"


@figure
def coverage_reading() -> str:
    """Return the reasons why classes that can be patched are read whole, or cannot be measured."""
    counts: dict[str, Counter[str]] = {}
    for row in _rotating():
        if _works(row, "static") and (reason := row["measured"].get("because")):
            counts.setdefault(_mark(row, "measured"), Counter())[reason] += 1
    lines = (
        f"- {title}: {'; '.join(f'{reason} ({count})' for reason, count in counts[mark].most_common())}\n"
        for title, mark in (("read whole", "whole"), ("not measured", "–"))
        if mark in counts
    )
    return f"\n\n{''.join(lines)}\n"


def _refusals(rows: list[dict[str, Any]], column: str) -> str:
    """Return the reasons why classes take no method of a kind, the commonest first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if not _works(row, column):
            groups.setdefault(row[column]["because"], []).append(row)
    order = sorted(groups.items(), key=lambda item: -len(item[1]))
    return "\n\n" + "".join(f"- *{reason}*: {_names(some)}\n" for reason, some in order) + "\n"


@figure
def coverage_refusals() -> str:
    """Return the classes that compute rotary embeddings and take no static method, by reason."""
    return _refusals([row for row in _rows() if row["rope"]], "static")


@figure
def coverage_remapping_refusals() -> str:
    rows = [row for row in _rotating() if _works(row, "static")]
    return _refusals(rows, "remapping")


@figure
def coverage_without_rope() -> str:
    return str(sum(not row["rope"] for row in _rows()))
