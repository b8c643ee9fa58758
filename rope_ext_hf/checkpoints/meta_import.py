"""A Llama in Meta's own format (params.json, consolidated.NN.pth) to a Hugging Face folder, streamed and atomic.

    MetaImport(read_meta(Path("Llama-2-13b")), Path("Llama-2-13b-hf"), "half").run()   # merges the model-parallel parts

`meta_params` describes which models these are, and how what params.json lacks is derived.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rope_ext_hf.checkpoints.meta_params import HF_EMBEDDING
from rope_ext_hf.checkpoints.meta_source import MetaSource
from rope_ext_hf.checkpoints.report import Conversion, ConversionReport
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
from rope_ext_hf.files import Progress, atomic_file, copy_mode, write_json

MAX_SHARD_BYTES = 5_000_000_000  # transformers' own default for years


class MetaImport(Conversion):
    """A Hugging Face folder of a model in Meta's format.

    Args:
        source: the model, from `read_meta`.
        dst: see `convert_checkpoint`.
        to: "half", which transformers runs, or "interleaved", which moves no rows.
        context_length: what the model is for, in tokens, as max_position_embeddings; default: see
            `Llama.context_length`. The report states where it comes from.
    """

    def __init__(self, source: MetaSource, dst: Path, to: str, *, context_length: int | None = None) -> None:
        self.source, self.to, self.view = source, to, source.view(to)
        self.folder, self.inputs = source.folder, source.inputs
        self.plan = {"to": to, "max_shard_bytes": MAX_SHARD_BYTES}
        length = source.llama.context_length(context_length, source.stated_length)
        self.config = source.llama.to_config(to, TORCH_DTYPES[self.view.tensors[HF_EMBEDDING].dtype], length)
        not_run = (
            f"{str(dst)!r} holds {to} weights, which the code of 'llama' models does not run; for transformers, "
            f"convert {str(source.folder)!r} to half"
        )
        self.warnings = (*([length.note] * length.guessed), *([not_run] * (to != "half")))
        self.report = ConversionReport(
            path=str(dst),
            source="meta",
            to=to,
            converted=2 * source.llama.layers if to == "half" else 0,
            tensors=len(self.view.tensors),
            bytes=size_of(self.view.tensors),
            loads_natively=to == "half",
            notes=tuple(dict.fromkeys([*filter(None, [length.note]), *self.warnings])),
        )

    def write(self, staging: Path, progress: Progress) -> tuple[str, ...]:
        shards = _shards(self.view.tensors, MAX_SHARD_BYTES)
        for name, shard in shards.items():
            if file_matches(staging / name, shard, self.view.read):
                progress.advance(size_of(shard))
                continue
            with atomic_file(staging / name, fsync=False) as part:
                write_safetensors(part, shard, self.view.read, {"format": "pt"}, progress.advance)
            copy_mode(self.source.parts[0].path, staging / name)
        if len(shards) > 1:
            weight_map = {tensor: name for name, shard in shards.items() for tensor in shard}
            index = {"metadata": {"total_size": self.report.bytes}, "weight_map": weight_map}
            write_json(staging / "model.safetensors.index.json", index)
        written = [*(part.path.name for part in self.source.parts), "params.json", "config.json", "checklist.chk"]
        skipped = copy_other_files(self.folder, staging, written)
        self.config.save_pretrained(staging)
        return skipped

    def verify(self, staging: Path) -> str:
        copy = TensorView.from_files(map(SafetensorsFile, sorted(staging.glob("*.safetensors"))))
        tensors = rotary_tensors(self.config, self.source.llama.head_dim)
        return compare_views(tensors, self.source.view(), copy, "interleaved", self.to)


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
