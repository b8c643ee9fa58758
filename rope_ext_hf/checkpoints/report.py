"""The report of a conversion."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["ConversionReport"]


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did.

    Attributes:
        source, to: the pairings before and after; "meta": Meta's own format, interleaved.
        converted: tensors whose rows moved.
        tensors: of all of them.
        bytes: of the weights.
        left_behind: files of the source folder that hold weights in another form, and were not copied.
        runs: whether the family's transformers class runs the new pairing, so that the folder loads as it is.
        verified: what `verify` compared; None where it was not asked for.
    """

    path: str
    source: str
    to: str
    converted: int
    tensors: int
    bytes: int
    left_behind: tuple[str, ...]
    runs: bool
    verified: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.source} -> {self.to}",
            f"  tensors          {self.converted:,} of {self.tensors:,} rotate, {self.bytes / 1e9:.2f} GB in all",
        ]
        if self.verified:
            lines.append(f"  verified         {self.verified}")
        if self.left_behind:
            lines.append(f"  left behind      {', '.join(self.left_behind)}: weights in another form")
        if not self.runs:
            lines.append(f"  note             transformers runs the other pairing here: {_mend(self.path, self.to)}")
        return "\n".join(lines)


def _mend(path: str, to: str) -> str:
    return f"for it, rope-ext convert {path} NEW --to {'interleaved' if to == 'half' else 'half'}"
