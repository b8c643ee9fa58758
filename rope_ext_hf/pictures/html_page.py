"""Self-contained HTML pages: one style for all, with the pictures inside the file and nothing to download."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import printable
from rope_ext_hf.pictures.drawing import text_width

MAX_PICTURE_BYTES = 20_000_000  # the largest picture that is put into a page

_WIDTHS = (24, 30, 36, 42, 48, 54, 62, 9999)
"""Widths of windows in rem. A table gets the first one that it fits in; in narrower windows its rows are blocks."""

_BLOCKS = """@media (max-width: {width}rem) {{
.from-{width}, .from-{width} tbody, .from-{width} td {{ display: block; }}
.from-{width} {{ white-space: normal; }} .from-{width} .heads {{ display: none; }}
.from-{width} tr {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(var(--cell), 100%), 1fr));
gap: .3rem 1rem; padding: .6rem 0; border-bottom: 1px solid var(--line); }}
.from-{width} td {{ padding: 0; border: 0; text-align: left; }} .from-{width} td:empty {{ display: none; }}
.from-{width} td:first-child {{ grid-column: 1 / -1; max-width: none; font-weight: 600; }}
.from-{width} td:not(:first-child)::before {{ content: attr(data-head); display: block; font-size: .8rem;
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
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem;
overflow-wrap: anywhere; }}
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
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
td:first-child {{ max-width: 16rem; white-space: normal; }}
@media (prefers-color-scheme: dark) {{ img {{ filter: invert(.93) hue-rotate(180deg); }} }}
.green {{ color: var(--green); }} .bold {{ font-weight: 600; }} .red {{ color: var(--red); }}
details {{ margin: .8rem 0; }} summary {{ cursor: pointer; }} figure, tr {{ break-inside: avoid; }}
pre {{ font-size: .8rem; }} pre, code {{ white-space: pre-wrap; }}
{blocks}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="about">{summary}</p>
{body}
</body>
</html>
"""


def html_page(title: str, summary: str, *parts: str) -> str:
    """Return a whole HTML page. `title` and `summary` are plain text, `parts` are HTML; empty parts are left out."""
    return _PAGE.format(
        title=html.escape(title),
        summary=html.escape(printable(summary)),
        body="\n".join(filter(None, parts)),
        blocks="\n".join([_BLOCKS.format(width=width) for width in _WIDTHS]),
    )


def html_table(table: Table | None) -> str:
    """Return a table that is also shown in the terminal as HTML, with its title and its caption; empty for None.

    Further lines of a head or a cell stand in small text below the first line, and the style of a cell becomes its
    class. In a window that is too narrow for the table, each row is a block: its first cell, then each value below the
    head of its column.
    """
    if table is None:
        return ""
    heads = [str(column.header) for column in table.columns]
    rows = [*zip(*[column.cells for column in table.columns], strict=True)]
    head = "".join([f"<th>{_lines(text)}</th>" for text in heads])
    body = "".join([f"<tr>{''.join(map(_cell, heads, row))}</tr>\n" for row in rows])
    title, caption = [html.escape(printable(str(text or ""))) for text in (table.title, table.caption)]
    names = [_in_a_line(text) for text in heads]
    columns = [max(map(_rem, column)) for column in zip(heads, *[map(str, row) for row in rows], strict=True)]
    needed = min(columns[0], 16.0) + sum(columns[1:]) + 1.2 * len(columns) + 2.5  # padding, the page's and a scroll bar
    fitting = next(width for width in _WIDTHS if width > needed or width == _WIDTHS[-1])
    cell = min(10.0, max([1.0, *columns[1:], *[0.8 * _rem(name) for name in names[1:]]]))
    return (
        f'<h2>{title}</h2>\n<table class="from-{fitting}" style="--cell: {cell:.1f}rem">'
        f'<tr class="heads">{head}</tr>\n{body}</table>\n<p class="caption"><small>{caption}</small></p>'
    )


def _rem(text: str) -> float:
    """Return the approximate width of a cell's text in rem; its first line may be bold, and further lines are small."""
    return max(text_width(line) * (0.84 if nth else 1.08) for nth, line in enumerate(text.split("\n")))


def _in_a_line(head: str) -> str:
    """Return the head of a column in one line, with the multiple of a length in parentheses: "4,096 (16x)"."""
    return " ".join([re.sub(r"^[\d.,]+x$", r"(\g<0>)", line.strip()) for line in head.split("\n")])


def _cell(head: str, cell: Any) -> str:
    style = f' class="{html.escape(str(cell.style))}"' if isinstance(cell, Text) and cell.style else ""
    name = html.escape(printable(_in_a_line(head)))
    return f'<td data-head="{name}"{style}>{_lines(str(cell))}</td>'


def _lines(text: str) -> str:
    """Return the lines of a table cell as HTML; lines after the first one are small."""
    first, *others = [html.escape(printable(line.strip())) for line in text.split("\n")]
    return first + "".join([f"<br><small>{line}</small>" for line in others])


def side_by_side(charts: Iterable[str]) -> str:
    """Return figures, given as HTML, side by side; where the page is narrow they stand below each other."""
    return f'<div class="charts">{"".join(charts)}</div>'


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
