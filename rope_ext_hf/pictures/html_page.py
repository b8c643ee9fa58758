"""Self-contained HTML pages: one style for all, with the pictures inside the file and nothing to download."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import printable
from rope_ext_hf.pictures.drawing import text_width

MAX_PICTURE_BYTES = 20_000_000  # the largest picture that is put into a page

_WIDTHS = (24, 30, 36, 42, 48, 54, 62, 70, 79)
"""Widths of windows in rem. A table gets the first one that it fits in; in narrower windows its rows are blocks.

The last one is a window of 1,280 pixels. A table that needs more scrolls in a box of its own.
"""
_SCROLLS = 62  # the width of windows from which a table that fits in none scrolls; in narrower windows it has blocks
_BREAK = "\n"  # between the lines of a head or a cell
_LABELS = 16.0  # the largest width of the column of methods in rem; longer labels take several lines
_HEAD = 8.0  # the largest width of the head of a column in rem, if its longest word is not wider

_BLOCKS = """@media (max-width: {width}rem) {{
.from-{width}, .from-{width} tbody, .from-{width} td, .from-{width} tbody th {{ display: block; }}
.from-{width} {{ white-space: normal; }} .from-{width} :is(colgroup, thead) {{ display: none; }}
.from-{width} tbody tr {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(var(--cell), 100%), 1fr));
gap: .3rem 1rem; padding: .6rem 0; border-bottom: 1px solid var(--line); }}
.from-{width} tbody :is(th, td) {{ padding: 0; border: 0; text-align: left; }}
.from-{width} tbody :is(th, td):empty {{ display: none; }}
.from-{width} tbody th {{ grid-column: 1 / -1; max-width: none; font-weight: 600; }}
.from-{width} td::before {{ content: attr(data-head); display: block; font-size: .8rem;
font-weight: 400; color: var(--quiet); }}
}}"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --quiet: light-dark(#595959, #a6a6a6);
--green: light-dark(#216e21, #5cc25c); --red: light-dark(#b3261e, #f2857c); }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 80rem; box-sizing: border-box; margin: 0 auto; padding: 1rem;
overflow-wrap: anywhere; }}
p, pre, figure {{ max-width: 62rem; }} .verdict {{ font-size: 1.1rem; font-weight: 600; }}
h1 {{ font-size: 1.4rem; line-height: 1.3; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
small, figcaption, .about {{ color: var(--quiet); }} .caption {{ white-space: pre-line; }}
img {{ width: 100%; height: auto; background: #fff; border-radius: 4px; }}
figure {{ margin: 1.5rem 0; display: flex; flex-wrap: wrap; align-items: start; gap: 1rem; }}
figcaption {{ flex: 100%; font-size: .9rem; }}
svg {{ flex: 1 1 18rem; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr));
gap: 0 1.5rem; align-items: start; }}
@media (max-width: 43.99rem) {{ svg.of-360 ~ svg.of-720 {{ display: none; }} }}
@media (min-width: 44rem) {{ svg.of-360:has(~ svg.of-720) {{ display: none; }} }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }}
th, td {{ padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }}
thead th {{ white-space: normal; overflow-wrap: normal; text-wrap: balance; max-width: {head}rem;
vertical-align: bottom; }}
th[colspan] {{ text-align: center; }} colgroup + colgroup {{ border-left: 1px solid var(--line); }}
thead small {{ white-space: nowrap; }}
tbody th {{ font-weight: 400; white-space: normal; max-width: {labels}rem; }}
tbody th, thead tr:first-child > :first-child {{ text-align: left; padding-left: 0; }}
.scrolls {{ overflow-x: auto; }} .scrolls table {{ min-width: max-content; }}
.scrolls :is(tbody th, thead tr:first-child > :first-child) {{ position: sticky; left: 0; background: Canvas; }}
@media (prefers-color-scheme: dark) {{ img {{ filter: invert(.93) hue-rotate(180deg); }} }}
.green {{ color: var(--green); }} .bold {{ font-weight: 600; }} .red {{ color: var(--red); }}
details {{ margin: .8rem 0; }} summary {{ cursor: pointer; }} figure, tr {{ break-inside: avoid; }}
pre {{ font-size: .8rem; }} pre, code {{ white-space: pre-wrap; }}
{blocks}
</style>
</head>
<body>
<h1>{title}</h1>
{conclusion}
<p class="about">{summary}</p>
{body}
</body>
</html>
"""


def html_page(title: str, summary: str, *parts: str, conclusion: Sequence[str] = ()) -> str:
    """Return a whole HTML page.

    Args:
        title: the heading, as plain text.
        summary: a sentence on what was measured, as plain text.
        parts: the rest of the page, as HTML; empty parts are left out.
        conclusion: sentences of plain text. The first one, the verdict, stands out below the title.
    """
    return _PAGE.format(
        title=html.escape(title),
        conclusion=_conclusion(conclusion),
        summary=html.escape(printable(summary)),
        body="\n".join(filter(None, parts)),
        blocks="\n".join([_BLOCKS.format(width=width) for width in _WIDTHS]),
        head=_HEAD,
        labels=_LABELS,
    )


def _conclusion(sentences: Sequence[str]) -> str:
    """Return sentences as HTML: the first one in bold, the others in a paragraph below it."""
    if not sentences:
        return ""
    verdict, *others = sentences
    below = paragraph(" ".join(others)) if others else ""
    return f'<p class="verdict">{html.escape(printable(verdict))}</p>\n{below}'


def html_table(table: Table | None) -> str:
    """Return a table that is also shown in the terminal as HTML, with its title and its caption; empty for None.

    Further lines of a head or a cell stand in small text below the first line, and the style of a cell becomes its
    class. Neighbouring columns whose heads have the same first line share one head with it. In a window that is too
    narrow for the table, each row is a block: its first cell, then each value below the head of its column. A table
    that is wider than any window scrolls by itself.
    """
    if table is None:
        return ""
    heads = [str(column.header) for column in table.columns]
    rows = [*zip(*[column.cells for column in table.columns], strict=True)]
    body = "".join([_row(heads, row) for row in rows])
    title, caption = [html.escape(printable(str(text or ""))) for text in (table.title, table.caption)]
    columns = [
        max([width, *[_rem(str(cell)) for cell in column.cells]])
        for width, column in zip(_head_widths(heads), table.columns, strict=True)
    ]
    padding = 1.2 * len(columns) + 2.5  # of cells, then of the page, with a scroll bar
    needed = min(columns[0], _LABELS) + sum(columns[1:]) + padding
    fitting = next((width for width in _WIDTHS if width > needed), None)
    cell = min(10.0, max([1.0, *columns[1:], *[0.8 * _rem(_in_a_line(head)) for head in heads[1:]]]))
    drawn = (
        f'<table class="from-{fitting or _SCROLLS}" style="--cell: {cell:.1f}rem" aria-label="{title}">'
        f"{_heads(heads)}\n<tbody>{body}</tbody></table>"
    )
    if fitting is None:
        drawn = f'<div class="scrolls" tabindex="0" role="region" aria-label="{title}">{drawn}</div>'
    return f'<h2>{title}</h2>\n{drawn}\n<p class="caption"><small>{caption}</small></p>'


def _groups(heads: Sequence[str]) -> list[list[str]]:
    """Return the heads of columns, grouped where neighbours have the same first line."""
    return [list(group) for _, group in groupby(heads, lambda head: head.partition(_BREAK)[0])]


def _heads(heads: Sequence[str]) -> str:
    """Return the head of a table as HTML: a row, or two rows and groups of columns where columns share a head."""
    groups = _groups(heads)
    both_rows = "" if len(groups) == len(heads) else ' rowspan="2"'
    upper, lower = "", ""
    for group in groups:
        if len(group) == 1:
            upper += f'<th scope="col"{both_rows}>{_lines(group[0])}</th>'
            continue
        upper += f'<th scope="colgroup" colspan="{len(group)}">{_lines(group[0].partition(_BREAK)[0])}</th>'
        below = [_lines(head.partition(_BREAK)[2]) for head in group]
        lower += "".join([f'<th scope="col"><small>{text}</small></th>' for text in below])
    if not lower:
        return f"<thead><tr>{upper}</tr></thead>"
    columns = "".join([f'<colgroup span="{len(group)}"></colgroup>' for group in groups])
    return f"{columns}<thead><tr>{upper}</tr><tr>{lower}</tr></thead>"


def _head_widths(heads: Sequence[str]) -> list[float]:
    """Return the approximate width that the head of each column needs in rem; heads may break between words."""
    widths = []
    for group in _groups(heads):
        for head in group:
            name, *others = head.split(_BREAK)
            words = max(_rem(word) for word in re.split(r"\s|(?<=-)", name)) / len(group)
            widths.append(max([words, *[0.84 * _rem(line) for line in others]]))
    return widths


def _rem(text: str) -> float:
    """Return the approximate width of a cell's text in rem; its first line may be bold, and further lines are small."""
    return max(text_width(line) * (0.84 if nth else 1.08) for nth, line in enumerate(text.split("\n")))


def _in_a_line(head: str) -> str:
    """Return the head of a column in one line, with the multiple of a length in parentheses: "4,096 (16x)"."""
    return " ".join([re.sub(r"^[\d.,]+x$", r"(\g<0>)", line.strip()) for line in head.split("\n")])


def _row(heads: Sequence[str], cells: Sequence[Any]) -> str:
    """Return a row of a table as HTML; its first cell is the head of the row."""
    first, *others = [f"{_style(cell)}>{_lines(str(cell))}" for cell in cells]
    names = [html.escape(printable(_in_a_line(head))) for head in heads[1:]]
    values = [f'<td data-head="{name}"{cell}</td>' for name, cell in zip(names, others, strict=True)]
    return f'<tr><th scope="row"{first}</th>{"".join(values)}</tr>\n'


def _style(cell: Any) -> str:
    return f' class="{html.escape(str(cell.style))}"' if isinstance(cell, Text) and cell.style else ""


def _lines(text: str) -> str:
    """Return the lines of a table cell as HTML; lines after the first one are small."""
    first, *others = [html.escape(printable(line.strip())) for line in text.split("\n")]
    return first + "".join([f"<br><small>{line}</small>" for line in others])


def side_by_side(charts: Iterable[str]) -> str:
    """Return figures, given as HTML, side by side, or below each other on a narrow page; empty if there are none."""
    drawn = "".join(charts)
    return f'<div class="charts">{drawn}</div>' if drawn else ""


def _heading(text: str) -> str:
    return f"<h2>{html.escape(printable(text))}</h2>\n"


def collapsed(summary: str, *parts: str) -> str:
    """Return HTML parts that are hidden until the reader clicks on the summary, a line of plain text."""
    return f"<details><summary>{html.escape(printable(summary))}</summary>{''.join(parts)}</details>"


def as_json(values: Mapping[str, Any]) -> str:
    """Return values as JSON in HTML."""
    return f"<pre>{html.escape(json.dumps(values, indent=1))}</pre>"


def paragraph(text: str) -> str:
    """Return plain text as a paragraph of HTML."""
    return f"<p>{html.escape(printable(text))}</p>"


def command_section(title: str, command: str, text: str) -> str:
    """Return HTML with a command and the text of the file that it reads, hidden until a click; empty without text."""
    if not text:
        return ""
    lines = "\n".join(map(printable, text.splitlines()))
    section = f"<p><code>{html.escape(printable(command))}</code></p>\n<pre>{html.escape(lines)}</pre>"
    return collapsed(title, section)


def embedded_picture(name: str, data: bytes) -> str:
    """Return an HTML image element that contains the picture itself; empty if the data are not a PNG."""
    if not data.startswith(b"\x89PNG\r\n"):
        return ""
    text = html.escape(printable(name))
    return f'<p><img alt="{text}" src="data:image/png;base64,{base64.b64encode(data).decode("ascii")}"></p>'
