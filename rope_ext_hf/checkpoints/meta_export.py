"""A Llama in Hugging Face's format to Meta's own (params.json, consolidated.NN.pth), streamed and atomic.

MetaExport(read_source(Path("Llama-2-13b-hf")), Path("Llama-2-13b"), model_parallel=2).run()
"""

from __future__ import annotations

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
from rope_ext_hf.checkpoints.meta_source import part_name, read_meta
from rope_ext_hf.checkpoints.report import Conversion, ConversionReport
from rope_ext_hf.checkpoints.source import Source, copy_other_files
from rope_ext_hf.checkpoints.torch_files import open_writer
from rope_ext_hf.checkpoints.verification import compare_views
from rope_ext_hf.checkpoints.weight_files import (
    TORCH_DTYPES,
    TensorInfo,
    TensorView,
    TorchFile,
    file_matches,
    size_of,
    tensor_bytes,
)
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.files import Progress, atomic_file, copy_mode, read_json, write_json
from rope_ext_hf.patches.config import PATCH_KEY


class MetaExport(Conversion):
    """A Llama in Meta's format.

    Args:
        source: the model, from `read_source`.
        dst: see `convert_checkpoint`.
        model_parallel: parts to write, each for one process of Meta's code.
        source_pairing: pairing of the weights now; default: the config's `rope_pairing`, else half.

    Raises:
        CheckpointError: a model that Meta's format cannot express, with the reason.

    All parts are written at the same time, so an interruption costs all of them. A warning names what Meta's format
    has no place for: max_position_embeddings, and a factor of Llama 3.1's scaling that its code does not have.
    """

    def __init__(
        self, source: Source, dst: Path, *, model_parallel: int = 1, source_pairing: str | None = None
    ) -> None:
        self.source, self.llama = source, _check_representable(source)
        weights = tuple(self.llama.weights(self.llama.generation.split))
        _check_tensors(source.view, source.folder, self.llama, weights)
        self.now = source_pairing or source.pairing or "half"
        self.count = count = _check_count(model_parallel, self.llama)
        self.weights = {weight.meta: weight for weight in weights}
        dtypes = {weight.meta: source.view.tensors[weight.hf].dtype for weight in weights}
        self.infos = {w.meta: TensorInfo.from_shape(dtypes[w.meta], w.part_shape(count)) for w in weights}
        # Output weights that equal the embeddings and are divided alike share their storage, which torch writes once.
        alike = count == 1 or self.weights[EMBEDDING].split == self.weights[OUTPUT].split
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
            tensors=len(weights),
            bytes=count * size_of(self.own),
            loads_natively=False,
            notes=(*self.warnings, *_theta_note(self.llama)),
        )

    def write(self, staging: Path, progress: Progress) -> tuple[str, ...]:
        self._write_parts(staging, progress)
        for index in range(self.count):
            copy_mode(next(iter(self.source.files.values())).path, staging / part_name(index))
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

    def _write_parts(self, folder: Path, progress: Progress) -> None:
        """Write the parts that do not exist or differ from what they should be, all at the same time."""
        todo = [i for i in range(self.count) if not self._is_written(folder / part_name(i), i)]
        progress.advance((self.count - len(todo)) * size_of(self.own))
        tensors = {name: (TORCH_DTYPES[info.dtype], info.shape) for name, info in self.own.items()}
        with ExitStack() as stack:
            paths = [stack.enter_context(atomic_file(folder / part_name(i), fsync=False)) for i in todo]
            writes = [stack.enter_context(open_writer(path, tensors, self.same)) for path in paths]
            for name, info in self.own.items():
                for tensor, write in zip(self._read(name, todo), writes, strict=True):
                    write(name, tensor_bytes(tensor))
                    progress.advance(info.size)


def _check_representable(source: Source) -> Llama:
    """Return the model of a Hugging Face folder, if Meta's format can express it."""
    where = f"{str(source.folder)!r} cannot be written in Meta's format:"
    if source.is_adapter:
        raise CheckpointError(f"{where} it is an adapter; merge it into its model first")
    if PATCH_KEY in read_json(source.folder / "config.json"):
        raise CheckpointError(f"{where} it was saved with a patch; unpatch the model and save that")
    return Llama.from_config(source.config, where)


def _check_tensors(view: TensorView, folder: Path, llama: Llama, weights: tuple[Weight, ...]) -> None:
    """Check that a Hugging Face folder has these tensors, as the config describes them, and no others."""
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


def _check_count(parts: int, llama: Llama) -> int:
    """Return the number of parts, if the model can be divided into that many."""
    whole("model_parallel", parts, error=CheckpointError)
    for size in ("kv_heads", "ffn", "vocab"):  # heads and dim are multiples of kv_heads
        if getattr(llama, size) % parts:
            raise CheckpointError(f"{size} {getattr(llama, size)} cannot be divided among {parts} parts")
    return parts


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
