"""A Llama between Meta's own format (params.json, consolidated.NN.pth) and a Hugging Face folder, streamed and atomic.

`meta_params` describes which models these are, and how what params.json lacks is derived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from rope_ext_hf.bounds import whole
from rope_ext_hf.checkpoints.meta_params import (
    EMBEDDING,
    HF_EMBEDDING,
    HF_OUTPUT,
    LLAMA_3_THETA,
    META_DTYPES,
    OUTPUT,
    Llama,
    Weight,
)
from rope_ext_hf.checkpoints.meta_source import MetaSource, part_name, read_meta
from rope_ext_hf.checkpoints.report import Conversion, ConversionReport
from rope_ext_hf.checkpoints.row_layouts import rotary_tensors
from rope_ext_hf.checkpoints.source import Source, copy_other_files
from rope_ext_hf.checkpoints.torch_files import open_writer
from rope_ext_hf.checkpoints.verification import compare_views
from rope_ext_hf.checkpoints.weight_files import (
    TORCH_DTYPES,
    SafetensorsFile,
    TensorInfo,
    TensorView,
    TorchFile,
    file_matches,
    size_of,
    tensor_bytes,
    write_safetensors,
)
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import atomic_file, copy_mode, read_json, write_json
from rope_ext_hf.patches.config import PATCH_KEY

MAX_SHARD_BYTES = 5_000_000_000  # transformers' own default for years


class MetaImport(Conversion):
    """A Hugging Face folder of a model in Meta's format; in "interleaved" no row moves."""

    def __init__(self, source: MetaSource, dst: Path, to: str, *, context_length: int | None) -> None:
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

    def write(self, staging: Path, advance: Callable[[int], None]) -> tuple[str, ...]:
        shards = _shards(self.view.tensors, MAX_SHARD_BYTES)
        for name, shard in shards.items():
            if file_matches(staging / name, shard, self.view.read):
                advance(size_of(shard))
                continue
            with atomic_file(staging / name, fsync=False) as part:
                write_safetensors(part, shard, self.view.read, advance)
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


class MetaExport(Conversion):
    """A Llama in Meta's format; a CheckpointError if that cannot express it.

    All parts, one for each process of Meta's code, are written at the same time, so an interruption costs all of them.
    """

    def __init__(self, source: Source, dst: Path, *, model_parallel: int, source_pairing: str | None) -> None:
        self.source, self.llama, self.count = source, _representable(source), model_parallel
        self.weights = {weight.meta: weight for weight in self.llama.weights(self.llama.generation.split)}
        _check_tensors(source, self.llama, self.weights.values())
        whole("model_parallel", model_parallel, error=CheckpointError)
        for size in ("kv_heads", "ffn", "vocab"):  # heads and dim are multiples of kv_heads
            if (number := getattr(self.llama, size)) % model_parallel:
                raise CheckpointError(f"{size} {number} cannot be divided among {model_parallel} parts")
        self.now = source_pairing or source.pairing or "half"
        self.infos = {
            name: TensorInfo.from_shape(source.view.tensors[weight.hf].dtype, weight.part_shape(self.count))
            for name, weight in self.weights.items()
        }
        # Output weights that equal the embeddings and are divided alike share their storage, which torch writes once.
        alike = self.count == 1 or self.weights[EMBEDDING].split == self.weights[OUTPUT].split
        self.same = {OUTPUT: EMBEDDING} if self.llama.tied and alike else {}
        self.own = {name: info for name, info in self.infos.items() if name not in self.same}
        self.folder, self.inputs = source.folder, source.inputs
        self.plan = {"to": "meta", "parts": model_parallel, "source_pairing": self.now}
        self.warnings = _losses(source, self.llama)
        self.report = ConversionReport(
            path=str(dst),
            source=self.now,
            to="meta",
            converted=2 * self.llama.layers if self.now == "half" else 0,
            tensors=len(self.weights),
            bytes=self.count * size_of(self.own),
            loads_natively=False,
            notes=(*self.warnings, *_theta_note(self.llama)),
        )

    def write(self, staging: Path, advance: Callable[[int], None]) -> tuple[str, ...]:
        paths = [staging / part_name(index) for index in range(self.count)]
        todo = [index for index, path in enumerate(paths) if not self._is_written(path, index)]
        advance((self.count - len(todo)) * size_of(self.own))
        tensors = {name: (TORCH_DTYPES[info.dtype], info.shape) for name, info in self.own.items()}
        with ExitStack() as stack:
            parts = [stack.enter_context(atomic_file(paths[index], fsync=False)) for index in todo]
            writes = [stack.enter_context(open_writer(part, tensors, self.same)) for part in parts]
            for name, info in self.own.items():
                for tensor, write in zip(self._read(name, todo), writes, strict=True):
                    write(name, tensor_bytes(tensor))
                    advance(info.size)
        for path in paths:
            copy_mode(next(iter(self.source.files.values())).path, path)
        skipped = copy_other_files(self.folder, staging, [*self.source.files, "config.json", "params.json"])
        write_json(staging / "params.json", self.llama.to_params())
        copy_mode(self.folder / "config.json", staging / "params.json")
        return skipped

    def verify(self, staging: Path) -> str:
        copy = read_meta(staging).view()
        return compare_views(self.source.tensors, self.source.view, copy, self.now, "interleaved")

    def _read(self, name: str, indexes: list[int]) -> list[Tensor]:
        """Read a tensor once and return these parts of it."""
        weight = self.weights[name]
        tensor = weight.to_pairing(self.source.view.read(weight.hf), self.now, "interleaved")
        return [weight.part(tensor, index, self.count) for index in indexes]

    def _is_written(self, path: Path, index: int) -> bool:
        return file_matches(path, self.infos, lambda name: self._read(name, [index])[0], open_file=TorchFile)


def _representable(source: Source) -> Llama:
    where = f"{str(source.folder)!r} cannot be written in Meta's format:"
    if source.is_adapter:
        raise CheckpointError(f"{where} it is an adapter; merge it into its model first")
    if PATCH_KEY in read_json(source.folder / "config.json"):
        raise CheckpointError(f"{where} it was saved with a patch; unpatch the model and save that")
    return Llama.from_config(source.config, where)


def _check_tensors(source: Source, llama: Llama, weights: Iterable[Weight]) -> None:
    """Check that a Hugging Face folder has these tensors, as the config describes them, and no others."""
    view, folder = source.view, source.folder
    needed = {weight.hf: weight.shape for weight in weights}
    for name, shape in needed.items():
        if name not in view.tensors:
            raise CheckpointError(f"{name!r} is missing in {str(folder)!r}")
        info = view.tensors[name]
        if info.shape != shape or info.dtype not in META_DTYPES:
            raise CheckpointError(
                f"{name!r} in {str(folder)!r} is {info.dtype} of shape {info.shape}; by the config it should have "
                f"shape {shape}, and be one of {', '.join(META_DTYPES)}"
            )
    for name in view.tensors:
        if name == HF_OUTPUT and llama.tied:
            if not torch.equal(view.read(name), view.read(HF_EMBEDDING)):
                raise CheckpointError(
                    f"{name!r} in {str(folder)!r} differs from {HF_EMBEDDING!r}, though config.json has "
                    "tie_word_embeddings; correct the config"
                )
        elif name not in needed and not name.endswith(".rotary_emb.inv_freq"):  # old checkpoints hold frequencies
            raise CheckpointError(f"{name!r} in {str(folder)!r} has no place in Meta's format")


def _losses(source: Source, llama: Llama) -> tuple[str, ...]:
    """What Meta's format cannot express of this model."""
    losses = []
    length = source.config.max_position_embeddings
    if length != (assumed := llama.context_length().tokens):
        losses.append(
            f"Meta's format has no place for max_position_embeddings, {length} here; readers will assume {assumed}. "
            f"To convert the weights back, give the length: --context-length {length}"
        )
    if "rope_scaling_factor" in llama.to_params():
        losses.append(
            f"Meta's code scales by 8, whatever params.json says; this model needs {llama.factor:g}, which stands "
            "there as rope_scaling_factor"
        )
    return tuple(losses)


def _theta_note(llama: Llama) -> tuple[str, ...]:
    """What to do about rope_theta, where params.json cannot have it for the sake of older code."""
    if "rope_theta" in llama.to_params():
        return ()
    return (
        f"params.json has no rope_theta, since the code of Llama 1 and 2 takes no such key and assumes "
        f"{llama.theta:,.0f}. Meta's Llama 3 code assumes {LLAMA_3_THETA:,.0f}: to run this model with it, add "
        f'"rope_theta": {llama.theta:.1f} to params.json',
    )
