"""Documents: the texts that an evaluation reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from rope_ext_hf.errors import CorpusError

Content = str | Sequence[int]


@dataclass(frozen=True)
class Document:
    """One text, measured on its own: a span never crosses from one document to the next.

    Attributes:
        name: of the document, in results and messages.
        text: empty where token ids are given.
        ids: token ids of a text that was tokenised before.
    """

    name: str
    text: str
    ids: Sequence[int] | None = None

    @classmethod
    def from_content(cls, name: str, content: Content) -> Document:
        return cls(name, content) if isinstance(content, str) else cls(name, "", content)


@dataclass(frozen=True)
class Tokens:
    """A tokenised document."""

    name: str
    ids: Tensor  # (tokens,) int64
    ends: tuple[int, ...]  # where each token ends in the text, in UTF-8 bytes
    text: str = field(default="", repr=False)  # empty where the document came as token ids

    def bytes_between(self, start: int, stop: int) -> int:
        """UTF-8 bytes of tokens start..stop."""
        return self.ends[stop - 1] - (self.ends[start - 1] if start else 0)


def utf8_bytes(name: str, text: str) -> int:
    """The UTF-8 bytes of a document's text; CorpusError for half a surrogate pair, which JSON can spell."""
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise CorpusError(f"{name}: not text: {error.reason} at character {error.start}") from error


class Documents(list[Document | Tokens]):
    """A list of documents."""

    source = "documents"  # the name of the text, in results
    left_out = 0  # how many were shorter than `min_bytes`


def corpus_name(corpus: Corpus | None) -> str | None:
    """The name of a text in results: the one it is given by, or that of `Documents`; None for None."""
    return str(corpus) if isinstance(corpus, (str, Path)) else None if corpus is None else Documents.source


Corpus = str | Path | Document | Tensor | Iterable[object]  # everything that `rope_ext_hf.reading.corpora.load` takes
