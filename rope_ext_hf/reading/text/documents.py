"""Documents: the texts that an evaluation reads, each with a name, as text or as token ids."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from rope_ext_hf.errors import CorpusError, did_you_mean, short

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
        ends: the end of each token in the text, in UTF-8 bytes; empty if there was no tokenizer. They may be
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


# --- rows of tables -----------------------------------------------------------------------------------------------


def read_rows(
    rows: Iterable[tuple[int, object]], where: str, column: str | None
) -> Iterator[tuple[str, str | array[int]]]:
    """Yield for every row its place within the file, such as ":7", and its text or token ids.

    Args:
        rows: the number of each row and the row itself, in order.
        where: the name of the file or data set, for messages.
        column: the name of the column that holds the text. None: the first row decides, see `choose_column`.

    Raises:
        CorpusError: a row is not a mapping, lacks the column, has something else than text or token ids in it, or an
            attention mask that does not fit the token ids.
    """
    chosen = None
    for number, row in rows:
        place = f"{where}:{number}"
        if not isinstance(row, dict):
            raise CorpusError(f"{place}: not an object with columns but {type(row).__name__}")
        if chosen is None:
            chosen = choose_column({name: isinstance(value, str) for name, value in row.items()}, place, column)
        if chosen not in row:
            raise CorpusError(f"{place}: no column {chosen!r}; its columns: {', '.join(row) or 'none'}")
        content = plain(row[chosen])
        if isinstance(content, list) and content and all(type(item) is int for item in content):
            content = token_ids(_unpadded(content, plain(row.get(mask_column(chosen))), place), place)
        if not isinstance(content, (str, array)):
            raise CorpusError(f"{place}: the column {chosen!r} holds {type(content).__name__}, not text")
        yield f":{number}", content


def choose_column(columns: Mapping[str, bool], where: str, column: str | None) -> str:
    """Return the column that holds the text.

    It is `column` if one is named, else the column "text", else the only column with text, else "input_ids".

    Args:
        columns: for each column, whether it holds text.
        where: the name of the file or data set, for messages.
        column: the column that the caller names, if any.
    """
    listed = ", ".join(columns) or "none"
    if column is not None:
        if column not in columns:
            raise CorpusError(f"{where}: no column {column!r}.{did_you_mean(column, columns)} Its columns: {listed}")
        return column
    if "text" in columns:
        return "text"
    with_text = [name for name, is_text in columns.items() if is_text]
    if not with_text and "input_ids" in columns:
        return "input_ids"
    if len(with_text) != 1:
        raise CorpusError(
            f"{where}: no column 'text', and {len(with_text)} others are text; "
            f"choose one with ?column=NAME. Its columns: {listed}"
        )
    return with_text[0]


def mask_column(column: str) -> str:
    """Return the name of the column with the attention mask of the token ids in a column, as tokenizers call it."""
    return column.replace("input_ids", "attention_mask") if "input_ids" in column else "attention_mask"


def plain(value: Any) -> Any:
    """Return a tensor or array as a list, and any other value as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _unpadded(ids: Sequence[int], mask: Any, where: str) -> Sequence[int]:
    """Return token ids without the padding before and after the text.

    Args:
        ids: the token ids.
        mask: their attention mask, in which padding is 0; None: there is no padding.
        where: the place of the ids, for messages.

    Raises:
        CorpusError: the mask is not one of zeros and ones for these ids, or has zeros between the tokens of the text.
    """
    if mask is None:
        return ids
    if not isinstance(mask, Sequence) or len(mask) != len(ids) or not all(value in (0, 1) for value in mask):
        raise CorpusError(f"{where}: the attention mask must be a 0 or 1 for each of the {len(ids):,} token ids")
    start, count = list(mask).index(1) if any(mask) else 0, sum(mask)
    if not all(mask[start : start + count]):
        raise CorpusError(
            f"{where}: the attention mask has zeros between tokens, and text is read without gaps; give the token ids "
            "without those that are masked"
        )
    return ids[start : start + count]
