"""Hugging Face checkpoints to Meta's format, streamed and atomic."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from rope_ext_hf.checkpoints.conversion import copy_others
from rope_ext_hf.checkpoints.meta_import import _compare, _paired, _part_name, is_meta, read_meta
from rope_ext_hf.checkpoints.meta_params import EMBEDDING, FLOATS, HF_EMBEDDING, HF_OUTPUT, OUTPUT, Llama, Weight
from rope_ext_hf.checkpoints.report import ConversionReport
from rope_ext_hf.checkpoints.source import Source, read_source
from rope_ext_hf.checkpoints.torch_files import writing
from rope_ext_hf.checkpoints.weight_files import TORCH_DTYPES, Entry, View, bytes_of, holds, size_of
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import (
    Progress,
    atomic_file,
    atomic_folder,
    check_destination,
    file_stamps,
    read_json,
    write_json,
)
from rope_ext_hf.patches.config import RECORD
from rope_ext_hf.rotary.pairing import PAIRINGS

__all__ = ["hf_to_meta"]


def hf_to_meta(
    src: str | Path,
    dst: str | Path,
    *,
    model_parallel: int = 1,
    source: str | None = None,
    resume: bool = False,
    verify: bool = False,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write a Llama in Meta's format.

    Args:
        src, dst, resume, verify, revision, progress: see `convert_checkpoint`.
        model_parallel: parts to write; each is for one process of Meta's code.
        source: the pairing of the weights now; default: what the config says (`rope_pairing`), else half.

    Raises:
        CheckpointError: what Meta's format cannot say, with the reason (before anything is written); a destination
            that exists, a full disk.
        UnsupportedModelError: a family that nothing is known of.

    Parts are written side by side, and so an interruption costs all of them. What Meta's format has no place for
    (max_position_embeddings, a factor of Llama 3.1's scaling that its code has not built in) is warned of.
    """
    dst = Path(dst)
    if source not in (None, *PAIRINGS):
        raise CheckpointError(f"pairings are half and interleaved, got {source!r}")
    check_destination(dst)
    if is_meta(Path(src).expanduser()):
        raise CheckpointError(f"{str(src)!r} is in Meta's format already")
    found = read_source(src, revision=revision)
    check_destination(dst, found.folder)
    llama = _sayable(found)
    weights, view = tuple(llama.weights(llama.generation[1])), View.of(found.files.values())
    _check_tensors(view, found.folder, llama, weights)
    now = source or found.pairing or "half"
    parts = _Parts(weights, view, now, _count(model_parallel, llama), llama.tied)
    done = Progress(model_parallel * parts.size, progress)
    plan = {
        "to": "meta",
        "parts": model_parallel,
        "source": now,
    }
    inputs = file_stamps(file.path for file in found.files.values())
    verified = None
    with atomic_folder(dst, inputs=inputs, size=done.total, plan=plan, resume=resume) as unfinished:
        parts.write(unfinished, done)
        left_behind = copy_others(found.folder, unfinished, [*found.files, "config.json", "params.json"])
        write_json(unfinished / "params.json", llama.params())
        if verify:
            verified = _compare(found.rows, view, read_meta(unfinished).view(), now, "interleaved")
    _warn_of_losses(found, llama)
    return ConversionReport(
        path=str(dst),
        source=now,
        to="meta",
        converted=2 * llama.layers if now == "half" else 0,
        tensors=len(weights),
        bytes=done.total,
        left_behind=left_behind,
        runs=False,
        verified=verified,
    )


def _sayable(found: Source) -> Llama:
    """The model of a Hugging Face folder.

    Raises:
        CheckpointError: one that Meta's format cannot say.
    """
    where = f"{str(found.folder)!r} cannot be written in Meta's format:"
    if not found.expected:
        raise CheckpointError(f"{where} it is an adapter; merge it into its model first")
    if RECORD in read_json(found.folder / "config.json"):
        raise CheckpointError(f"{where} it was saved with a patch; unpatch the model and save that")
    return Llama.of_config(found.config, where)


def _check_tensors(view: View, folder: Path, llama: Llama, weights: tuple[Weight, ...]) -> None:
    """Whether a Hugging Face folder has these tensors and no others.

    Raises:
        CheckpointError: one that is missing, unknown, or disagrees with the config.
    """
    needed = {weight.hf: weight.shape for weight in weights}
    for name, shape in needed.items():
        if name not in view.tensors:
            raise CheckpointError(f"{name!r} is missing in {str(folder)!r}")
        entry = view.tensors[name]
        if entry.shape != shape or entry.dtype not in FLOATS:
            raise CheckpointError(
                f"{name!r} in {str(folder)!r} is {entry.dtype} of shape {entry.shape}; by the config it should have "
                f"shape {shape}, and be one of {', '.join(FLOATS)}"
            )
    for name in view.tensors:
        if name == HF_OUTPUT and llama.tied:
            if not torch.equal(view.read(name), view.read(HF_EMBEDDING)):
                raise CheckpointError(
                    f"{name!r} in {str(folder)!r} is not {HF_EMBEDDING!r}, though tie_word_embeddings in config.json "
                    "says so; correct the config"
                )
        elif name not in needed and not name.endswith(".rotary_emb.inv_freq"):  # old checkpoints hold frequencies
            raise CheckpointError(f"{name!r} in {str(folder)!r} has no place in Meta's format")


def _count(parts: int, llama: Llama) -> int:
    """The parts, if the model can be divided among so many."""
    if type(parts) is not int or parts < 1:
        raise CheckpointError(f"model_parallel must be a positive whole number, got {parts!r}")
    for size in ("kv_heads", "ffn", "vocab"):  # heads and dim are multiples of kv_heads
        if getattr(llama, size) % parts:
            raise CheckpointError(f"{size} {getattr(llama, size)} cannot be divided among {parts} parts")
    return parts


class _Parts:
    """The model-parallel parts to be written, side by side; all are of one size."""

    def __init__(self, weights: tuple[Weight, ...], source: View, now: str, count: int, tied: bool) -> None:
        self.weights = {weight.meta: weight for weight in weights}
        self.source, self.now, self.count = source, now, count
        self.entries = {w.meta: Entry.of(source.tensors[w.hf].dtype, w.part_shape(count)) for w in weights}
        # Output weights that are the embeddings', divided alike, are the same memory, which torch writes once.
        self.shared = tied and (count == 1 or self.weights[EMBEDDING].split == self.weights[OUTPUT].split)
        self.own = {name: entry for name, entry in self.entries.items() if not (self.shared and name == OUTPUT)}
        self.size = size_of(self.own)

    def _read(self, name: str, indexes: list[int]) -> list[Tensor]:
        """These parts of a tensor, which is read once."""
        weight = self.weights[name]
        tensor = _paired(self.source.read(weight.hf), weight, self.now, "interleaved")
        return [weight.part(tensor, index, self.count) for index in indexes]

    def _holds(self, path: Path, index: int) -> bool:
        return holds(path, self.entries, lambda name: self._read(name, [index])[0])

    def write(self, folder: Path, done: Progress) -> None:
        """Those that are not there and right."""
        todo = [i for i in range(self.count) if not self._holds(folder / _part_name(i), i)]
        done.advance((self.count - len(todo)) * self.size)
        same = {OUTPUT: EMBEDDING} if self.shared else {}
        tensors = {name: (TORCH_DTYPES[entry.dtype], entry.shape) for name, entry in self.own.items()}
        with ExitStack() as stack:
            paths = [stack.enter_context(atomic_file(folder / _part_name(i), fsync=False)) for i in todo]
            writes = [stack.enter_context(writing(path, tensors, same)) for path in paths]
            for name, entry in self.own.items():
                for tensor, write in zip(self._read(name, todo), writes, strict=True):
                    write(name, bytes_of(tensor))
                    done.advance(entry.end)


def _warn_of_losses(found: Source, llama: Llama) -> None:
    length = llama.generation[0]
    if found.config.max_position_embeddings != length:
        warnings.warn(
            f"Meta's format has no place for max_position_embeddings, {found.config.max_position_embeddings} here; who "
            f"reads it will take it for {length}",
            stacklevel=3,
        )
    if "rope_scaling_factor" in llama.params():
        warnings.warn(
            f"Meta's code scales by 8, whatever params.json says; this model needs {llama.factor:g}, which stands "
            "there as rope_scaling_factor",
            stacklevel=3,
        )
