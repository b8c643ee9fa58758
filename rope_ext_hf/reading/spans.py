"""Plan an evaluation: documents as token ids, cut into spans by a protocol, before any weights are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rope_ext_hf.bounds import whole
from rope_ext_hf.errors import CorpusError, MethodError, warn_caller
from rope_ext_hf.hub import leading_tokens, load_tokenizer
from rope_ext_hf.patches.layer_types import AttentionLayers
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.documents import Corpus, Document, Tokens, token_ids, utf8_bytes
from rope_ext_hf.reading.protocols import (
    DefaultPrefix,
    Protocol,
    ProtocolOptions,
    Span,
    check_lengths,
    resolve_protocol,
)
from rope_ext_hf.reading.token_bytes import byte_ends

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Setting:
    """How the text of a result was read, see `rope_ext_hf.reading.protocols`."""

    protocol: str
    targets: int
    stride: int
    bos: bool
    left_out: int  # documents that were too short
    keys: str = ""  # which model found the key tokens, and how; empty: there are none


def tokenize(documents: Iterable[Document | Tokens], tokenizer: PreTrainedTokenizerBase) -> list[Tokens]:
    """Tokenise documents, no special tokens added; those that are tokenised already stay as they are."""
    return [each if isinstance(each, Tokens) else _tokenize(each, tokenizer) for each in documents]


def text_of(documents: Iterable[Document | Tokens], tokenizer: PreTrainedTokenizerBase) -> str:
    """Documents end to end, an empty line between them; token ids are decoded."""
    return "\n\n".join(
        each.text if each.ids is None or each.text else str(tokenizer.decode(list(each.ids))) for each in documents
    )


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The token ids of a part of a prompt, no special tokens added."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def encode_answer(tokenizer: PreTrainedTokenizerBase, question: str, answer: str) -> tuple[list[int], list[int]]:
    """The token ids of a question and of the answer behind it, cut where the question alone has other tokens."""
    alone, both = encode(tokenizer, question), encode(tokenizer, question + answer)
    shared = next((i for i, (a, b) in enumerate(zip(alone, both, strict=False)) if a != b), len(alone))
    return both[:shared], both[shared:]


def _tokenize(document: Document, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    if document.ids is not None:  # which token has which bytes is unknown: each gets its share
        ids = list(token_ids(document.ids, document.name))
        total = len(tokenizer.decode(ids).encode("utf-8", errors="replace"))
        return Tokens(document.name, torch.tensor(ids, dtype=torch.int64), _shares(total, len(ids)))
    text, total = document.text, utf8_bytes(document.name, document.text)
    encoded = tokenizer(
        text,
        add_special_tokens=False,
        return_offsets_mapping=tokenizer.is_fast,
        return_attention_mask=False,
        verbose=False,
    )
    ids = encoded["input_ids"]
    if not tokenizer.is_fast:  # no offsets; exact for byte tokenizers, where tokens and bytes are as many
        ends = _shares(total, len(ids))
    else:
        ends = byte_ends(text, encoded.tokens(), encoded["offset_mapping"])
    return Tokens(document.name, torch.tensor(ids, dtype=torch.int64), ends, text)


def _shares(total: int, count: int) -> tuple[int, ...]:
    """Where each of `count` parts of equal size ends."""
    if total == count:  # a token per byte: a text has millions
        return tuple(range(1, total + 1))
    return tuple(round(total * (i + 1) / count) for i in range(count))


@dataclass(frozen=True)
class EvalPlan:
    """The spans that a perplexity evaluation reads, the same for every method; pure data."""

    protocol: Protocol
    lengths: tuple[int, ...]  # ascending context lengths
    options: ProtocolOptions
    prefix: tuple[int, ...]  # token ids that stand first in each span, or before each document, see `Protocol`
    # every document with anything to read, and its spans in reading order
    documents: tuple[tuple[Tokens, tuple[Span, ...]], ...]
    left_out: int  # documents too short for the lengths

    @property
    def passes(self) -> list[int]:
        """Tokens of each pass; spans that share a pass come one after the other."""
        place = attrgetter("context", "start", "stop")
        passes = (key for _, spans in self.documents for key, _ in groupby(spans, key=place))
        return [stop - start for _, start, stop in passes]

    def input_ids(self, document: Tokens, start: int, stop: int) -> tuple[Tensor, int]:
        """The token ids of one pass, (tokens,) int64, and the document position of the first of them."""
        has_prefix = start < 0 or self.protocol.prefix == "span"
        return with_prefix(document.ids, start, stop, self.prefix if has_prefix else ()), start


def make_plan(
    documents: Sequence[Tokens],
    *,
    lengths: Sequence[int],
    protocol: str = "matched",
    targets: int | None = None,
    stride: int = 256,
    tokenizer: PreTrainedTokenizerBase | None = None,
    bos: bool | None = None,
    max_spans: int | None = None,
) -> EvalPlan:
    """Cut tokenised documents into spans, as `perplexity` does."""
    chosen = resolve_protocol(protocol)
    ordered, scored = check_lengths(lengths, targets)
    for name, value in (("stride", stride), ("max_spans", max_spans)):
        if value is not None:
            whole(name, value)
    prefix = prefix_tokens(tokenizer, bos, chosen.default_prefix)
    options = ProtocolOptions(scored, stride, max(1, len(prefix)))
    least = ordered[0] - (scored if chosen.uses_targets else 1)  # tokens that no span of the shortest length scores
    if least < len(prefix):
        raise MethodError(
            f"{len(prefix)} tokens stand before every text ({', '.join(map(str, prefix))}), and the shortest length, "
            f"{ordered[0]}, leaves {least}; give longer lengths, fewer targets, or bos=False (--no-bos)"
        )
    before = len(prefix) if chosen.prefix == "span" else 0  # places that the cut has before the first token
    cut: list[tuple[Tokens, list[Span]]] = []
    for document in documents:
        spans = list(chosen.spans(before + len(document.ids), ordered, options))
        if chosen.prefix == "document":  # position -1 stands for all that is before the first token
            spans = [s if s.start >= 0 else s._replace(start=-len(prefix)) for s in spans]
        moved = (
            Span(s.length, s.start - before, s.stop - before, s.score_from - before, s.score_to - before, s.context)
            for s in spans
        )
        # A span scores no token of the prefix, nor its own first token, before which nothing stands.
        read = [s._replace(score_from=max(s.score_from, s.start + max(1, before), 0)) for s in moved]
        cut.append((document, [span for span in read if span.score_from < span.score_to]))
    left_out = sum(not spans for _, spans in cut)
    if max_spans is not None:
        cut = _subsample(cut, ordered, max_spans)
    reading_order = attrgetter("context", "start", "stop", "score_from")
    kept = tuple([(document, tuple(sorted(spans, key=reading_order))) for document, spans in cut if spans])
    measured = {span.length for _, spans in kept for span in spans}
    if missing := [length for length in ordered if length not in measured]:
        longest = max([len(document.ids) for document in documents], default=0)
        raise CorpusError(
            f"no document has {missing[-1]} tokens, the longest length asked for; "
            f"the longest of {len(documents)} has {longest}. Give longer text or shorter lengths"
        )
    return EvalPlan(chosen, tuple(ordered), options, prefix, kept, left_out)


def _subsample(
    cut: Sequence[tuple[Tokens, list[Span]]], lengths: Sequence[int], most: int
) -> list[tuple[Tokens, list[Span]]]:
    """At most `most` spans per length, taken evenly over the corpus; under `matched` the same ones at each length."""
    kept: list[tuple[Tokens, list[Span]]] = [(document, []) for document, _ in cut]
    for length in lengths:
        flat = [(i, span) for i, (_, spans) in enumerate(cut) for span in spans if span.length == length]
        count = min(most, len(flat))
        for n in range(count):
            i, span = flat[(2 * n + 1) * len(flat) // (2 * count)]
            kept[i][1].append(span)
    return kept


def prefix_tokens(
    tokenizer: PreTrainedTokenizerBase | None, bos: bool | None, default: DefaultPrefix = "added"
) -> tuple[int, ...]:
    """The token ids that an input begins with.

    With `bos` those that the tokenizer puts before every text, else its BOS token; with False none; with None those of
    `default`, see `Protocol.default_prefix`.
    """
    if bos is False or (bos is None and (tokenizer is None or default == "none")):
        return ()
    if tokenizer is None:
        raise MethodError("bos=True needs a tokenizer")
    if (leading := leading_tokens(tokenizer)) or (bos is None and default == "added"):
        return leading
    token: int | None = tokenizer.bos_token_id
    if token is None and bos is None and default == "bos or eos":
        token = tokenizer.eos_token_id
    if token is None and bos:
        raise MethodError(
            f"bos=True, but {type(tokenizer).__name__} puts no tokens before a text and has no BOS token; leave out bos"
        )
    return () if token is None else (token,)


def with_prefix(ids: Tensor, start: int, stop: int, prefix: tuple[int, ...]) -> Tensor:
    """Tokens start to stop of a document (tokens,), the first of them replaced by the prefix; start may be negative."""
    return torch.cat([ids.new_tensor(prefix), ids[max(start + len(prefix), 0) : stop]])


def prepare(
    model: PreTrainedModel,
    corpus: Corpus,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    bos: bool | None = None,
    **options: Any,
) -> EvalPlan:
    """Load, tokenise, check and plan, as `perplexity` does; the model may be on the meta device."""
    given = load(corpus)
    raw = [document for document in given if isinstance(document, Document)]
    if tokenizer is None and (raw or bos is not False):
        tokenizer = own_tokenizer(model, needed=any(document.ids is None for document in raw))
    documents = [document for document in given if isinstance(document, Tokens)]
    without_text = [
        Tokens(document.name, torch.tensor(list(token_ids(document.ids, document.name)), dtype=torch.int64), ())
        for document in raw
        if document.ids is not None
    ]
    check_vocabulary(model, without_text)  # before the tokenizer decodes them
    documents += without_text if tokenizer is None else tokenize(raw, tokenizer)
    check_vocabulary(model, documents)
    plan = make_plan(documents, tokenizer=tokenizer, bos=bos, **options)
    check_prompts(model, (), max(plan.passes))
    return plan


def check_prompts(model: PreTrainedModel, prompts: Iterable[Tensor], longest: int) -> None:
    """Check token ids against the vocabulary, and warn where a sliding window is shorter than the longest input."""
    check_vocabulary(model, [Tokens("prompt", ids, ()) for ids in prompts])
    if (warning := sliding_window_warning(model, longest)) is not None:
        warn_caller(warning)


def sliding_window_warning(model: PreTrainedModel, longest: int) -> str | None:
    """Return a warning if spans of `longest` tokens are longer than the sliding window of some layers, else None."""
    config = model.config.get_text_config()
    attention = AttentionLayers(config)
    if not attention.sliding or attention.window is None or attention.window >= longest:
        return None
    return (
        f"{attention.sliding} of {config.num_hidden_layers} layers attend to the last {attention.window:,} tokens "
        f"only; spans of {longest:,} tokens are longer"
    )


def check_vocabulary(model: PreTrainedModel, documents: Sequence[Tokens]) -> None:
    """Raise CorpusError where a document holds a token that the model has no embedding for."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    for document in documents:
        ids = document.ids
        if ids.is_floating_point() or ids.is_complex() or ids.ndim != 1:
            raise CorpusError(f"{document.name}: token ids must be whole numbers, (tokens,); got {ids.dtype}")
        for token in (int(ids.min()), int(ids.max())) if len(ids) else ():
            if not 0 <= token < vocabulary:
                raise CorpusError(
                    f"{document.name}: token id {token} is outside the model's vocabulary of {vocabulary}; "
                    "wrong tokenizer?"
                )


def own_tokenizer(model: PreTrainedModel, *, needed: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the model's weights; None where the model has no name and none is needed."""
    if model.name_or_path:
        return load_tokenizer(model.name_or_path)
    if needed:
        raise CorpusError("this model was not loaded from a folder, so its tokenizer is unknown; give tokenizer=...")
    return None
