"""Documents: the texts that an evaluation reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Content", "Document", "Documents"]

Content = str | Sequence[int]


@dataclass(frozen=True)
class Document:
    """One text, measured on its own: a context window never crosses from one document to the next."""

    name: str
    text: str
    ids: Sequence[int] | None = None
    """Token ids, where the text was tokenised before; it is empty then."""

    @classmethod
    def from_content(cls, name: str, content: Content) -> Document:
        return cls(name, content) if isinstance(content, str) else cls(name, "", content)


class Documents(list[Document]):
    """Documents, and how many were left out because they are shorter than `min_bytes`."""

    left_out = 0
