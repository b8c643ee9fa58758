"""Plan an evaluation: documents as token ids, cut into spans by a protocol, before any weights are read."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rope_ext_hf.errors import CorpusError, MethodError
from rope_ext_hf.eval.corpora import load
from rope_ext_hf.eval.documents import Document
from rope_ext_hf.eval.preflight import narrow_layers
from rope_ext_hf.eval.protocols import PROTOCOLS, Plan, Window, check_lengths
from rope_ext_hf.eval.results import DocumentLoss, Effort, Setting
from rope_ext_hf.eval.scorer import Reader

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "Reading",
    "Tokens",
    "check_vocabulary",
    "own_tokenizer",
    "plan_reading",
    "prefix_token",
    "prepare",
    "tokenize",
]


@dataclass(frozen=True)
class Tokens:
    """A tokenised document: ids (tokens,) int64 and, per token, where it ends in the text, in UTF-8 bytes."""

    name: str
    ids: Tensor
    ends: tuple[int, ...]

    def bytes_between(self, start: int, stop: int) -> int:
        """UTF-8 bytes of tokens start..stop."""
        return self.ends[stop - 1] - (self.ends[start - 1] if start else 0)


def tokenize(documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Documents as token ids, no special tokens added."""
    return [_tokenize(document, tokenizer) for document in documents]


def _tokenize(document: Document, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    if document.ids is not None:  # which token has which bytes is not known: each gets its share
        ids = list(document.ids)
        total = len(tokenizer.decode(ids).encode("utf-8"))
        return Tokens(document.name, torch.tensor(ids, dtype=torch.int64), _shares(total, len(ids)))
    text = document.text
    total = len(text.encode("utf-8"))
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=tokenizer.is_fast,
        return_attention_mask=False,
        verbose=False,
    )
    ids = encoded["input_ids"]
    if not tokenizer.is_fast:  # no offsets; exact for byte tokenizers, where tokens and bytes are as many
        ends = list(_shares(total, len(ids)))
    else:
        bytes_before = range(total + 1) if text.isascii() else [0, *accumulate(len(c.encode("utf-8")) for c in text)]
        ends = list(accumulate((bytes_before[end] for _, end in encoded["offset_mapping"]), max))
    return Tokens(document.name, torch.tensor(ids, dtype=torch.int64), tuple(ends))


def _shares(total: int, count: int) -> tuple[int, ...]:
    """Where each of so many parts ends, all of them being of equal size."""
    return tuple(round(total * (i + 1) / count) for i in range(count))


@dataclass(frozen=True)
class Reading:
    """What a measurement reads, worked out before it starts; the same for every method.

    Attributes:
        windows: per document with anything to read, its windows in reading order.
        lengths: ascending context lengths.
        prefix: the token that stands first in each window (before the document, under `blocks`), or None.
        left_out: documents too short for the lengths.
    """

    protocol: str
    lengths: tuple[int, ...]
    plan: Plan
    prefix: int | None
    windows: tuple[tuple[Tokens, tuple[Window, ...]], ...]
    left_out: int

    @property
    def setting(self) -> Setting:
        """The part of it that a result records."""
        return Setting(self.protocol, self.plan.targets, self.plan.stride, self.prefix is not None, self.left_out)

    @property
    def tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(self.passes)

    @property
    def passes(self) -> list[int]:
        """The size of each window that goes through the model, in tokens."""
        return [w.stop - w.start for _, windows in self.windows for w in _distinct(windows)]

    @property
    def scored(self) -> int:
        """Tokens that are scored, once per length they count for."""
        return sum(w.score_to - w.score_from for _, windows in self.windows for w in windows)

    def measure(
        self, reader: Reader, progress: Callable[[int], None] | None = None
    ) -> Iterator[tuple[int, DocumentLoss, Effort]]:
        """Read everything; yields (context length, one document's loss, what it took) as soon as each is complete."""
        for document, windows in self.windows:
            yield from self.measure_document(reader, document, windows, progress)

    def measure_document(
        self,
        reader: Reader,
        document: Tokens,
        windows: Sequence[Window],
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[int, DocumentLoss, Effort]]:
        """The part of `measure` that reads one document; lengths that share their passes share what those took."""
        reader.spent()
        for context, same_context in groupby(windows, key=lambda window: window.context):
            found: dict[int, DocumentLoss] = {}
            for (start, stop), spans in groupby(same_context, key=lambda window: (window.start, window.stop)):
                scored = list(spans)
                first = min(window.score_from for window in scored)
                ids, shift = self._ids(document, start, stop)
                losses = reader.losses(ids, first - shift, length=context).to(torch.float64)
                for span in scored:
                    nats = losses[span.score_from - first : span.score_to - first].sum().item()
                    size = document.bytes_between(span.score_from, span.score_to)
                    before = found.get(span.length, DocumentLoss(document.name, 0.0, 0, 0, 0))
                    found[span.length] = before.plus(nats, span.score_to - span.score_from, size)
                if progress is not None:
                    progress(stop - start)
            effort = reader.spent()
            yield from ((length, loss, effort) for length, loss in found.items())

    def _ids(self, document: Tokens, start: int, stop: int) -> tuple[Tensor, int]:
        """A window's ids and the document position of the first of them."""
        ids = document.ids[max(start, 0) : stop].clone()
        if start < 0:
            assert self.prefix is not None
            return torch.cat([ids.new_tensor([self.prefix]), ids]), -1
        if self.prefix is not None and self.protocol != "blocks":
            ids[0] = self.prefix
        return ids, start


def plan_reading(
    documents: Sequence[Tokens],
    *,
    lengths: Sequence[int],
    protocol: str = "matched",
    targets: int | None = None,
    stride: int = 256,
    tokenizer: PreTrainedTokenizerBase | None = None,
    bos: bool | None = None,
    max_windows: int | None = None,
    left_out: int = 0,
) -> Reading:
    """Work out what `perplexity` reads; the arguments are its, and `left_out` documents were too short before.

    Raises:
        CorpusError, MethodError: as `perplexity` does.
    """
    if protocol not in PROTOCOLS:
        near = difflib.get_close_matches(protocol, PROTOCOLS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise MethodError(f"unknown protocol {protocol!r}.{hint} Known protocols: {', '.join(PROTOCOLS)}")
    try:
        ordered, scored = check_lengths(lengths, targets)
    except ValueError as error:
        raise MethodError(str(error)) from error
    if stride < 1:
        raise MethodError(f"stride must be at least 1 token, got {stride}")
    plan = Plan(scored, stride)
    prefix = prefix_token(tokenizer, bos, protocol)
    found: list[tuple[Tokens, list[Window]]] = []
    for document in documents:
        windows = list(PROTOCOLS[protocol](len(document.ids), ordered, plan))
        if prefix is None:  # nothing stands before the first token, so it cannot be scored
            windows = [w if w.start >= 0 else w._replace(start=0, score_from=max(1, w.score_from)) for w in windows]
        found.append((document, [w for w in windows if w.score_from < w.score_to]))
    if max_windows is not None:
        found = _thinned(found, ordered, max_windows)
    read = tuple((document, tuple(sorted(windows, key=_order))) for document, windows in found if windows)
    measured = {window.length for _, windows in read for window in windows}
    if missing := [length for length in ordered if length not in measured]:
        longest = max((len(document.ids) for document in documents), default=0)
        raise CorpusError(
            f"no document has {missing[-1]} tokens, the longest length asked for; "
            f"the longest of {len(documents)} has {longest}. Give longer text or shorter lengths"
        )
    return Reading(protocol, tuple(ordered), plan, prefix, read, left_out + len(documents) - len(read))


def _order(window: Window) -> tuple[int, int, int, int]:
    return window.context, window.start, window.stop, window.score_from


def _distinct(windows: Sequence[Window]) -> list[Window]:
    """One window per pass: spans of one pass come one after the other."""
    return [
        next(group) for _, group in groupby(windows, key=lambda window: (window.context, window.start, window.stop))
    ]


def _thinned(
    found: Sequence[tuple[Tokens, list[Window]]], lengths: Sequence[int], most: int
) -> list[tuple[Tokens, list[Window]]]:
    """At most so many windows per length, taken evenly over the corpus; under `matched` the same ones at each."""
    kept: list[tuple[Tokens, list[Window]]] = [(document, []) for document, _ in found]
    for length in lengths:
        flat = [(i, window) for i, (_, windows) in enumerate(found) for window in windows if window.length == length]
        count = min(most, len(flat))
        for n in range(count):
            i, window = flat[(2 * n + 1) * len(flat) // (2 * count)]
            kept[i][1].append(window)
    return kept


def prefix_token(tokenizer: PreTrainedTokenizerBase | None, bos: bool | None, protocol: str) -> int | None:
    """The token windows begin with: as asked for, else as the tokenizer does; under `blocks` as lm-eval does."""
    if bos is False or (bos is None and tokenizer is None):
        return None
    if tokenizer is None:
        raise MethodError("bos=True needs a tokenizer")
    token: int | None = tokenizer.bos_token_id
    if bos is None and protocol == "blocks":
        return token if token is not None else tokenizer.eos_token_id
    if bos is None:
        return token if token is not None and list(tokenizer("a")["input_ids"])[:1] == [token] else None
    if token is None:
        raise MethodError(f"bos=True, but {type(tokenizer).__name__} has no BOS token")
    return token


def prepare(
    model: PreTrainedModel,
    corpus: str | Sequence[Document] | Sequence[Tokens],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    bos: bool | None = None,
    **plan: Any,
) -> Reading:
    """Load, tokenise, check and plan: everything `perplexity` does before the model reads. The arguments are its."""
    given = load(corpus) if isinstance(corpus, str) else list(corpus)
    raw = [document for document in given if isinstance(document, Document)]
    if tokenizer is None and (raw or bos is not False):
        tokenizer = own_tokenizer(model, needed=bool(raw))
    documents = [document for document in given if isinstance(document, Tokens)]
    if raw and tokenizer is not None:
        documents += tokenize(raw, tokenizer)
    check_vocabulary(model, documents)
    reading = plan_reading(documents, tokenizer=tokenizer, bos=bos, left_out=getattr(given, "left_out", 0), **plan)
    if (narrow := narrow_layers(model, max(reading.passes))) is not None:
        warnings.warn(narrow, stacklevel=3)
    return reading


def check_vocabulary(model: PreTrainedModel, documents: Sequence[Tokens]) -> None:
    """Raise CorpusError where a document holds a token the model has no embedding for."""
    largest = max((int(document.ids.max()) for document in documents if len(document.ids)), default=0)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if largest >= vocabulary:
        raise CorpusError(f"token id {largest} is outside the model's vocabulary of {vocabulary}; wrong tokenizer?")


def own_tokenizer(model: PreTrainedModel, *, needed: bool) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer

    if model.name_or_path:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    if needed:
        raise CorpusError("this model was not loaded from a folder, so its tokenizer is unknown; give tokenizer=...")
    return None
