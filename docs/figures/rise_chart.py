"""The chart of docs/choosing.md: the rise of the loss by method, length and model, as an SVG file of coloured cells.

The file is plain text without a date or a random id, so that the same measurements give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from docs.figures.measurements import NAMES, factor_lines, rows_by_setting
from docs.figures.registry import ROOT, Row
from rope_ext_hf.methods.registry import list_methods

CHART = ROOT / "docs" / "rises.svg"
BINS = (
    (0.1, "#fdf0d5", "up to 0.1"),
    (0.3, "#fbd38d", "up to 0.3"),
    (1.0, "#f2994a", "up to 1"),
    (float("inf"), "#d1495b", "above 1"),
)
"""Upper end of a significant rise in bits per byte, its colour and its name in the legend."""
NONE, UNCLEAR = "#bfe3c8", "#e3e3e8"
"""The colours of a mean of at most 0.1 without a significant rise, and of a larger one with too wide an interval."""
METHOD_WIDTH, CELL_WIDTH, CELL_HEIGHT, GAP = 158, 41, 21, 10
WIDTH = METHOD_WIDTH + 3 * (5 * CELL_WIDTH + GAP)

_Key = tuple[str, float | None, int]


def rise_chart() -> str:
    """Return the SVG: above, methods fitted to the length; below, inputs of one context length under each factor."""
    lines = list(factor_lines().items())
    top = 86
    fitted, below = _panel(lines, top, "Inputs of", _fitted_rows(), "{}x", (2, 4, 8, 16, 32))
    heading = below + 20
    short, end = _panel(lines, heading + 34, "Factor", _short_rows(), "x{}", (2, 4, 8, 16))
    parts = [
        _text(0, 18, "Rise of the loss, in bits per byte, over the unpatched model at its context length", size=15),
        *_legend(30),
        _text(0, 66, "Longer inputs: each method is set for the length of the input", size=13),
        *fitted,
        _text(0, heading + 14, "Short inputs: what a factor costs an input of one context length", size=13),
        *short,
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {end + 8}" width="{WIDTH}" height="{end + 8}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" fill="#1a1a1a">'
    )
    background = f'<rect width="{WIDTH}" height="{end + 8}" fill="#ffffff"/>'
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"


def _fitted_rows() -> Iterator[tuple[str, dict[int, _Key]]]:
    """Yield a title and its key at each length, for every method; methods with equal values share a row."""
    lines = factor_lines().values()
    scales = (2, 4, 8, 16, 32)
    alike: dict[tuple[str, ...], tuple[list[str], dict[int, _Key]]] = {}
    for name, has_factor in dict.fromkeys(
        (row["method"], bool(row["factor"])) for line in lines for row in line["rows"]
    ):
        keys: dict[int, _Key] = {scale: (name, float(scale) if has_factor else None, scale) for scale in scales}
        values = tuple(
            "–" if (row := rows_by_setting(line).get(keys[scale])) is None else f"{row['increase']:+.2f}"
            for line in lines
            for scale in scales
        )
        alike.setdefault(values, ([], keys))[0].append(name)
    order = ["unpatched", *list_methods()]
    for names, keys in sorted(alike.values(), key=lambda item: order.index(item[0][0])):
        yield ", ".join(names), keys


def _short_rows() -> Iterator[tuple[str, dict[int, _Key]]]:
    """Yield a title and its key at each factor, for every method with a factor."""
    lines = factor_lines().values()
    names = dict.fromkeys(row["method"] for line in lines for row in line["rows"] if row["factor"])
    for name in sorted(names, key=list(list_methods()).index):
        yield name, {factor: (name, float(factor), 1) for factor in (2, 4, 8, 16)}


def _panel(
    lines: Sequence[tuple[str, Row]],
    top: int,
    heading: str,
    rows: Iterator[tuple[str, dict[int, _Key]]],
    column: str,
    columns: Sequence[int],
) -> tuple[list[str], int]:
    """Return the shapes of one table of cells whose first row starts at `top`, and where it ends."""
    parts = []
    for number, (model, _) in enumerate(lines):
        left = METHOD_WIDTH + number * (5 * CELL_WIDTH + GAP)
        parts.append(_text(left, top - 2, NAMES[model], size=12, weight="bold"))
        for place, value in enumerate(columns):
            parts.append(_text(left + (place + 0.5) * CELL_WIDTH, top + 13, column.format(value), size=11, middle=True))
    parts.append(_text(0, top + 13, f"{heading} …", size=11))
    y = top + 19
    for title, keys in rows:
        parts.append(_text(0, y + 15, title, size=12))
        for number, (_, line) in enumerate(lines):
            left = METHOD_WIDTH + number * (5 * CELL_WIDTH + GAP)
            for place, value in enumerate(columns):
                parts.append(_cell(left + place * CELL_WIDTH, y, rows_by_setting(line).get(keys[value])))
        y += CELL_HEIGHT
    return parts, y


def _cell(x: float, y: float, row: Row | None) -> str:
    """Return one cell: its colour says whether the rise is significant, and its text the mean."""
    if row is None:
        return _text(x + CELL_WIDTH / 2, y + 14.5, "–", size=11, middle=True)
    colour = next(colour for end, colour, _ in BINS if row["increase"] <= end)
    if row["low"] <= 0:
        colour = NONE if row["increase"] <= BINS[0][0] else UNCLEAR
    shape = f'<rect x="{x + 1:g}" y="{y + 1:g}" width="{CELL_WIDTH - 2}" height="{CELL_HEIGHT - 2}" fill="{colour}"/>'
    return shape + _text(x + CELL_WIDTH / 2, y + 14.5, f"{row['increase']:+.2f}", size=10.5, middle=True)


def _legend(y: int) -> Iterator[str]:
    """Yield a square and its meaning for every colour."""
    x = 0
    first = [(NONE, "no significant rise"), (UNCLEAR, "too wide an interval")]
    for colour, name in [*first, *((colour, name) for _, colour, name in BINS)]:
        yield f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>'
        yield _text(x + 20, y + 11.5, name, size=11)
        x += 42 + 6 * len(name)


def _text(x: float, y: float, text: str, *, size: float, weight: str = "", middle: bool = False) -> str:
    anchor = ' text-anchor="middle"' if middle else ""
    bold = f' font-weight="{weight}"' if weight else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}"{bold}{anchor}>{escape(text)}</text>'
