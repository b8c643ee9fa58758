"""A folder in Meta's own Llama format (params.json, consolidated.NN.pth), checked once."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rope_ext_hf.checkpoints.meta_params import EMBEDDING, FREQUENCIES, META_DTYPES, OUTPUT, Llama, Weight, read_params
from rope_ext_hf.checkpoints.source import Source, read_source
from rope_ext_hf.checkpoints.weight_files import TORCH_DTYPES, TensorInfo, TensorView, TorchFile
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import FileStamps, file_stamps, list_files, resolve_inside
from rope_ext_hf.hub import model_folder


@dataclass(frozen=True)
class MetaSource:
    """A folder in Meta's format, read as far as the headers."""

    folder: Path
    llama: Llama
    parts: tuple[TorchFile, ...]  # its files, in order: each holds the tensors of one model-parallel process
    split: int  # the dimension of the embeddings that the parts divide
    stated_length: int | None  # the context length in tokens by params.json, which usually has none
    inputs: FileStamps  # stamps of params.json and the parts, taken before they were read

    def view(self, to: str = "interleaved") -> TensorView:
        """The whole tensors that a Hugging Face folder of this model holds, by their names there, in this pairing."""
        tied = {OUTPUT} if self.llama.tied else {}
        weights = {weight.hf: weight for weight in self.llama.weights(self.split) if weight.meta not in tied}
        first = self.parts[0].tensors
        return TensorView(
            {name: TensorInfo.from_shape(first[w.meta].dtype, w.shape) for name, w in weights.items()},
            lambda name: weights[name].to_pairing(self._read(weights[name]), "interleaved", to),
        )

    def _read(self, weight: Weight) -> Tensor:
        """Read a whole tensor; rows that rotate are interleaved."""
        if weight.split is None or len(self.parts) == 1:
            return self.parts[0].read(weight.meta)
        tensor = torch.empty(weight.shape, dtype=TORCH_DTYPES[self.parts[0].tensors[weight.meta].dtype])
        for chunk, part in zip(tensor.chunk(len(self.parts), weight.split), self.parts, strict=True):
            chunk.copy_(part.read(weight.meta))
        return tensor


def open_checkpoint(
    path: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> Source | MetaSource:
    """Open a folder or Hub repository, in Meta's format or Hugging Face's."""
    folder = model_folder(path, revision=revision)
    return read_meta(folder) if _is_meta(folder) else read_source(folder, trust_remote_code=trust_remote_code)


def _is_meta(folder: Path) -> bool:
    """Whether a folder is in Meta's format; a Hugging Face folder may have a params.json too (Mistral's do)."""
    has_params, has_config = ((folder / name).is_file() for name in ("params.json", "config.json"))
    has_parts = any(folder.glob("consolidated.*.pth"))
    return (has_params and has_parts) or ((has_params or has_parts) and not has_config)


def read_meta(folder: Path) -> MetaSource:
    """Read params.json and the headers of the parts; of the weights only norms and embeddings, which are compared."""
    paths = [resolve_inside(folder, "params.json"), *_part_paths(folder)]
    list_files(folder)  # refuses links that lead out of the folder
    inputs = file_stamps(paths)
    params = read_params(paths[0])
    parts = tuple(map(TorchFile, paths[1:]))
    if params["n_kv_heads"] % len(parts):
        raise CheckpointError(
            f"{str(folder)!r}: {params['n_kv_heads']} key heads cannot be divided among {len(parts)} parts"
        )
    rows, columns = _matrix(parts[0], EMBEDDING)
    split = 0 if columns == params["dim"] else 1
    vocab = rows if split else rows * len(parts)
    if params["vocab_size"] not in (-1, vocab):
        raise CheckpointError(
            f"params.json in {str(folder)!r} has vocab_size {params['vocab_size']}; {EMBEDDING!r} has {vocab} rows"
        )
    ffn = _matrix(parts[0], "layers.0.feed_forward.w1.weight")[0] * len(parts)
    _check_parts(parts, Llama.from_params(params, vocab, ffn, tied=False).weights(split))
    llama = Llama.from_params(params, vocab, ffn, _tied(parts, split))
    return MetaSource(folder, llama, parts, split, params.get("max_seq_len"), inputs)


def _part_paths(folder: Path) -> list[Path]:
    names = sorted(p.name for p in folder.iterdir() if re.fullmatch(r"consolidated\.\d+\.pth", p.name))
    if not names:
        raise CheckpointError(f"{str(folder)!r} holds no weights; looked for {part_name(0)}")
    expected = [part_name(i) for i in range(len(names))]
    if missing := [name for name in expected if name not in names]:
        raise CheckpointError(f"{missing[0]!r} is missing in {str(folder)!r}, which has {', '.join(names)}")
    return [resolve_inside(folder, name) for name in expected]


def part_name(index: int) -> str:
    return f"consolidated.{index:02}.pth"


def _info(part: TorchFile, name: str) -> TensorInfo:
    if name not in part.tensors:
        raise CheckpointError(f"{name!r} is missing in {str(part.path)!r}")
    return part.tensors[name]


def _matrix(part: TorchFile, name: str) -> tuple[int, int]:
    shape = _info(part, name).shape
    if len(shape) != 2:
        raise CheckpointError(f"{name!r} in {str(part.path)!r} has shape {shape}, not two dimensions")
    return shape[0], shape[1]


def _check_parts(parts: tuple[TorchFile, ...], weights: Iterable[Weight]) -> None:
    """Check that every part has every tensor, in the right shape and one dtype, copies are equal, and nothing else."""
    known, optional = {FREQUENCIES}, not any(OUTPUT in part.tensors for part in parts)
    for weight in weights:  # one by one: params.json may claim any number of layers
        known.add(weight.meta)
        if weight.meta == OUTPUT and optional:
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
        if unknown := sorted(set(part.tensors) - known):
            raise CheckpointError(
                f"{unknown[0]!r} in {str(part.path)!r} does not belong to a Llama with these params.json; "
                f"{len(unknown)} such tensors"
            )


def _tied(parts: tuple[TorchFile, ...], split: int) -> bool:
    """Whether the output weights are the embeddings, or are not stored at all."""
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
