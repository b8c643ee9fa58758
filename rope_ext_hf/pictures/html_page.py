"""Self-contained HTML pages: one style, pictures inside the file, nothing fetched."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import printable

MAX_PICTURE_BYTES = 20_000_000

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884;
--green: light-dark(#2a7d2a, #5cc25c); --red: light-dark(#b3261e, #f2857c); }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
img {{ width: 100%; height: auto; background: #fff; border-radius: 4px; }}
figure {{ margin: 1.5rem 0; display: flex; flex-wrap: wrap; gap: 1rem; }} figcaption {{ flex: 100%; }}
svg {{ flex: 1 1 20rem; }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(20rem, 100%), 1fr)); gap: 0 1.5rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }}
th, td {{ padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }}
th:first-child, td:first-child {{ text-align: left; position: sticky; left: 0; background: Canvas; }}
td:first-child {{ max-width: min(16rem, 31vw); white-space: normal; overflow-wrap: anywhere; }}
@media (prefers-color-scheme: dark) {{ img {{ filter: invert(.93) hue-rotate(180deg); }} }}
@media (max-width: 30rem) {{ th, td {{ padding: .3rem .4rem; }} }}
td small {{ color: GrayText; }}
.green {{ color: var(--green); }} .bold {{ font-weight: 600; }} .red {{ color: var(--red); }}
details {{ margin: .5rem 0; }} figure, tr {{ break-inside: avoid; }}
@media print {{ .wide {{ overflow: visible; }} table {{ white-space: normal; font-size: .8rem; }} }}
pre {{ overflow-x: auto; font-size: .8rem; }} code {{ overflow-wrap: anywhere; white-space: pre-wrap; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
{body}
</body>
</html>
"""


def html_page(title: str, summary: str, *parts: str) -> str:
    """A whole page: plain title and summary, and parts of HTML, of which empty ones are left out."""
    return _PAGE.format(
        title=html.escape(title), summary=html.escape(printable(summary)), body="\n".join(filter(None, parts))
    )


def html_table(table: Table | None) -> str:
    """A table of a terminal, with its title and its caption; empty without one.

    Further lines of a head or a cell stand small below the first one; a style becomes classes.
    """
    if table is None:
        return ""
    head = "".join([f"<th>{_lines(str(column.header))}</th>" for column in table.columns])
    cells = zip(*[column.cells for column in table.columns], strict=True)
    rows = "".join([f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in cells])
    title, caption = [html.escape(printable(str(text or ""))) for text in (table.title, table.caption)]
    return (
        f'<h2>{title}</h2>\n<div class="wide"><table><tr>{head}</tr>\n{rows}</table></div>\n'
        f"<p><small>{caption}</small></p>"
    )


def _cell(cell: Any) -> str:
    style = f' class="{html.escape(str(cell.style))}"' if isinstance(cell, Text) and cell.style else ""
    return f"<td{style}>{_lines(str(cell))}</td>"


def _lines(text: str) -> str:
    first, *others = [html.escape(printable(line.strip())) for line in text.split("\n")]
    return first + "".join([f"<br><small>{line}</small>" for line in others])


def provenance_section(summary: str, values: Mapping[str, Any]) -> str:
    """A section that opens to these values, as JSON."""
    return heading("Provenance") + collapsed(summary, as_json(values))


def side_by_side(charts: Iterable[str]) -> str:
    """Figures in a row, below each other where the page is narrow."""
    return f'<div class="charts">{"".join(charts)}</div>'


def heading(text: str) -> str:
    return f"<h2>{html.escape(printable(text))}</h2>\n"


def collapsed(summary: str, *parts: str) -> str:
    """HTML that a click on a line of plain text opens."""
    return f"<details><summary>{html.escape(printable(summary))}</summary>{''.join(parts)}</details>"


def as_json(values: Mapping[str, Any]) -> str:
    return f"<pre>{html.escape(json.dumps(values, indent=1))}</pre>"


def paragraph(text: str) -> str:
    return f"<p>{html.escape(printable(text))}</p>"


def command_section(title: str, command: str, text: str) -> str:
    """A command under a title, and the text of the file that it reads; empty without one."""
    if not text:
        return ""
    lines = "\n".join(map(printable, text.splitlines()))
    return f"{heading(title)}<p><code>{html.escape(printable(command))}</code></p>\n<pre>{html.escape(lines)}</pre>"


def embedded_picture(name: str, data: bytes) -> str:
    """An image element that holds a picture; empty where the data are no PNG."""
    if not data.startswith(b"\x89PNG\r\n"):
        return ""
    text = html.escape(printable(name))
    return f'<p><img alt="{text}" src="data:image/png;base64,{base64.b64encode(data).decode("ascii")}"></p>'
