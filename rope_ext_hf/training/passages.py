"""Texts that a search reads: passages of text at the target length, parts of them, prompts, and which tokens count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.errors import CorpusError, MethodError, UnsupportedModelError
from rope_ext_hf.eval.key_token_runs import find_key_tokens, find_keys
from rope_ext_hf.eval.perplexity_runs import PerplexityMeasurement
from rope_ext_hf.eval.retrieval_runs import make_trials
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.patches.patching import patched
from rope_ext_hf.reading.documents import Tokens
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.spans import prefix_token
from rope_ext_hf.suites.statements import RETRIEVALS
from rope_ext_hf.training.run_folder import cut

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LARGEST_LOSS = 100.0  # nats per token; what a loss that is not finite counts as
LEAST_READ = 4  # passages before the reading of a candidate may be stopped


class Passage(NamedTuple):
    """A text of the target length, or a prompt with its answer."""

    ids: Tensor  # (tokens,) int64
    first: int  # tokens from here on are scored
    weights: Tensor | None = None
    """(tokens - first,) float64, what the loss of each counts; None: the same, and 1 together."""

    def loss(self, scorer: TokenScorer) -> float:
        nats = scorer.losses(self.ids, self.first).double()
        loss = float(nats.mean() if self.weights is None else nats @ self.weights)
        return loss if math.isfinite(loss) else LARGEST_LOSS


def pieces(documents: Sequence[Tokens], length: int, count: int) -> list[Tokens]:
    """At most `count` pieces of `length` tokens, spread over each document; those of different documents in turn."""
    room = [len(each.ids) // length for each in documents]
    taken = [0] * len(documents)
    order: list[tuple[int, int]] = []
    while len(order) < count and (left := [i for i, most in enumerate(room) if taken[i] < most]):
        for index in left[: count - len(order)]:
            order.append((index, taken[index]))
            taken[index] += 1
    made = []
    for index, number in order:  # spread evenly over the document
        start = (2 * number + 1) * room[index] // (2 * taken[index]) * length
        made.append(cut(documents[index], start, start + length, f"{documents[index].name}, from token {start:,}"))
    return made


def text_passages(
    documents: Sequence[Tokens], length: int, count: int, tokenizer: PreTrainedTokenizerBase, targets: int
) -> list[Passage]:
    """At most `count` passages of the target length, evenly from all documents; their last `targets` tokens count."""
    prefix = prefix_token(tokenizer, None)
    before = [] if prefix is None else [prefix]
    parts = pieces(documents, length - len(before), count)
    if len(parts) < LEAST_READ:
        raise CorpusError(
            f"the half of the text that is searched on has {len(parts)} passages of {length:,} tokens, and at least "
            f"{LEAST_READ} are needed; give longer text or a shorter target length"
        )
    return [Passage(torch.cat([part.ids.new_tensor(before), part.ids]), length - targets) for part in parts]


def best_of(
    model: PreTrainedModel, methods: Sequence[RopeMethod], passages: Sequence[Passage], **underneath: Any
) -> RopeMethod:
    """The method that reads the first few passages with the lowest loss; those that cannot be patched are left out."""
    losses: dict[RopeMethod, float] = {}
    for method in methods:
        with suppress(MethodError, UnsupportedModelError), patched(model, method, **underneath):
            scorer = TokenScorer(model)
            losses[method] = fmean(passage.loss(scorer) for passage in passages[:LEAST_READ])
    if not losses:
        raise MethodError("key tokens cannot be found: the model runs none of the methods that would find them")
    return min(losses, key=lambda method: losses[method])


def key_passages(
    model: PreTrainedModel,
    evaluator: RopeMethod,
    passages: Sequence[Passage],
    measurement: PerplexityMeasurement,
    **underneath: Any,
) -> tuple[list[Passage], PerplexityMeasurement]:
    """Passages with key tokens under `evaluator`, which alone count, and the measurement of other text with its own."""
    with patched(model, evaluator, **underneath):
        scorer = TokenScorer(model)
        masks, setting = find_keys(scorer, measurement.plan)
        prefix = measurement.plan.prefix
        found = [
            (each, find_key_tokens(scorer, each.ids, each.first, setting, prefix=prefix, length=len(each.ids)))
            for each in passages
        ]
    found = [(passage, keys) for passage, keys in found if keys.any()]
    if len(found) < LEAST_READ:
        raise CorpusError(
            f"{len(found)} passages have a key token under {evaluator.label()} ({setting}), and at least {LEAST_READ} "
            "are needed; give longer text or more passages, or another fitness"
        )
    each = len(found) / sum(int(keys.sum()) for _, keys in found)  # so that the passages' mean is that of all keys
    read = [Passage(passage.ids, passage.first, keys.double() * each) for passage, keys in found]
    keys_from = f"the model under {evaluator.label()}: {setting}"
    return read, PerplexityMeasurement(measurement.plan, masks, keys_from)


def scored_tokens(context_length: int) -> int:
    """How many tokens are scored at the end of a passage, in the search and in the measurement of its result.

    Divisors that fit most of a passage and fail just before its end would win if all of its second half counted.
    """
    return max(1, context_length // 2)


def short_passages(passages: Sequence[Passage], length: int) -> list[Passage]:
    """Two parts of the context length from each passage, from its middle and its end; their ends are scored."""
    first = length - scored_tokens(length)
    if len(passages[0].ids) < 2 * length:
        return [Passage(passage.ids[-length:], first) for passage in passages]
    return [
        Passage(passage.ids[start : start + length], first)
        for passage in passages
        for start in (len(passage.ids) // 2, len(passage.ids) - length)
    ]


def prompts(
    task: str, documents: Sequence[Tokens], length: int, count: int, tokenizer: PreTrainedTokenizerBase, seed: int
) -> list[Passage]:
    """Prompts of a retrieval task in the text, at depths from its start to its end; their right answers are scored."""
    if task not in RETRIEVALS:
        raise MethodError(
            f"unknown fitness {task!r}; it is loss, key-tokens or a retrieval task: {', '.join(RETRIEVALS)}"
        )
    haystack = torch.cat([document.ids for document in documents])
    made = make_trials(RETRIEVALS[task], tokenizer, trials=count, distractors=1, seed=seed)
    if (least := max(trial.wording for trial in made)) > length:
        raise MethodError(f"length {length} is too short for task {task!r}: its wording alone has {least} tokens")
    passages = []
    for index, trial in enumerate(made):
        prompt = trial.prompt(haystack, length, (index % 5) / 4)
        passages.append(Passage(torch.cat([prompt, trial.answers[0]]), len(prompt)))
    return passages
