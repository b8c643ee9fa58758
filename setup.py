"""The one thing pyproject.toml cannot say: README.md with absolute links, for the page of a package index."""

import sys
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "docs"))  # a build has no packages but setuptools, and no root folder on its path

from links import absolute_links, repository_url  # noqa: E402

setup(
    long_description=absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), repository_url(ROOT)),
    long_description_content_type="text/markdown",
)
