"""Convert a Llama between Meta's own format (params.json, consolidated.NN.pth) and a Hugging Face folder.

A Mistral in its own format (params.json, consolidated*.safetensors) becomes a Hugging Face folder in the same way. One
tensor at a time is in memory, and the new folder appears whole or not at all.

`meta_params` describes the models, and the derivation of whatever params.json lacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from rope_ext_hf.bounds import whole
from rope_ext_hf.checkpoints.meta_params import (
    EMBEDDING,
    FREQUENCIES,
    HF_EMBEDDING,
    HF_OUTPUT,
    LLAMA_3_THETA,
    META_DTYPES,
    OUTPUT,
    Llama,
    Weight,
    read_params,
)
from rope_ext_hf.checkpoints.report import Conversion, ConversionReport
from rope_ext_hf.checkpoints.row_layouts import RotaryTensors
from rope_ext_hf.checkpoints.source import Source, copy_other_files, has_weights
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
from rope_ext_hf.downloads import mistral_format_files
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import (
    atomic_file,
    copy_mode,
    file_stamps,
    list_files,
    read_json,
    resolve_inside,
    write_json,
)
from rope_ext_hf.hub import model_folder
from rope_ext_hf.patches.patch_records import PATCH_KEY

MAX_SHARD_BYTES = 5_000_000_000  # as transformers has had it by default for years


class MetaSource:
    """A folder in Meta's format, read as far as the headers; norms and embeddings are read and compared too.

    Attributes:
        folder: the folder.
        inputs: stamps of its files, taken before they were read.
        files: the weight files.
        parts: what each of Meta's model-parallel processes loads, in order: one file of Meta's, or all of Mistral's.
        split: the dimension of the embeddings that the parts divide.
        llama: the model.
        stated_length: the context length in tokens by params.json, which usually has none.

    Raises:
        CheckpointError: a file or tensor is missing, unknown, or contradicts params.json or another part.
    """

    def __init__(self, folder: Path) -> None:
        names = sorted(p.name for p in folder.iterdir() if re.fullmatch(r"consolidated\.\d+\.pth", p.name))
        shards = sorted(p.name for p in folder.glob("consolidated*.safetensors"))
        if not names and not shards:
            raise CheckpointError(
                f"{str(folder)!r} holds no weights; looked for {_part_name(0)} and consolidated*.safetensors"
            )
        expected = [_part_name(i) for i in range(len(names))] or shards
        missing = [name for name in expected if name not in (names or shards)]
        if missing:
            raise CheckpointError(f"{missing[0]!r} is missing in {str(folder)!r}, which has {', '.join(names)}")
        paths = [resolve_inside(folder, name) for name in ("params.json", *expected)]
        list_files(folder)  # refuses links that lead out of the folder
        self.folder, self.inputs = folder, file_stamps(paths)  # before they are read
        self.files = paths[1:]
        params = read_params(paths[0])
        self.parts: tuple[_Part, ...] = tuple(map(TorchFile, self.files)) if names else (_Shards(self.files),)
        parts = self.parts
        if params["n_kv_heads"] % len(parts):
            raise CheckpointError(
                f"{str(folder)!r}: {params['n_kv_heads']} key heads cannot be divided among {len(parts)} parts"
            )
        rows, columns = _matrix(parts[0], EMBEDDING)
        self.split = 0 if columns == params["dim"] else 1
        vocab = rows if self.split else rows * len(parts)
        if params["vocab_size"] not in (-1, vocab):
            raise CheckpointError(
                f"params.json in {str(folder)!r} has vocab_size {params['vocab_size']}; {EMBEDDING!r} has {vocab} rows"
            )
        ffn = _matrix(parts[0], "layers.0.feed_forward.w1.weight")[0] * len(parts)
        if params.get("hidden_dim", ffn) != ffn:
            raise CheckpointError(
                f"params.json in {str(folder)!r} has hidden_dim {params['hidden_dim']}; w1 of the first layer "
                f"has {ffn} rows"
            )
        _check_parts(parts, Llama.from_params(params, vocab, ffn, tied=False).weights(self.split))
        self.llama = Llama.from_params(params, vocab, ffn, _tied(parts, self.split))
        self.stated_length: int | None = params.get("max_position_embeddings", params.get("max_seq_len"))

    def view(self, to: str = "interleaved", now: str = "interleaved") -> TensorView:
        """Return the whole tensors of a Hugging Face folder of this model, by their names there.

        Args:
            to: the pairing to return them in.
            now: the pairing that they are in.
        """
        tied = {OUTPUT} if self.llama.tied else {}
        weights = {weight.hf: weight for weight in self.llama.weights(self.split) if weight.meta not in tied}
        first = self.parts[0].tensors
        return TensorView(
            {name: TensorInfo.from_shape(first[w.meta].dtype, w.shape) for name, w in weights.items()},
            lambda name: weights[name].to_pairing(self._read(weights[name]), now, to),
        )

    def _read(self, weight: Weight) -> Tensor:
        """Read a whole tensor, put together from its parts, in the pairing that it is stored in."""
        if weight.split is None or len(self.parts) == 1:
            return self.parts[0].read(weight.meta)
        tensor = torch.empty(weight.shape, dtype=TORCH_DTYPES[self.parts[0].tensors[weight.meta].dtype])
        for chunk, part in zip(tensor.chunk(len(self.parts), weight.split), self.parts, strict=True):
            chunk.copy_(part.read(weight.meta))
        return tensor


class _Shards:
    """All files of Mistral's format together, with the members of a single file."""

    def __init__(self, paths: list[Path]) -> None:
        self.path, files = paths[0], list(map(SafetensorsFile, paths))
        view = TensorView.from_files(files)
        if len(view.tensors) < sum(len(file.tensors) for file in files):
            raise CheckpointError(f"a tensor is in two files of {', '.join(path.name for path in paths)}")
        self.tensors, self.read = view.tensors, view.read


_Part = TorchFile | _Shards


def open_checkpoint(
    path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Source | MetaSource:
    """Open a folder or Hub repository in Meta's format or in Hugging Face's, which may have a params.json too.

    Mistral's repositories hold a model in both formats: it is read in Hugging Face's.
    """
    folder = model_folder(path, revision=revision)
    has_params = (folder / "params.json").is_file()
    has_config = (folder / "config.json").is_file()
    has_parts = any(folder.glob("consolidated.*.pth"))
    has_shards = any(folder.glob("consolidated*.safetensors"))
    if (has_params and has_parts) or ((has_params or has_parts or has_shards) and not has_config):
        return MetaSource(folder)
    if has_params and has_shards and not has_weights(folder):
        return MetaSource(folder)
    return Source(folder, trust_remote_code=trust_remote_code)


def _part_name(index: int) -> str:
    """Return the name of the file that a model-parallel process of Meta's code loads."""
    return f"consolidated.{index:02}.pth"


def _info(part: _Part, name: str) -> TensorInfo:
    """Return the description of a tensor; raise a CheckpointError if the part lacks it."""
    if name not in part.tensors:
        raise CheckpointError(f"{name!r} is missing in {str(part.path)!r}")
    return part.tensors[name]


def _matrix(part: _Part, name: str) -> tuple[int, int]:
    """Return the rows and columns of a tensor; raise a CheckpointError if it is no matrix."""
    shape = _info(part, name).shape
    if len(shape) != 2:
        raise CheckpointError(f"{name!r} in {str(part.path)!r} has shape {shape}, not two dimensions")
    return shape[0], shape[1]


def _check_parts(parts: tuple[_Part, ...], weights: Iterable[Weight]) -> None:
    """Raise a CheckpointError unless every part has exactly these tensors, or parts of them.

    They must have the right shape and the same dtype in all parts. Where every part has a whole copy, the copies must
    be equal.
    """
    known = {FREQUENCIES}
    has_output = any(OUTPUT in part.tensors for part in parts)
    for weight in weights:  # one by one, because params.json may claim any number of layers
        known.add(weight.meta)
        if weight.meta == OUTPUT and not has_output:
            continue
        shape, dtype = weight.part_shape(len(parts)), _info(parts[0], weight.meta).dtype
        for part in parts:
            info, where = _info(part, weight.meta), f"{weight.meta!r} in {str(part.path)!r}"
            if info.shape != shape:
                raise CheckpointError(
                    f"{where} has shape {info.shape}; by params.json, the embeddings, w1 of the first layer and "
                    f"{len(parts)} parts it should have {shape}"
                )
            if info.dtype not in META_DTYPES or info.dtype != dtype:
                first = "" if part is parts[0] else f", in the first part {dtype}"
                raise CheckpointError(
                    f"{where} is {info.dtype}{first}; all parts must have one of {', '.join(META_DTYPES)}"
                )
            if weight.split is None and not torch.equal(part.read(weight.meta), parts[0].read(weight.meta)):
                raise CheckpointError(f"{where} differs from the first part, though every part must hold the same copy")
    for part in parts:
        unknown = sorted(set(part.tensors) - known)
        if unknown:
            raise CheckpointError(
                f"{unknown[0]!r} in {str(part.path)!r} does not belong to a model with these params.json; "
                f"{len(unknown)} such tensors"
            )


def _tied(parts: tuple[_Part, ...], split: int) -> bool:
    """Return whether the output weights equal the embeddings, or are not stored at all."""
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


class MetaImport(Conversion):
    """The conversion of a folder in Meta's format into a Hugging Face folder.

    Args:
        source: the folder.
        dst: the new folder.
        to: the pairing to write.
        now: the pairing of the source.
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
                f"{str(dst)!r} holds {to} weights, with which transformers does not run 'llama' models; for use "
                f"there, convert {str(source.folder)!r} to half",
            )
        self.report = ConversionReport(
            path=str(dst),
            source="meta",
            to=to,
            converted=2 * source.llama.layers if to != now else 0,
            tensors=len(self.view.tensors),
            bytes=size_of(self.view.tensors),
            loads_natively=to == "half",
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
        now: the pairing of the source.
        model_parallel: the number of parts.

    Raises:
        CheckpointError: Meta's format cannot express the model, or it cannot be divided into so many parts.
    """

    def __init__(self, source: Source, dst: Path, *, now: str, model_parallel: int) -> None:
        where = f"{str(source.folder)!r} cannot be written in Meta's format:"
        if source.is_adapter:
            raise CheckpointError(f"{where} it is an adapter; merge it into its model first")
        if PATCH_KEY in read_json(source.folder / "config.json"):
            raise CheckpointError(f"{where} it was saved with a patch; unpatch the model and save that")
        self.source, self.llama, self.count = source, Llama.from_config(source.config, where), model_parallel
        self.weights = {weight.meta: weight for weight in self.llama.weights(self.llama.generation.split)}
        _check_tensors(source, self.llama, self.weights.values())
        whole("model_parallel", model_parallel, error=CheckpointError)
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
            notes=(*self.warnings, *([] if "rope_theta" in self.llama.to_params() else [theta])),
        )

    def write(self, staging: Path, advance: Callable[[int], None]) -> tuple[str, ...]:
        paths = [staging / _part_name(index) for index in range(self.count)]
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
        """Read a tensor once, and return these parts of it, in the interleaved pairing."""
        weight = self.weights[name]
        tensor = weight.to_pairing(self.source.view.read(weight.hf), self.now, "interleaved")
        return [weight.part(tensor, index, self.count) for index in indexes]

    def _is_written(self, path: Path, index: int) -> bool:
        """Return whether an interrupted conversion has written a part, and it is right."""
        return file_matches(path, self.infos, lambda name: self._read(name, [index])[0], open_file=TorchFile)


def _check_tensors(source: Source, llama: Llama, weights: Iterable[Weight]) -> None:
    """Raise a CheckpointError unless a Hugging Face folder has exactly these tensors, as the config describes them."""
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
    """Return sentences about the settings of a model that Meta's format cannot express."""
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
