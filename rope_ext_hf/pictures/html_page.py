"""Self-contained HTML pages: one style, pictures inside the file, nothing fetched."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from typing import Any

from rope_ext_hf.errors import printable

__all__ = ["MAX_PICTURE_BYTES", "embedded_picture", "html_page", "provenance"]

MAX_PICTURE_BYTES = 20_000_000

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --best: #2a7d2a; --bad: #b3261e; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
img {{ width: 100%; height: auto; background: #fff; border-radius: 4px; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }}
th, td {{ padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }}
th:first-child, td:first-child {{ text-align: left; position: sticky; left: 0; background: Canvas; }}
td small {{ color: GrayText; }}
.best {{ color: var(--best); font-weight: 600; }} .bad {{ color: var(--bad); }}
pre {{ overflow-x: auto; font-size: .8rem; }}
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
    """A whole page.

    Args:
        title, summary: plain text.
        parts: HTML, one below the other; empty ones are left out.
    """
    return _PAGE.format(
        title=html.escape(title), summary=html.escape(printable(summary)), body="\n".join(filter(None, parts))
    )


def provenance(summary: str, values: Mapping[str, Any]) -> str:
    """A section that opens to these values, as JSON."""
    text = html.escape(json.dumps(values, indent=1))
    return f"<h2>Provenance</h2>\n<details><summary>{html.escape(summary)}</summary><pre>{text}</pre></details>"


def embedded_picture(name: str, data: bytes) -> str:
    """An image element that holds a picture; empty where the data are no PNG."""
    if not data.startswith(b"\x89PNG\r\n"):
        return ""
    text = html.escape(printable(name))
    return f'<p><img alt="{text}" src="data:image/png;base64,{base64.b64encode(data).decode("ascii")}"></p>'
