"""A conversion as a value: what it writes, and its report."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import size_text
from rope_ext_hf.files import FileStamps, atomic_folder
from rope_ext_hf.terminal import Report, wrapped


@dataclass(frozen=True)
class ConversionReport(Report):
    """What a conversion wrote.

    Attributes:
        path: the new folder.
        source, to: the pairings before and after; "meta": Meta's own format, which is interleaved.
        converted: tensors whose rows were reordered.
        tensors: all tensors.
        bytes: size of the weights.
        loads_natively: whether the family's transformers class runs the new pairing.
        source_pairing: the pairing that the weights were taken for, what it rests on, and what they show of it.
        skipped_files: files of the source that hold weights in another format, which were not copied.
        verified: what `verify` compared; None: nothing.
        notes: further remarks for whoever uses the new folder.
    """

    path: str
    source: str
    to: str
    converted: int
    tensors: int
    bytes: int
    loads_natively: bool
    source_pairing: str = ""
    skipped_files: tuple[str, ...] = ()
    verified: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.source} -> {self.to}",
            f"  tensors          {self.converted:,} of {self.tensors:,} reordered; {size_text(self.bytes)} written",
        ]
        skipped = self.skipped_files and f"{', '.join(self.skipped_files)}: weights in another format"
        rows = [("source", self.source_pairing), ("verified", self.verified), ("not copied", skipped)]
        rows += [("note", note) for note in self.notes]
        lines += [wrapped(text, f"  {name:<17}") for name, text in rows if text]
        return "\n".join(lines)


class Conversion(ABC):
    """A conversion that was checked and not yet written. Its class is made from a source and what is asked for."""

    folder: Path  # the folder that is read
    inputs: FileStamps  # stamps of the files in it
    plan: Mapping[str, Any]  # JSON-ready: the settings with which an interrupted conversion may be continued
    report: ConversionReport  # what is known before anything is written
    warnings: tuple[str, ...] = ()  # the notes of the report that call for attention

    @abstractmethod
    def write(self, staging: Path, advance: Callable[[int], None]) -> tuple[str, ...]:
        """Write all files, keeping the weight files that are there and right; return those that were skipped.

        `advance` is called with the bytes of weights that are there, block by block.
        """

    @abstractmethod
    def verify(self, staging: Path) -> str:
        """Compare what was written with the source; return what was compared, in words."""

    def run(
        self, *, resume: bool = False, verify: bool = False, progress: Callable[[int, int], None] | None = None
    ) -> ConversionReport:
        """Write the new folder, whole or not at all. For the arguments and errors see `convert_checkpoint`."""
        dst, size, written = Path(self.report.path), self.report.bytes, 0

        def advance(count: int) -> None:
            nonlocal written
            written += count
            if progress is not None:
                progress(written, size)

        with atomic_folder(
            dst, source=self.folder, inputs=self.inputs, size=size, plan=self.plan, resume=resume
        ) as staging:
            skipped = self.write(staging, advance)
            verified = self.verify(staging) if verify else None
        for warning in self.warnings:
            warnings.warn(warning, stacklevel=3)
        return replace(self.report, skipped_files=skipped, verified=verified)
