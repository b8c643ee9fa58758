"""The report of a conversion."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rope_ext_hf.rotary.pairing import other_pairing

__all__ = ["ConversionReport", "reverse_command"]


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion wrote.

    Attributes:
        path: the new folder.
        source, to: the pairings before and after; "meta": Meta's own format, which is interleaved.
        converted: tensors whose rows were reordered.
        tensors: all tensors.
        bytes: size of the weights.
        skipped_files: files of the source that hold weights in another format, which were not copied.
        loads_natively: whether the family's transformers class runs the new pairing.
        verified: what `verify` compared; None: nothing.
        notes: further remarks for whoever uses the new folder.
    """

    path: str
    source: str
    to: str
    converted: int
    tensors: int
    bytes: int
    skipped_files: tuple[str, ...]
    loads_natively: bool
    verified: str | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a JSON-ready dict."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.source} -> {self.to}",
            f"  tensors          {self.converted:,} of {self.tensors:,} reordered, {self.bytes / 1e9:.2f} GB in all",
        ]
        if self.verified:
            lines.append(f"  verified         {self.verified}")
        if self.skipped_files:
            lines.append(f"  not copied       {', '.join(self.skipped_files)}: weights in another format")
        lines += [f"  note             {note}" for note in self.notes]
        return "\n".join(lines)


def reverse_command(path: str, to: str) -> str:
    """Return advice on how to bring a converted folder to the pairing that transformers runs."""
    return f"for transformers, convert it back: rope-ext convert {path} NEW --to {other_pairing(to)}"
