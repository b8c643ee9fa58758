"""Meta's own Llama format (params.json, consolidated.NN.pth) to and from Hugging Face folders: streamed, whole or not.

    read_meta("Llama-2-13b").llama                       # params.json and what the parts say of themselves
    meta_to_hf("Llama-2-13b", "Llama-2-13b-hf")          # merges the model-parallel parts
    hf_to_meta("Llama-2-13b-hf", "again", model_parallel=2)

For Llama 1, 2, 3, 3.1 to 3.3 and Code Llama, after Meta's code (github.com/meta-llama: llama, llama/model.py;
llama-models, models/llama3/args.py, models/llama3/model.py, models/checkpoint.py) and transformers'
convert_llama_weights_to_hf.py. What params.json does not say follows from what it does say:

- max_position_embeddings: with use_scaled_rope 131072 (Llama 3.1 and later); else with rope_theta 1e6 16384 (Code
  Llama), with any other but 1e4 8192 (Llama 3); else with norm_eps 1e-5 4096 (Llama 2), with any other 2048 (Llama 1).
  Llama 1 65B says 1e-5 too: give max_position_embeddings there.
- the factor of use_scaled_rope: `rope_scaling_factor`, a key of ours that Meta's code passes over; where it is not
  given, 32 if the embeddings are tied (Llama 3.2 1B and 3B), else 8, which Meta's code has built in for all of them
  (github.com/meta-llama/llama-models/issues/241).
- rope_theta: 500000 with use_scaled_rope, else 1e4, as the code of each generation has it.
- the token ids of begin and end: 128000 and 128001 from a vocabulary of 128256 on, else 1 and 2. Chat models end turns
  with further ones, which neither params.json nor the weights name.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rope_ext_hf.checkpoint import INDEXES, ConversionReport, Source, copy_others, read_source
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.pairing import PAIRINGS, repair
from rope_ext_hf.patches.config import PAIRING_KEY, RECORD
from rope_ext_hf.patches.layouts import RotatingRows, rotating_rows
from rope_ext_hf.shards import (
    TORCH_DTYPES,
    Entry,
    SafetensorsFile,
    TorchFile,
    bytes_of,
    files_of,
    holds,
    inside,
    new_folder,
    read_json,
    write_safetensors,
)
from rope_ext_hf.verifying import compare_scores

__all__ = ["Llama", "MetaSource", "Weight", "hf_to_meta", "is_meta", "meta_to_hf", "read_meta"]

SHARD = 5_000_000_000  # bytes; transformers' own default was this for years
FLOATS = ("F64", "F32", "F16", "BF16")
LLAMA_3_VOCABULARY = 128_256

# Keys of params.json and the type of their values; null says nothing. Any other key may change the model: refused.
_PARAMS: dict[str, type] = {
    **dict.fromkeys(("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of"), int),
    **dict.fromkeys(("max_seq_len", "max_batch_size"), int),  # of a run, not of the model
    **dict.fromkeys(("norm_eps", "rope_theta", "ffn_dim_multiplier", "rope_scaling_factor"), float),
    "use_scaled_rope": bool,
}
_REQUIRED = ("dim", "n_layers", "n_heads")

# The tensors of a layer: Meta's name, Hugging Face's, shape, the dimension that parts divide (None: every part has all
# of it), the count of heads its rows rotate in.
_LAYER: tuple[tuple[str, str, tuple[str, ...], int | None, str | None], ...] = (
    ("attention.wq", "self_attn.q_proj", ("dim", "dim"), 0, "heads"),
    ("attention.wk", "self_attn.k_proj", ("kv_dim", "dim"), 0, "kv_heads"),
    ("attention.wv", "self_attn.v_proj", ("kv_dim", "dim"), 0, None),
    ("attention.wo", "self_attn.o_proj", ("dim", "dim"), 1, None),
    ("feed_forward.w1", "mlp.gate_proj", ("ffn", "dim"), 0, None),
    ("feed_forward.w2", "mlp.down_proj", ("dim", "ffn"), 1, None),
    ("feed_forward.w3", "mlp.up_proj", ("ffn", "dim"), 0, None),
    ("attention_norm", "input_layernorm", ("dim",), None, None),
    ("ffn_norm", "post_attention_layernorm", ("dim",), None, None),
)
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
HF_EMBEDDING, HF_OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_IGNORED = "rope.freqs"  # Llama 1 and 2 saved their frequencies; rope_theta says the same

# Of a Hugging Face config: what Meta's code has no setting for, and the one value it works with.
_MUST: tuple[tuple[str, Any], ...] = (
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("mlp_bias", False),
    ("quantization_config", None),
)
_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# multiple_of and ffn_dim_multiplier of the published models: 1 and 2; 3.2 1B; 2 and 3 70B; 3.1 405B; 3 8B.
_FFN: tuple[tuple[int, float | None], ...] = ((256, None), (256, 1.5), (4096, 1.3), (4096, 1.2), (1024, 1.3))


@dataclass(frozen=True)
class Weight:
    """One tensor in both formats.

    Attributes:
        meta, hf: its names.
        shape: whole.
        split: the dimension that model-parallel parts divide; None: each of them has all of it.
        heads: that its rows rotate in; None: they do not.
    """

    meta: str
    hf: str
    shape: tuple[int, ...]
    split: int | None
    heads: int | None

    def part_shape(self, parts: int) -> tuple[int, ...]:
        return tuple(size // parts if dim == self.split else size for dim, size in enumerate(self.shape))

    def part(self, tensor: Tensor, index: int, parts: int) -> Tensor:
        """The part of the whole tensor that a model-parallel part has."""
        return tensor if self.split is None else tensor.chunk(parts, self.split)[index]


@dataclass(frozen=True, kw_only=True)
class Llama:
    """What both formats say of a model, in the words of neither.

    Attributes:
        eps: of its norms.
        theta: base of its rotary embedding.
        factor: of Llama 3.1's scaling; None: not scaled.
        tied: its output weights are its embeddings.
    """

    dim: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    eps: float
    theta: float
    factor: float | None
    tied: bool

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def kv_dim(self) -> int:
        return self.head_dim * self.kv_heads

    @property
    def generation(self) -> tuple[int, int]:
        """Its trained length, and the dimension of the embeddings that the code of its generation divides."""
        if self.factor is not None:
            return 131_072, 0
        if self.theta == 1e6:
            return 16_384, 1
        if self.theta != 1e4:
            return 8_192, 0
        return (4_096, 1) if self.eps == 1e-5 else (2_048, 1)

    def weights(self, split: int) -> Iterator[Weight]:
        """Every tensor, the output weights even if tied; parts divide dimension `split` of the embeddings."""
        yield Weight(EMBEDDING, HF_EMBEDDING, (self.vocab, self.dim), split, None)
        for layer in range(self.layers):
            for meta, hf, shape, dim, heads in _LAYER:
                yield Weight(
                    f"layers.{layer}.{meta}.weight",
                    f"model.layers.{layer}.{hf}.weight",
                    tuple(getattr(self, size) for size in shape),
                    dim,
                    getattr(self, heads) if heads else None,
                )
        yield Weight("norm.weight", "model.norm.weight", (self.dim,), None, None)
        yield Weight(OUTPUT, HF_EMBEDDING if self.tied else HF_OUTPUT, (self.vocab, self.dim), 0, None)

    def params(self) -> dict[str, Any]:
        """As params.json, without the keys that the code of its generation would not know."""
        multiple_of, multiplier = _ffn_numbers(self.dim, self.ffn)
        scaled = self.factor is not None
        known = {
            "dim": self.dim,
            "n_layers": self.layers,
            "n_heads": self.heads,
            "n_kv_heads": self.kv_heads if self.kv_heads != self.heads else None,
            "vocab_size": self.vocab,
            "multiple_of": multiple_of,
            "ffn_dim_multiplier": multiplier,
            "norm_eps": self.eps,
            # The code of Llama 1 and 2 takes no such key.
            "rope_theta": self.theta if scaled or self.theta != 1e4 else None,
            "use_scaled_rope": scaled or None,
            "rope_scaling_factor": self.factor if self.factor != _usual_factor(self.tied) else None,
        }
        return {key: value for key, value in known.items() if value is not None}

    def config(self, to: str, dtype: torch.dtype, max_position_embeddings: int | None) -> Any:
        """As a Hugging Face config whose weights are in this pairing."""
        from transformers import LlamaConfig

        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.theta}
        if self.factor is not None:
            rope |= {"rope_type": "llama3", "factor": self.factor} | _SCALING
        begin, end = (128_000, 128_001) if self.vocab >= LLAMA_3_VOCABULARY else (1, 2)
        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            vocab_size=self.vocab,
            hidden_size=self.dim,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            rms_norm_eps=self.eps,
            max_position_embeddings=max_position_embeddings or self.generation[0],
            rope_parameters=rope,
            tie_word_embeddings=self.tied,
            bos_token_id=begin,
            eos_token_id=end,
            dtype=str(dtype).removeprefix("torch."),
            **{PAIRING_KEY: to},
        )


def _usual_factor(tied: bool) -> float:
    return 32.0 if tied else 8.0


def _ffn_size(dim: int, multiple_of: int, multiplier: float | None) -> int:
    """Meta's formula (FeedForward in llama3/model.py)."""
    hidden = int(2 * 4 * dim / 3)
    if multiplier is not None:
        hidden = int(multiplier * hidden)
    return multiple_of * ((hidden + multiple_of - 1) // multiple_of)


def _ffn_numbers(dim: int, ffn: int) -> tuple[int, float | None]:
    """Numbers for which Meta's formula gives this size; those of a published model if they do, else short ones."""
    multiple_of = math.gcd(ffn, 256)
    exact = (ffn + 0.5) / int(2 * 4 * dim / 3)  # int() takes the half away again, whatever the product is rounded to
    found = ((multiple_of, round(exact, digits)) for digits in range(1, 17))
    return next(pair for pair in (*_FFN, *found, (multiple_of, exact)) if _ffn_size(dim, *pair) == ffn)


@dataclass(frozen=True)
class MetaSource:
    """A folder in Meta's format, its parts mapped.

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

    def entry(self, weight: Weight) -> Entry:
        dtype = self.parts[0].tensors[weight.meta].dtype
        return Entry(dtype, weight.shape, 0, math.prod(weight.shape) * TORCH_DTYPES[dtype].itemsize)

    def read(self, weight: Weight) -> Tensor:
        """The whole tensor, its rows interleaved where they rotate."""
        parts = [part.read(weight.meta) for part in self.parts]
        return parts[0] if weight.split is None or len(parts) == 1 else torch.cat(parts, weight.split)

    def view(self) -> _View:
        weights = {weight.hf: weight for weight in self.weights()}
        return _View({name: self.entry(w) for name, w in weights.items()}, lambda name: self.read(weights[name]))


@dataclass(frozen=True)
class _View:
    """Whole tensors by their Hugging Face names, wherever they are; looks like a weight file."""

    tensors: Mapping[str, Entry]
    read: Callable[[str], Tensor]

    @classmethod
    def of(cls, files: Iterable[SafetensorsFile | TorchFile]) -> _View:
        where = {name: file for file in files for name in file.tensors}
        return cls({name: file.tensors[name] for name, file in where.items()}, lambda name: where[name].read(name))


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


def is_meta(folder: Path) -> bool:
    """Whether a folder is in this format; a Hugging Face folder may have a params.json beside it (Mistral's)."""
    here = (folder / "params.json").is_file()
    return here and (not (folder / "config.json").is_file() or any(folder.glob("consolidated.*.pth")))


def read_meta(folder: str | Path) -> MetaSource:
    """Read params.json, map the parts and check all of it; of the weights only norms and tied embeddings are read.

    Raises:
        CheckpointError: anything missing, unknown or contradictory, naming it.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"no such folder: {str(folder)!r}")
    files_of(folder)
    params = _read_params(inside(folder, "params.json"))
    parts = _read_parts(folder)
    count = len(parts)
    dim, heads = params["dim"], params["n_heads"]
    kv_heads = params.get("n_kv_heads", heads)
    if dim % heads or (dim // heads) % 2 or heads % kv_heads:
        raise CheckpointError(
            f"params.json in {str(folder)!r}: dim {dim}, n_heads {heads} and n_kv_heads {kv_heads} do not fit together"
        )
    if kv_heads % count:
        raise CheckpointError(f"{str(folder)!r}: {kv_heads} key heads cannot be divided among {count} parts")
    rows, columns = _matrix(parts[0], EMBEDDING)
    split = 0 if columns == dim else 1
    vocab = rows * count if split == 0 else rows
    if params.get("vocab_size", -1) not in (-1, vocab):
        raise CheckpointError(
            f"params.json in {str(folder)!r} says vocab_size {params['vocab_size']}; {EMBEDDING!r} has {vocab} rows"
        )
    scaled = params.get("use_scaled_rope", False)
    if "rope_scaling_factor" in params and not scaled:
        raise CheckpointError(f"params.json in {str(folder)!r} says rope_scaling_factor, but not use_scaled_rope")
    llama = Llama(
        dim=dim,
        layers=params["n_layers"],
        heads=heads,
        kv_heads=kv_heads,
        ffn=_matrix(parts[0], "layers.0.feed_forward.w1.weight")[0] * count,
        vocab=vocab,
        eps=float(params.get("norm_eps", 1e-5)),
        theta=float(params.get("rope_theta", 5e5 if scaled else 1e4)),
        factor=None,
        tied=False,
    )
    _check_parts(parts, llama.weights(split))
    tied = _tied(parts, split)
    factor = float(params.get("rope_scaling_factor", _usual_factor(tied))) if scaled else None
    return MetaSource(folder, replace(llama, factor=factor, tied=tied), parts, split)


def _read_params(path: Path) -> dict[str, Any]:
    found = read_json(path)
    if isinstance(found.get("model"), dict):  # as some releases nest them
        found = found["model"]
    params = {key: value for key, value in found.items() if value is not None}
    where = f"params.json in {str(path.parent)!r}"
    if unknown := sorted(set(params) - set(_PARAMS)):
        raise CheckpointError(
            f"{where} says {unknown[0]} = {params[unknown[0]]!r}, which no Llama from 1 to 3.3 for text has; "
            f"known: {', '.join(_PARAMS)}"
        )
    for key, value in params.items():
        kind = _PARAMS[key]
        unsaid = key == "vocab_size" and value == -1
        number = type(value) in (int, kind) and math.isfinite(value) and (value > 0 or unsaid)
        if not (type(value) is bool if kind is bool else number):
            raise CheckpointError(f"{where}: {key} is {value!r}, not a {'bool' if kind is bool else 'positive number'}")
    if missing := [key for key in _REQUIRED if key not in params]:
        raise CheckpointError(f"{where} does not say {missing[0]}")
    return params


def _read_parts(folder: Path) -> tuple[TorchFile, ...]:
    names = sorted(p.name for p in folder.iterdir() if re.fullmatch(r"consolidated\.\d+\.pth", p.name))
    if not names:
        raise CheckpointError(f"{str(folder)!r} holds no weights; looked for {_part_name(0)}")
    expected = [_part_name(i) for i in range(len(names))]
    if missing := [name for name in expected if name not in names]:
        raise CheckpointError(f"{missing[0]!r} is missing in {str(folder)!r}, which has {', '.join(names)}")
    return tuple(TorchFile(inside(folder, name)) for name in expected)


def _part_name(index: int) -> str:
    return f"consolidated.{index:02}.pth"


def _matrix(part: TorchFile, name: str) -> tuple[int, int]:
    entry = part.tensors.get(name)
    if entry is None:
        raise CheckpointError(f"{name!r} is missing in {str(part.path)!r}")
    if len(entry.shape) != 2:
        raise CheckpointError(f"{name!r} in {str(part.path)!r} has shape {entry.shape}, not two dimensions")
    return entry.shape[0], entry.shape[1]


def _check_parts(parts: tuple[TorchFile, ...], weights: Iterable[Weight]) -> None:
    """Every tensor in every part, of the right shape and of one dtype, copies equal, and nothing else."""
    known, optional = {_IGNORED}, not any(OUTPUT in part.tensors for part in parts)
    for weight in weights:  # one by one: params.json may claim any number of layers
        known.add(weight.meta)
        if weight.meta == OUTPUT and optional:
            continue
        for part in parts:
            where = f"{weight.meta!r} in {str(part.path)!r}"
            entry = part.tensors.get(weight.meta)
            if entry is None:
                raise CheckpointError(f"{weight.meta!r} is missing in {str(part.path)!r}")
            if entry.shape != weight.part_shape(len(parts)):
                raise CheckpointError(
                    f"{where} has shape {entry.shape}; by params.json, the embeddings, w1 of the first layer and "
                    f"{len(parts)} parts it should have {weight.part_shape(len(parts))}"
                )
            first = parts[0].tensors[weight.meta]
            if entry.dtype not in FLOATS or entry.dtype != first.dtype:
                raise CheckpointError(
                    f"{where} is {entry.dtype}"
                    + (f", in the first part {first.dtype}" if part is not parts[0] else "")
                    + f"; known: {', '.join(FLOATS)}, one for all parts"
                )
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
    embeddings = [part.read(EMBEDDING) for part in parts]
    outputs = [part.read(OUTPUT) for part in parts]
    if split == 0 or len(parts) == 1:
        return all(torch.equal(output, embedding) for output, embedding in zip(outputs, embeddings, strict=True))
    return all(  # parts of the one are rows, of the other columns: block by block
        torch.equal(output.chunk(len(parts), 1)[j], embedding.chunk(len(parts), 0)[i])
        for i, output in enumerate(outputs)
        for j, embedding in enumerate(embeddings)
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
        dst: a new folder. Tokenizer files and whatever else there is come along as they are.
        to: "half", which transformers runs, or "interleaved", which moves no row.
        source: where given, "interleaved": weights in Meta's format are.
        max_position_embeddings: default: by generation, see above.
        max_shard_bytes: of a weight file; a larger tensor gets one of its own.
        resume: go on after an interruption; finished files are compared with what they should be.
        verify: before the folder gets its name, compare it with the source, see `convert_checkpoint`.
        progress: called with bytes written and bytes in all.

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
    _check_destination(dst, Path(src).expanduser())
    found = read_meta(src)
    weights = {weight.hf: weight for weight in found.weights()}
    entries = {name: found.entry(weight) for name, weight in weights.items()}

    def read(name: str) -> Tensor:
        tensor, heads = found.read(weights[name]), weights[name].heads
        return repair(tensor, to, heads=heads) if heads and to == "half" else tensor

    count = _Count(sum(entry.end for entry in entries.values()), progress)
    plan = {"to": to, "max_shard_bytes": max_shard_bytes, "files": _stamps(found.parts)}
    verified = None
    with new_folder(dst, plan, count.total, resume=resume) as unfinished:
        shards = _shards(entries, max_shard_bytes)
        for name, shard in shards.items():
            if holds(unfinished / name, shard, read):
                count.advance(sum(entry.end for entry in shard.values()))
                continue
            part = unfinished / f"{name}.part"
            write_safetensors(part, shard, read, {"format": "pt"}, count.advance)
            part.replace(unfinished / name)
        known = [*(part.path.name for part in found.parts), "params.json", "config.json", "checklist.chk"]
        left_behind = copy_others(found.folder, unfinished, [*known, *(index for index, _ in INDEXES)])
        if len(shards) > 1:
            where = {tensor: name for name, shard in shards.items() for tensor in shard}
            index = {"metadata": {"total_size": count.total}, "weight_map": where}
            _write_json(unfinished / "model.safetensors.index.json", index)
        dtype = TORCH_DTYPES[entries[HF_EMBEDDING].dtype]
        config = found.llama.config(to, dtype, max_position_embeddings)
        config.save_pretrained(unfinished)
        if verify:
            rows = rotating_rows(config, found.llama.head_dim)
            written = _View.of(SafetensorsFile(unfinished / name) for name in shards)
            verified = _compare(rows, found.view(), written, "interleaved", to)
    if to != "half":
        warnings.warn(
            f"{str(dst)!r} holds {to} weights, which transformers' 'llama' does not run; for it, convert {str(src)!r} "
            "to half",
            stacklevel=2,
        )
    return ConversionReport(
        path=str(dst),
        source="meta",
        to=to,
        converted=2 * found.llama.layers if to == "half" else 0,
        tensors=len(entries),
        bytes=count.total,
        left_behind=left_behind,
        runs=to == "half",
        verified=verified,
    )


def _check_destination(dst: Path, folder: Path) -> None:
    if os.path.lexists(dst):
        raise CheckpointError(f"{str(dst)!r} exists already; give a new folder")
    if dst.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(f"{str(dst)!r} lies in the source, which stays as it is; give a folder elsewhere")


def _shards(entries: Mapping[str, Entry], most: int) -> dict[str, dict[str, Entry]]:
    """The tensors of each weight file, by its name, in order."""
    shards: list[dict[str, Entry]] = [{}]
    room = most
    for name, entry in entries.items():
        if shards[-1] and entry.end > room:
            shards.append({})
            room = most
        shards[-1][name] = entry
        room -= entry.end
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}


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
        src: a folder or Hub id: safetensors or .bin, sharded or not.
        dst: a new folder. Tokenizer files and whatever else there is come along, config.json and index do not.
        model_parallel: parts to write; each is for one process of Meta's code.
        source: the pairing of the weights now; default: what the config says (`rope_pairing`), else half.
        resume: go on after an interruption; finished parts are compared with what they should be.
        verify: before the folder gets its name, compare it with the source, see `convert_checkpoint`.
        progress: called with bytes written and bytes in all.

    Raises:
        CheckpointError: what Meta's format cannot say, with the reason (before anything is written); a destination
            that exists, a full disk.
        UnsupportedModelError: a family that nothing is known of.

    While parts are put together, the disk must have room for one more. What Meta's format has no place for
    (max_position_embeddings, a factor of Llama 3.1's scaling that its code has not built in) is warned of.
    """
    dst = Path(dst)
    if source not in (None, *PAIRINGS):
        raise CheckpointError(f"pairings are half and interleaved, got {source!r}")
    _check_destination(dst, Path(src).expanduser())
    if is_meta(Path(src).expanduser()):
        raise CheckpointError(f"{str(src)!r} is in Meta's format already")
    found = read_source(src, revision=revision)
    llama = _from_config(found)
    weights = tuple(llama.weights(llama.generation[1]))
    where = _find(found, llama, weights)
    _check_model_parallel(llama, model_parallel)
    now = source or found.pairing or "half"

    def read(weight: Weight) -> Tensor:
        tensor = where[weight.hf].read(weight.hf)
        return repair(tensor, "interleaved", heads=weight.heads) if weight.heads and now == "half" else tensor

    shared = llama.tied and (model_parallel == 1 or llama.generation[1] == 0)
    parts = _Parts(weights, read, _part_entries(weights, where, model_parallel), model_parallel, shared)
    count = _Count(model_parallel * parts.size, progress)
    plan = {"to": "meta", "parts": model_parallel, "source": now, "files": _stamps(found.files.values())}
    verified = None
    with new_folder(dst, plan, count.total + parts.size, resume=resume) as unfinished:
        todo = [i for i in range(model_parallel) if not parts.done(unfinished, i)]
        count.advance((model_parallel - len(todo)) * parts.size)
        parts.write(unfinished, todo, count.advance)
        known = [*found.files, *(index for index, _ in INDEXES), "config.json", "params.json"]
        left_behind = copy_others(found.folder, unfinished, known)
        _write_json(unfinished / "params.json", llama.params())
        if verify:
            verified = _compare(
                found.rows, _View.of(found.files.values()), read_meta(unfinished).view(), now, "interleaved"
            )
    _warn_of_losses(found, llama)
    return ConversionReport(
        path=str(dst),
        source=now,
        to="meta",
        converted=2 * llama.layers if now == "half" else 0,
        tensors=len(weights),
        bytes=count.total,
        left_behind=left_behind,
        runs=False,
        verified=verified,
    )


def _from_config(found: Source) -> Llama:
    """The model of a Hugging Face folder.

    Raises:
        CheckpointError: a config that Meta's format cannot say.
    """
    config = found.config
    start = f"{str(found.folder)!r} cannot be written in Meta's format: "
    if not found.expected:
        raise CheckpointError(f"{start}it is an adapter; merge it into its model first")
    if RECORD in read_json(found.folder / "config.json"):
        raise CheckpointError(f"{start}it was saved with a patch; unpatch the model and save that")
    if config.model_type != "llama":
        raise CheckpointError(f"{start}it is a {config.model_type!r}, and Meta's code runs 'llama' alone")
    heads, rope = config.num_attention_heads, config.rope_parameters
    rope_type = rope.get("rope_type", "default")
    rules: list[tuple[str, Any, tuple[Any, ...]]] = [
        *((key, getattr(config, key, value), (value,)) for key, value in _MUST),
        ("head_dim", config.head_dim, (config.hidden_size // heads,)),
        ("rope_type", rope_type, ("default", "llama3")),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,)),
        *((key, rope.get(key), (value,)) for key, value in _SCALING.items() if rope_type == "llama3"),
    ]
    for key, value, allowed in rules:
        if value not in allowed:
            raise CheckpointError(
                f"{start}{key} is {value!r}, and Meta's code runs {' and '.join(map(repr, allowed))} alone"
            )
    return Llama(
        dim=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        ffn=config.intermediate_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
        theta=float(rope["rope_theta"]),
        factor=float(rope["factor"]) if rope_type == "llama3" else None,
        tied=config.tie_word_embeddings,
    )


def _find(found: Source, llama: Llama, weights: tuple[Weight, ...]) -> dict[str, SafetensorsFile | TorchFile]:
    """The file of each tensor.

    Raises:
        CheckpointError: one that is missing, unknown, or disagrees with the config.
    """
    where = {name: file for file in found.files.values() for name in file.tensors}
    needed = {weight.hf: weight.shape for weight in weights}
    for name, shape in needed.items():
        if name not in where:
            raise CheckpointError(f"{name!r} is missing in {str(found.folder)!r}")
        entry = where[name].tensors[name]
        if entry.shape != shape or entry.dtype not in FLOATS:
            raise CheckpointError(
                f"{name!r} in {str(found.folder)!r} is {entry.dtype} of shape {entry.shape}; by the config it should "
                f"have shape {shape}, and be one of {', '.join(FLOATS)}"
            )
    for name, file in where.items():
        if name == HF_OUTPUT and llama.tied:
            if not torch.equal(file.read(name), where[HF_EMBEDDING].read(HF_EMBEDDING)):
                raise CheckpointError(
                    f"{name!r} in {str(found.folder)!r} is not {HF_EMBEDDING!r}, though tie_word_embeddings in "
                    "config.json says so; correct the config"
                )
        elif name not in needed and not name.endswith(".rotary_emb.inv_freq"):  # old checkpoints hold frequencies
            raise CheckpointError(f"{name!r} in {str(found.folder)!r} has no place in Meta's format")
    return where


def _check_model_parallel(llama: Llama, parts: int) -> None:
    if type(parts) is not int or parts < 1:
        raise CheckpointError(f"model_parallel must be a positive whole number, got {parts!r}")
    for size in ("kv_heads", "ffn", "vocab"):  # heads and dim are multiples of kv_heads
        if getattr(llama, size) % parts:
            raise CheckpointError(f"{size} {getattr(llama, size)} cannot be divided among {parts} parts")


def _part_entries(
    weights: tuple[Weight, ...], where: Mapping[str, SafetensorsFile | TorchFile], parts: int
) -> dict[str, Entry]:
    entries = {}
    for weight in weights:
        dtype, shape = where[weight.hf].tensors[weight.hf].dtype, weight.part_shape(parts)
        entries[weight.meta] = Entry(dtype, shape, 0, math.prod(shape) * TORCH_DTYPES[dtype].itemsize)
    return entries


@dataclass(frozen=True)
class _Parts:
    """The model-parallel parts to be written; all are of one size.

    torch.save wants whole tensors. So that they need not be in memory, their bytes go into a file beside the part
    first; that file is mapped, torch writes from the mapping, and the system drops its pages as it likes.

    Attributes:
        entries: the tensors of a part.
        shared: the output weights are the embeddings' own memory, which torch then writes once.
    """

    weights: tuple[Weight, ...]
    read: Callable[[Weight], Tensor]
    entries: dict[str, Entry]
    count: int
    shared: bool

    @property
    def size(self) -> int:
        return sum(entry.end for entry in self._own().values())

    def _own(self) -> dict[str, Entry]:
        return {name: entry for name, entry in self.entries.items() if not (self.shared and name == OUTPUT)}

    def done(self, folder: Path, index: int) -> bool:
        by_name = {weight.meta: weight for weight in self.weights}
        return holds(
            folder / _part_name(index),
            self.entries,
            lambda name: by_name[name].part(self.read(by_name[name]), index, self.count),
        )

    def write(self, folder: Path, todo: list[int], progress: Callable[[int], None]) -> None:
        """These parts; every tensor is read once."""
        own, raw = self._own(), [folder / f"{_part_name(index)}.raw" for index in todo]
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in raw]
            for weight in (weight for weight in self.weights if weight.meta in own):
                tensor = self.read(weight)
                for index, file in zip(todo, files, strict=True):
                    progress(file.write(bytes_of(weight.part(tensor, index, self.count))))
        for index, path in zip(todo, raw, strict=True):
            part = folder / f"{_part_name(index)}.part"
            with part.open("wb") as file:
                torch.save(self._mapped(path), file)  # an open file: what the disk refuses stays an OSError
            part.replace(folder / _part_name(index))
            path.unlink()

    def _mapped(self, path: Path) -> dict[str, Tensor]:
        tensors, at = {}, 0
        for name, entry in self._own().items():
            data = np.memmap(path, np.uint8, "c", at, (entry.end,))
            tensors[name] = torch.from_numpy(data).view(TORCH_DTYPES[entry.dtype]).view(entry.shape)
            at += entry.end
        return tensors | ({OUTPUT: tensors[EMBEDDING]} if self.shared else {})


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


@dataclass
class _Count:
    """Bytes written so far."""

    total: int
    progress: Callable[[int, int], None] | None
    done: int = 0

    def advance(self, count: int) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total)


def _stamps(files: Iterable[SafetensorsFile | TorchFile]) -> dict[str, tuple[int, int]]:
    return {str(file.path.resolve()): (file.path.stat().st_size, file.path.stat().st_mtime_ns) for file in files}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
