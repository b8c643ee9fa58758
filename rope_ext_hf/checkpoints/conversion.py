"""Checkpoints from one RoPE layout to another, on disk: every tensor that rotates, streamed, whole or not at all.

    report = convert_checkpoint("path/or/hub-id", "converted", to="interleaved")

The folder is planned and checked first: every tensor that stands in an attention module is either known to rotate,
known to stay, or a reason to stop (`patches/layouts.py`). Then each weight file is copied range by range inside the
kernel, and only the tensors that rotate go through memory, one at a time. Everything is written beside the destination,
into `.NAME.unfinished`, and renamed when it is complete and on disk.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from rope_ext_hf.checkpoints.report import ConversionReport, _mend
from rope_ext_hf.checkpoints.row_layouts import Blocks, Layout
from rope_ext_hf.checkpoints.source import INDEXES, WEIGHTS, Source, Weights, _folder, _safetensors_name, read_source
from rope_ext_hf.checkpoints.verification import compare_logits, compare_scores
from rope_ext_hf.checkpoints.weight_files import SafetensorsFile, bytes_of, holds, size_of, write_safetensors
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import (
    Progress,
    atomic_file,
    atomic_folder,
    check_destination,
    copy_range,
    file_stamps,
    list_files,
    read_json,
    write_all,
    write_json,
)
from rope_ext_hf.patches.config import PAIRING_KEY
from rope_ext_hf.patches.families import family
from rope_ext_hf.patches.family_settings import class_pairing, set_pairing_switch
from rope_ext_hf.rotary.pairing import PAIRINGS

__all__ = ["convert_checkpoint", "copy_others"]


def convert_checkpoint(
    src: str | Path,
    dst: str | Path,
    to: str,
    *,
    source: str | None = None,
    force: bool = False,
    resume: bool = False,
    verify: bool = False,
    model_parallel: int = 1,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write a copy of a checkpoint whose weights are in the other pairing, or in Meta's own format, or were in it.

    Args:
        src: a folder or Hub id: safetensors or .bin, sharded or not; a model or an adapter (LoRA, DoRA); a Llama in
            Meta's format (params.json), see `rope_ext_hf.meta`.
        dst: a new folder. Everything else in the source folder comes along; weights in further forms do not.
        to: "half", "interleaved", or "meta" for a Llama in Meta's format.
        source: the pairing of the weights now; default: what the config says (`rope_pairing`), else what the family's
            transformers class runs.
        force: convert although the weights are said to be in that pairing already.
        resume: go on after an interruption; finished files are compared with what they should be.
        verify: before the folder gets its name, compare the attention scores of a few layers of source and copy, each
            under the rotation that its weights are for, and with memory for two models their logits.
        model_parallel: parts to write, for "meta".
        progress: called with bytes written and bytes in all.

    Raises:
        CheckpointError: anything in the source that is missing, contradictory or unknown (before anything is written),
            weights that are in that pairing already, a destination that exists, a full disk, a failed verification.
        UnsupportedModelError: a family that the table says nothing of.

    Tensors are equal to the source's byte for byte but for the order of their rows; there and back is the identity.
    """
    from rope_ext_hf.checkpoints.meta_export import hf_to_meta
    from rope_ext_hf.checkpoints.meta_import import is_meta, meta_to_hf

    dst = Path(dst)
    if to not in (*PAIRINGS, "meta") or source not in (None, *PAIRINGS):
        raise CheckpointError(
            f"pairings are half and interleaved, and meta is to be converted to; got {to!r}"
            + (f" and {source!r}" if source else "")
        )
    check_destination(dst)
    if to == "meta":
        return hf_to_meta(
            src,
            dst,
            model_parallel=model_parallel,
            source=source,
            resume=resume,
            verify=verify,
            revision=revision,
            progress=progress,
        )
    if is_meta(folder := _folder(src, revision)):
        return meta_to_hf(folder, dst, to, source=source, resume=resume, verify=verify, progress=progress)
    found = read_source(src, revision=revision, trust_remote_code=trust_remote_code)
    now = source or found.pairing
    if now is None:
        raise CheckpointError(
            f"which pairing {found.rows.model_type!r} runs is not in the family table, and the config does not say; "
            "say which one the weights are in (source)"
        )
    if now == to and not force:
        raise CheckpointError(
            f"the weights in {str(src)!r} are {to} already, {'you say' if source else 'by their config'}; to convert "
            "them all the same, say so (force)"
        )
    check_destination(dst, found.folder)
    size = sum(size_of(file.tensors) for file in found.files.values())
    work = _Work(found, found.layouts(), to, Progress(size, progress))
    verified = None
    inputs = file_stamps(file.path for file in found.files.values())
    with atomic_folder(dst, inputs=inputs, size=size, plan={"to": to}, resume=resume) as unfinished:
        for name, file in found.files.items():
            work.write(name, file, unfinished)
        left_behind = work.copy_the_rest(unfinished)
        if verify:
            written = {name: SafetensorsFile(unfinished / _safetensors_name(name)) for name in found.files}
            verified = compare_scores(found.rows, found.files, written, to)
            if not found.adapter:
                before = "interleaved" if to == "half" else "half"
                verified += "; " + compare_logits(found.folder, before, unfinished, to, size)
    runs = class_pairing(work.config_after()) == to
    report = ConversionReport(
        path=str(dst),
        source="interleaved" if to == "half" else "half",
        to=to,
        converted=len(work.layouts),
        tensors=sum(len(file.tensors) for file in found.files.values()),
        bytes=size,
        left_behind=left_behind,
        runs=runs,
        verified=verified,
    )
    if not runs:
        warnings.warn(
            f"{str(dst)!r} holds {to} weights, which the code of {found.rows.model_type!r} models does not run; "
            + _mend(str(dst), to),
            stacklevel=2,
        )
    return report


@dataclass
class _Work:
    """One conversion under way."""

    found: Source
    layouts: dict[str, Layout | Blocks]
    to: str
    progress: Progress

    def write(self, name: str, file: Weights, unfinished: Path) -> None:
        """One weight file, complete when this returns; it is on disk when all of them are."""
        target = unfinished / _safetensors_name(name)
        header = file.header if isinstance(file, SafetensorsFile) else None
        if holds(target, file.tensors, lambda n: self._repaired(file, n), header):
            self.progress.advance(size_of(file.tensors))
            return
        with atomic_file(target, fsync=False) as part:
            if isinstance(file, SafetensorsFile):
                self._copy(file, part)
            else:
                advance = self.progress.advance
                write_safetensors(part, file.tensors, lambda n: self._repaired(file, n), {"format": "pt"}, advance)

    def _repaired(self, file: Weights, name: str) -> Tensor:
        tensor = file.read(name)
        return self.layouts[name].repaired(tensor, self.to) if name in self.layouts else tensor

    def _copy(self, file: SafetensorsFile, part: Path) -> None:
        """The same header, the same bytes, but for the tensors that rotate."""
        source = os.open(file.path, os.O_RDONLY)
        target = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            write_all(target, memoryview(file.header))
            at = len(file.header)
            for name, entry in file.tensors.items():
                if name in self.layouts:
                    copy_range(source, target, at, entry.begin, self.progress.advance)
                    write_all(target, bytes_of(self._repaired(file, name)))
                    self.progress.advance(entry.end - entry.begin)
                    at = entry.end
            copy_range(source, target, at, file.path.stat().st_size, self.progress.advance)
        finally:
            os.close(source)
            os.close(target)

    def config_after(self) -> Any:
        """The config object, with what the conversion changes in it."""
        set_pairing_switch(self.found.config, self.to)
        return self.found.config

    def copy_the_rest(self, unfinished: Path) -> tuple[str, ...]:
        """Everything that is not weights; returns what was left behind."""
        left_behind = copy_others(self.found.folder, unfinished, self.found.files)
        if self.found.index is not None:
            names = {t: _safetensors_name(n) for n, file in self.found.files.items() for t in file.tensors}
            base = "adapter_model" if self.found.adapter else "model"
            write_json(unfinished / f"{base}.safetensors.index.json", self.found.index | {"weight_map": names})
        self._write_config(unfinished)
        return left_behind

    def _write_config(self, unfinished: Path) -> None:
        path = unfinished / ("adapter_config.json" if self.found.adapter else "config.json")
        config = read_json(path)
        switch = family(self.found.rows.model_type).pairing_switch
        if switch is not None and not self.found.adapter:
            parts = [part for part in config.values() if isinstance(part, dict)]
            text = next((part for part in parts if part.get("model_type") == self.found.rows.model_type), config)
            text[switch] = self.to == "interleaved"
        write_json(path, config | {PAIRING_KEY: self.to})


def copy_others(folder: Path, unfinished: Path, known: Collection[str]) -> tuple[str, ...]:
    """Copy everything but weights, indexes and these files; returns the weights in further forms."""
    left_behind = []
    for name in list_files(folder):
        if name in known or name in dict(INDEXES):
            continue
        if Path(name).suffix in WEIGHTS or Path(name).parts[0] == "original":
            left_behind.append(name)
            continue
        target = unfinished / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target)
    return tuple(left_behind)
