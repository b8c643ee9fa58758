"""The last hidden states that a perplexity run has stored, from which its distributions are computed later.

states_files.py says what is in which file. A run's folder may come from somebody else: names of files are never read
from it, links are not followed, and every file is checked against what it must hold.
"""

from __future__ import annotations

import math
import os
import stat
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rope_ext_hf.checkpoints.files.numbers import TensorInfo
from rope_ext_hf.checkpoints.files.torch_files import TORCH_DTYPES
from rope_ext_hf.checkpoints.files.weight_files import SafetensorsFile
from rope_ext_hf.errors import CheckpointError, FileError, MethodError, listed, printable, short
from rope_ext_hf.files.whole import disk_errors, parse_json_object
from rope_ext_hf.reading.protocols import ProtocolOptions, Span, resolve_protocol
from rope_ext_hf.reading.spans import EvalPlan
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.reading.through.head_losses import HeadLosses, LogitScaling
from rope_ext_hf.runs.conclusions.labels import Method, method_key
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.runs.folder.journal import read_plain, read_records
from rope_ext_hf.runs.kinds import run_kind
from rope_ext_hf.runs.measurement import RunContents
from rope_ext_hf.runs.run import Run
from rope_ext_hf.tools.divergence.states_files import (
    BLOCK,
    CHECKSUM,
    DESCRIPTION,
    FOLDER,
    FORMAT,
    HEAD,
    MEASURE_AGAIN,
    TENSOR,
    TEXT,
    Rows,
    check_folder,
    count_read,
    file_name,
    first_checksum,
    stretches,
    tokens_digest,
)

if TYPE_CHECKING:
    pass

_FLOATS = ("F16", "BF16", "F32", "F64")  # dtypes of heads and states, as safetensors names them


@dataclass
class StoredStates:
    """The stored hidden states of one method of a run, with everything that makes distributions of them.

    Attributes:
        run: the run, with the results of this method alone.
        method: `RopeMethod.to_dict` of the method, or None for the model as loaded.
        label: the label of the method in the run.
        plan: the documents and spans, as the run read them; without the text of the documents, and without the tokens
            that no span reads, so that spans begin earlier.
        names: a digest of the names of the tokens, see `token_names`; empty: it is not known.
        scaling: the steps from the numbers of the head to logits.
        vocabulary: the number of logits for each token.
        nats: the loss that the run recorded, summed over the scored tokens, by the number of the document and the
            length.
    """

    run: Run[Any]
    method: Method
    label: str
    plan: EvalPlan
    names: str
    scaling: LogitScaling
    vocabulary: int
    nats: dict[tuple[int, int], float]
    _folder: Path
    _files: dict[tuple[int, int], _CheckedFile]
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
        states = Path(folder) / FOLDER
        if run.settings["kind"] != "perplexity" or not setting.get("states"):
            raise FileError(
                f"the run in {str(folder)!r} has no stored hidden states; measure it again with --store-states model"
            )
        check_folder(states)
        chosen = _chosen_method(run, label)
        results = [result for result in run.results if result.key == chosen]
        if {result.length for result in results} != {int(cell[0]) for cell in run.settings["cells"]}:
            raise FileError(
                f"the run in {str(folder)!r} is not finished; the command that began it continues it: `rope-ext run` "
                "with this folder"
            )
        described = _description(states / DESCRIPTION)
        number = described["format"]

        def checked(name: str, *, whole: bool = True) -> _CheckedFile:
            return _CheckedFile.open(states / name, first_checksum(run.settings, name, number), whole=whole)

        if described["text"] != run.settings.get("text"):
            raise FileError(f"the states in {str(states)!r} are those of another text than run.json's; {MEASURE_AGAIN}")
        plan = _read_plan(checked(TEXT).file, run, described["tokens"])
        vocabulary, hidden = _head_shape(checked(HEAD).file)
        method = results[0].method
        contents, kind = RunContents.from_settings(run.settings), run_kind(run.settings["kind"])
        records = [r for r in read_records(run.folder, contents, kind.parse) if method_key(r.method) == chosen]
        nats = {(record.item, int(record.cell[0])): record.value.to_record()[0] for record in records}
        counts = Rows.of(plan).counts
        if counts.keys() != nats.keys():
            raise FileError(f"{str(states / TEXT)!r} has other documents or lengths than the run; {MEASURE_AGAIN}")
        files = {}
        for place, count in counts.items():
            file = checked(file_name(method, *place), whole=False)
            info = file.file.tensors.get(TENSOR)
            if info is None or info.shape != (count, hidden) or info.dtype not in _FLOATS:
                raise _damaged(file.file.path, f"it does not hold {count:,} states of {hidden:,} numbers")
            files[place] = file
        scaling = LogitScaling(**described["finishing"])
        return cls(
            run.select([method]),
            method,
            run.names[chosen],
            plan,
            described["names"],
            scaling,
            vocabulary,
            nats,
            states,
            files,
        )

    @cached_property
    def _row_starts(self) -> dict[tuple[int, Span], int]:
        return Rows.of(self.plan).starts

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
            file.check()
            self._checked.add(place)
        first = self._row_starts[item, span]
        return file.file.read_rows(TENSOR, first + start, first + stop)

    def head(self, device: torch.device, head_bytes: int) -> HeadLosses:
        """Return the head of the run's model on a device.

        Args:
            device: the device.
            head_bytes: memory for logits, in bytes.
        """
        file = SafetensorsFile(self._folder / HEAD)
        weight = file.read("weight")
        head = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in file.tensors, device="meta")
        head.weight = nn.Parameter(weight.to(device), requires_grad=False)
        if "bias" in file.tensors:
            head.bias = nn.Parameter(file.read("bias").to(device), requires_grad=False)
        return HeadLosses(head, self.scaling, self.vocabulary, weight.dtype, head_bytes)

    @property
    def head_size(self) -> int:
        """The size of the head in bytes."""
        return sum(info.size for info in SafetensorsFile(self._folder / HEAD).tensors.values())


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


def _description(path: Path) -> dict[str, Any]:
    """Return the content of states.json, checked."""
    _check_plain(path)
    try:
        described = parse_json_object(read_plain(path, BLOCK))
        number = described["format"]
        if type(number) is int and number > FORMAT:
            raise FileError(f"{str(path)!r} is of a later version of this package; update rope-ext-hf")
        scaling = described["finishing"]
        right = all(isinstance(described[key], str) for key in ("text", "tokens", "names"))
        right = right and type(number) is int and scaling.keys() == set(LogitScaling._fields)
        if not right or not all(value is None or type(value) in (int, float) for value in scaling.values()):
            raise ValueError("a value of another type")
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, FileError):
            raise
        raise _damaged(path, "it does not describe stored states") from error
    return described


def _read_plan(file: SafetensorsFile, run: Run[Any], digest: str) -> EvalPlan:
    """Return the documents and spans that a run read, from the file that holds them.

    `digest`: that of the tokens, see `tokens_digest`.
    """
    path = file.path
    names, setting = run.settings["items"], run.settings["setting"]
    lengths = {int(cell[0]) for cell in run.settings["cells"]}
    expected = {"prefix": "I64"}
    for item in range(len(names)):
        expected |= {f"ids.{item}": "I32", f"spans.{item}": "I64"}
    if {name: info.dtype for name, info in file.tensors.items()} != expected:
        raise _damaged(path, "it does not hold the token ids and spans of the run's documents")
    prefix = tuple(file.read("prefix").tolist())
    read = []
    for item, name in enumerate(names):
        known, rows = file.read(f"ids.{item}"), file.read(f"spans.{item}")
        if known.ndim != 1 or rows.ndim != 2 or rows.shape[1] != len(Span._fields) or not len(rows):
            raise _damaged(path, "token ids or spans have another shape")
        spans = tuple(Span(*row) for row in rows.tolist())
        for span in spans:
            right = span.length in lengths and span.context >= 1 and -len(prefix) <= span.start < span.score_from
            if not right or not span.score_from < span.score_to <= span.stop:
                raise _damaged(path, f"{tuple(span)} is not a span of the document {short(printable(name))!r}")
        if count_read(spans) != len(known):
            raise _damaged(path, f"its spans of {short(printable(name))!r} read another number of tokens")
        read.append((known, spans))
    if digest != tokens_digest(prefix, read):
        raise FileError(f"{str(path)!r} has other tokens than the run read; {MEASURE_AGAIN}")
    # Memory for the tokens that no span reads would follow from a number in the file, and not from its size.
    documents = [
        (Tokens(name, known.long(), ()), _without_gaps(spans)) for name, (known, spans) in zip(names, read, strict=True)
    ]
    protocol = resolve_protocol(setting["protocol"])
    options = ProtocolOptions(setting["targets"], setting["stride"], max(1, len(prefix)))
    return EvalPlan(protocol, tuple(sorted(lengths)), options, prefix, tuple(documents), setting["left_out"])


def _without_gaps(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the spans as they are in a document without the tokens that none of them reads."""
    joined, before = stretches(spans), [0]
    for begin, end in joined:
        before.append(before[-1] + end - begin)
    moved = []
    for span in spans:
        stretch = bisect_right(joined, (max(0, span.start), math.inf)) - 1
        shift = joined[stretch][0] - before[stretch]
        places = {name: getattr(span, name) - shift for name in ("start", "stop", "score_from", "score_to")}
        moved.append(span._replace(**places))
    return tuple(moved)


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
        raise FileError(f"{str(path)!r} is missing; {MEASURE_AGAIN}")
    with disk_errors(path):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise FileError(f"{str(path)!r} is not a plain file; a run's folder holds plain files, so replace it")


@dataclass(frozen=True)
class _CheckedFile:
    """A safetensors file of stored states, and the checksum before its first byte (see `first_checksum`)."""

    file: SafetensorsFile
    first: int

    @classmethod
    def open(cls, path: Path, first: int, *, whole: bool) -> _CheckedFile:
        """Open a file; `whole`: compare its content with its checksum, too."""
        _check_plain(path)
        try:
            checked = cls(SafetensorsFile(path), first)
        except CheckpointError as error:
            raise _damaged(path, str(error)) from error
        if any(info.dtype not in TORCH_DTYPES for info in checked.file.tensors.values()):
            raise _damaged(path, "torch has no dtype for its numbers")
        if whole:
            checked.check()
        return checked

    def check(self) -> None:
        """Raise FileError if the content or the place of the file is not that of its checksum."""
        checksum = self.first
        for block in _blocks(self.file.path, len(self.file.header)):
            checksum = zlib.crc32(block, checksum)
        if self.file.metadata.get(CHECKSUM) != f"{checksum:08x}":
            raise _damaged(self.file.path, "its content has changed since it was written, or it is another file's")


def _blocks(path: Path, start: int) -> Iterator[bytes]:
    with disk_errors(path), path.open("rb") as file:
        file.seek(start)
        while block := file.read(BLOCK):
            yield block


def _damaged(path: Path, reason: str) -> FileError:
    return FileError(f"{str(path)!r} is damaged: {reason}; {MEASURE_AGAIN}")
