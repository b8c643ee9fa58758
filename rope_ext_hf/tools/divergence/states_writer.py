"""Writing of the hidden states of a perplexity run, as they are computed; see states_files.py for the files."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from rope_ext_hf.checkpoints.files.numbers import TensorInfo, tensor_bytes
from rope_ext_hf.checkpoints.files.torch_files import DTYPE_NAMES
from rope_ext_hf.checkpoints.files.weight_files import safetensors_header
from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval.spans.span_measurement import scored_parts
from rope_ext_hf.files.whole import atomic_file, check_room, disk_errors, fsync_path, read_json, write_text
from rope_ext_hf.reading.spans import EvalPlan, Pass
from rope_ext_hf.reading.through.head_losses import HeadLosses, LogitScaling
from rope_ext_hf.runs.conclusions.labels import Method
from rope_ext_hf.runs.folder.journal import GO_ON
from rope_ext_hf.tools.divergence.states_files import (
    BLOCK,
    CHECKSUM,
    DESCRIPTION,
    DTYPES,
    FOLDER,
    FORMAT,
    HEAD,
    TENSOR,
    TEXT,
    Rows,
    check_folder,
    file_name,
    first_checksum,
    head_of,
    tokens_digest,
    tokens_read,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StatesWriter:
    """Writes the hidden states of one method into a run's folder, as they are computed.

    The states of one document at one length go into a file of their own, whose name tells after `finish` that it is
    complete.

    Args:
        folder: the run's folder.
        method: `RopeMethod.to_dict` of the method, or None for the model as loaded.
        plan: the documents and spans.
        text: the digest of what the run reads, as run.json has it.
        names: the digest of the names of tokens, see `token_names`.
        dtype: the dtype of the states: "model", "float16" or "float32".
        model: the model.
        head: its head.

    Raises:
        FileError: the disk has too little room, or the folder is damaged.
        UnsupportedModelError: the model's head is more than a linear layer.
    """

    def __init__(
        self,
        folder: Path,
        method: Method,
        plan: EvalPlan,
        *,
        text: str,
        names: str,
        dtype: str,
        model: PreTrainedModel,
        head: HeadLosses,
    ) -> None:
        linear = head_of(model)
        self._folder, self._method, self._rows = folder / FOLDER, method, Rows.of(plan)
        self._hidden, self._dtype = linear.in_features, DTYPES.get(dtype, linear.weight.dtype)
        self._begun = set[tuple[int, int]]()
        self._settings = read_json(folder / "run.json")
        with disk_errors(self._folder, GO_ON):
            self._folder.mkdir(exist_ok=True)
        check_folder(self._folder)
        missing = [place for place in self._rows.counts if not (self._folder / file_name(method, *place)).exists()]
        size = sum(self._rows.counts[place] for place in missing) * self._hidden * self._dtype.itemsize
        check_room(self._folder, size, GO_ON)
        description = self._folder / DESCRIPTION
        self._format = read_json(description)["format"] if description.exists() else FORMAT
        if not description.exists():
            self._describe(plan, text, names, linear, head.scaling)

    def _describe(self, plan: EvalPlan, text: str, names: str, head: nn.Linear, scaling: LogitScaling) -> None:
        """Write the head and the text, and last the file that describes them."""
        tensors = {"prefix": torch.tensor(plan.prefix, dtype=torch.int64)}
        read = [(tokens_read(document, spans), spans) for document, spans in plan.documents]
        for item, (ids, spans) in enumerate(read):
            tensors[f"ids.{item}"] = ids
            tensors[f"spans.{item}"] = torch.tensor(spans, dtype=torch.int64)
        _write_checked(self._folder / TEXT, tensors, self._first_checksum(TEXT))
        with _weights_in_place(head):
            weights = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
            in_memory = {name: weight.detach().cpu() for name, weight in weights.items()}
            _write_checked(self._folder / HEAD, in_memory, self._first_checksum(HEAD))
        described = {
            "format": FORMAT,
            "text": text,
            "tokens": tokens_digest(plan.prefix, read),
            "names": names,
            "finishing": scaling._asdict(),
        }
        write_text(self._folder / DESCRIPTION, json.dumps(described, indent=1) + "\n")

    def put(self, item: int, one_pass: Pass, begin: int, outputs: Tensor) -> None:
        """Write the outputs of a decoder that predict some scored tokens of a pass; the same may be written again.

        Args:
            item: the number of the document.
            one_pass: the pass.
            begin: the place of the first of these tokens among those that the pass scores.
            outputs: the outputs, (tokens, hidden).

        Raises:
            FileError: the disk is full, or cannot be written to.
            MethodError: a number is too large for float16.
        """
        states = outputs.to(self._dtype)
        if self._dtype == torch.float16 and bool((states.isinf() & outputs.isfinite()).any()):
            raise MethodError(
                f"a hidden state has the number {outputs.abs().max().item():.3g}, which is too large for float16; give "
                "store_states='model' or 'float32' (--store-states model)"
            )
        states = states.cpu()
        for span, part, row in scored_parts(one_pass, begin, len(outputs)):
            self._write((item, span.length), self._rows.starts[item, span] + row, states[part])

    def _write(self, place: tuple[int, int], row: int, states: Tensor) -> None:
        path = self._part(place)
        with disk_errors(path, GO_ON):
            if place not in self._begun:
                path.unlink(missing_ok=True)  # of a run that was killed; or a link, which must not be followed
            with _opened(path, os.O_RDWR | os.O_CREAT) as file:
                if place not in self._begun:
                    file.write(self._header(place))
                    self._begun.add(place)
                file.seek(len(self._header(place)) + row * self._hidden * self._dtype.itemsize)
                file.write(tensor_bytes(states))

    def finish(self, item: int, length: int) -> None:
        """Give the file of a document and a length its name, once it is on disk; all of its states must be written."""
        place = item, length
        path = self._part(place)
        with disk_errors(path, GO_ON):
            with _opened(path, os.O_RDWR) as file:
                file.seek(len(self._header(place)))
                checksum = self._first_checksum(file_name(self._method, *place))
                while block := file.read(BLOCK):
                    checksum = zlib.crc32(block, checksum)
                file.seek(0)
                file.write(self._header(place, checksum))
                file.flush()
                os.fsync(file.fileno())
            path.replace(self._folder / file_name(self._method, *place))
            fsync_path(self._folder)
        self._begun.discard(place)

    def _first_checksum(self, name: str) -> int:
        return first_checksum(self._settings, name, self._format)

    def _part(self, place: tuple[int, int]) -> Path:
        return self._folder / f"{file_name(self._method, *place)}.part"

    def _header(self, place: tuple[int, int], checksum: int = 0) -> bytes:
        info = TensorInfo.from_shape(DTYPE_NAMES[self._dtype], (self._rows.counts[place], self._hidden))
        return safetensors_header({TENSOR: info}, {CHECKSUM: f"{checksum:08x}"})


def _opened(path: Path, flags: int) -> BinaryIO:
    """Open a file for reading and writing, without following a link."""
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    return os.fdopen(descriptor, "r+b")


def _write_checked(path: Path, tensors: Mapping[str, Tensor], checksum: int) -> None:
    """Write tensors into a safetensors file with their checksum, completely or not at all.

    `checksum`: that before the first byte, see `first_checksum`.
    """
    infos = {name: TensorInfo.from_shape(DTYPE_NAMES[x.dtype], tuple(x.shape)) for name, x in tensors.items()}
    for tensor in tensors.values():
        checksum = zlib.crc32(tensor_bytes(tensor), checksum)
    with atomic_file(path) as part, part.open("wb") as file:
        file.write(safetensors_header(infos, {CHECKSUM: f"{checksum:08x}"}))
        for tensor in tensors.values():
            file.write(tensor_bytes(tensor))


def _weights_in_place(head: nn.Linear) -> Any:
    """Return a context in which the weights of a head are there, also where accelerate keeps them elsewhere."""
    if not head.weight.is_meta:
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(head)
