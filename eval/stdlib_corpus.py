"""Text that is always there: the sources of Python's standard library, split into training and held-out text."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from rope_ext_hf.errors import CorpusError
from rope_ext_hf.eval.documents import Document

__all__ = ["HELD_OUT", "stdlib_held_out", "stdlib_training"]

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

# Tests are absent from many distributions; encodings are tables of code points, not text.
_NOT_TEXT = frozenset({"__pycache__", "encodings", "idle_test", "site-packages", "test", "tests"})


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


def stdlib_training() -> list[Document]:
    """Every readable module of the standard library that is neither held out nor a test, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root).with_suffix("").as_posix()
        if name in HELD_OUT or not _NOT_TEXT.isdisjoint(file.relative_to(root).parts):
            continue
        try:
            documents.append(Document(name, file.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return documents
