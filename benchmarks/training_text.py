"""Training text of the bundled model and of the benchmarks' models: Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.load import HELD_OUT

# Tests are absent from many distributions; encodings are tables of code points, not text.
_NOT_TEXT = frozenset({"__pycache__", "encodings", "idle_test", "site-packages", "test", "tests"})


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
