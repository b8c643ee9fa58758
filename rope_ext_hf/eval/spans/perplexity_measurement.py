"""The measurement of the losses of documents at each context length, which perplexity runs show.

It gives the tokens of each span, which `EvalPlan` has cut from a document, to `TokenScorer`, and sums the losses of the
scored ones. The loop of a run adds up the spans of a document.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.errors import CorpusError
from rope_ext_hf.eval.spans.span_measurement import SpanMeasurement, first_scored, grouped
from rope_ext_hf.reading.protocols import Span
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.spans import EvalPlan, Setting
from rope_ext_hf.runs.measurement import Cell, Reading

__all__ = ["DocumentLoss", "PerplexityMeasurement"]


class DocumentLoss(NamedTuple):
    """The loss of one document at one context length.

    Attributes:
        name: the name of the document.
        nats: the loss, summed over the scored tokens.
        tokens: number of scored tokens.
        bytes: number of bytes of their text; 0 where that is not known.
        spans: number of spans (pieces of text of one context length) that were read.
        key_nats, key_tokens: loss and number of the key tokens among the scored ones, which are those that need the
            long context (LongPPL); 0 if none were looked for.
        recent_nats: the loss of the same tokens when the model as loaded reads only the last tokens before them, as
            many as its context length has room for; None: not measured.
    """

    name: str
    nats: float
    tokens: int
    bytes: int
    spans: int
    key_nats: float = 0.0
    key_tokens: int = 0
    recent_nats: float | None = None

    def plus(self, other: DocumentLoss) -> DocumentLoss:
        """Return the loss of this part of a document and of another part of it, together."""
        recent_nats = None
        if self.recent_nats is not None and other.recent_nats is not None:
            recent_nats = self.recent_nats + other.recent_nats
        return DocumentLoss(
            self.name,
            nats=self.nats + other.nats,
            tokens=self.tokens + other.tokens,
            bytes=self.bytes + other.bytes,
            spans=self.spans + other.spans,
            key_nats=self.key_nats + other.key_nats,
            key_tokens=self.key_tokens + other.key_tokens,
            recent_nats=recent_nats,
        )

    def to_record(self) -> list[float]:
        """Return all fields but the name as a list for JSON.

        The two numbers of key tokens are left out where there are none, and the last one where it is not known.
        """
        record = [self.nats, self.tokens, self.bytes, self.spans]
        if self.key_tokens:
            record += [self.key_nats, self.key_tokens]
        if self.recent_nats is not None:
            record.append(self.recent_nats)
        return record


class PerplexityMeasurement(SpanMeasurement[DocumentLoss]):
    """The measurement of the losses of documents, and of key tokens in them; an item is a document.

    Key tokens are those whose prediction needs the long context, as LongPPL chooses them.

    Args:
        plan: the documents, and the spans (pieces of text) that are read and scored.
        keys: for each document a mask of its key tokens, (tokens,) bool; None: no key tokens are looked for.
        keys_from: the model that chose the key tokens, and how, in words.

    Raises:
        CorpusError: no scored token is a key token.
    """

    kind = "perplexity"

    def __init__(self, plan: EvalPlan, keys: Sequence[Tensor] | None = None, keys_from: str = "") -> None:
        super().__init__(plan)
        self.keys = keys
        targets, stride, bos = plan.options.targets, plan.options.stride, bool(plan.prefix)
        self.setting = Setting(plan.protocol.name, targets, stride, bos, plan.left_out, keys_from, note=plan.note)
        if keys is not None and not self._scores_a_key_token(keys):
            raise CorpusError(
                f"none of the scored tokens is a key token ({keys_from}), so LongPPL has no value; give longer text or "
                "longer lengths, or another evaluator, one that reads the longest length well"
            )

    def with_keys(self, keys: Sequence[Tensor], keys_from: str) -> PerplexityMeasurement:
        """Return the same measurement with key tokens; the arguments are those of the class."""
        return PerplexityMeasurement(self.plan, keys, keys_from)

    def _scores_a_key_token(self, keys: Sequence[Tensor]) -> bool:
        """Return whether any scored token is a key token.

        `keys`: for each document a mask of its key tokens, (tokens,) bool.
        """
        return any(
            mask[span.score_from : span.score_to].any()
            for mask, (_, spans) in zip(keys, self.plan.documents, strict=True)
            for span in spans
        )

    def digested(self, cell: Cell) -> Iterable[bytes]:
        """Return the bytes that identify what is read at one context length, for a digest.

        They cover the token ids of all documents, the byte of the text at which each token ends, the key tokens, and
        the spans.
        """
        yield repr(self.plan.prefix).encode()
        for document, _ in self.plan.documents:
            yield document.ids.numpy().tobytes()
            yield array("q", document.ends).tobytes()  # where the bytes of each token end, for bits per byte
        for mask in self.keys or ():
            yield mask.numpy().tobytes()
        for _, spans in self.plan.documents:
            yield repr([span for span in spans if span.length == cell[0]]).encode()

    def readings(self, scorer: TokenScorer, item: int, cells: Sequence[Cell]) -> list[Reading]:
        """Return the passes of a document, each with those of the reference that belong to it, see `_recent_losses`."""
        readings = super().readings(scorer, item, cells)
        if not (self.plan.recent and scorer.unpatched):
            return readings
        counts = [len(self.plan.recent_spans(reading.what.spans)) for reading in readings]
        return [
            reading._replace(further=(self.plan.recent,) * count)
            for reading, count in zip(readings, counts, strict=True)
        ]

    def score_together(self, scorer: TokenScorer, readings: Sequence[Reading]) -> list[Sequence[DocumentLoss]]:
        """Read some passes together, and return the losses of their spans, see `SpanMeasurement.score_together`."""
        nats_of_passes = [nats.to(torch.float64) for nats in self.losses(scorer, readings)]
        recent_nats = self._recent_losses(scorer, readings) if self.plan.recent and scorer.unpatched else {}
        losses: list[Sequence[DocumentLoss]] = []
        for reading, nats in zip(readings, nats_of_passes, strict=True):
            item, one_pass = reading.item, reading.what
            first = first_scored(one_pass)
            losses.append(
                [
                    self._document_loss(
                        item, span, nats[span.score_from - first : span.score_to - first], recent_nats.get((item, span))
                    )
                    for span in one_pass.spans
                ]
            )
        return losses

    def losses(self, scorer: TokenScorer, readings: Sequence[Reading]) -> Sequence[Tensor]:
        """Return the losses of the scored tokens of each pass in nats, each (tokens,) float32.

        A pass goes to the scorer as its token ids, and the position of the first one that is scored.
        """
        return scorer.losses_together(self.texts(readings), length=readings[0].what.context)

    def _recent_losses(self, scorer: TokenScorer, readings: Sequence[Reading]) -> dict[tuple[int, Span], float]:
        """Return for some spans the loss of their targets, in nats, when only the last tokens before them are read.

        The model as loaded alone is measured so, under a protocol that has this reference; see `EvalPlan.recent`. The
        result has the index of the document and the span as its keys.
        """
        spans = [
            (reading.item, span, recent)
            for reading in readings
            for span, recent in self.plan.recent_spans(reading.what.spans)
        ]
        losses = {}
        for group in grouped(spans, lambda _: self.plan.recent, scorer.tokens_together):
            texts = [self.text(item, recent.start, recent.stop, recent.score_from) for item, _, recent in group]
            with scorer.without_cost():
                nats_of_group = scorer.losses_together(texts, length=self.plan.recent)
            for (item, span, recent), nats in zip(group, nats_of_group, strict=True):
                scored = nats[: recent.score_to - recent.score_from].to(torch.float64)
                losses[item, span] = scored.sum().item()
        return losses

    def _document_loss(self, item: int, span: Span, nats: Tensor, recent_nats: float | None) -> DocumentLoss:
        """Return the loss of one span; `nats` are the losses of its targets, (targets,) float64."""
        document, _ = self.plan.documents[item]
        keys = nats[:0]
        if self.keys is not None:
            keys = nats[self.keys[item][span.score_from : span.score_to]]
        return DocumentLoss(
            document.name,
            nats=nats.sum().item(),
            tokens=len(nats),
            bytes=document.bytes_between(span.score_from, span.score_to),
            spans=1,
            key_nats=keys.sum().item(),
            key_tokens=len(keys),
            recent_nats=recent_nats,
        )
