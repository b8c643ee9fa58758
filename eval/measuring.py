"""How well a model predicts held-out text, by context length.

    from rope_ext_hf.eval import perplexity
    for result in perplexity(model, "stdlib", lengths=[256, 1024]):
        print(result.length, result.perplexity)

A protocol cuts documents into spans (`protocols.py`, `plan.py`), a scorer reads the spans in fixed memory
(`scorer.py`), and sums per document make a result with its confidence interval (`results.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from rope_ext_hf.eval.documents import Document
from rope_ext_hf.eval.plan import EvalPlan, Tokens, prepare
from rope_ext_hf.eval.protocols import Span
from rope_ext_hf.eval.results import Cost, DocumentLoss, Result
from rope_ext_hf.eval.scorer import TokenScorer
from rope_ext_hf.patches.patching import patched_method

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["aggregate", "perplexity", "score_document", "score_plan"]


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
    progress: Callable[[int], None] | None = None,
) -> list[Result]:
    """Perplexity at several context lengths.

    Args:
        model: a causal language model, patched or not, in any dtype, on any device.
        corpus: what `rope_ext_hf.eval.corpora.load` takes, documents, or documents already tokenised.
        lengths: context lengths in tokens.
        protocol: a name of `rope_ext_hf.eval.protocols.PROTOCOLS`.
        targets: tokens scored per span, under a protocol that uses it; default half the shortest length.
        stride: tokens between the starts of spans, under a protocol that uses it.
        tokenizer: default: the one beside the model's weights.
        bos: begin every span with the tokenizer's BOS token; default: if the tokenizer itself does so.
        max_spans: at most this many spans per length, taken evenly over the corpus.
        chunk: tokens per pass of the decoder; default: by the free memory, within a fixed budget.
        offload_cache: keep keys and values in main memory, and on the model's device only those of one layer.
        progress: called with the number of tokens read, after each pass.

    Returns:
        One Result per length, shortest first. A span with a loss that is not finite makes its whole result
        non-finite; the result names its document.

    Raises:
        CorpusError: no document as long as the longest length, or token ids the model's vocabulary lacks.
        MethodError: an unknown protocol, or lengths, targets and stride that do not fit.

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
    method = patched_method(model)
    scorer = TokenScorer(model, chunk=chunk, offload_cache=offload_cache)
    return aggregate(method.to_dict() if method else None, plan, score_plan(scorer, plan, progress))


def score_plan(
    scorer: TokenScorer, plan: EvalPlan, progress: Callable[[int], None] | None = None
) -> Iterator[tuple[int, DocumentLoss, Cost]]:
    """Score every document of a plan.

    Args:
        scorer: reads the spans.
        plan: the documents and their spans.
        progress: called with the number of tokens read, after each pass.

    Yields:
        (context length, the document's loss at it, what its passes cost), as soon as a document's length is complete.
    """
    for document, spans in plan.documents:
        yield from score_document(scorer, plan, document, spans, progress)


def score_document(
    scorer: TokenScorer,
    plan: EvalPlan,
    document: Tokens,
    spans: Sequence[Span],
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, DocumentLoss, Cost]]:
    """Score some spans of one document; lengths that share passes share their cost."""
    scorer.take_cost()
    for context, same_context in groupby(spans, key=lambda span: span.context):
        losses: dict[int, DocumentLoss] = {}
        for (start, stop), same_pass in groupby(same_context, key=lambda span: (span.start, span.stop)):
            scored = list(same_pass)
            first = min(span.score_from for span in scored)
            ids, shift = plan.input_ids(document, start, stop)
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
        yield from ((length, loss, cost) for length, loss in losses.items())


def aggregate(
    method: dict[str, Any] | None, plan: EvalPlan, measured: Iterable[tuple[int, DocumentLoss, Cost]]
) -> list[Result]:
    """One result per length from what `score_plan` yields."""
    losses: dict[int, list[DocumentLoss]] = {length: [] for length in plan.lengths}
    costs = dict.fromkeys(plan.lengths, Cost())
    for length, loss, cost in measured:
        losses[length].append(loss)
        costs[length] = costs[length].plus(cost)
    return [
        Result.from_documents(method, plan.setting, length, losses[length], costs[length]) for length in plan.lengths
    ]
