"""Plan an evaluation before any weights are read: cut tokenised documents into spans, the stretches read at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.bounds import check_int
from rope_ext_hf.errors import CorpusError, MethodError, warn_caller
from rope_ext_hf.models.layer_types import AttentionLayers
from rope_ext_hf.reading.protocols import (
    Protocol,
    ProtocolOptions,
    Span,
    check_lengths,
    resolve_protocol,
)
from rope_ext_hf.reading.text.documents import Corpus, Document, Tokens, token_ids
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import (
    check_vocabulary,
    own_tokenizer,
    prefix_tokens,
    tokenize,
    warn_of_unknown,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = [
    "EvalPlan",
    "Pass",
    "check_prompts",
    "with_prefix",
]


@dataclass(frozen=True)
class Setting:
    """The settings with which text was read for a result.

    Attributes:
        protocol: the name of the protocol, see `rope_ext_hf.reading.protocols`.
        targets, stride: see `ProtocolOptions`.
        bos: whether a prefix, such as BOS, was read.
        left_out: the number of documents that were too short.
        keys: the model that chose the key tokens (those whose prediction needs long context, LongPPL), and its
            settings; "" if key tokens were not measured.
        states: the dtype in which the last hidden states were stored: "model" (that of the model), "float16" or
            "float32"; "" if they were not stored.
        note: what a reader of the result should know about its text; empty if there is nothing.
    """

    protocol: str
    targets: int
    stride: int
    bos: bool
    left_out: int
    keys: str = ""
    states: str = ""
    note: str = ""


class Pass(NamedTuple):
    """A stretch of a document that is read in one pass through a model, and the spans that it scores.

    Attributes:
        start, stop: the first token of the document in the pass, and the one after the last.
        context: the length at which length-dependent methods are held.
        spans: the spans whose targets are scored.
    """

    start: int
    stop: int
    context: int
    spans: tuple[Span, ...]


def span_passes(spans: Iterable[Span], *, depends_on_total_length: bool) -> list[Pass]:
    """Return the passes in which spans of one document are read, in the order of the spans.

    Spans that read the same tokens at the same length share a pass. Where the method does not follow the length of the
    input, all spans with the same first token share one as well: the output of a causal model for a token does not
    depend on later tokens, so that the longest pass also scores the shorter spans.

    Args:
        spans: the spans.
        depends_on_total_length: whether the method follows the length of the input.
    """
    of_pass = attrgetter("context", "start", "stop") if depends_on_total_length else attrgetter("start")
    shared: dict[Any, list[Span]] = {}
    for span in spans:
        shared.setdefault(of_pass(span), []).append(span)
    passes = []
    for group in shared.values():
        longest = max(group, key=attrgetter("stop"))
        passes.append(Pass(longest.start, longest.stop, longest.context, tuple(group)))
    return passes


@dataclass(frozen=True)
class EvalPlan:
    """The spans (stretches of tokens) that a perplexity evaluation reads, the same for every method; pure data.

    Attributes:
        protocol: the protocol that cut them.
        lengths: context lengths, ascending.
        options: the options of the protocol.
        prefix: token ids that stand first in each span, or before each document, see `Protocol`.
        documents: each document that has any spans, and its spans in reading order.
        left_out: the number of documents that are too short for the lengths.
        recent: the number of tokens that the model as loaded reads for the reference of a protocol that has one, see
            `Protocol.recent`; 0: there is none.
        note: see `Setting`.
    """

    protocol: Protocol
    lengths: tuple[int, ...]
    options: ProtocolOptions
    prefix: tuple[int, ...]
    documents: tuple[tuple[Tokens, tuple[Span, ...]], ...]
    left_out: int
    recent: int = 0
    note: str = ""

    def passes(self, *, depends_on_total_length: bool, recent: bool = False) -> list[int]:
        """Return the number of tokens in each pass under one method.

        Args:
            depends_on_total_length: whether the method follows the length of the input, so that spans from one
                beginning do not share a pass, see `span_passes`.
            recent: count the passes of the reference too.
        """
        passes = []
        for _, spans in self.documents:
            passes += [
                stop - start
                for start, stop, _, _ in span_passes(spans, depends_on_total_length=depends_on_total_length)
            ]
            if recent:
                passes += [self.recent for _ in self.recent_spans(spans)]
        return passes

    def recent_spans(self, spans: Iterable[Span]) -> list[tuple[Span, Span]]:
        """Return those spans that are longer than `recent` tokens, each with the span of its reference.

        The reference has the same targets, and reads no more than the last `recent` tokens up to their end.
        """
        if not self.recent:
            return []
        return [
            (span, span._replace(start=span.score_to - self.recent, stop=span.score_to, context=self.recent))
            for span in spans
            if span.score_to - span.start > self.recent
        ]

    @property
    def most_spans(self) -> int:
        """The largest number of spans that are read at one length."""
        counts = Counter(span.length for _, spans in self.documents for span in spans)
        return max(counts.values())

    def input_ids(self, document: Tokens, start: int, stop: int) -> tuple[Tensor, int]:
        """Return the token ids for one pass, (tokens,) int64, and the position of the first of them in the document.

        `start`, `stop`: the first token of the document in the pass, and the one after the last.
        """
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
    context_length: int | None = None,
) -> EvalPlan:
    """Cut tokenised documents into spans, the stretches of tokens that are read at once.

    Args:
        documents: the documents.
        lengths: context lengths, in tokens.
        protocol: the name of the protocol.
        targets, stride: see `ProtocolOptions`; `targets` is half the shortest length by default.
        tokenizer: the tokenizer that gives the prefix.
        bos: see `prefix_tokens`.
        max_spans: the most spans per length, taken evenly over the text; None: all.
        context_length: that of the model, in tokens, for the reference of a protocol that has one; None: there is no
            reference.

    Raises:
        CorpusError: no document is long enough for one of the lengths.
        MethodError: an impossible value of one of the arguments, or lengths too short for the prefix.
    """
    chosen = resolve_protocol(protocol)
    ordered, scored = check_lengths(lengths, targets)
    for name, value in (("stride", stride), ("max_spans", max_spans)):
        if value is not None:
            check_int(name, value)
    prefix = prefix_tokens(tokenizer, bos, chosen.default_prefix)
    options = ProtocolOptions(scored, stride, max(1, len(prefix)))
    least = ordered[0] - (scored if chosen.uses_targets else 1)  # tokens that no span of the shortest length scores
    if least < len(prefix):
        raise MethodError(
            f"{len(prefix)} tokens stand before every text ({', '.join(map(str, prefix))}), and the shortest length, "
            f"{ordered[0]}, leaves {least}; give longer lengths, fewer targets, or bos=False (--no-bos)"
        )
    cut = [(document, _spans(document, chosen, ordered, options, len(prefix))) for document in documents]
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
    recent = context_length if chosen.recent and context_length and scored < context_length < ordered[-1] else 0
    return EvalPlan(chosen, tuple(ordered), options, prefix, kept, left_out, recent)


def _spans(
    document: Tokens, protocol: Protocol, lengths: Sequence[int], options: ProtocolOptions, prefix: int
) -> list[Span]:
    """Return those spans of one document in which any token is scored.

    `prefix`: the number of tokens in the prefix.
    """
    before = prefix if protocol.prefix == "span" else 0  # the document is cut as if it began with these tokens
    kept = []
    for span in protocol.spans(before + len(document.ids), lengths, options):
        start = span.start
        if protocol.prefix == "document" and start < 0:  # position -1 stands for the whole prefix
            start = -prefix
        start -= before
        # A span scores no token of the prefix, nor its own first token, which has no token before it.
        score_from = max(span.score_from - before, start + max(1, before), 0)
        score_to = span.score_to - before
        if score_from < score_to:
            kept.append(Span(span.length, start, span.stop - before, score_from, score_to, span.context))
    return kept


def _subsample(
    cut: Sequence[tuple[Tokens, list[Span]]], lengths: Sequence[int], most: int
) -> list[tuple[Tokens, list[Span]]]:
    """Return at most `most` spans per length, chosen evenly over the text.

    Under the protocol `matched`, the same ones are chosen at each length.
    """
    kept: list[tuple[Tokens, list[Span]]] = [(document, []) for document, _ in cut]
    for length in lengths:
        flat = [(i, span) for i, (_, spans) in enumerate(cut) for span in spans if span.length == length]
        count = min(most, len(flat))
        for n in range(count):
            i, span = flat[(2 * n + 1) * len(flat) // (2 * count)]
            kept[i][1].append(span)
    return kept


def with_prefix(ids: Tensor, start: int, stop: int, prefix: tuple[int, ...]) -> Tensor:
    """Return the tokens from `start` to `stop` of a document, with the prefix in place of the first of them.

    If `start` is negative, the prefix stands before the document instead. The result is (tokens,).
    """
    return torch.cat([ids.new_tensor(prefix), ids[max(start + len(prefix), 0) : stop]])


def prepare(
    model: PreTrainedModel,
    corpus: Corpus,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    bos: bool | None = None,
    **options: Any,
) -> EvalPlan:
    """Load and tokenise a text, check it against the model, and cut it into spans.

    Args:
        model: the model, which may be on the meta device.
        corpus: see `rope_ext_hf.reading.text.load.load`.
        tokenizer: default: the one beside the weights.
        bos: see `prefix_tokens`.
        **options: further arguments of `make_plan`.
    """
    loaded = load(corpus)
    raw = [document for document in loaded if isinstance(document, Document)]
    if tokenizer is None and (raw or bos is not False):
        tokenizer = own_tokenizer(model, needed=any(document.ids is None for document in raw))
    documents = [document for document in loaded if isinstance(document, Tokens)]
    without_text = [
        Tokens(document.name, torch.tensor(list(token_ids(document.ids, document.name)), dtype=torch.int64), ())
        for document in raw
        if document.ids is not None
    ]
    check_vocabulary(model, without_text)  # before the tokenizer decodes them
    if tokenizer is None:
        documents += without_text
    else:
        default = resolve_protocol(options.get("protocol", "matched")).default_prefix
        documents += tokenize(raw, tokenizer, bos=bos, default=default)
    check_vocabulary(model, documents)
    plan = make_plan(documents, tokenizer=tokenizer, bos=bos, **options)
    check_prompts(model, (), max(plan.passes(depends_on_total_length=False)))
    read = [document for document, _ in plan.documents]
    unknown = "" if tokenizer is None else warn_of_unknown(read, tokenizer)
    return replace(plan, note="\n".join(filter(None, (loaded.note, unknown))))


def check_prompts(model: PreTrainedModel, prompts: Iterable[Tensor], longest: int) -> None:
    """Check the token ids of prompts against the vocabulary.

    Warn if some layers have a sliding window that is shorter than the longest input, `longest` tokens.
    """
    check_vocabulary(model, [Tokens("prompt", ids, ()) for ids in prompts])
    if (warning := sliding_window_warning(model, longest)) is not None:
        warn_caller(warning)


def sliding_window_warning(model: PreTrainedModel, longest: int) -> str | None:
    """Return a warning if inputs of `longest` tokens are longer than the sliding window of some layers.

    None: they are not.
    """
    config = model.config.get_text_config()
    attention = AttentionLayers(config)
    if not attention.sliding or attention.window is None or attention.window >= longest:
        return None
    return (
        f"{attention.sliding} of {config.num_hidden_layers} layers attend to the last {attention.window:,} tokens "
        f"only; spans of {longest:,} tokens are longer"
    )
