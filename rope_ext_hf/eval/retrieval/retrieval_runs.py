"""Runs that measure retrieval: the end of a long text asks for a statement that stands earlier in it, at some depth.

Three things are measured: whether greedy decoding would give the right answer, the rank of the right answer among wrong
ones by likelihood, and its loss in nats per token. Rank and loss show differences even between models that are too
small to answer. The texts of statements and questions are in `statements.RETRIEVALS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rope_ext_hf.errors import CorpusError, MethodError, counted, entry, printable, short
from rope_ext_hf.eval.measurement_options import Passkey
from rope_ext_hf.eval.retrieval.retrieval_prompts import Trial, make_trials, shared_trials
from rope_ext_hf.eval.retrieval.statements import RETRIEVALS
from rope_ext_hf.pictures.charts import Chart, HeatCell, HeatMaps, loss_text
from rope_ext_hf.reading.scorer import Cost, TokenScorer, check_numbers
from rope_ext_hf.reading.spans import check_prompts
from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import own_tokenizer, tokenize, warn_of_unknown
from rope_ext_hf.runs.conclusions.labels import Method, MethodResult
from rope_ext_hf.runs.conclusions.measures import Evidence, Measure
from rope_ext_hf.runs.conclusions.statistics import Estimate, estimate
from rope_ext_hf.runs.kinds import RunKind, register_run_kind
from rope_ext_hf.runs.measurement import Cell, Measurement, Reading, RunPlan
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.tables import beyond_mark, two_column_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class RetrievalSetting:
    """The settings with which the prompts of a retrieval run are made.

    Attributes:
        task: a key of `statements.RETRIEVALS`.
        keys: the number of statements in every prompt.
        distractors: the number of wrong answers that the right one is ranked among.
        seed: the seed for drawing names, values, and the place where the surrounding text begins.
        own_prompts: true if each depth has prompts of its own, which are items of their own. If false, the prompts of
            one trial have the same text at every depth and count as one item. That is so in older runs, and where each
            text is asked about all of its keys.
    """

    task: str
    keys: int
    distractors: int
    seed: int
    own_prompts: bool = False


class TrialScore(NamedTuple):
    """The score for one prompt: whether the right answer would be given, its rank and its loss.

    Attributes:
        exact: true if greedy decoding would give the right answer.
        rank: the rank of the right answer by likelihood, from 1.
        loss: the loss of the right answer, in nats per token: the mean over the answer's tokens, each given the prompt
            and the right tokens before it. None in runs of earlier versions, which did not store it.
    """

    exact: bool
    rank: float
    loss: float | None = None

    def to_record(self) -> list[float]:
        """Return the score as a list for JSON, in the form that a journal stores; an unknown loss is left out."""
        return [value for value in self if value is not None]


@dataclass(frozen=True)
class Retrieval(MethodResult):
    """The result of retrieving statements from one depth at one context length.

    Attributes:
        method: `RopeMethod.to_dict` of the method, or None for the model as loaded.
        length: length of prompt and answer together, in tokens.
        task: a key of `rope_ext_hf.eval.retrieval.statements.RETRIEVALS`.
        keys: number of statements in every prompt, of which one is asked for.
        depth: share of the haystack (the text around the statements) that stands before this statement, from 0 to 1.
        trials: number of prompts, each with names and values of its own.
        distractors: number of wrong answers that the right one is ranked among.
        exact_match: share of prompts for which greedy decoding would give the right answer.
        rank: mean rank of the right answer by likelihood, from 1 for the likeliest; equally likely answers share the
            mean of their ranks.
        top1: share of prompts for which the right answer ranks first.
        chance: the `top1` that guessing gives.
        scores: the score for each prompt.
        loss: loss of the right answer in nats per token: the mean over the answer's tokens, then over prompts, each of
            which weighs the same. None if the loss of any prompt is unknown, as in runs of earlier versions.
        loss_low, loss_high: the 95% confidence interval of `loss` over prompts; None with fewer than three.
    """

    task: str
    keys: int
    depth: float
    trials: int
    distractors: int
    exact_match: float
    rank: float
    top1: float
    chance: float
    scores: tuple[TrialScore, ...]
    loss: float | None = None
    loss_low: float | None = None
    loss_high: float | None = None

    @property
    def complete(self) -> bool:
        """True if the loss of the right answer is known."""
        return self.loss is not None

    @property
    def chance_rank(self) -> float:
        """The `rank` that guessing gives."""
        return 1 + self.distractors / 2

    @property
    def above_chance(self) -> bool:
        """True if `rank` is better than `chance_rank` by 3 standard errors of a mean of uniform ranks."""
        error = math.sqrt(((self.distractors + 1) ** 2 - 1) / 12 / self.trials)
        return self.rank < self.chance_rank - 3 * error

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON values, together with the values that guessing gives."""
        return super().to_dict() | {"chance_rank": self.chance_rank, "above_chance": self.above_chance}


@register_run_kind
class RetrievalRuns(RunKind):
    """The kind of run that measures how statements are retrieved from a long text.

    Each prompt gets a value per cell; in these runs a cell is a context length and a depth.
    """

    name = "passkey"
    setting = RetrievalSetting
    item = "prompt"
    per = " per length and depth"
    columns = (
        "task",
        "keys",
        "length",
        "depth",
        "top1",
        "rank",
        "exact_match",
        "trials",
        "distractors",
        "chance",
        "chance_rank",
        "loss",
        "loss_low",
        "loss_high",
    )

    def plan(
        self, options: Passkey, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **settings: Any
    ) -> RunPlan[Any]:
        """Return the plan: the prompts to read, and the answers to score, see `RunKind.plan`."""
        return _plan(options, model, tokenizer, settings)

    def parse(self, item: str, value: Any) -> TrialScore:
        """Return the score for a prompt from the JSON value in a journal's line; ValueError if it is not a score.

        `item` is the name of the prompt.
        """
        match value:
            case [bool(exact), int() | float() as rank, *rest] if rank >= 1 and math.isfinite(rank):
                match rest:
                    case []:
                        return TrialScore(exact, float(rank))
                    case [int() | float() as loss] if not isinstance(loss, bool) and not math.isnan(loss):
                        return TrialScore(exact, float(rank), float(loss))
        raise ValueError(
            "expected a score [exact, rank, loss], or [exact, rank] as earlier versions wrote it, got "
            f"{short(repr(value))}"
        )

    def result(
        self, method: Method, setting: RetrievalSetting, cell: Cell, values: Sequence[TrialScore], costs: Sequence[Cost]
    ) -> Retrieval:
        """Return the result for one context length and depth, from the scores for its prompts."""
        losses = [value.loss for value in values if value.loss is not None]
        loss = estimate(losses) if len(losses) == len(values) else None
        return Retrieval(
            method=method,
            task=setting.task,
            keys=setting.keys,
            length=int(cell[0]),
            depth=cell[1],
            trials=len(values),
            distractors=setting.distractors,
            exact_match=fmean(value.exact for value in values),
            rank=fmean(value.rank for value in values),
            top1=fmean(value.rank == 1 for value in values),
            chance=1 / (setting.distractors + 1),
            scores=tuple(values),
            loss=None if loss is None else loss.value,
            loss_low=None if loss is None else loss.low,
            loss_high=None if loss is None else loss.high,
        )

    def table(self, run: Run[Retrieval], *, detailed: bool = False) -> Table:
        """Return a table with a row per method and depth, and a column per length: exact match, mean rank and loss.

        Args:
            run: has at least one result.
            detailed: add a second line to each cell, with the 95% confidence interval of the loss.
        """
        first, losses = run.results[0], _any_loss(run)
        keys = f", one of {first.keys} keys" if first.keys > 1 else ""
        numbers = "exact match, mean rank, loss of the answer" if losses else "exact match, mean rank"
        title = f"Retrieval, task {short(printable(first.task))}{keys}: {numbers}"
        caption = (
            f"{self.counted_items(first.trials)}. The rank is that of the right answer among "
            f"{first.distractors + 1}: 1 is best, {first.chance_rank:g} is luck; green: better than luck by 3 standard "
            "errors"
        )
        if losses:
            caption += ". The loss is that of the right answer, in nats per token: lower is better"
        if detailed and any(result.loss_low is not None for result in run.results):
            caption += "; in parentheses: its 95% confidence interval over prompts"
        cell = partial(_retrieval_cell, run, losses=losses, detailed=detailed)
        return two_column_table(run, title, caption, "depth", "{:.0%}".format, cell)

    def chart(self, run: Run[Retrieval]) -> Chart:
        """Return a heat map per method, by length and depth."""
        first = run.results[0]
        loss = ", and its loss in nats per token" if _any_loss(run) else ""
        note = (
            "Exact answers by context length and depth (0% first); below, the mean rank of the right answer among "
            f"{first.distractors + 1} (luck: {first.chance_rank:g}), faint where no better than chance{loss}. "
            f"{counted(first.trials, 'prompt')} per cell."
        )
        panels = {
            name: {(r.depth, r.length): HeatCell(r.exact_match, r.rank, not r.above_chance, r.loss) for r in row}
            for name, row in run.by_label.items()
        }
        return HeatMaps(panels, run.context_length, note)

    def measures(self, run: Run[Retrieval]) -> Sequence[Measure]:
        """Return the measures: a share of right answers, and the loss of the right answer where it is known.

        The share is that of exact answers, or if no answer is exact, of right answers that rank first. Conclusions are
        drawn from the loss where hardly any answer is exact. An item is a prompt, or all prompts of one text.
        """
        first, task = run.results[0], short(printable(run.results[0].task))
        own_prompts = run.settings.get("setting", {}).get("own_prompts")

        def items_of(by_depth: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
            """Return the items of one method at one length from the numbers of each prompt, a list for each depth."""
            if own_prompts:
                return [(number, 1.0) for numbers in by_depth for number in numbers]
            return [(fmean(numbers_of_trial), 1.0) for numbers_of_trial in zip(*by_depth, strict=True)]

        def share(name: str, right: Callable[[TrialScore], bool], chance: float) -> Measure:
            """Return the share of prompts for which `right` is true."""
            items = run.items(lambda results: items_of([[float(right(s)) for s in r.scores] for r in results]))
            return Measure(f"{name} ({task})", "%", Evidence.RETRIEVAL, True, items, "prompt", chance=chance)

        def losses(results: Sequence[Retrieval]) -> Iterable[tuple[float, float]]:
            known = [[s.loss for s in result.scores if s.loss is not None] for result in results if result.complete]
            return items_of(known) if len(known) == len(results) else []

        exact = share("exact match", attrgetter("exact"), 0.0)
        shown = exact
        if not any(result.exact_match for result in run.results):
            shown = share("top-1 accuracy", lambda score: score.rank == 1, first.chance)
        loss = run.items(losses)
        if not loss:
            return [shown]
        name, unit, evidence = f"loss of the answer ({task})", "nats per token", Evidence.ANSWER_LOSS
        return [shown, Measure(name, unit, evidence, False, loss, "prompt", instead_of=exact)]


class _RetrievalMeasurement(Measurement):
    """The measurement of right answers (given or not, rank and loss) at every depth of every context length.

    An item is one prompt.

    Args:
        setting: how the prompts are made.
        trials: a list of prompts for each depth.
        haystack: (tokens,) int64, the text around the statements.
        lengths: the lengths of prompt and answer together, in tokens.
        depths: the depths of the statements, ascending and all different.
        shared: true if the prompts with one number and length differ only in their question. Then the text before the
            question is read once for all depths.
    """

    kind = "passkey"

    def __init__(
        self,
        setting: RetrievalSetting,
        trials: Sequence[Sequence[Trial]],
        haystack: Tensor,
        lengths: Sequence[int],
        depths: Sequence[float],
        shared: bool,
    ) -> None:
        self.setting, self.haystack, self.shared = setting, haystack, shared
        self.trials = dict(zip(depths, trials, strict=True))
        ordered = sorted(set(lengths))
        self.all_cells = [(length, depth) for length in ordered for depth in depths]
        self.items = [f"trial {index}" for index in range(len(trials[0]))]
        self.passes = [
            length if index == 0 or not shared else trial.tail
            for length in ordered
            for index, trials_of_depth in enumerate(trials)
            for trial in trials_of_depth
        ]
        answer_tokens = sum(trial.answers.numel() for trials_of_depth in trials for trial in trials_of_depth)
        self.scored = answer_tokens * len(ordered)
        self.short_passes = len(trials[0][0].answers)  # every answer is a pass of its own

    def digested(self, cell: Cell) -> Iterable[bytes]:
        """Return the bytes that identify the prompts at one length and depth, for a digest."""
        yield repr(self.setting).encode() + self.haystack.numpy().tobytes()
        for trial in self.trials[cell[1]]:
            for ids in (trial.head, *trial.statements, trial.question, trial.answers):
                yield f"{tuple(ids.shape)}".encode() + ids.numpy().tobytes()
            yield f"{trial.start} {trial.depths} {trial.spare}".encode()
        yield repr(cell).encode()

    def readings(self, scorer: TokenScorer, item: int, cells: Sequence[Cell]) -> list[Reading]:
        """Return the prompts of one item at several lengths and depths.

        If prompts share their text, the text of each length is read once, and then asked about each depth.
        """
        readings: list[Reading] = []
        length_read_last = 0.0
        for cell in cells:
            again = self.shared and length_read_last == cell[0]
            length_read_last = cell[0]
            tokens = self.trials[cell[1]][item].tail if again else int(cell[0])
            readings.append(Reading(item, (cell,), tokens, again))
        return readings

    def score(self, scorer: TokenScorer, reading: Reading) -> list[TrialScore]:
        """Score one prompt; `reading.what` says whether its text was read for the prompt before it."""
        [(number, depth)] = reading.cells
        length, trial = int(number), self.trials[depth][reading.item]
        prompt = trial.prompt(self.haystack, length, depth)
        shared = len(prompt) - len(trial.question) if self.shared else 0
        losses, likeliest = scorer.candidates(prompt, trial.answers, length=length, shared=shared, again=reading.what)
        check_numbers(losses, length)
        exact = torch.equal(likeliest[0], trial.answers[0])
        nats = losses.double()  # (answers, tokens)
        return [TrialScore(exact, _rank(nats.sum(-1)), nats[0].mean().item())]


def _rank(losses: Tensor) -> float:
    """Return the rank of the first loss among several, 1 for the lowest; a tie counts as half a rank.

    `losses`: (answers,), those of the right answer and of wrong ones.
    """
    others = losses[1:]
    return 1 + float((others < losses[0]).sum()) + float((others == losses[0]).sum()) / 2


def _any_loss(run: Run[Retrieval]) -> bool:
    """Return whether the loss of the right answer is known for any result; runs of earlier versions have none."""
    return any(result.complete for result in run.results)


def _retrieval_cell(run: Run[Retrieval], result: Retrieval, *, losses: bool, detailed: bool) -> Text:
    """Return the table cell for one result: exact match and mean rank, and with `losses` the loss of the answer.

    `detailed`: add the interval of the loss in a second line.
    """
    text = f"{result.exact_match:.0%} {result.rank:4.1f}"
    interval = ""
    if losses:
        text += f" {'-' if result.loss is None else loss_text(result.loss):>4}"
    if detailed and result.loss is not None:
        loss = Estimate(result.loss, result.loss_low, result.loss_high, result.trials)
        interval = loss.line_below(loss_text)
    return Text(f"{text}{beyond_mark(run, result)}{interval}", style="green" if result.above_chance else "")


def _plan(
    options: Passkey, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: dict[str, Any]
) -> RunPlan[_RetrievalMeasurement]:
    """Make the prompts, and check that they fit the lengths and the model."""
    name = options.task or "passkey"
    task = entry("task", name, RETRIEVALS)
    lengths, haystack = list(options.lengths), options.haystack
    reader: Any = own_tokenizer(model, needed=True) if tokenizer is None else tokenizer
    repeated = haystack is None and task.filler is not None
    of_trials = {field: getattr(options, field) for field in ("trials", "distractors", "keys", "seed")}
    make = partial(make_trials, task, reader, repeated=repeated, **of_trials)
    places = sorted(set(options.depths))
    shared = options.keys >= len(places) > 1
    if shared:
        by_depth = shared_trials(make, places)
    else:  # with prompts of one text at several depths, the items would not be independent
        by_depth = [make(first=index * options.trials) for index in range(len(places))]
    trials = [trial for trials_of_depth in by_depth for trial in trials_of_depth]
    least = max(trial.wording for trial in trials)
    if min(lengths) < least:
        raise MethodError(
            f"length {min(lengths)} is too short for task {name!r}; its wording alone has {least} tokens, so give "
            "longer lengths or fewer keys"
        )
    if haystack is None:
        haystack_documents = load("stdlib" if task.filler is None else Document("filler", task.filler))
    else:
        haystack_documents = load(haystack)
    hay_documents = tokenize(haystack_documents, reader)
    warn_of_unknown(hay_documents, reader)
    hay = torch.cat([document.ids for document in hay_documents])
    if not len(hay):
        raise CorpusError("the haystack is empty; give a text with at least one token")
    checked = [hay]
    for trial in trials:
        checked += [trial.prompt(hay, least, 0.0), trial.answers.flatten()]
    check_prompts(model, checked, max(lengths))
    setting = RetrievalSetting(name, options.keys, options.distractors, options.seed, own_prompts=not shared)
    measurement = _RetrievalMeasurement(setting, by_depth, hay, lengths, places, shared)
    source = "" if haystack is None else f" in {haystack_documents.source}"
    return RunPlan(measurement, f"task {name}{source}", **settings)
