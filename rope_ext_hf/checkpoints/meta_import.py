"""Meta's own Llama format (params.json, consolidated.NN.pth) to and from Hugging Face folders: streamed, whole or not.

    read_meta("Llama-2-13b").llama                       # params.json and what the parts say of themselves
    meta_to_hf("Llama-2-13b", "Llama-2-13b-hf")          # merges the model-parallel parts
    hf_to_meta("Llama-2-13b-hf", "again", model_parallel=2)

For which models, and what follows from params.json that it does not say: `rope_ext_hf.llama`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.checkpoints.conversion import copy_others
from rope_ext_hf.checkpoints.meta_params import (
    EMBEDDING,
    FLOATS,
    FREQUENCIES,
    HF_EMBEDDING,
    OUTPUT,
    Llama,
    Weight,
    read_params,
)
from rope_ext_hf.checkpoints.report import ConversionReport
from rope_ext_hf.checkpoints.row_layouts import RotatingRows, rotating_rows
from rope_ext_hf.checkpoints.verification import compare_scores
from rope_ext_hf.checkpoints.weight_files import (
    TORCH_DTYPES,
    Entry,
    SafetensorsFile,
    TorchFile,
    View,
    holds,
    size_of,
    write_safetensors,
)
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import (
    Progress,
    atomic_file,
    atomic_folder,
    check_destination,
    file_stamps,
    list_files,
    resolve_inside,
    write_json,
)
from rope_ext_hf.rotary.pairing import PAIRINGS, repair

__all__ = ["SHARD", "MetaSource", "is_meta", "meta_to_hf", "read_meta"]

SHARD = 5_000_000_000  # bytes; transformers' own default was this for years


@dataclass(frozen=True)
class MetaSource:
    """A folder in Meta's format, none of its weights read yet.

    Attributes:
        llama: the model.
        parts: its files, in order.
        split: the dimension of the embeddings that they divide.
    """

    folder: Path
    llama: Llama
    parts: tuple[TorchFile, ...]
    split: int

    def weights(self) -> Iterator[Weight]:
        """Every tensor that a Hugging Face folder has of it."""
        return (w for w in self.llama.weights(self.split) if not (self.llama.tied and w.meta == OUTPUT))

    def read(self, weight: Weight) -> Tensor:
        """The whole tensor, its rows interleaved where they rotate."""
        if weight.split is None or len(self.parts) == 1:
            return self.parts[0].read(weight.meta)
        tensor = torch.empty(weight.shape, dtype=TORCH_DTYPES[self.parts[0].tensors[weight.meta].dtype])
        for piece, part in zip(tensor.chunk(len(self.parts), weight.split), self.parts, strict=True):
            piece.copy_(part.read(weight.meta))
        return tensor

    def view(self, to: str = "interleaved") -> View:
        """The whole tensors by their Hugging Face names, in this pairing."""
        weights = {weight.hf: weight for weight in self.weights()}

        def read(name: str) -> Tensor:
            return _paired(self.read(weights[name]), weights[name], "interleaved", to)

        first = self.parts[0].tensors
        return View({name: Entry.of(first[w.meta].dtype, w.shape) for name, w in weights.items()}, read)


def _paired(tensor: Tensor, weight: Weight, now: str, to: str) -> Tensor:
    return repair(tensor, to, heads=weight.heads) if weight.heads and now != to else tensor


def is_meta(folder: Path) -> bool:
    """Whether a folder is in this format; a Hugging Face folder may have a params.json beside it (Mistral's)."""
    here = (folder / "params.json").is_file()
    return here and (not (folder / "config.json").is_file() or any(folder.glob("consolidated.*.pth")))


def read_meta(folder: str | Path) -> MetaSource:
    """Read params.json and what the parts say of themselves; of the weights only norms and embeddings, to compare them.

    Raises:
        CheckpointError: anything missing, unknown or contradictory, naming it.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"no such folder: {str(folder)!r}")
    list_files(folder)
    params = read_params(resolve_inside(folder, "params.json"))
    parts = _read_parts(folder)
    if params["n_kv_heads"] % len(parts):
        raise CheckpointError(
            f"{str(folder)!r}: {params['n_kv_heads']} key heads cannot be divided among {len(parts)} parts"
        )
    rows, columns = _matrix(parts[0], EMBEDDING)
    split = 0 if columns == params["dim"] else 1
    vocab = rows if split else rows * len(parts)
    if params["vocab_size"] not in (-1, vocab):
        raise CheckpointError(
            f"params.json in {str(folder)!r} says vocab_size {params['vocab_size']}; {EMBEDDING!r} has {vocab} rows"
        )
    ffn = _matrix(parts[0], "layers.0.feed_forward.w1.weight")[0] * len(parts)
    _check_parts(parts, Llama.of_params(params, vocab, ffn, tied=False).weights(split))
    return MetaSource(folder, Llama.of_params(params, vocab, ffn, _tied(parts, split)), parts, split)


def _read_parts(folder: Path) -> tuple[TorchFile, ...]:
    names = sorted(p.name for p in folder.iterdir() if re.fullmatch(r"consolidated\.\d+\.pth", p.name))
    if not names:
        raise CheckpointError(f"{str(folder)!r} holds no weights; looked for {_part_name(0)}")
    expected = [_part_name(i) for i in range(len(names))]
    if missing := [name for name in expected if name not in names]:
        raise CheckpointError(f"{missing[0]!r} is missing in {str(folder)!r}, which has {', '.join(names)}")
    return tuple(TorchFile(resolve_inside(folder, name)) for name in expected)


def _part_name(index: int) -> str:
    return f"consolidated.{index:02}.pth"


def _entry(part: TorchFile, name: str) -> Entry:
    if name not in part.tensors:
        raise CheckpointError(f"{name!r} is missing in {str(part.path)!r}")
    return part.tensors[name]


def _matrix(part: TorchFile, name: str) -> tuple[int, int]:
    shape = _entry(part, name).shape
    if len(shape) != 2:
        raise CheckpointError(f"{name!r} in {str(part.path)!r} has shape {shape}, not two dimensions")
    return shape[0], shape[1]


def _check_parts(parts: tuple[TorchFile, ...], weights: Iterable[Weight]) -> None:
    """Every tensor in every part, of the right shape and of one dtype, copies equal, and nothing else."""
    known, optional = {FREQUENCIES}, not any(OUTPUT in part.tensors for part in parts)
    for weight in weights:  # one by one: params.json may claim any number of layers
        known.add(weight.meta)
        if weight.meta == OUTPUT and optional:
            continue
        shape, dtype = weight.part_shape(len(parts)), _entry(parts[0], weight.meta).dtype
        for part in parts:
            entry, where = _entry(part, weight.meta), f"{weight.meta!r} in {str(part.path)!r}"
            if entry.shape != shape:
                raise CheckpointError(
                    f"{where} has shape {entry.shape}; by params.json, the embeddings, w1 of the first layer and "
                    f"{len(parts)} parts it should have {shape}"
                )
            if entry.dtype not in FLOATS or entry.dtype != dtype:
                first = "" if part is parts[0] else f", in the first part {dtype}"
                raise CheckpointError(f"{where} is {entry.dtype}{first}; known: {', '.join(FLOATS)}, one for all parts")
            if weight.split is None and not torch.equal(part.read(weight.meta), parts[0].read(weight.meta)):
                raise CheckpointError(f"{where} is not what it is in the first part, though every part has all of it")
    for part in parts:
        if unknown := sorted(set(part.tensors) - known):
            raise CheckpointError(
                f"{unknown[0]!r} in {str(part.path)!r} is no tensor of a Llama with these params.json; "
                f"{len(unknown)} such tensors"
            )


def _tied(parts: tuple[TorchFile, ...], split: int) -> bool:
    """Whether the output weights are the embeddings, or not there at all."""
    if OUTPUT not in parts[0].tensors:
        return True
    if parts[0].tensors[OUTPUT].dtype != parts[0].tensors[EMBEDDING].dtype:
        return False
    if split == 0:
        return all(torch.equal(part.read(OUTPUT), part.read(EMBEDDING)) for part in parts)
    embeddings = [part.read(EMBEDDING).tensor_split(len(parts)) for part in parts]  # columns, in blocks of rows
    return all(
        torch.equal(part.read(OUTPUT), torch.cat([blocks[i] for blocks in embeddings], 1))
        for i, part in enumerate(parts)
    )


def meta_to_hf(
    src: str | Path,
    dst: str | Path,
    to: str = "half",
    *,
    source: str | None = None,
    max_position_embeddings: int | None = None,
    max_shard_bytes: int = SHARD,
    resume: bool = False,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write a Hugging Face folder of a model in Meta's format.

    Args:
        src: a folder with params.json and consolidated.00.pth, consolidated.01.pth, ...
        dst, resume, verify, progress: see `convert_checkpoint`.
        to: "half", which transformers runs, or "interleaved", which moves no row.
        source: where given, "interleaved": weights in Meta's format are.
        max_position_embeddings: default: by generation, see `rope_ext_hf.llama`.
        max_shard_bytes: of a weight file; a larger tensor gets one of its own.

    Raises:
        CheckpointError: as `read_meta`; a destination that exists, a full disk.
    """
    dst = Path(dst)
    if to not in PAIRINGS:
        raise CheckpointError(f"pairings are half and interleaved, got {to!r}")
    if source not in (None, "interleaved"):
        raise CheckpointError(f"weights in Meta's format are interleaved; source says {source!r}")
    if max_shard_bytes < 1 or (max_position_embeddings is not None and max_position_embeddings < 1):
        raise CheckpointError(
            "max_shard_bytes and max_position_embeddings must be positive, got "
            f"{max_shard_bytes} and {max_position_embeddings}"
        )
    check_destination(dst, Path(src).expanduser())
    found = read_meta(src)
    view = found.view(to)
    done = Progress(size_of(view.tensors), progress)
    plan = {"to": to, "max_shard_bytes": max_shard_bytes}
    inputs = file_stamps(file.path for file in found.parts)
    verified = None
    with atomic_folder(dst, inputs=inputs, size=done.total, plan=plan, resume=resume) as unfinished:
        shards = _shards(view.tensors, max_shard_bytes)
        for name, shard in shards.items():
            if holds(unfinished / name, shard, view.read):
                done.advance(size_of(shard))
                continue
            with atomic_file(unfinished / name, fsync=False) as part:
                write_safetensors(part, shard, view.read, {"format": "pt"}, done.advance)
        if len(shards) > 1:
            where = {tensor: name for name, shard in shards.items() for tensor in shard}
            index = {"metadata": {"total_size": done.total}, "weight_map": where}
            write_json(unfinished / "model.safetensors.index.json", index)
        known = [*(part.path.name for part in found.parts), "params.json", "config.json", "checklist.chk"]
        left_behind = copy_others(found.folder, unfinished, known)
        dtype = TORCH_DTYPES[view.tensors[HF_EMBEDDING].dtype]
        config = found.llama.config(to, dtype, max_position_embeddings)
        config.save_pretrained(unfinished)
        if verify:
            rows = rotating_rows(config, found.llama.head_dim)
            written = View.of(SafetensorsFile(unfinished / name) for name in shards)
            verified = _compare(rows, found.view(), written, "interleaved", to)
    if to != "half":
        warnings.warn(
            f"{str(dst)!r} holds {to} weights, which the code of 'llama' models does not run; for it, convert "
            f"{str(src)!r} to half",
            stacklevel=2,
        )
    return ConversionReport(
        path=str(dst),
        source="meta",
        to=to,
        converted=2 * found.llama.layers if to == "half" else 0,
        tensors=len(view.tensors),
        bytes=done.total,
        left_behind=left_behind,
        runs=to == "half",
        verified=verified,
    )


def _shards(entries: Mapping[str, Entry], most: int) -> dict[str, dict[str, Entry]]:
    """The tensors of each weight file, by its name, in order."""
    shards: list[dict[str, Entry]] = [{}]
    for name, entry in entries.items():
        if shards[-1] and size_of(shards[-1]) + entry.end > most:
            shards.append({})
        shards[-1][name] = entry
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _compare(rows: RotatingRows, source: Any, written: Any, before: str, after: str) -> str:
    """What was compared: attention scores, or every tensor where none was to change.

    Raises:
        CheckpointError: a difference.
    """
    if before != after:
        return compare_scores(rows, {"": source}, {"": written}, after)
    for name in written.tensors:
        if not torch.equal(written.read(name), source.read(name)):
            raise CheckpointError(f"verification failed: {name!r} is not what it was; the folder did not get its name")
    return f"{len(written.tensors):,} tensors equal to the source's"
