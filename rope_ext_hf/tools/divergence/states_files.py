"""Files in which the hidden states of a perplexity run are stored, and which state is in which of them.

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
import os
import stat
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import CheckpointError, FileError, UnsupportedModelError
from rope_ext_hf.files.whole import disk_errors, json_digest
from rope_ext_hf.reading.protocols import Span
from rope_ext_hf.reading.spans import EvalPlan
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.reading.text.tokenizing import own_tokenizer
from rope_ext_hf.reading.through.head_losses import is_linear_head
from rope_ext_hf.runs.conclusions.labels import Method, method_key

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = "states"  # its name in a run's folder
DESCRIPTION, HEAD, TEXT = "states.json", "head.safetensors", "text.safetensors"
FORMAT = 2  # in format 1, a checksum said nothing about the place of its file
TENSOR = "states"  # the name of the tensor in a file of states
BLOCK = 2**24  # bytes that are read or written at a time
DTYPES = {"float16": torch.float16, "float32": torch.float32}
CHECKSUM = "crc32"  # in the metadata of each file: a damaged bit would be read as another number
_OF_RUN = ("weights", "text", "over", "basis", "patches", "of_patch")
"""The settings of a run that say of which model and text its states are."""
MEASURE_AGAIN = "measure the run again with another --out"


def file_name(method: Method, item: int, length: int) -> str:
    digest = hashlib.sha256(method_key(method).encode()).hexdigest()[:16]
    return f"{digest}.{item}.{length}.safetensors"


def first_checksum(settings: Mapping[str, Any], name: str, number: int = FORMAT) -> int:
    """Return the checksum before the first byte of a file: that of the run and of the name of the file.

    So a file has another checksum in the place of another one: of another document, length, method or model.

    Args:
        settings: those of the run, as run.json holds them.
        name: the name of the file.
        number: the format in which the states are stored.
    """
    if number < FORMAT:
        return 0
    return zlib.crc32(f"{json_digest({key: settings.get(key) for key in _OF_RUN})} {name}".encode())


@dataclass(frozen=True)
class Rows:
    """The rows of all files of one method: which row of which file belongs to the first target of a span.

    Attributes:
        counts: the number of rows by the number of the document and the length.
        starts: the first row of each span, by the number of its document.
    """

    counts: dict[tuple[int, int], int]
    starts: dict[tuple[int, Span], int]

    @classmethod
    def of(cls, plan: EvalPlan) -> Rows:
        """Return the rows of the spans of a plan, which are in the order of the plan."""
        counts: dict[tuple[int, int], int] = {}
        starts: dict[tuple[int, Span], int] = {}
        for item, (_, spans) in enumerate(plan.documents):
            for span in spans:
                place = item, span.length
                starts[item, span] = counts.get(place, 0)
                counts[place] = starts[item, span] + span.score_to - span.score_from
        return cls(counts, starts)


def tokens_read(document: Tokens, spans: Sequence[Span]) -> Tensor:
    """Return the token ids of a document that any of its spans reads, in order, (tokens,) int32."""
    return torch.cat([document.ids[begin:end] for begin, end in stretches(spans)]).to(torch.int32)


def stretches(spans: Iterable[Span]) -> list[tuple[int, int]]:
    """Return the stretches of a document that spans read, in order: the first token, and the one after the last."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted((max(0, span.start), span.stop) for span in spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def count_read(spans: Iterable[Span]) -> int:
    """Return the number of tokens of a document that spans read."""
    return sum(end - begin for begin, end in stretches(spans))


def tokens_digest(prefix: tuple[int, ...], documents: Iterable[tuple[Tensor, Sequence[Span]]]) -> str:
    """Return a digest of a prefix and of documents: the token ids that spans read, see `tokens_read`, and the spans."""
    sha = hashlib.sha256(repr(prefix).encode())
    for ids, spans in documents:
        sha.update(ids.numpy().tobytes() + repr([*map(tuple, spans)]).encode())
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
        ids.update(tokens_read(document, spans).tolist())
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
    width = DTYPES.get(dtype, loaded).itemsize
    states = sum(Rows.of(plan).counts.values()) * head.in_features * width
    weights = head.out_features * (head.in_features + (head.bias is not None)) * loaded.itemsize
    tokens = sum(count_read(spans) for _, spans in plan.documents) * torch.int32.itemsize
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


def check_folder(states: Path) -> None:
    """Raise FileError if the folder of states is missing, or a link."""
    if not os.path.lexists(states):
        raise FileError(f"{str(states)!r} is missing; {MEASURE_AGAIN}")
    with disk_errors(states):
        if not stat.S_ISDIR(states.lstat().st_mode):
            raise FileError(f"{str(states)!r} is not a folder but a link or a file; replace it by the folder")
