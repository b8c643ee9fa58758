"""Documents: the texts that an evaluation reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["MAX_TOKEN_ID", "Content", "Document", "Documents"]

MAX_TOKEN_ID = 2**31 - 1

Content = str | Sequence[int]


@dataclass(frozen=True)
class Document:
    """One text, measured on its own: a span never crosses from one document to the next."""

    name: str
    text: str
    ids: Sequence[int] | None = None
    """Token ids of a text that was tokenised before; `text` is empty then."""

    @classmethod
    def from_content(cls, name: str, content: Content) -> Document:
        return cls(name, content) if isinstance(content, str) else cls(name, "", content)


class Documents(list[Document]):
    """A list of documents; `left_out` counts those that were shorter than `min_bytes`."""

    left_out = 0
