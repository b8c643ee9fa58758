"""Hooks of mkdocs: the repository's address, in the header and in links that leave docs/, and options in one piece."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # mkdocs loads this file alone

from docs.links import absolute_links, repository_url

ROOT = Path(__file__).parents[1]


def on_config(config: Any) -> Any:
    """Set the addresses of the site, before mkdocs reads anything. A placeholder is not shown in the header."""
    url = repository_url(ROOT)
    config.site_url = f"{url}/"
    if not url.split("/")[2].endswith(".invalid"):
        config.repo_url, config.repo_name = url, url.rpartition("/")[2]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the source of a page for mkdocs. The page "contributing" is CONTRIBUTING.md."""
    url = repository_url(ROOT)
    if page.file.src_uri == "contributing.md":
        return absolute_links((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), url)
    return absolute_links(markdown, url, "docs", only_above=True)


def on_page_content(html: str, **_: Any) -> str:
    """Return a page's HTML for mkdocs. A browser would break a line at each hyphen of `--max-spans`."""
    return re.sub(r"<code>[^<]*</code>", lambda code: _OPTION.sub(r'\1<span class="option">\2</span>', code[0]), html)


_OPTION = re.compile(r"([>\s])(--?[a-z][\w-]*)")
