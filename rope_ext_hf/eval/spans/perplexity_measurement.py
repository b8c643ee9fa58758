"""The measurement of the losses of documents at each context length, which perplexity runs show."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.errors import CorpusError, MethodError
from rope_ext_hf.eval.spans.span_measurement import SpanMeasurement, first_scored, grouped
from rope_ext_hf.eval.states_files import stored_bytes
from rope_ext_hf.eval.states_writer import StatesWriter
from rope_ext_hf.reading.protocols import Span
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.reading.spans import EvalPlan, Pass, Setting
from rope_ext_hf.runs.conclusions.labels import Method
from rope_ext_hf.runs.measurement import Cell, Passed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        states: the dtype in which last hidden states are stored in the run's folder: "model" (that of the model),
            "float16" or "float32"; "": they are not stored.
        names: the digest of the names of the tokens, which is stored beside them, see `stored_states.token_names`.

    Raises:
        CorpusError: no scored token is a key token.
    """

    kind = "perplexity"

    def __init__(
        self,
        plan: EvalPlan,
        keys: Sequence[Tensor] | None = None,
        keys_from: str = "",
        *,
        states: str = "",
        names: str = "",
    ) -> None:
        super().__init__(plan)
        self.keys, self.keys_from, self.states, self.names = keys, keys_from, states, names
        self.takes_outputs = bool(states)
        self._writer: StatesWriter | None = None
        targets, stride, bos = plan.options.targets, plan.options.stride, bool(plan.prefix)
        self.setting = Setting(plan.protocol.name, targets, stride, bos, plan.left_out, keys_from, states, plan.note)
        if keys is not None and not self._scores_a_key_token(keys):
            raise CorpusError(
                f"none of the scored tokens is a key token ({keys_from}), so LongPPL has no value; give longer text or "
                "longer lengths, or another evaluator, one that reads the longest length well"
            )

    def with_keys(self, keys: Sequence[Tensor], keys_from: str) -> PerplexityMeasurement:
        """Return the same measurement with key tokens; the arguments are those of the class."""
        return PerplexityMeasurement(self.plan, keys, keys_from, states=self.states, names=self.names)

    def stored_bytes(self, model: PreTrainedModel, dtype: torch.dtype, methods: int) -> int:
        """Return the bytes that the last hidden states take, if they are stored, see `Measurement.stored_bytes`."""
        return stored_bytes(model, self.plan, self.states, dtype, methods) if self.states else 0

    def begin(self, folder: Path | None, method: Method, scorer: TokenScorer) -> None:
        """Get ready to store the last hidden states under a method, if they are stored.

        Raises:
            MethodError: the run is without files.
            UnsupportedModelError: the model has no hidden states that could be stored.
        """
        if not self.states:
            return
        if folder is None:
            raise MethodError("store_states needs the folder of a run, in which states are stored; give out=...")
        scorer.check_outputs()
        self._writer = StatesWriter(
            folder,
            method,
            self.plan,
            text=self.fingerprint(),
            names=self.names,
            dtype=self.states,
            model=scorer.model,
            head=scorer.head,
        )

    def measure_items(
        self, scorer: TokenScorer, missing: Iterable[tuple[int, Sequence[Cell]]], progress: Passed
    ) -> Iterator[tuple[int, Cell, DocumentLoss, Cost]]:
        """Score documents at some lengths; where states are stored, those of a document and length are on disk first.

        See `SpanMeasurement.measure_items`.
        """
        for item, cell, loss, cost in super().measure_items(scorer, missing, progress):
            if self._writer is not None:
                self._writer.finish(item, int(cell[0]))
            yield item, cell, loss, cost

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

    def score(
        self, scorer: TokenScorer, batch: Sequence[tuple[int, Pass]], progress: Passed
    ) -> tuple[list[list[DocumentLoss]], Cost]:
        """Read some passes together, and return the losses of their spans, see `SpanMeasurement.score`."""
        nats_of_passes = _float64(self._losses(scorer, batch))
        cost = scorer.take_cost()
        recent_nats = self._recent_losses(scorer, batch, progress)
        losses = []
        for (item, one_pass), nats in zip(batch, nats_of_passes, strict=True):
            first = first_scored(one_pass)
            losses.append(
                [
                    self._document_loss(
                        item, span, nats[span.score_from - first : span.score_to - first], recent_nats.get((item, span))
                    )
                    for span in one_pass.spans
                ]
            )
        return losses, cost

    def _losses(self, scorer: TokenScorer, batch: Sequence[tuple[int, Pass]]) -> list[Tensor]:
        """Return the losses of the scored tokens of some passes, and store the hidden states that predict them."""
        texts, length, writer = self.texts(batch), batch[0][1].context, self._writer
        if writer is None:
            return scorer.losses_together(texts, length=length)

        def use(number: int, begin: int, outputs: Tensor, targets: Tensor) -> Tensor:
            item, one_pass = batch[number]
            writer.put(item, one_pass, begin, outputs)
            return scorer.head.losses(outputs, targets).cpu()

        return [torch.cat(parts) for parts in scorer.outputs_together(texts, use, length=length)]

    def _recent_losses(
        self, scorer: TokenScorer, batch: Sequence[tuple[int, Pass]], progress: Passed
    ) -> dict[tuple[int, Span], float]:
        """Return for some spans the loss of their targets, in nats, when only the last tokens before them are read.

        The model as loaded alone is measured so, under a protocol that has this reference; see `EvalPlan.recent`. The
        result has the index of the document and the span as its keys.
        """
        if not scorer.unpatched:
            return {}
        spans = [
            (item, span, recent) for item, one_pass in batch for span, recent in self.plan.recent_spans(one_pass.spans)
        ]
        losses = {}
        for group in grouped(spans, lambda _: self.plan.recent, scorer.tokens_together):
            texts = [self.text(item, recent.start, recent.stop, recent.score_from) for item, _, recent in group]
            nats_of_group = _float64(scorer.losses_together(texts, length=self.plan.recent))
            for (item, span, recent), nats in zip(group, nats_of_group, strict=True):
                losses[item, span] = nats[: recent.score_to - recent.score_from].sum().item()
                progress(recent.stop - recent.start)
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


def _float64(losses: Sequence[Tensor]) -> list[Tensor]:
    return [losses_of_text.to(torch.float64) for losses_of_text in losses]
