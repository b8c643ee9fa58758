"""The base class of checkpoint conversions, and the report of what a conversion wrote."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rope_ext_hf.checkpoints.files.tokenizer_files import tokenizer_text
from rope_ext_hf.errors import counted, size_text
from rope_ext_hf.files.whole import FileStamps, atomic_folder
from rope_ext_hf.terminal import Report, wrapped


@dataclass(frozen=True)
class ConversionReport(Report):
    """The report of the conversion of a checkpoint from one RoPE layout to another.

    Attributes:
        path: the new folder.
        source, to: the pairings before and after; "meta": Meta's own format, which is interleaved; "gguf": a GGUF file.
        converted: the number of tensors whose rows were reordered.
        tensors: the number of all tensors.
        bytes: the size of the weights.
        loads_natively: whether the family's transformers class runs the new pairing.
        heads, key_heads: the numbers of heads of queries and of keys that rotate in a layer; None: layers differ.
        tokenizer: a sentence that says what became of the tokenizer.
        source_pairing: a text with the pairing that the source was taken to have, who states it, and what the weights
            show.
        skipped_files: files of the source that were not copied, because they hold or may hold weights.
        verified: a sentence that says what `verify` compared; None: nothing was compared.
        notes: further remarks for users of the new folder.
    """

    path: str
    source: str
    to: str
    converted: int
    tensors: int
    bytes: int
    loads_natively: bool
    heads: int | None = None
    key_heads: int | None = None
    tokenizer: str = ""
    source_pairing: str = ""
    skipped_files: tuple[str, ...] = ()
    verified: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        done = f"{self.converted:,} of {self.tensors:,} reordered"
        if self.source == "gguf":
            done = f"{self.tensors:,} unpacked"
        lines = [
            f"{self.path}: {self.source} -> {self.to}",
            f"  tensors          {done}; {size_text(self.bytes)} written",
        ]
        heads = "not the same in all layers"
        if self.heads is not None and self.key_heads is not None:
            heads = f"{counted(self.heads, 'query head')}, {counted(self.key_heads, 'key head')} in each layer"
        skipped = ", ".join(self.skipped_files)
        skipped += ": they hold or may hold weights, which are not converted" if skipped else ""
        rows = [("heads", heads), ("source", self.source_pairing), ("verified", self.verified)]
        rows += [("tokenizer", self.tokenizer), ("not copied", skipped)]
        rows += [("note", note) for note in self.notes]
        lines += [wrapped(text, f"  {name:<17}") for name, text in rows if text]
        return "\n".join(lines)


class Conversion(ABC):
    """A conversion of a checkpoint. Its constructor checks the source; `run` then writes the new folder.

    Attributes:
        folder: the folder that is read.
        inputs: the stamps of the files in it.
        plan: the settings, JSON-ready: an interrupted conversion may be continued with the same settings alone.
        report: the report, as far as it is known before anything is written.
        warnings: the notes in the report that call for attention.
    """

    folder: Path
    inputs: FileStamps
    plan: Mapping[str, Any]
    report: ConversionReport
    warnings: tuple[str, ...] = ()

    @abstractmethod
    def write(self, staging: Path, advance: Callable[[int], None]) -> tuple[str, ...]:
        """Write all files into a folder, and return the names of files in the source that were skipped.

        Correct weight files that an interrupted conversion left in the folder are kept. `advance` is called with the
        number of bytes in each block of weights that is done.
        """

    @abstractmethod
    def verify(self, staging: Path) -> str:
        """Compare the written folder with the source, and return a sentence that says what was compared."""

    def run(
        self,
        *,
        resume: bool = False,
        verify: bool = False,
        progress: Callable[[int, int], None] | None = None,
        check: Future[Any] | None = None,
    ) -> ConversionReport:
        """Write the new folder, either whole or not at all; see `convert_checkpoint` for the arguments and errors.

        `check` is a check of the source that runs meanwhile: its error ends the conversion.
        """
        dst, size, written = Path(self.report.path), self.report.bytes, 0

        def advance(count: int) -> None:
            nonlocal written
            written += count
            if check is not None and check.done():
                check.result()
            if progress is not None:
                progress(written, size)

        with atomic_folder(
            dst, source=self.folder, inputs=self.inputs, size=size, plan=self.plan, resume=resume
        ) as staging:
            skipped = self.write(staging, advance)
            if check is not None:
                check.result()
            tokenizer = self.report.tokenizer or tokenizer_text(self.folder, staging, self.report.to)
            verified = self.verify(staging) if verify else None
        for warning in self.warnings:
            warnings.warn(warning, stacklevel=3)
        return replace(self.report, skipped_files=skipped, verified=verified, tokenizer=tokenizer)
