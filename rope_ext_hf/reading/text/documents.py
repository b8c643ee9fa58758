"""Documents: the texts that an evaluation reads, each with a name, as text or as token ids."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from rope_ext_hf.errors import CorpusError, short

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Document", "LateEnds", "Tokens", "corpus_name", "utf8_bytes"]

Corpus: TypeAlias = "str | Path | Document | Tensor | Iterable[object]"
"""Everything that `rope_ext_hf.reading.text.load.load` takes."""

_MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class Document:
    """One text, measured on its own: tokens of different documents are never read together.

    Attributes:
        name: the name of the document in results and messages.
        text: the text; empty if the document is given as token ids.
        ids: the token ids, if the text was tokenised before; None if the document is given as text.
    """

    name: str
    text: str
    ids: Sequence[int] | None = None

    @classmethod
    def from_content(cls, name: str, content: str | Sequence[int]) -> Document:
        """Return the document with this content, which is a text or a sequence of token ids."""
        return cls(name, content) if isinstance(content, str) else cls(name, "", content)


class LateEnds(Sequence[int]):
    """The ends of the tokens of a document, which are computed when the first of them is read.

    Most documents of a large corpus are only counted, and finding the ends takes longer than tokenising.

    Args:
        count: the number of tokens.
        compute: a function that returns the ends.
    """

    def __init__(self, count: int, compute: Callable[[], Sequence[int]]) -> None:
        self._count, self._compute = count, compute

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        return tuple(self._compute())

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self._ends[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self._ends)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._ends == tuple(other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Tokens:
    """A tokenised document.

    Attributes:
        name: the name of the document.
        ids: the token ids, (tokens,) int64.
        ends: the end of each token in the text, in UTF-8 bytes; empty if there was no tokenizer to tell. They may be
            `LateEnds`.
        text: the text; empty if the document was given as token ids.
    """

    name: str
    ids: Tensor
    ends: Sequence[int]
    text: str = field(default="", repr=False)

    def bytes_between(self, start: int, stop: int) -> int:
        """Return the number of UTF-8 bytes in the tokens from `start` up to `stop`; 0 if it is not known."""
        if not self.ends:
            return 0
        begin = self.ends[start - 1] if start else 0
        return self.ends[stop - 1] - begin


class Documents(list[Document | Tokens]):
    """A list of documents, as `rope_ext_hf.reading.text.load.load` returns it.

    Attributes:
        source: the name of the text in results.
        note: a sentence about what was left out; empty if nothing was.
    """

    source = "documents"
    note = ""


def corpus_name(corpus: Corpus | None) -> str | None:
    """Return the name that results give a text: the name or path by which it was given, or "documents".

    The result is None for None.
    """
    if corpus is None:
        return None
    return str(corpus) if isinstance(corpus, (str, Path)) else Documents.source


def utf8_bytes(name: str, text: str) -> int:
    """Return the number of UTF-8 bytes in the text of a document; `name` is for the error message.

    Raises:
        CorpusError: the text has half a surrogate pair, which JSON can spell and UTF-8 cannot.
    """
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise CorpusError(f"{name}: not text: {error.reason} at character {error.start}") from error


def token_ids(ids: Sequence[Any], where: str) -> array[int]:
    """Return token ids as an array of 64-bit integers, which takes a fifth of the memory of a list.

    Raises:
        CorpusError: an element is not a whole number, 0 or larger; the message begins with `where`.
    """
    for item in ids:
        if type(item) is not int or not 0 <= item < _MAX_TOKEN_ID:
            raise CorpusError(
                f"{where}: {short(repr(item))} is not a token id; token ids are whole numbers, 0 or larger"
            )
    return array("q", ids)
