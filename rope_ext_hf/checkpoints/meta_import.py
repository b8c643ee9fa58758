"""A Llama in Meta's own format (params.json, consolidated.NN.pth) to a Hugging Face folder, streamed and atomic.

    meta_to_hf(read_meta(Path("Llama-2-13b")), Path("Llama-2-13b-hf"))       # merges the model-parallel parts

`meta_params` describes which models these are, and how what params.json lacks is derived.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from rope_ext_hf.checkpoints.meta_params import HF_EMBEDDING
from rope_ext_hf.checkpoints.meta_source import MetaSource
from rope_ext_hf.checkpoints.report import ConversionReport
from rope_ext_hf.checkpoints.row_layouts import rotary_tensors
from rope_ext_hf.checkpoints.source import copy_other_files
from rope_ext_hf.checkpoints.verification import compare_views
from rope_ext_hf.checkpoints.weight_files import (
    TORCH_DTYPES,
    SafetensorsFile,
    TensorInfo,
    TensorView,
    file_matches,
    size_of,
    write_safetensors,
)
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import Progress, atomic_file, atomic_folder, copy_mode, write_json
from rope_ext_hf.rotary.pairing import PAIRINGS

__all__ = ["meta_to_hf"]

MAX_SHARD_BYTES = 5_000_000_000  # transformers' own default for years


def meta_to_hf(
    source: MetaSource,
    dst: Path,
    to: str = "half",
    *,
    context_length: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    resume: bool = False,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ConversionReport:
    """Write a Hugging Face folder of a model in Meta's format.

    Args:
        source: the model, from `read_meta`.
        dst, resume, verify, progress: see `convert_checkpoint`.
        to: "half", which transformers runs, or "interleaved", which moves no rows.
        context_length: what the model is for, in tokens, as max_position_embeddings; default: see
            `Llama.context_length`. The report states where it comes from.
        max_shard_bytes: limit of a weight file; a larger tensor gets a file of its own.

    Raises:
        CheckpointError: an impossible argument, or a failed verification.
        FileError: a destination that exists, a full disk.
    """
    if to not in PAIRINGS:
        raise CheckpointError(f"a model in Meta's format can be converted to {' or '.join(PAIRINGS)}, got {to!r}")
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    if context_length is not None and (type(context_length) is not int or context_length < 1):
        raise CheckpointError(f"context_length must be a positive whole number of tokens, got {context_length!r}")
    length = source.llama.context_length(context_length, source.stated_length)
    view = source.view(to)
    done = Progress(size_of(view.tensors), progress)
    verified = None
    with atomic_folder(
        dst,
        source=source.folder,
        inputs=source.inputs,
        size=done.total,
        plan={"to": to, "max_shard_bytes": max_shard_bytes},
        resume=resume,
    ) as staging:
        shards = _shards(view.tensors, max_shard_bytes)
        for name, shard in shards.items():
            if file_matches(staging / name, shard, view.read):
                done.advance(size_of(shard))
                continue
            with atomic_file(staging / name, fsync=False) as part:
                write_safetensors(part, shard, view.read, {"format": "pt"}, done.advance)
            copy_mode(source.parts[0].path, staging / name)
        if len(shards) > 1:
            weight_map = {tensor: name for name, shard in shards.items() for tensor in shard}
            index = {"metadata": {"total_size": done.total}, "weight_map": weight_map}
            write_json(staging / "model.safetensors.index.json", index)
        written = [*(part.path.name for part in source.parts), "params.json", "config.json", "checklist.chk"]
        skipped = copy_other_files(source.folder, staging, written)
        dtype = TORCH_DTYPES[view.tensors[HF_EMBEDDING].dtype]
        config = source.llama.to_config(to, dtype, length)
        config.save_pretrained(staging)
        if verify:
            copy = TensorView.from_files(SafetensorsFile(staging / name) for name in shards)
            verified = compare_views(
                rotary_tensors(config, source.llama.head_dim), source.view(), copy, "interleaved", to
            )
    notes = [length.note] if length.note else []
    loud = notes[:] if length.guessed else []
    if to != "half":
        loud.append(
            f"{str(dst)!r} holds {to} weights, which the code of 'llama' models does not run; for transformers, "
            f"convert {str(source.folder)!r} to half"
        )
        notes.append(loud[-1])
    for warning in loud:
        warnings.warn(warning, stacklevel=3)
    return ConversionReport(
        path=str(dst),
        source="meta",
        to=to,
        converted=2 * source.llama.layers if to == "half" else 0,
        tensors=len(view.tensors),
        bytes=done.total,
        skipped_files=skipped,
        loads_natively=to == "half",
        verified=verified,
        notes=tuple(notes),
    )


def _shards(tensors: Mapping[str, TensorInfo], max_bytes: int) -> dict[str, dict[str, TensorInfo]]:
    """Divide tensors into weight files, in order; return the tensors of each by its name."""
    shards: list[dict[str, TensorInfo]] = [{}]
    for name, info in tensors.items():
        if shards[-1] and size_of(shards[-1]) + info.size > max_bytes:
            shards.append({})
        shards[-1][name] = info
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}
