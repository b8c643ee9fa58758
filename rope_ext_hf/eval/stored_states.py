"""The last hidden states of a perplexity run, stored in its folder, from which its distributions can be computed later.

A last hidden state is the output of the decoder after its last norm: what the head makes logits of. It takes a few
kilobytes a token, where the logits take hundreds. The folder `states` in a run's folder holds:

    states.json                         the format, and the steps from the head's numbers to logits
    head.safetensors                    the head: weight (vocabulary, hidden), and bias where it has one
    text.safetensors                    the spans of each document, the token ids that they read, and the prefix
    METHOD.ITEM.LENGTH.safetensors      the states of one document at one length, (scored tokens, hidden), by span

METHOD is a digest of the method, ITEM the number of the document. A run's folder may come from somebody else: names of
files are never read from it, links are not followed, and every file is checked against what it must hold.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch import Tensor, nn

from rope_ext_hf.checkpoints.weight_files import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    SafetensorsFile,
    TensorInfo,
    safetensors_header,
    tensor_bytes,
)
from rope_ext_hf.errors import CheckpointError, FileError, MethodError, UnsupportedModelError, listed, printable, short
from rope_ext_hf.eval.span_measurement import scored_parts
from rope_ext_hf.files import (
    atomic_file,
    check_room,
    disk_errors,
    fsync_path,
    json_digest,
    parse_json_object,
    write_text,
)
from rope_ext_hf.reading.documents import Tokens
from rope_ext_hf.reading.head_losses import Finishing, HeadLosses, is_linear_head
from rope_ext_hf.reading.protocols import ProtocolOptions, Span, resolve_protocol
from rope_ext_hf.reading.spans import EvalPlan, Pass, own_tokenizer
from rope_ext_hf.runs.folder import read_run
from rope_ext_hf.runs.journal import GO_ON, read_plain, read_records
from rope_ext_hf.runs.kinds import run_kind
from rope_ext_hf.runs.labels import Method, method_key
from rope_ext_hf.runs.measurement import RunContents
from rope_ext_hf.runs.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_STATES = "states"  # the name of the folder in a run's folder
_DESCRIPTION, _HEAD, _TEXT = "states.json", "head.safetensors", "text.safetensors"
_FORMAT = 1
_NAME = "states"  # the name of the tensor in a file of states
_BLOCK = 2**24  # bytes that are read or written at a time
_DTYPES = {"float16": torch.float16, "float32": torch.float32}
_FLOATS = ("F16", "BF16", "F32", "F64")  # dtypes of heads and states, as safetensors names them
_CHECKSUM = "crc32"  # in the metadata of each file: a damaged bit would be read as another number
_LONGEST = 2**30  # tokens of a document; a larger number in a file would only ask for memory
_MEASURE_AGAIN = "measure the run again with another --out"


# --- which state is in which file -------------------------------------------------------------------------------------


def _file_name(method: Method, item: int, length: int) -> str:
    digest = hashlib.sha256(method_key(method).encode()).hexdigest()[:16]
    return f"{digest}.{item}.{length}.safetensors"


@dataclass(frozen=True)
class _Rows:
    """The rows of all files of one method: which row of which file belongs to the first target of a span.

    Attributes:
        counts: the number of rows by the number of the document and the length.
        starts: the first row of each span, by the number of its document.
    """

    counts: dict[tuple[int, int], int]
    starts: dict[tuple[int, Span], int]

    @classmethod
    def of(cls, plan: EvalPlan) -> _Rows:
        """Return the rows of the spans of a plan, which are in the order of the plan."""
        counts: dict[tuple[int, int], int] = {}
        starts: dict[tuple[int, Span], int] = {}
        for item, (_, spans) in enumerate(plan.documents):
            for span in spans:
                place = item, span.length
                starts[item, span] = counts.get(place, 0)
                counts[place] = starts[item, span] + span.score_to - span.score_from
        return cls(counts, starts)


def _tokens_read(document: Tokens, spans: Sequence[Span]) -> Tensor:
    """Return the token ids of a document that any of its spans reads, in order, (tokens,) int32."""
    return document.ids[: _end(spans)][_is_read(spans)].to(torch.int32)


def _is_read(spans: Sequence[Span]) -> Tensor:
    """Return for each token of a document, up to the last one that is read, whether a span reads it; (tokens,) bool."""
    is_read = torch.zeros(_end(spans), dtype=torch.bool)
    for span in spans:
        is_read[max(0, span.start) : span.stop] = True
    return is_read


def _end(spans: Sequence[Span]) -> int:
    return max(span.stop for span in spans)


def _tokens_digest(plan: EvalPlan) -> str:
    """Return a digest of the token ids that the spans of a plan read, of the spans, and of the prefix."""
    sha = hashlib.sha256(repr(plan.prefix).encode())
    for document, spans in plan.documents:
        sha.update(_tokens_read(document, spans).numpy().tobytes() + repr([*map(tuple, spans)]).encode())
    return sha.hexdigest()


def token_names(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, plan: EvalPlan) -> str:
    """Return a digest of the names of all tokens that a plan reads.

    The same ids stand for the same text under two tokenizers whose digests are equal.

    Args:
        model: the model.
        tokenizer: its tokenizer; default: the one beside its weights. Where there is none, the result is empty.
        plan: the documents and spans.
    """
    if tokenizer is None:
        with suppress(CheckpointError):
            tokenizer = own_tokenizer(model, needed=False)
    if tokenizer is None:
        return ""
    ids = set(plan.prefix)
    for document, spans in plan.documents:
        ids.update(_tokens_read(document, spans).tolist())
    ordered = sorted(ids)
    names = tokenizer.convert_ids_to_tokens(ordered)
    return json_digest([[token, str(name)] for token, name in zip(ordered, names, strict=True)])


def stored_bytes(model: PreTrainedModel, plan: EvalPlan, dtype: str, loaded: torch.dtype, methods: int) -> int:
    """Return the bytes that the states of some methods take, together with the head and the token ids.

    Args:
        model: the model, which may be on the meta device.
        plan: the documents and spans.
        dtype: the dtype of the states: "model", "float16" or "float32".
        loaded: the dtype of the model once it is loaded.
        methods: the number of methods.
    """
    head = head_of(model)
    width = _DTYPES.get(dtype, loaded).itemsize
    states = sum(_Rows.of(plan).counts.values()) * head.in_features * width
    weights = head.out_features * (head.in_features + (head.bias is not None)) * loaded.itemsize
    tokens = sum(int(_is_read(spans).sum()) for _, spans in plan.documents) * torch.int32.itemsize
    return methods * states + weights + tokens


def head_of(model: PreTrainedModel) -> nn.Linear:
    """Return the head of a model whose hidden states can be stored.

    Raises:
        UnsupportedModelError: the model has no head apart from its decoder, or a head that is more than a linear layer.
    """
    head: Any = model.get_output_embeddings()
    if head is None or not is_linear_head(head):
        what = (
            "has no head apart from its decoder" if head is None else f"has a head of the class {type(head).__name__}"
        )
        raise UnsupportedModelError(
            f"{type(model).__name__} {what}, so its hidden states cannot be stored; they can where the head is a plain "
            "linear layer: merge adapters, or store the states of the model before it is quantised"
        )
    linear: nn.Linear = head
    return linear


# --- writing ----------------------------------------------------------------------------------------------------------


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
        self._folder, self._method, self._rows = folder / _STATES, method, _Rows.of(plan)
        self._hidden, self._dtype = linear.in_features, _DTYPES.get(dtype, linear.weight.dtype)
        self._begun = set[tuple[int, int]]()
        with disk_errors(self._folder, GO_ON):
            self._folder.mkdir(exist_ok=True)
        _check_folder(self._folder)
        missing = [place for place in self._rows.counts if not (self._folder / _file_name(method, *place)).exists()]
        size = sum(self._rows.counts[place] for place in missing) * self._hidden * self._dtype.itemsize
        check_room(self._folder, size, GO_ON)
        if not (self._folder / _DESCRIPTION).exists():
            self._describe(plan, text, names, linear, head.finishing)

    def _describe(self, plan: EvalPlan, text: str, names: str, head: nn.Linear, finishing: Finishing) -> None:
        """Write the head and the text, and last the file that describes them."""
        tensors = {"prefix": torch.tensor(plan.prefix, dtype=torch.int64)}
        for item, (document, spans) in enumerate(plan.documents):
            tensors[f"ids.{item}"] = _tokens_read(document, spans)
            tensors[f"spans.{item}"] = torch.tensor(spans, dtype=torch.int64)
        _write_checked(self._folder / _TEXT, tensors)
        with _weights_in_place(head):
            weights = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
            _write_checked(self._folder / _HEAD, {name: weight.detach().cpu() for name, weight in weights.items()})
        described = {
            "format": _FORMAT,
            "text": text,
            "tokens": _tokens_digest(plan),
            "names": names,
            "finishing": finishing._asdict(),
        }
        write_text(self._folder / _DESCRIPTION, json.dumps(described, indent=1) + "\n")

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
                checksum = 0
                while block := file.read(_BLOCK):
                    checksum = zlib.crc32(block, checksum)
                file.seek(0)
                file.write(self._header(place, checksum))
                file.flush()
                os.fsync(file.fileno())
            path.replace(self._folder / _file_name(self._method, *place))
            fsync_path(self._folder)
        self._begun.discard(place)

    def _part(self, place: tuple[int, int]) -> Path:
        return self._folder / f"{_file_name(self._method, *place)}.part"

    def _header(self, place: tuple[int, int], checksum: int = 0) -> bytes:
        info = TensorInfo.from_shape(DTYPE_NAMES[self._dtype], (self._rows.counts[place], self._hidden))
        return safetensors_header({_NAME: info}, {_CHECKSUM: f"{checksum:08x}"})


def _opened(path: Path, flags: int) -> BinaryIO:
    """Open a file for reading and writing, without following a link."""
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    return os.fdopen(descriptor, "r+b")


def _write_checked(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a safetensors file with their checksum, completely or not at all."""
    infos = {name: TensorInfo.from_shape(DTYPE_NAMES[x.dtype], tuple(x.shape)) for name, x in tensors.items()}
    checksum = 0
    for tensor in tensors.values():
        checksum = zlib.crc32(tensor_bytes(tensor), checksum)
    with atomic_file(path) as part, part.open("wb") as file:
        file.write(safetensors_header(infos, {_CHECKSUM: f"{checksum:08x}"}))
        for tensor in tensors.values():
            file.write(tensor_bytes(tensor))


def _weights_in_place(head: nn.Linear) -> Any:
    """Return a context in which the weights of a head are there, also where accelerate keeps them elsewhere."""
    if not head.weight.is_meta:
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(head)


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass
class StoredStates:
    """The stored hidden states of one method of a run, with everything that makes distributions of them.

    Attributes:
        run: the run, with the results of this method alone.
        method: `RopeMethod.to_dict` of the method, or None for the model as loaded.
        label: the label of the method in the run.
        plan: the documents and spans, as the run read them; without the text of the documents.
        names: a digest of the names of the tokens, see `token_names`; empty: it is not known.
        finishing: the steps from the numbers of the head to logits.
        vocabulary: the number of logits for each token.
        nats: the loss that the run recorded, summed over the scored tokens, by the number of the document and the
            length.
    """

    run: Run[Any]
    method: Method
    label: str
    plan: EvalPlan
    names: str
    finishing: Finishing
    vocabulary: int
    nats: dict[tuple[int, int], float]
    _folder: Path
    _files: dict[tuple[int, int], SafetensorsFile]
    _checked: set[tuple[int, int]] = field(default_factory=set)

    @classmethod
    def open(cls, folder: Path, label: str | None = None) -> StoredStates:
        """Open the states that a run has stored, and check that all of them are there.

        Args:
            folder: the run's folder.
            label: the label of the method whose states are read, as the tables of the run have it; default: the first.

        Raises:
            FileError: the folder holds no run with stored states, the run is not finished, or a file is missing or
                damaged.
            MethodError: no method of the run has this label.
        """
        run = read_run(folder)
        setting = run.settings["setting"]
        states = Path(folder) / _STATES
        if run.settings["kind"] != "perplexity" or not setting.get("states"):
            raise FileError(
                f"the run in {str(folder)!r} has no stored hidden states; measure it again with --store-states model"
            )
        _check_folder(states)
        chosen = _chosen_method(run, label)
        results = [result for result in run.results if result.key == chosen]
        if {result.length for result in results} != {int(cell[0]) for cell in run.settings["cells"]}:
            raise FileError(
                f"the run in {str(folder)!r} is not finished; the command that began it continues it: `rope-ext run` "
                "with this folder"
            )
        described = _description(states / _DESCRIPTION)
        if described["text"] != run.settings.get("text"):
            raise FileError(
                f"the states in {str(states)!r} are those of another text than run.json's; {_MEASURE_AGAIN}"
            )
        plan = _read_plan(states / _TEXT, run)
        if described["tokens"] != _tokens_digest(plan):
            raise FileError(f"{str(states / _TEXT)!r} has other tokens than the run read; {_MEASURE_AGAIN}")
        vocabulary, hidden = _head_shape(_open_checked(states / _HEAD))
        method = results[0].method
        contents, kind = RunContents.from_settings(run.settings), run_kind(run.settings["kind"])
        records = [r for r in read_records(run.folder, contents, kind.parse) if method_key(r.method) == chosen]
        nats = {(record.item, int(record.cell[0])): record.value.to_record()[0] for record in records}
        counts = _Rows.of(plan).counts
        if counts.keys() != nats.keys():
            raise FileError(f"{str(states / _TEXT)!r} has other documents or lengths than the run; {_MEASURE_AGAIN}")
        files = {}
        for place, count in counts.items():
            file = _open_checked(states / _file_name(method, *place), check=False)
            info = file.tensors.get(_NAME)
            if info is None or info.shape != (count, hidden) or info.dtype not in _FLOATS:
                raise _damaged(file.path, f"it does not hold {count:,} states of {hidden:,} numbers")
            files[place] = file
        finishing = Finishing(**described["finishing"])
        return cls(
            run.select([method]),
            method,
            run.names[chosen],
            plan,
            described["names"],
            finishing,
            vocabulary,
            nats,
            states,
            files,
        )

    @cached_property
    def _row_starts(self) -> dict[tuple[int, Span], int]:
        return _Rows.of(self.plan).starts

    def rows(self, item: int, span: Span, start: int, stop: int) -> Tensor:
        """Return the states that predict the targets `start` to `stop` - 1 of a span, (targets, hidden), on the CPU.

        Args:
            item: the number of the document.
            span: the span.
            start, stop: counted from the first target of the span.

        Raises:
            FileError: the file of this document and length is damaged.
        """
        place = item, span.length
        file = self._files[place]
        if place not in self._checked:
            _check_checksum(file)
            self._checked.add(place)
        first = self._row_starts[item, span]
        return file.read_rows(_NAME, first + start, first + stop)

    def head(self, device: torch.device, head_bytes: int) -> HeadLosses:
        """Return the head of the run's model on a device.

        Args:
            device: the device.
            head_bytes: memory for logits, in bytes.
        """
        file = SafetensorsFile(self._folder / _HEAD)
        weight = file.read("weight")
        head = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in file.tensors, device="meta")
        head.weight = nn.Parameter(weight.to(device), requires_grad=False)
        if "bias" in file.tensors:
            head.bias = nn.Parameter(file.read("bias").to(device), requires_grad=False)
        return HeadLosses(head, self.finishing, self.vocabulary, weight.dtype, head_bytes)

    @property
    def head_size(self) -> int:
        """The size of the head in bytes."""
        return sum(info.size for info in SafetensorsFile(self._folder / _HEAD).tensors.values())


def _chosen_method(run: Run[Any], label: str | None) -> str:
    """Return the key of the method with a label, or of the first method of a run."""
    if not run.names:
        raise FileError(f"the run in {str(run.path)!r} has no result yet; the command that began it continues it")
    for key, name in run.names.items():
        if label in (None, name):
            return key
    raise MethodError(
        f"the run in {str(run.path)!r} has no method with the label {short(repr(label))}; it has "
        f"{listed(map(repr, run.names.values()))}"
    )


def _check_folder(states: Path) -> None:
    """Raise FileError if the folder of states is missing, or a link."""
    if not os.path.lexists(states):
        raise FileError(f"{str(states)!r} is missing; {_MEASURE_AGAIN}")
    with disk_errors(states):
        if not stat.S_ISDIR(states.lstat().st_mode):
            raise FileError(f"{str(states)!r} is not a folder but a link or a file; replace it by the folder")


def _description(path: Path) -> dict[str, Any]:
    """Return the content of states.json, checked."""
    _check_plain(path)
    try:
        described = parse_json_object(read_plain(path, _BLOCK))
        if type(number := described.get("format")) is int and number > _FORMAT:
            raise FileError(f"{str(path)!r} is of a later version of this package; update rope-ext-hf")
        finishing = described["finishing"]
        right = all(isinstance(described[key], str) for key in ("text", "tokens", "names"))
        right = right and finishing.keys() == set(Finishing._fields)
        if not right or not all(value is None or type(value) in (int, float) for value in finishing.values()):
            raise ValueError("a value of another type")
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, FileError):
            raise
        raise _damaged(path, "it does not describe stored states") from error
    return described


def _read_plan(path: Path, run: Run[Any]) -> EvalPlan:
    """Return the documents and spans that a run read, from the file that holds them."""
    file = _open_checked(path)
    names, setting = run.settings["items"], run.settings["setting"]
    lengths = {int(cell[0]) for cell in run.settings["cells"]}
    expected = {"prefix": "I64"}
    for item in range(len(names)):
        expected |= {f"ids.{item}": "I32", f"spans.{item}": "I64"}
    if {name: info.dtype for name, info in file.tensors.items()} != expected:
        raise _damaged(path, "it does not hold the token ids and spans of the run's documents")
    prefix = tuple(file.read("prefix").tolist())
    documents = []
    for item, name in enumerate(names):
        known, rows = file.read(f"ids.{item}"), file.read(f"spans.{item}")
        if known.ndim != 1 or rows.ndim != 2 or rows.shape[1] != len(Span._fields) or not len(rows):
            raise _damaged(path, "token ids or spans have another shape")
        spans = tuple(Span(*row) for row in rows.tolist())
        for span in spans:
            right = span.length in lengths and span.context >= 1 and -len(prefix) <= span.start < span.score_from
            if not right or not span.score_from < span.score_to <= span.stop <= _LONGEST:
                raise _damaged(path, f"{tuple(span)} is not a span of the document {short(printable(name))!r}")
        is_read = _is_read(spans)
        if int(is_read.sum()) != len(known):
            raise _damaged(path, f"its spans of {short(printable(name))!r} read another number of tokens")
        ids = torch.zeros(len(is_read), dtype=torch.int64)
        ids[is_read] = known.long()
        documents.append((Tokens(name, ids, ()), spans))
    protocol = resolve_protocol(setting["protocol"])
    options = ProtocolOptions(setting["targets"], setting["stride"], max(1, len(prefix)))
    return EvalPlan(protocol, tuple(sorted(lengths)), options, prefix, tuple(documents), setting["left_out"])


def _head_shape(file: SafetensorsFile) -> tuple[int, int]:
    """Return the number of logits and the number of inputs of a head, after checking its weight and its bias."""
    weight = file.tensors.get("weight")
    if weight is None or len(weight.shape) != 2 or not file.tensors.keys() <= {"weight", "bias"}:
        raise _damaged(file.path, "it has no weight (vocabulary, hidden)")
    vocabulary, hidden = weight.shape
    bias = file.tensors.get("bias", TensorInfo.from_shape(weight.dtype, (vocabulary,)))
    if weight.dtype not in _FLOATS or (bias.dtype, bias.shape) != (weight.dtype, (vocabulary,)):
        raise _damaged(file.path, "its weight and bias do not fit together")
    return vocabulary, hidden


def _check_plain(path: Path) -> None:
    """Raise FileError if a file is missing, or not a plain file."""
    if not os.path.lexists(path):
        raise FileError(f"{str(path)!r} is missing; {_MEASURE_AGAIN}")
    with disk_errors(path):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise FileError(f"{str(path)!r} is not a plain file; a run's folder holds plain files, so replace it")


def _open_checked(path: Path, *, check: bool = True) -> SafetensorsFile:
    """Open a safetensors file of stored states; `check`: compare its content with its checksum, too."""
    _check_plain(path)
    try:
        file = SafetensorsFile(path)
    except CheckpointError as error:
        raise _damaged(path, str(error)) from error
    if any(info.dtype not in TORCH_DTYPES for info in file.tensors.values()):
        raise _damaged(path, "torch has no dtype for its numbers")
    if check:
        _check_checksum(file)
    return file


def _check_checksum(file: SafetensorsFile) -> None:
    """Raise FileError if the content of a file is not that of its checksum."""
    checksum = 0
    for block in _blocks(file.path, len(file.header)):
        checksum = zlib.crc32(block, checksum)
    if file.metadata.get(_CHECKSUM) != f"{checksum:08x}":
        raise _damaged(file.path, "its content has changed since it was written")


def _blocks(path: Path, start: int) -> Iterator[bytes]:
    with disk_errors(path), path.open("rb") as file:
        file.seek(start)
        while block := file.read(_BLOCK):
            yield block


def _damaged(path: Path, reason: str) -> FileError:
    return FileError(f"{str(path)!r} is damaged: {reason}; {_MEASURE_AGAIN}")
