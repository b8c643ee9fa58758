"""Hooks of mkdocs: the repository's address from pyproject.toml, in the header and in links that leave docs/."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # mkdocs loads this file alone

from links import absolute_links, repository_url  # noqa: E402

ROOT = Path(__file__).parent.parent


def on_config(config: Any) -> Any:
    """Called by mkdocs once, before anything is read."""
    config.repo_url = repository_url(ROOT)
    config.site_url = f"{config.repo_url}/"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return absolute_links(markdown, repository_url(ROOT), f"docs/{Path(page.file.src_uri).parent.as_posix()}".rstrip("/."), only_above=True)
