"""Perplexity of held-out text, by context length.

    from rope_ext_hf.eval import perplexity
    for result in perplexity(model, "stdlib", lengths=[256, 1024]):
        print(result.length, result.perplexity)

A protocol cuts documents into spans (`protocols.py`, `plan.py`), a scorer reads the spans in fixed memory
(`scorer.py`), and sums per document make a result with its confidence interval (`results.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rope_ext_hf.eval.documents import Document
from rope_ext_hf.eval.journal import Cell
from rope_ext_hf.eval.plan import EvalPlan, Tokens, prepare
from rope_ext_hf.eval.results import Cost, DocumentLoss, Result, Setting
from rope_ext_hf.eval.runner import Measurement, measure
from rope_ext_hf.eval.scorer import TokenScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["PerplexityMeasurement", "perplexity"]


class PerplexityMeasurement(Measurement):
    """The losses of a plan's documents."""

    kind = "perplexity"

    def __init__(self, plan: EvalPlan) -> None:
        self.plan = plan

    @cached_property
    def items(self) -> Sequence[str]:
        return [document.name for document, _ in self.plan.documents]

    @property
    def setting(self) -> Setting:
        return self.plan.setting

    @property
    def passes(self) -> Sequence[int]:
        return self.plan.passes

    @property
    def scored(self) -> int:
        return self.plan.scored

    def cells(self, item: int) -> Sequence[Cell]:
        return [(length,) for length in sorted({span.length for span in self.plan.documents[item][1]})]

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.plan.prefix).encode())
        for document, spans in self.plan.documents:
            digest.update(document.ids.numpy().tobytes())
            digest.update(torch.tensor(document.ends, dtype=torch.int64).numpy().tobytes())  # bits per byte
            digest.update(repr(spans).encode())
        return digest.hexdigest()

    def measure(
        self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Callable[[int], None] | None
    ) -> Iterator[tuple[Cell, DocumentLoss, Cost]]:
        """Score one document; lengths that share passes share their cost."""
        document, spans = self.plan.documents[item]
        wanted = [span for span in spans if (span.length,) in cells]
        scorer.take_cost()
        for context, same_context in groupby(wanted, key=lambda span: span.context):
            losses: dict[int, DocumentLoss] = {}
            for (start, stop), same_pass in groupby(same_context, key=lambda span: (span.start, span.stop)):
                scored = list(same_pass)
                first = min(span.score_from for span in scored)
                ids, shift = self.plan.input_ids(document, start, stop)
                nats = scorer.losses(ids, first - shift, length=context).to(torch.float64)  # (stop - first,)
                for span in scored:
                    before = losses.get(span.length, DocumentLoss(document.name, 0.0, 0, 0, 0))
                    losses[span.length] = before.plus(
                        nats[span.score_from - first : span.score_to - first].sum().item(),
                        span.score_to - span.score_from,
                        document.bytes_between(span.score_from, span.score_to),
                    )
                if progress is not None:
                    progress(stop - start)
            cost = scorer.take_cost()
            yield from (((length,), loss, cost) for length, loss in losses.items())


def perplexity(
    model: PreTrainedModel,
    corpus: str | Sequence[Document] | Sequence[Tokens],
    *,
    lengths: Sequence[int],
    protocol: str = "matched",
    targets: int | None = None,
    stride: int = 256,
    tokenizer: PreTrainedTokenizerBase | None = None,
    bos: bool | None = None,
    max_spans: int | None = None,
    chunk: int | None = None,
    offload_cache: bool = False,
    out: str | Path | None = None,
    data: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Result]:
    """Measure the perplexity of a model at several context lengths.

    Args:
        model: a causal language model, patched or not, in any dtype, on any device.
        corpus: what `rope_ext_hf.eval.corpora.load` takes, documents, or documents already tokenised.
        lengths: context lengths in tokens.
        protocol: a name of `rope_ext_hf.eval.protocols.PROTOCOLS`.
        targets: tokens scored per span, under a protocol that uses it; default half the shortest length.
        stride: tokens between the starts of spans, under a protocol that uses it.
        tokenizer: default: the one beside the model's weights.
        bos: begin every span with the tokenizer's BOS token; default: if the tokenizer itself does so, or as the code
            that the protocol is from does.
        max_spans: at most this many spans per length, taken evenly over the corpus.
        chunk: tokens per pass of the decoder; default: by the free memory, within a fixed budget.
        offload_cache: keep keys and values in main memory, and on the model's device only those of one layer.
        out: write a run's folder into this folder, as `rope-ext ppl` does, and continue the run where it is there
            already; default: no files.
        data: what the text is called in the run's folder; default: `corpus` where it is a string.
        progress: called with the number of tokens read, after each pass.

    Returns:
        One Result per length, shortest first. A span with a loss that is not finite makes its whole result
        non-finite; the result names its document.

    Raises:
        CorpusError: no document as long as the longest length, or token ids the model's vocabulary lacks.
        MethodError: an unknown protocol, or lengths, targets and stride that do not fit.
        FileError: the run's folder cannot be written, or is damaged.

    Length-dependent methods are held at each context length (`fixed_length`). A warning counts the layers whose sliding
    window is shorter than the longest span.
    """
    plan = prepare(
        model,
        corpus,
        lengths=lengths,
        protocol=protocol,
        targets=targets,
        stride=stride,
        tokenizer=tokenizer,
        bos=bos,
        max_spans=max_spans,
    )
    measurement = PerplexityMeasurement(plan)
    return measure(
        model,
        measurement,
        data=data or (corpus if isinstance(corpus, str) else "documents"),
        out=out,
        chunk=chunk,
        offload_cache=offload_cache,
        progress=progress,
    )
