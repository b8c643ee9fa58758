"""Text that is always there: the sources of Python's standard library that the bundled model never read."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from rope_ext_hf.errors import CorpusError
from rope_ext_hf.reading.documents import Document

HELD_OUT = (
    "_pydecimal",
    "argparse",
    "inspect",
    "mailbox",
    "pydoc_data/topics",
    "tarfile",
    "turtle",
    "typing",
)
"""Modules no training of the reference model ever reads."""


def stdlib_held_out() -> list[Document]:
    """The held-out modules this Python installation has (some distributions split a few off), in `HELD_OUT`'s order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [root / f"{name}.py" for name in HELD_OUT]
    documents = [
        Document(name, file.read_text(encoding="utf-8"))
        for name, file in zip(HELD_OUT, files, strict=True)
        if file.is_file()
    ]
    if not documents:
        raise CorpusError(f"no source of the standard library found in {root}; give a text file with --data FILE")
    return documents
