"""Candidates of a search, and what each reads: passages of the text, or prompts in it, and which tokens count.

Candidates are fixed methods, then divisors by band and by pair, which never fall from a pair to the next slower one
(LongRoPE, Ding et al. 2024, arXiv 2402.13753, sec. 3.2).

Passages of different documents come in turn; their ends are scored, as in the measurement of the result. A candidate
stops when its losses are above the best one's on the same passages by the whole 95% interval of their difference; as
long as no candidate holds the bound at the context length, one that does is not stopped.
"""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rope_ext_hf.errors import CorpusError, MethodError, UnsupportedModelError
from rope_ext_hf.eval.perplexity_runs import PerplexityMeasurement
from rope_ext_hf.eval.retrieval_runs import make_trials
from rope_ext_hf.eval.statements import RETRIEVALS
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.dynamic import LongRoPE
from rope_ext_hf.methods.registry import list_methods, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import Factors
from rope_ext_hf.patches.patching import patched
from rope_ext_hf.reading.documents import Tokens
from rope_ext_hf.reading.scorer import TokenScorer, check_numbers
from rope_ext_hf.reading.spans import prefix_tokens, with_prefix
from rope_ext_hf.runs.statistics import Estimate, estimate
from rope_ext_hf.runs.verdicts import Outcome, verdict
from rope_ext_hf.tools.suites.key_token_runs import find_key_tokens, find_keys
from rope_ext_hf.tools.training.run_folder import cut

_LARGEST_LOSS = 100.0  # nats per token; what a loss that is not finite counts as
LEAST_READ = 4  # passages before the reading of a candidate may be stopped
_PENALTY = 10.0
"""Nats that one lost at the context length beyond the bound adds to the loss by which candidates are compared."""

_CHANGED = 0.3  # the probability with which LongRoPE's search changes a divisor (evolution/algorithms/dim_mono.py)
_LEAST_FACTOR, _LARGEST_FACTOR = 0.8, 1.6  # attention factors that are tried; published ones lie between 1 and 1.4


class Passage(NamedTuple):
    """A text of the target length, or a prompt with its answer."""

    ids: Tensor  # (tokens,) int64
    first: int  # tokens from here on are scored
    weights: Tensor | None = None
    """(tokens - first,) float64, what the loss of each counts; None: the same, and 1 together."""

    def loss(self, scorer: TokenScorer) -> float:
        nats = scorer.losses(self.ids, self.first).double()
        loss = float(nats.mean() if self.weights is None else nats @ self.weights)
        return loss if math.isfinite(loss) else _LARGEST_LOSS


def pieces(documents: Sequence[Tokens], length: int, count: int) -> list[Tokens]:
    """At most `count` pieces of `length` tokens, spread over each document; those of different documents in turn."""
    room = [len(each.ids) // length for each in documents]
    rounds = range(max(room, default=0))
    order = [(index, number) for number in rounds for index, most in enumerate(room) if number < most][:count]
    taken, made = Counter(index for index, _ in order), []
    for index, number in order:  # spread evenly over the document
        start = (2 * number + 1) * room[index] // (2 * taken[index]) * length
        made.append(cut(documents[index], start, start + length, f"{documents[index].name}, from token {start:,}"))
    return made


def text_passages(
    documents: Sequence[Tokens], length: int, count: int, tokenizer: PreTrainedTokenizerBase, targets: int
) -> list[Passage]:
    """At most `count` passages of the target length, evenly from all documents; their last `targets` tokens count."""
    before = prefix_tokens(tokenizer, None)
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


def short_passages(passages: Sequence[Passage], length: int, prefix: tuple[int, ...]) -> list[Passage]:
    """Two parts of the context length from each passage, from its middle and its end; their ends are scored.

    Both begin with the tokens that the tokenizer puts before a text.
    """
    first = length - scored_tokens(length)
    of_middle = [] if len(passages[0].ids) < 2 * length else [len(passages[0].ids) // 2]
    return [
        Passage(with_prefix(passage.ids, start, start + length, prefix), first)
        for passage in passages
        for start in (*of_middle, len(passage.ids) - length)
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


def fixed_methods(rotary: Rotary | None = None) -> list[str]:
    """The methods that a search begins with by default and compares its result with; those that fit the rotary."""
    fitting = []
    for name in (name for name, cls in list_methods().items() if cls.begins_search):
        with suppress(MethodError):
            if rotary is not None:
                resolve_method(name, rotary, factor=2)
            fitting.append(name)
    return fitting


def is_static(method: RopeMethod) -> bool:
    """Whether a method is one list of frequencies for inputs of every length."""
    return not method.length_dependent and not isinstance(method, RemappingMethod)


def two_lists(method: RopeMethod, rotary: Rotary, target_length: int) -> RopeMethod:
    """A static method for inputs longer than the context length alone; shorter ones keep the model's frequencies."""
    inv_freq, attention_factor = method.frequencies(rotary)
    return LongRoPE(
        short_factor=(1.0,) * (rotary.dim // 2),
        long_factor=tuple(_divisors(rotary, inv_freq).tolist()),
        factor=target_length / rotary.context_length,
        attention_factor=attention_factor / rotary.attention_factor,
    )


def _divisors(rotary: Rotary, inv_freq: Tensor) -> Tensor:
    own = rotary.inv_freq()
    return torch.where(own > 0, own / inv_freq, 1.0)  # pairs that do not rotate


@dataclass(frozen=True)
class DivisorCurve:
    """Divisors of all pairs, by their logarithms to base 2 at some points, between which they are straight.

    The first point is the fastest pair, the last one the slowest that rotates.
    """

    levels: tuple[float, ...]  # at each point, ascending
    attention_factor: float  # the factor of cos and sin, beside the model's own

    @classmethod
    def of_method(cls, method: RopeMethod, rotary: Rotary, points: int) -> DivisorCurve:
        """The curve nearest to a static method's divisors."""
        inv_freq, attention_factor = method.frequencies(rotary)
        pairs = int((rotary.inv_freq() > 0).sum())
        if pairs < 2:
            raise MethodError(f"divisors are searched where at least 2 pairs rotate, and {pairs} does here")
        logs = _divisors(rotary, inv_freq)[:pairs].log2()
        return cls(_ascending(_resample(logs, points).tolist()), attention_factor / rotary.attention_factor)

    def resampled(self, points: int) -> DivisorCurve:
        levels = _resample(torch.tensor(self.levels, dtype=torch.float64), points)
        return dataclasses.replace(self, levels=_ascending(levels.tolist()))

    def method(self, rotary: Rotary) -> RopeMethod:
        """The curve as a method with one list."""
        pairs = int((rotary.inv_freq() > 0).sum())
        logs = _resample(torch.tensor(self.levels, dtype=torch.float64), pairs)
        rest = (1.0,) * (rotary.dim // 2 - pairs)
        return Factors(factors=(*(2**logs).tolist(), *rest), attention_factor=self.attention_factor)

    def changed(self, draws: random.Random, step: float, highest: float) -> DivisorCurve:
        """A neighbour: some levels changed one by one (as in LongRoPE's search), or all from one point on together.

        `step` is the standard deviation of a change; levels stay from 0 to `highest`.
        """
        start = draws.randrange(len(self.levels))
        shift = draws.gauss(0, step) if draws.random() < 0.5 else None
        levels = []
        for index, level in enumerate(self.levels):
            if shift is not None:
                level += shift if index >= start else 0.0
            elif index == start or draws.random() < _CHANGED:
                level += draws.gauss(0, step)
            levels.append(min(max(level, 0.0), highest))
        factor = self.attention_factor
        if draws.random() < _CHANGED:
            factor *= math.exp(draws.gauss(0, step / 10))
        changed = DivisorCurve(_ascending(levels), min(max(factor, _LEAST_FACTOR), _LARGEST_FACTOR))
        return changed if changed != self else self.changed(draws, step, highest)  # a level below the one before it


def _resample(values: Tensor, points: int) -> Tensor:
    """The broken line through some values at other, evenly spaced points, (points,) float64."""
    places = torch.linspace(0, len(values) - 1, points, dtype=torch.float64)
    below = places.floor().long().clamp(max=len(values) - 2)
    share = places - below
    return values[below] * (1 - share) + values[below + 1] * share


def _ascending(levels: Sequence[float]) -> tuple[float, ...]:
    """Each level raised to the highest before it."""
    return tuple(accumulate(levels, max))


@dataclass(frozen=True)
class Candidate:
    """A method that a search tried, and what it read under that method."""

    stage: str  # "methods", "bands" or "pairs"
    method: dict[str, Any]  # `RopeMethod.to_dict` of the method that was patched in
    label: str  # its name in tables
    loss: float  # nats per token over all passages; stopped: the best one's then plus the difference so far
    losses: tuple[float, ...]  # of each passage that was read
    lost: float | None  # how much higher the loss is at the context length, in nats per token; None: stopped before
    most_lost: float | None  # the upper end of its 95% interval
    stopped: bool  # it was surely worse than the best before
    parameters: dict[str, Any]  # the values that made it, for the search to go on from
    seconds: float  # of its reading
    cpu_seconds: float

    def holds(self, bound: float) -> bool:
        """Whether it surely loses no more than this at the context length; not if it was stopped."""
        return self.most_lost is not None and self.most_lost <= bound

    def cost(self, bound: float) -> float:
        """The value that the search makes small."""
        return self.loss + _PENALTY * max(0.0, (self.most_lost or 0.0) - bound)


def best_candidate(candidates: Sequence[Candidate], bound: float) -> Candidate | None:
    """The candidate with the lowest loss among those that hold the bound; None: none does."""
    return min((each for each in candidates if each.holds(bound)), key=lambda each: each.loss, default=None)


class Reader:
    """Reads candidates on one model, all in the same order of passages, which have the target length.

    On the `short` ones, of the context length, at most `bound` nats per token may be lost to the model as loaded.
    `underneath` has `over` and `context_length`, as `rope_ext_hf.patch` takes them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        passages: Sequence[Passage],
        short: Sequence[Passage],
        bound: float,
        **underneath: Any,
    ) -> None:
        self.model, self.passages, self.short, self.bound, self.underneath = model, passages, short, bound, underneath
        self.scorer = TokenScorer(model, longest=len(passages[0].ids))
        self.as_loaded = self.losses(None, short)
        if _LARGEST_LOSS in self.as_loaded:
            check_numbers(torch.tensor(math.nan), len(short[0].ids))

    def losses(self, method: RopeMethod | None, passages: Sequence[Passage]) -> list[float]:
        """The loss of each passage under a method, in nats per token; None: of the model as loaded."""
        with nullcontext() if method is None else patched(self.model, method, **self.underneath):
            return [passage.loss(self.scorer) for passage in passages]

    def _lost(self) -> Estimate:
        """How much higher the loss of the present method is at the context length, in nats per token, over passages."""
        pairs = zip(self.short, self.as_loaded, strict=True)
        return estimate([passage.loss(self.scorer) - own for passage, own in pairs])

    def read(
        self, stage: str, method: RopeMethod, before: Sequence[Candidate], parameters: dict[str, Any], label: str = ""
    ) -> Candidate:
        """Read the passages under a method, and stop once it is surely worse than the best candidate before."""
        started, cpu = time.monotonic(), time.process_time()
        best = best_candidate(before, self.bound)
        losses: list[float] = []
        lost: Estimate | None = None
        stopped = False
        with patched(self.model, method, **self.underneath):
            if best is None:  # the first one that holds the bound is read to the end, however high its loss is
                lost = self._lost()
                whole = [each for each in before if not each.stopped and _most(lost) > self.bound]
                best = min(whole, key=lambda each: each.cost(self.bound), default=None)
            for passage in self.passages:
                losses.append(passage.loss(self.scorer))
                if best is not None and LEAST_READ <= len(losses) < len(self.passages):
                    gap = estimate([a - b for a, b in zip(losses, best.losses, strict=False)])
                    if stopped := verdict(gap).outcome is Outcome.WORSE:
                        break
            lost = None if stopped else lost or self._lost()
        return Candidate(
            stage=stage,
            method=method.to_dict(),
            label=label or method.label(),
            loss=best.loss + gap.value if stopped and best is not None else fmean(losses),
            losses=tuple(losses),
            lost=None if lost is None else lost.value,
            most_lost=None if lost is None else _most(lost),
            stopped=stopped,
            parameters=parameters,
            seconds=time.monotonic() - started,
            cpu_seconds=time.process_time() - cpu,
        )


def _most(lost: Estimate) -> float:
    """The upper end of the interval; without one, nothing is known of the loss at the context length."""
    return _LARGEST_LOSS if lost.high is None else lost.high
