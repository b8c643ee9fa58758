"""Texts to train on and to measure with.

    from rope_ext_hf.eval.corpora import load
    documents = load("stdlib")            # held-out modules of Python's own standard library
    documents = load("war-and-peace.txt")  # one file, one document

Real text that needs no download: every Python installation carries several megabytes of English documentation and
source code. The bundled reference model was trained on it, less the modules in `HELD_OUT`, which are what `stdlib`
measures with.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

from rope_ext_hf.errors import CorpusError

__all__ = ["HELD_OUT", "Document", "load", "stdlib_held_out", "stdlib_training"]

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


@dataclass(frozen=True)
class Document:
    """One text, measured on its own: a context window never crosses from one document to the next."""

    name: str
    text: str


def load(data: str) -> list[Document]:
    """The documents named by `data`: `"stdlib"`, or the path of a UTF-8 text file.

    Raises:
        CorpusError: no such file, not UTF-8, or empty.
    """
    if data == "stdlib":
        return stdlib_held_out()
    path = Path(data)
    if not path.is_file():
        raise CorpusError(f"no such text file: {data!r}; --data takes 'stdlib' or the path of a UTF-8 text file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{data!r} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not text.strip():
        raise CorpusError(f"{data!r} is empty")
    return [Document(path.name, text)]


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
