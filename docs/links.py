"""The project's address, and Markdown whose relative links point there.

The address stands once, in [project.urls] of pyproject.toml. README.md and the pages use relative links, which work in
a clone and on a code host; `setup.py` makes those of README.md absolute for a package index, and the site those that
leave docs/.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from pathlib import Path

__all__ = ["absolute_links", "repository_url"]

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|#")


def repository_url(root: Path) -> str:
    """Return the address of the repository, without a slash at its end."""
    urls = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]
    return str(urls["Repository"]).rstrip("/")


def absolute_links(markdown: str, url: str, folder: str = "", *, only_above: bool = False) -> str:
    """Markdown with its relative links as addresses below `url`: pictures as files, everything else as pages.

    Args:
        markdown: the text.
        url: the address of the repository.
        folder: where the text stands in the repository.
        only_above: leave links alone that stay inside `folder`.
    """

    def replace(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        path = posixpath.normpath(posixpath.join(folder, target))
        if _ABSOLUTE.match(target) or (only_above and path.startswith(f"{folder}/")):
            return link[0]
        return f"{picture}[{text}]({url}/{'raw' if picture else 'blob'}/main/{path})"

    return _LINK.sub(replace, markdown)
