"""Convert a Llama between Meta's own format (params.json, consolidated.NN.pth) and a Hugging Face folder.

A Mistral in its own format (params.json, consolidated*.safetensors) becomes a Hugging Face folder in the same way. One
tensor at a time is in memory, and the new folder appears whole or not at all.

`meta_params` describes the models, and the derivation of whatever params.json lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from rope_ext_hf.bounds import check_int
from rope_ext_hf.checkpoints.files.numbers import TensorInfo, size_of, tensor_bytes
from rope_ext_hf.checkpoints.files.other_files import copy_other_files
from rope_ext_hf.checkpoints.files.torch_files import TORCH_DTYPES, TorchFile, open_writer
from rope_ext_hf.checkpoints.files.weight_files import SafetensorsFile, TensorView, file_matches, write_safetensors
from rope_ext_hf.checkpoints.meta.meta_params import (
    EMBEDDING,
    HF_EMBEDDING,
    HF_OUTPUT,
    LLAMA_3_THETA,
    META_DTYPES,
    OUTPUT,
    Llama,
    Weight,
)
from rope_ext_hf.checkpoints.meta.meta_source import MetaSource, part_name
from rope_ext_hf.checkpoints.report import Conversion, ConversionReport
from rope_ext_hf.checkpoints.rows.row_layouts import RotaryTensors
from rope_ext_hf.checkpoints.source import Source
from rope_ext_hf.checkpoints.verification import compare_views
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files.whole import (
    atomic_file,
    copy_mode,
    mistral_format_files,
    read_json,
    write_json,
)
from rope_ext_hf.models.config_keys import PATCH_KEY

MAX_SHARD_BYTES = 5_000_000_000  # as transformers has had it by default for years


class MetaImport(Conversion):
    """The conversion of a folder in Meta's format into a Hugging Face folder.

    Args:
        source: the folder.
        dst: the new folder.
        to: the pairing in which weights are written.
        now: the pairing of the weights in the source.
        context_length: the length that the model is for, in tokens; None: see `Llama.context_length`.
    """

    def __init__(self, source: MetaSource, dst: Path, to: str, *, now: str, context_length: int | None) -> None:
        self.source, self.to, self.now, self.view = source, to, now, source.view(to, now)
        self.folder, self.inputs = source.folder, source.inputs
        self.plan = {"to": to, "source_pairing": now, "max_shard_bytes": MAX_SHARD_BYTES}
        length = source.llama.context_length(context_length, source.stated_length)
        self.config = source.llama.to_config(to, TORCH_DTYPES[self.view.tensors[HF_EMBEDDING].dtype], length)
        if length.guessed:
            self.warnings += (length.note,)
        if to != "half":
            self.warnings += (
                f"{str(dst)!r} holds weights in the {to} pairing, with which transformers does not run 'llama' models; "
                f"for use there, convert {str(source.folder)!r} to half",
            )
        self.report = ConversionReport(
            path=str(dst),
            source="meta",
            to=to,
            converted=2 * source.llama.layers if to != now else 0,
            tensors=len(self.view.tensors),
            bytes=size_of(self.view.tensors),
            loads_natively=to == "half",
            heads=source.llama.heads,
            key_heads=source.llama.kv_heads,
            notes=tuple(dict.fromkeys([*filter(None, [length.note]), *self.warnings])),
        )

    def write(self, staging: Path, advance: Callable[[int], None]) -> tuple[str, ...]:
        split = split_state_dict_into_shards_factory(
            dict(self.view.tensors),
            get_storage_size=lambda info: info.size,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=MAX_SHARD_BYTES,
        )
        for name, tensors in split.filename_to_tensors.items():
            shard = {tensor: self.view.tensors[tensor] for tensor in tensors}
            if file_matches(staging / name, shard, self.view.read):
                advance(size_of(shard))
                continue
            with atomic_file(staging / name, fsync=False) as part:
                write_safetensors(part, shard, self.view.read, advance)
            copy_mode(self.source.parts[0].path, staging / name)
        if split.is_sharded:
            index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
            write_json(staging / "model.safetensors.index.json", index)
        weights = [*(path.name for path in self.source.files), *mistral_format_files(self.folder)]
        written = [*weights, "params.json", "config.json", "checklist.chk"]
        skipped = copy_other_files(self.folder, staging, written)
        self.config.save_pretrained(staging)
        return skipped

    def verify(self, staging: Path) -> str:
        copy = TensorView.from_files(map(SafetensorsFile, sorted(staging.glob("*.safetensors"))))
        tensors = RotaryTensors(self.config, self.source.llama.head_dim)
        return compare_views(tensors, self.source.view(self.now, self.now), copy, self.now, self.to)


class MetaExport(Conversion):
    """The conversion of a Hugging Face folder with a Llama into Meta's format.

    All parts, one for each process of Meta's code, are written at the same time, so that an interruption loses all of
    them.

    Args:
        source: the folder.
        dst: the new folder.
        now: the pairing of the weights in the source.
        model_parallel: the number of parts to write.

    Raises:
        CheckpointError: Meta's format cannot express the model, or it cannot be divided into so many parts.
    """

    def __init__(self, source: Source, dst: Path, *, now: str, model_parallel: int) -> None:
        where = f"{str(source.folder)!r} cannot be written in Meta's format:"
        if source.is_adapter:
            raise CheckpointError(f"{where} it is an adapter; merge it into its model first")
        if PATCH_KEY in read_json(source.folder / "config.json"):
            raise CheckpointError(f"{where} it was saved with a patch; unpatch the model and save that")
        self.source, self.llama, self.count = source, Llama.from_config(source.class_config, where), model_parallel
        self.weights = {weight.meta: weight for weight in self.llama.weights(self.llama.generation.split)}
        _check_tensors(source, self.llama, self.weights.values())
        check_int("model_parallel", model_parallel, error=CheckpointError)
        for size in ("kv_heads", "ffn", "vocab"):  # heads and dim are multiples of kv_heads
            number = getattr(self.llama, size)
            if number % model_parallel:
                raise CheckpointError(f"{size} {number} cannot be divided among {model_parallel} parts")
        self.now = now
        self.infos = {
            name: TensorInfo.from_shape(source.view.tensors[weight.hf].dtype, weight.part_shape(self.count))
            for name, weight in self.weights.items()
        }
        # Output weights that equal the embeddings and are divided in the same dimension share their storage, which
        # torch writes once.
        divided_alike = self.count == 1 or self.weights[EMBEDDING].split == self.weights[OUTPUT].split
        self.same = {OUTPUT: EMBEDDING} if self.llama.tied and divided_alike else {}
        self.stored = {name: info for name, info in self.infos.items() if name not in self.same}
        self.folder, self.inputs = source.folder, source.inputs
        self.plan = {"to": "meta", "parts": model_parallel, "source_pairing": self.now}
        self.warnings = _lost_settings(source, self.llama)
        theta = (
            f"params.json has no rope_theta, since the code of Llama 1 and 2 takes no such key and assumes "
            f"{self.llama.theta:,.0f}. Meta's Llama 3 code assumes {LLAMA_3_THETA:,.0f}: to run this model with it, "
            f'add "rope_theta": {self.llama.theta:.1f} to params.json'
        )
        self.report = ConversionReport(
            path=str(dst),
            source=self.now,
            to="meta",
            converted=2 * self.llama.layers if self.now == "half" else 0,
            tensors=len(self.weights),
            bytes=self.count * size_of(self.stored),
            loads_natively=False,
            heads=self.llama.heads,
            key_heads=self.llama.kv_heads,
            notes=(*self.warnings, *([] if "rope_theta" in self.llama.to_params() else [theta])),
        )

    def write(self, staging: Path, advance: Callable[[int], None]) -> tuple[str, ...]:
        paths = [staging / part_name(index) for index in range(self.count)]
        todo = [index for index, path in enumerate(paths) if not self._is_written(path, index)]
        advance((self.count - len(todo)) * size_of(self.stored))
        tensors = {name: (TORCH_DTYPES[info.dtype], info.shape) for name, info in self.stored.items()}
        with ExitStack() as stack:
            parts = [stack.enter_context(atomic_file(paths[index], fsync=False)) for index in todo]
            writes = [stack.enter_context(open_writer(part, tensors, self.same)) for part in parts]
            for name, info in self.stored.items():
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
        copy = MetaSource(staging).view()
        return compare_views(self.source.tensors, self.source.view, copy, self.now, "interleaved")

    def _read(self, name: str, indexes: list[int]) -> list[Tensor]:
        """Read a tensor once, and return the parts of it that have these indexes, in the interleaved pairing."""
        weight = self.weights[name]
        tensor = weight.to_pairing(self.source.view.read(weight.hf), self.now, "interleaved")
        return [weight.part(tensor, index, self.count) for index in indexes]

    def _is_written(self, path: Path, index: int) -> bool:
        """Return whether an interrupted conversion has already written this part correctly."""
        return file_matches(path, self.infos, lambda name: self._read(name, [index])[0], open_file=TorchFile)


def _check_tensors(source: Source, llama: Llama, weights: Iterable[Weight]) -> None:
    """Raise a CheckpointError unless a Hugging Face folder has exactly the tensors that its config describes."""
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


def _lost_settings(source: Source, llama: Llama) -> tuple[str, ...]:
    """Return one sentence for each kind of setting of the model that Meta's format cannot express."""
    sentences = []
    length = source.config.max_position_embeddings
    assumed = llama.context_length().tokens
    if length != assumed:
        sentences.append(
            f"Meta's format has no place for max_position_embeddings, {length} here; readers will assume {assumed}. "
            f"To convert the weights back, give the length: --context-length {length}"
        )
    if "rope_scaling_factor" in llama.to_params():
        sentences.append(
            f"Meta's code scales by 8, whatever params.json says; this model needs {llama.factor:g}, which stands "
            "there as rope_scaling_factor"
        )
    return tuple(sentences)
