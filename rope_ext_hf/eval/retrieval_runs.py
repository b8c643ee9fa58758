"""Runs that measure retrieval: what a long text stated is asked for at its end, at every depth of every context length.

Beside whether greedy decoding gives the right answer, its rank among wrong ones by likelihood is measured: it shows a
signal in models too small to answer. Statements and questions are data: `suites.statements.RETRIEVALS`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rope_ext_hf.errors import CorpusError, MethodError, entry, printable, short
from rope_ext_hf.eval.questions import Passkey
from rope_ext_hf.eval.statements import RETRIEVALS, RetrievalQuestion, Task, ask, insert, other_answers
from rope_ext_hf.pictures.charts import Chart, HeatCell, HeatMaps
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.documents import Document
from rope_ext_hf.reading.scorer import Cost, TokenScorer, check_numbers
from rope_ext_hf.reading.spans import check_prompts, encode, encode_answer, own_tokenizer, prefix_tokens, tokenize
from rope_ext_hf.runs.journal import Cell
from rope_ext_hf.runs.kinds import RunKind, register_run_kind
from rope_ext_hf.runs.labels import Method, MethodResult
from rope_ext_hf.runs.measurement import Measurement, Passed, RunPlan, Scored
from rope_ext_hf.runs.measures import Evidence, Measure
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.tables import beyond_mark, two_column_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class RetrievalSetting:
    """The making of prompts: the task's name, keys and distractors per prompt, and the seed of names and values.

    `own_prompts`: each depth has prompts of its own. Elsewhere the prompts of one trial have the same text at every
    depth and are one item; so it was in older runs, and so it is where one text is asked for each of its keys.
    """

    task: str
    keys: int
    distractors: int
    seed: int
    own_prompts: bool = False


class TrialScore(NamedTuple):
    """One prompt's share of a result: whether greedy decoding answers right, and the rank of the right answer."""

    exact: bool
    rank: float

    def to_record(self) -> list[float]:
        return list(self)


@dataclass(frozen=True)
class Retrieval(MethodResult):
    """Retrieval from one depth of one context length.

    Attributes:
        method: `RopeMethod.to_dict` of the RoPE method, or None for the model as loaded.
        task: a key of `suites.statements.RETRIEVALS`.
        keys: statements in every prompt, of which one is asked for.
        length: of prompt and answer together, in tokens.
        depth: share of the haystack that stands before the statement asked for.
        trials: prompts, each with names and values of its own.
        distractors: wrong answers that the right one is ranked among.
        exact_match: share of trials in which greedy decoding gives the right answer.
        rank: mean rank of the right answer by likelihood, 1 is best; among equals, the middle.
        top1: share of trials in which it ranks first.
        chance: the value of `top1` by luck.
        scores: of each trial.
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

    @property
    def chance_rank(self) -> float:
        """The value of `rank` by luck."""
        return 1 + self.distractors / 2

    @property
    def above_chance(self) -> bool:
        """Whether the rank is better than chance by 3 standard errors of a mean of uniform ranks."""
        error = math.sqrt(((self.distractors + 1) ** 2 - 1) / 12 / self.trials)
        return self.rank < self.chance_rank - 3 * error

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"chance_rank": self.chance_rank, "above_chance": self.above_chance}


@register_run_kind
class RetrievalRuns(RunKind):
    """Retrieval of what a long text stated; a cell is a context length and a depth."""

    name = "passkey"
    setting = RetrievalSetting
    items = "prompts per length and depth"
    columns = (
        *("task", "keys", "length", "depth", "top1", "rank", "exact_match", "trials", "distractors"),
        *("chance", "chance_rank"),
    )

    def plan(
        self, question: Passkey, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **settings: Any
    ) -> RunPlan[Any]:
        return _plan(question, model, tokenizer, settings)

    def parse(self, item: str, value: Any) -> TrialScore:
        match value:
            case [bool(exact), int() | float() as rank] if rank >= 1 and math.isfinite(rank):
                return TrialScore(exact, float(rank))
        raise ValueError(f"expected [exact, rank], got {short(repr(value))}")

    def result(
        self, method: Method, setting: RetrievalSetting, cell: Cell, values: Sequence[TrialScore], costs: Sequence[Cost]
    ) -> Retrieval:
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
        )

    def table(self, run: Run[Retrieval], *, detailed: bool = False) -> Table:
        """One row per method and depth, one column per length: exact match and mean rank."""
        one = run.results[0]
        keys = f", one of {one.keys} keys" if one.keys > 1 else ""
        title = f"Retrieval, task {short(printable(one.task))}{keys}: exact match, mean rank"
        caption = (
            f"{one.trials} prompts per depth and length. The rank is that of the right answer among "
            f"{one.distractors + 1}: 1 is best, {one.chance_rank:g} is luck; green: better than luck by 3 standard "
            "errors"
        )
        return two_column_table(run, title, caption, "depth", "{:.0%}".format, partial(_retrieval_cell, run))

    def chart(self, run: Run[Retrieval]) -> Chart:
        one = run.results[0]
        note = (
            "Exact answers by context length and depth (0% first); below, the mean rank of the right answer among "
            f"{one.distractors + 1} (luck: {one.chance_rank:g}), faint where no better than chance. "
            f"{one.trials} prompts per cell."
        )
        panels = {
            name: {(r.depth, r.length): HeatCell(r.exact_match, r.rank, not r.above_chance) for r in row}
            for name, row in run.by_label.items()
        }
        return HeatMaps(panels, run.context_length, note)

    def measures(self, run: Run[Retrieval]) -> Sequence[Measure]:
        """Exact answers, or where there are none right answers first; an item is a prompt, or prompts of one text."""
        one = run.results[0]
        exact = any(r.exact_match for r in run.results)

        def items_of(results: Sequence[Retrieval]) -> Iterable[tuple[float, float]]:
            rows = [[float(score.exact if exact else score.rank == 1) for score in each.scores] for each in results]
            if run.settings.get("setting", {}).get("own_prompts"):
                return [(score, 1.0) for row in rows for score in row]
            return [(fmean(of_trial), 1.0) for of_trial in zip(*rows, strict=True)]

        items = run.items(items_of)
        task = short(printable(one.task))
        name, chance = ("exact match", 0.0) if exact else ("top-1 accuracy", one.chance)
        return [Measure(f"{name} ({task})", "%", Evidence.RETRIEVAL, True, items, "prompt", chance=chance)]


@dataclass
class _Trial:
    """One prompt less its haystack, as token ids (tokens,) int64; the same at every length and for every method."""

    head: Tensor
    statements: tuple[Tensor, ...]  # the one asked for first
    depths: tuple[float, ...]  # of the other statements, as shares of the haystack
    question: Tensor
    answers: Tensor  # (1 + distractors, A), the right one first
    start: float  # where in the haystack its text begins, as a share
    spare: int = 0  # tokens that are left free, so that the haystack is as long as under a longer question

    @property
    def wording(self) -> int:
        """Tokens of prompt and answer besides the haystack, and those left free."""
        return sum(map(len, (self.head, *self.statements, self.question, self.answers[0]))) + self.spare

    @property
    def tail(self) -> int:
        return len(self.question) + len(self.answers[0])

    def prompt(self, haystack: Tensor, length: int, depth: float) -> Tensor:
        """(length - spare - A,): with the answer `length` tokens less `spare`; a short haystack is repeated."""
        filled = length - self.wording
        hay = haystack[(int(self.start * len(haystack)) + torch.arange(filled)) % len(haystack)]
        pieces = [self.head]
        stop = 0
        for index, start, stop in insert(filled, (depth, *self.depths)):
            pieces += [hay[start:stop], self.statements[index]]
        return torch.cat([*pieces, hay[stop:], self.question])


class _RetrievalMeasurement(Measurement):
    """The ranks of right answers, at every depth of every context length; an item is one trial."""

    kind = "passkey"

    def __init__(
        self,
        setting: RetrievalSetting,
        trials: Sequence[Sequence[_Trial]],  # a list per depth
        haystack: Tensor,
        lengths: Sequence[int],
        depths: Sequence[float],  # ascending, all different
        shared: bool,  # prompts of one trial and length differ in their question only, which alone is read again
    ) -> None:
        self.setting, self.haystack, self.shared = setting, haystack, shared
        self.trials = dict(zip(depths, trials, strict=True))
        ordered = sorted(set(lengths))
        self.all_cells = [(length, depth) for length in ordered for depth in depths]
        self.items = [f"trial {index}" for index in range(len(trials[0]))]
        self.passes = [
            length if index == 0 or not shared else trial.tail
            for length in ordered
            for index, of_depth in enumerate(trials)
            for trial in of_depth
        ]
        self.scored = sum(trial.answers.numel() for of_depth in trials for trial in of_depth) * len(ordered)
        # Every answer is a pass of its own; one of a few tokens takes as long as one of 16: it reads all weights.
        answers = trials[0][0].answers
        self.after_each_pass = len(answers) * max(16, answers.shape[1])

    def digested(self, cell: Cell) -> Iterable[bytes]:
        yield repr(self.setting).encode() + self.haystack.numpy().tobytes()
        for trial in self.trials[cell[1]]:
            for ids in (trial.head, *trial.statements, trial.question, trial.answers):
                yield f"{tuple(ids.shape)}".encode() + ids.numpy().tobytes()
            yield f"{trial.start} {trial.depths} {trial.spare}".encode()
        yield repr(cell).encode()

    def measure(self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Passed) -> Scored[TrialScore]:
        read = 0  # the length that was read last
        for cell in cells:
            length, depth = int(cell[0]), cell[1]
            trial = self.trials[depth][item]
            prompt = trial.prompt(self.haystack, length, depth)
            again = self.shared and read == length
            shared = len(prompt) - len(trial.question) if self.shared else 0
            losses, likeliest = scorer.candidates(prompt, trial.answers, length=length, shared=shared, again=again)
            exact = torch.equal(likeliest[0], trial.answers[0])
            read = length
            progress(trial.tail if again else length)
            check_numbers(losses, length)
            yield cell, TrialScore(exact, _rank(losses.double().sum(-1))), scorer.take_cost()


def _rank(losses: Tensor) -> float:
    """The rank of the first of some losses, lowest best; ties count as half a rank."""
    others = losses[1:]
    return 1 + float((others < losses[0]).sum()) + float((others == losses[0]).sum()) / 2


def _retrieval_cell(run: Run[Retrieval], result: Retrieval) -> Text:
    text = f"{result.exact_match:.0%} {result.rank:4.1f}{beyond_mark(run, result)}"
    return Text(text, style="green" if result.above_chance else "")


def make_trials(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    trials: int,
    distractors: int,
    keys: int = 1,
    asked: int = 0,  # index of the statement that is asked for; statements and their places are the same for each
    depths: Sequence[float] = (),  # of the first statements, shares of the haystack; others stand at random depths
    seed: int = 0,
    first: int = 0,  # number of the first trial: trials of other numbers have other names, values and places
    repeated: bool = False,  # the haystack is a short text again and again; prompts then start at its beginning
) -> list[_Trial]:
    """Draw names and values, those that training never uses, in the task's held-out wordings, which take turns.

    Distractors have as many tokens as the right answer, so that none is likelier for its length. The answers to the
    other keys are among them, where they have. MethodError: a tokenizer without enough answers of one length.
    """
    prefix = prefix_tokens(tokenizer, None)
    made = []
    for index in range(first, first + trials):
        rng = random.Random(f"{seed} {index}")
        drawn = ask(task, rng, keys=keys, wording=index).about(asked)
        start = 0.0 if repeated else rng.random()
        places = [*depths, *(rng.random() for _ in range(keys - len(depths)))]
        others = other_answers(task, drawn, rng, wording=index)
        question, answers = _question_and_answers(tokenizer, drawn, others, distractors)
        head = [*prefix, *encode(tokenizer, drawn.head)]
        made.append(
            _Trial(
                head=torch.tensor(head, dtype=torch.int64),
                statements=tuple(torch.tensor(encode(tokenizer, statement)) for statement in drawn.statements),
                depths=tuple(places[:asked] + places[asked + 1 :]),
                question=torch.tensor(question, dtype=torch.int64),
                answers=torch.tensor(answers),
                start=start,
            )
        )
    return made


def _question_and_answers(
    tokenizer: PreTrainedTokenizerBase, drawn: RetrievalQuestion, others: Iterator[str], distractors: int
) -> tuple[list[int], list[list[int]]]:
    """The token ids of a question and of its answers, the right one first, then wrong ones of as many tokens."""
    question, right = encode_answer(tokenizer, drawn.question, drawn.answer)
    answers, shared = [right], len(question)
    texts = {drawn.answer}
    for _ in range(1000 * (distractors + 1)):
        if len(answers) == distractors + 1:
            break
        if (other := next(others)) in texts:
            continue
        texts.add(other)
        ids = encode(tokenizer, drawn.question + other)
        if len(ids) == shared + len(right) and ids[:shared] == question:
            answers.append(ids[shared:])
    if len(answers) <= distractors:
        raise MethodError(
            f"only {len(answers) - 1} other answers have the {len(right)} tokens of {drawn.answer!r}, "
            f"asked for {distractors}; ask for fewer distractors"
        )
    return question, answers


def shared_trials(make: Callable[..., list[_Trial]], depths: Sequence[float]) -> list[list[_Trial]]:
    """Trials by `make_trials` for each depth, whose prompts have a statement at every depth and another question."""
    lists = [make(asked=index, depths=depths) for index in range(len(depths))]
    for same in zip(*lists, strict=True):
        longest = max(trial.wording for trial in same)
        for trial in same:
            trial.spare = longest - trial.wording
    return lists


def _plan(
    question: Passkey, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: dict[str, Any]
) -> RunPlan[_RetrievalMeasurement]:
    """Make the prompts and check them."""
    task = question.task or "passkey"
    chosen, lengths, haystack = entry("task", task, RETRIEVALS), list(question.lengths), question.haystack
    reader: Any = own_tokenizer(model, needed=True) if tokenizer is None else tokenizer
    repeated = haystack is None and chosen.filler is not None
    asked = {name: getattr(question, name) for name in ("trials", "distractors", "keys", "seed")}
    make = partial(make_trials, chosen, reader, repeated=repeated, **asked)
    places = sorted(set(question.depths))
    shared = question.keys >= len(places) > 1
    if shared:
        by_depth = shared_trials(make, places)
    else:  # prompts of one text at several depths would not be independent
        by_depth = [make(first=index * question.trials) for index in range(len(places))]
    made = [trial for of_depth in by_depth for trial in of_depth]
    least = max(trial.wording for trial in made)
    if min(lengths) < least:
        raise MethodError(f"length {min(lengths)} is too short for task {task!r}; its wording alone has {least} tokens")
    own = "stdlib" if chosen.filler is None else Document("filler", chosen.filler)
    documents = load(own if haystack is None else haystack)
    hay = torch.cat([document.ids for document in tokenize(documents, reader)])
    if not len(hay):
        raise CorpusError("the haystack is empty")
    every = [hay, *(ids for trial in made for ids in (trial.prompt(hay, least, 0.0), trial.answers.flatten()))]
    check_prompts(model, every, max(lengths))
    setting = RetrievalSetting(task, question.keys, question.distractors, question.seed, own_prompts=not shared)
    measurement = _RetrievalMeasurement(setting, by_depth, hay, lengths, places, shared)
    given = "" if haystack is None else f" in {documents.source}"
    return RunPlan(measurement, f"task {task}{given}", **settings)
