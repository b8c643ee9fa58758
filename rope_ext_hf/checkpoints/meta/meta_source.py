"""Folders in Meta's own format (params.json, consolidated.NN.pth), and in Mistral's (consolidated*.safetensors).

`meta_params` describes the models, and the derivation of whatever params.json lacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from rope_ext_hf.checkpoints.files.numbers import TensorInfo
from rope_ext_hf.checkpoints.files.torch_files import TORCH_DTYPES, TorchFile
from rope_ext_hf.checkpoints.files.weight_files import SafetensorsFile, TensorView
from rope_ext_hf.checkpoints.meta.meta_params import (
    EMBEDDING,
    FREQUENCIES,
    META_DTYPES,
    OUTPUT,
    Llama,
    Weight,
    read_params,
)
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files.other_formats import check_format
from rope_ext_hf.files.whole import file_stamps, list_files, resolve_inside


class MetaSource:
    """A folder with a model in Meta's format, opened and checked; most weights are not read yet.

    The headers of its files are read, and the norms and embeddings, which must agree between the parts.

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
        names, is_metas = _weight_file_names(folder)
        paths = [resolve_inside(folder, name) for name in ("params.json", *names)]
        list_files(folder)  # refuses links that lead out of the folder
        self.folder, self.inputs = folder, file_stamps(paths)  # before they are read
        self.files = paths[1:]
        params = read_params(paths[0])
        self.parts: tuple[_Part, ...] = tuple(map(TorchFile, self.files)) if is_metas else (_Shards(self.files),)
        if params["n_kv_heads"] % len(self.parts):
            raise CheckpointError(
                f"{str(folder)!r}: {params['n_kv_heads']} key heads cannot be divided among {len(self.parts)} parts"
            )
        rows, columns = _matrix(self.parts[0], EMBEDDING)
        self.split = 0 if columns == params["dim"] else 1
        vocab = rows if self.split else rows * len(self.parts)
        if params["vocab_size"] not in (-1, vocab):
            raise CheckpointError(
                f"params.json in {str(folder)!r} has vocab_size {params['vocab_size']}; {EMBEDDING!r} has {vocab} rows"
            )
        ffn = _matrix(self.parts[0], "layers.0.feed_forward.w1.weight")[0] * len(self.parts)
        if params.get("hidden_dim", ffn) != ffn:
            raise CheckpointError(
                f"params.json in {str(folder)!r} has hidden_dim {params['hidden_dim']}; w1 of the first layer "
                f"has {ffn} rows"
            )
        _check_parts(self.parts, Llama.from_params(params, vocab, ffn, tied=False).weights(self.split))
        self.llama = Llama.from_params(params, vocab, ffn, _tied(self.parts, self.split))
        self.stated_length: int | None = params.get("max_position_embeddings", params.get("max_seq_len"))

    def view(self, to: str = "interleaved", now: str = "interleaved") -> TensorView:
        """Return the tensors that a Hugging Face folder with this model would hold, each whole and by its name there.

        Args:
            to: the pairing to return the tensors in.
            now: the pairing that the weights are in.
        """
        tied = {OUTPUT} if self.llama.tied else {}
        weights = {weight.hf: weight for weight in self.llama.weights(self.split) if weight.meta not in tied}
        first = self.parts[0].tensors

        def read(name: str) -> Tensor:
            return weights[name].to_pairing(self._read(weights[name]), now, to)

        return TensorView(
            {name: TensorInfo.from_shape(first[w.meta].dtype, w.shape) for name, w in weights.items()},
            read,
            lambda name: read(name).float().numpy(),
        )

    def _read(self, weight: Weight) -> Tensor:
        """Read a whole tensor, joined from its parts, in the pairing in which it is stored."""
        if weight.split is None or len(self.parts) == 1:
            return self.parts[0].read(weight.meta)
        tensor = torch.empty(weight.shape, dtype=TORCH_DTYPES[self.parts[0].tensors[weight.meta].dtype])
        for chunk, part in zip(tensor.chunk(len(self.parts), weight.split), self.parts, strict=True):
            chunk.copy_(part.read(weight.meta))
        return tensor


class _Shards:
    """All weight files of a model in Mistral's format, read as if they were a single file."""

    def __init__(self, paths: list[Path]) -> None:
        self.path, files = paths[0], list(map(SafetensorsFile, paths))
        view = TensorView.from_files(files)
        if len(view.tensors) < sum(len(file.tensors) for file in files):
            raise CheckpointError(f"a tensor is in two files of {', '.join(path.name for path in paths)}")
        self.tensors, self.read = view.tensors, view.read


_Part = TorchFile | _Shards


def part_name(index: int) -> str:
    """Return the name of the weight file that one model-parallel process of Meta's code loads."""
    return f"consolidated.{index:02}.pth"


def _weight_file_names(folder: Path) -> tuple[list[str], bool]:
    """Return the names of the weight files in order, and whether they are in Meta's format.

    False means that they are in Mistral's.
    """
    parts = sorted(path.name for path in folder.iterdir() if re.fullmatch(r"consolidated\.\d+\.pth", path.name))
    shards = sorted(path.name for path in folder.glob("consolidated*.safetensors"))
    if not parts:
        if not shards:
            check_format(folder)
            raise CheckpointError(
                f"{str(folder)!r} holds no weights; looked for {part_name(0)} and consolidated*.safetensors"
            )
        return shards, False
    expected = [part_name(index) for index in range(len(parts))]
    missing = [name for name in expected if name not in parts]
    if missing:
        raise CheckpointError(f"{missing[0]!r} is missing in {str(folder)!r}, which has {', '.join(parts)}")
    return expected, True


def _info(part: _Part, name: str) -> TensorInfo:
    """Return the description of the tensor with this name; raise a CheckpointError if the part lacks it."""
    if name not in part.tensors:
        raise CheckpointError(f"{name!r} is missing in {str(part.path)!r}")
    return part.tensors[name]


def _matrix(part: _Part, name: str) -> tuple[int, int]:
    """Return the numbers of rows and columns of a tensor; raise a CheckpointError if it is not a matrix."""
    shape = _info(part, name).shape
    if len(shape) != 2:
        raise CheckpointError(f"{name!r} in {str(part.path)!r} has shape {shape}, not two dimensions")
    return shape[0], shape[1]


def _check_parts(parts: tuple[_Part, ...], weights: Iterable[Weight]) -> None:
    """Raise a CheckpointError unless every model-parallel part has exactly these tensors, whole or in part.

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
            names = ", ".join(map(repr, unknown[:3])) + (f", ... ({len(unknown)} in all)" if len(unknown) > 3 else "")
            raise CheckpointError(
                f"{str(part.path)!r} has tensors that a model with this params.json does not have: {names}"
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
