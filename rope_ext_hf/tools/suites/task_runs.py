"""Runs that measure a suite of tasks: scores by context length and task, effective lengths, and a table of them.

Answers are generated greedily and scored by the suite. For models too small to answer, the right answer is ranked
among others by likelihood instead. The docstring of the module `base` says how to add a suite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rope_ext_hf.errors import MethodError, did_you_mean, printable, short
from rope_ext_hf.reading.scorer import Cost, TokenScorer, check_numbers
from rope_ext_hf.reading.spans import check_prompts
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import own_tokenizer, text_of, warn_of_unknown
from rope_ext_hf.runs.conclusions.labels import Method, MethodResult, method_key
from rope_ext_hf.runs.conclusions.measures import EffectiveLength, Evidence, Measure
from rope_ext_hf.runs.conclusions.statistics import Estimate, estimate_share
from rope_ext_hf.runs.conclusions.verdicts import Outcome, verdict
from rope_ext_hf.runs.kinds import RunKind, register_run_kind
from rope_ext_hf.runs.measurement import Cell, Measurement, Reading, RunPlan
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.tables import beyond_mark, length_table
from rope_ext_hf.tools.suites.base import PromptSettings, Suite
from rope_ext_hf.tools.suites.base import suite as find_suite
from rope_ext_hf.tools.suites.suite_options import Tasks
from rope_ext_hf.tools.suites.task_prompts import PromptEncoder, TaskPrompt, candidates, check_tasks, stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_THRESHOLD = 0.85  # share of the score at the shortest length that a longer one must keep, as in NoLiMa (2502.05167)
_ROUNDING = 1e-6  # scores that differ by less are equal but for rounding


@dataclass(frozen=True)
class TaskSetting:
    """The settings by which a suite's prompts are made and their answers scored."""

    suite: str
    tasks: str  # names of tasks, separated by commas; a cell's second number is the index of one
    score: str  # "generate" or "rank"
    seed: int
    chat: bool  # whether the tokenizer's chat template was applied
    extra: int  # tokens that may be generated beyond each task's own budget
    chance: float = 0.0  # the score by chance where answers are ranked; 0 where they are generated


class TaskScore(NamedTuple):
    """The score of one prompt."""

    score: float  # from 0 to 1
    answer: str  # the generated answer; empty where answers are ranked

    def to_record(self) -> list[Any]:
        return list(self)


@dataclass(frozen=True)
class TaskResult(MethodResult):
    """The score of one task at one context length.

    Attributes:
        method: `RopeMethod.to_dict` of the RoPE method, or None for the model as loaded.
        length: tokens of prompt and generation together, at most.
        suite: the suite's name.
        task: the task's name.
        samples: number of prompts.
        score: the mean of the prompts' scores, from 0 to 1.
        scores: the score of each prompt.
    """

    suite: str
    task: str
    samples: int
    score: float
    scores: tuple[float, ...]


@register_run_kind
class TaskRuns(RunKind):
    """Runs that measure a suite of tasks.

    Results are kept by cell: a context length and the index of a task.
    """

    name = "tasks"
    setting = TaskSetting
    item = "prompt"
    per = " per task and length"
    columns = (
        "suite",
        "task",
        "length",
        "score",
        "samples",
        "suite_score",
        "effective_length",
        "effective_length_low",
        "effective_length_high",
    )

    def plan(
        self, options: Tasks, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **settings: Any
    ) -> RunPlan[Any]:
        return _plan(options, model, tokenizer, settings)

    def parse(self, item: str, value: Any) -> TaskScore:
        match value:
            case [int() | float() as score, str(answer)] if 0 <= score <= 1 and not isinstance(score, bool):
                return TaskScore(float(score), answer)
        raise ValueError(f"expected [score, answer], got {short(repr(value))}")

    def result(
        self, method: Method, setting: TaskSetting, cell: Cell, values: Sequence[TaskScore], costs: Sequence[Cost]
    ) -> TaskResult:
        scores = tuple(value.score for value in values)
        task = setting.tasks.split(",")[int(cell[1])]
        return TaskResult(method, int(cell[0]), setting.suite, task, len(scores), fmean(scores), scores)

    def rows(self, run: Run[TaskResult]) -> Iterable[Sequence[Any]]:
        lengths, means = effective_lengths(run), _suite_scores(run)
        for result in run.results:
            suite_scores = means.get(result.key, {}).get(result.length)
            suite_score = fmean(suite_scores) if suite_scores else ""
            row = [result.suite, result.task, result.length, result.score, result.samples, suite_score]
            yield [*row, *lengths.get(result.key, ("", "", ""))]

    def table(self, run: Run[TaskResult], *, detailed: bool = False) -> Table:
        """Return a table with the suite's score for each method at each length; `detailed` adds a row per task."""
        first, reaches, scores = run.results[0], effective_lengths(run), _suite_scores(run)
        generated = run.settings["setting"]["score"] == "generate"
        unit = "share of the right answers" if generated else "share of prompts whose right answer ranks first"
        title = f"Suite {short(printable(first.suite))}: {unit}, in percent; the model is made for {run.meant_for}"
        chance = run.settings["setting"].get("chance")
        by_chance = f", {chance:.1%} by chance" if chance else ""
        caption = f"{self.counted_items(first.samples)}{by_chance}. {_MEANING}"
        view = length_table(run, title, caption, "method", *(("task",) if detailed else ()))
        view.add_column("effective\nlength", justify="right", overflow="fold")
        for name, results in run.by_label.items():
            key = results[0].key
            marks = {result.length: beyond_mark(run, result) for result in results}
            means = {n: f"{fmean(prompts):.1%}{marks[n]}" for n, prompts in scores.get(key, {}).items()}
            reach = str(reaches[key]) if key in reaches else ""
            task_column = ("all",) if detailed else ()
            cells = [means.get(n, "") for n in run.lengths]
            view.add_row(Text(name), *task_column, *cells, reach, end_section=not detailed)
            if not detailed:
                continue
            for task in dict.fromkeys(result.task for result in results):
                of_task = [result for result in results if result.task == task]
                scores_of_task = {result.length: f"{result.score:.1%}{marks[result.length]}" for result in of_task}
                view.add_row("", Text(printable(task)), *(scores_of_task.get(n, "") for n in run.lengths), "")
        return view

    def measures(self, run: Run[TaskResult]) -> Sequence[Measure]:
        """Return the suite's score as a measure, so that methods can be compared prompt by prompt.

        Prompts with the same index in all tasks count as one.
        """
        suite_scores = _suite_scores(run)
        items = {
            key: {length: [(score, 1.0) for score in scores] for length, scores in by_length.items()}
            for key, by_length in suite_scores.items()
        }
        name = f"score of {short(printable(run.results[0].suite))}"
        chance = run.settings["setting"].get("chance", 0.0)
        unpatched = suite_scores.get(method_key(run.settings["loaded"]))
        threshold = _THRESHOLD * fmean(unpatched[min(unpatched)]) if unpatched else None
        reaches = effective_lengths(run)
        return [Measure(name, "%", Evidence.ANSWERS, True, items, "prompt", reaches, threshold, chance)]

    def summary(self, run: Run[TaskResult]) -> dict[str, Any]:
        """Return the suite's score at each length and the effective length with its interval, by the method's label."""
        scores, reaches = _suite_scores(run), effective_lengths(run)
        keys = {name: results[0].key for name, results in run.by_label.items()}
        means = {
            name: {length: fmean(prompts) for length, prompts in scores.get(key, {}).items()}
            for name, key in keys.items()
        }
        return {
            "suite_scores": means,
            "effective_lengths": {name: reaches[key]._asdict() for name, key in keys.items() if key in reaches},
        }


_MEANING = (
    f"Effective length: the longest length up to which every score is at least {_THRESHOLD:.0%} of the unpatched "
    "model's score at the shortest length; in parentheses its 95% confidence interval over prompts"
)


class _TaskMeasurement(Measurement):
    """The measurement of a suite's tasks, in which one prompt of every task and length is an item."""

    kind = "tasks"

    def __init__(
        self,
        setting: TaskSetting,
        prompts: Mapping[Cell, Sequence[TaskPrompt]],  # by (context length, index of a task), equally many of each
        score: Callable[[str, Sequence[str], Sequence[str]], float],  # takes the answer, references and wrong answers
        decode: Callable[[Tensor], str],  # makes text of generated token ids
        stop: Collection[int],  # token ids that end an answer
        changes_daily: str,  # as `Measurement` describes it
    ) -> None:
        self.setting, self.prompts = setting, dict(sorted(prompts.items()))
        self.all_cells = list(self.prompts)
        self.score_answer, self.decode, self.stop, self.changes_daily = score, decode, stop, changes_daily
        all_prompts = list(chain.from_iterable(self.prompts.values()))
        self.items = [f"sample {index}" for index in range(len(all_prompts) // len(self.prompts))]
        self.passes = [prompt.tokens for prompt in all_prompts]
        answers = [sum(map(len, prompt.candidates)) or prompt.budget for prompt in all_prompts]
        self.scored, self.short_passes = sum(answers), math.ceil(fmean(answers))

    @property
    def computed_by(self) -> tuple[str, ...]:
        scoring_module = type(find_suite(self.setting.suite)).__module__
        return (*super().computed_by, scoring_module)

    def digested(self, cell: Cell) -> Iterable[bytes]:
        yield repr((self.setting, sorted(self.stop))).encode()
        for prompt in self.prompts[cell]:
            yield repr((prompt.budget, prompt.references, prompt.others)).encode()
            for ids in (prompt.ids, *prompt.candidates):
                yield f"{len(ids)}".encode() + ids.numpy().tobytes()

    def readings(self, scorer: TokenScorer, item: int, cells: Sequence[Cell]) -> list[Reading]:
        return [Reading(item, (cell,), self.prompts[cell][item].tokens) for cell in cells]

    def score(self, scorer: TokenScorer, reading: Reading) -> list[TaskScore]:
        [cell] = reading.cells
        prompt = self.prompts[cell][reading.item]
        if prompt.candidates:
            return [TaskScore(_ranks_first(scorer, prompt), "")]
        answer = self.decode(scorer.generate(prompt.ids.long(), prompt.budget, stop=self.stop))
        return [TaskScore(self.score_answer(answer, prompt.references, prompt.others), answer)]


def _ranks_first(scorer: TokenScorer, prompt: TaskPrompt) -> float:
    """Return 1 if the right answer has the highest likelihood per token among the answers to rank, else 0.

    If n answers share the highest likelihood, and the right one is among them, it is 1/n.
    """
    # Answers are padded with their last token: the tokens after an answer do not change its likelihood.
    longest = max(map(len, prompt.candidates))
    answers = torch.stack([torch.cat([ids, ids[-1:].expand(longest - len(ids))]).long() for ids in prompt.candidates])
    losses, _ = scorer.candidates(prompt.ids.long(), answers)  # (candidates, longest)
    means = torch.stack([row[: len(ids)].double().mean() for row, ids in zip(losses, prompt.candidates, strict=True)])
    check_numbers(means, prompt.tokens)
    return float(means[0] <= means.min()) / int((means == means.min()).sum())


def _suite_scores(run: Run[TaskResult]) -> dict[str, dict[int, list[float]]]:
    """Average the scores of all tasks, prompt by prompt, at each length at which every task was measured.

    The result: the method's key -> the context length -> one mean for each prompt number.
    """
    tasks = run.settings["setting"]["tasks"].split(",")

    def means(results: Sequence[TaskResult]) -> Iterable[float]:
        if len(results) < len(tasks):
            return ()
        return map(fmean, zip(*(result.scores for result in results), strict=True))

    return run.items(means)


def effective_lengths(run: Run[TaskResult]) -> dict[str, EffectiveLength]:
    """Return the effective length under each method, by the method's key.

    This is the longest length up to which the score at every length is at least `_THRESHOLD` of the unpatched model's
    score at the shortest length. (Where the unpatched model was not measured, each method is compared with itself.) The
    interval is over prompts: up to its low end, every score is significantly above the threshold; up to its high end,
    none is significantly below. The threshold itself is taken as exact, as in NoLiMa.

    A method is left out if it has no score at the shortest length or at one length only, or if the score that it is
    compared with is not significantly better than chance.
    """
    suite_scores = _suite_scores(run)
    shortest = min((length for by_length in suite_scores.values() for length in by_length), default=0)
    unpatched = suite_scores.get(method_key(run.settings["loaded"]), {})
    chance = run.settings["setting"].get("chance", 0.0)
    lengths = {}
    for key, by_length in suite_scores.items():
        if shortest not in by_length or len(by_length) < 2:
            continue
        reference = unpatched[shortest] if shortest in unpatched else by_length[shortest]
        base = estimate_share(reference)
        if verdict(base, than=chance, higher_is_better=True).outcome is not Outcome.BETTER:
            continue
        scores = {length: estimate_share(prompts) for length, prompts in by_length.items()}
        if by_length[shortest] is reference:
            scores[shortest] = Estimate(1.0, 1.0, 1.0, base.items)  # a score passes beside itself
        least = _THRESHOLD * base.value
        outcomes = {n: verdict(score, than=least, higher_is_better=True).outcome for n, score in scores.items()}
        lengths[key] = EffectiveLength(
            _reach({n: score.value >= least - _ROUNDING for n, score in scores.items()}),
            _reach({n: outcome is Outcome.BETTER for n, outcome in outcomes.items()}),
            _reach({n: outcome is not Outcome.WORSE for n, outcome in outcomes.items()}),
        )
    return lengths


def _reach(passed: dict[int, bool]) -> int:
    """Return the last length before the first one that does not pass; 0 if the shortest length does not pass.

    `passed` has the lengths in ascending order.
    """
    return max(takewhile(passed.__getitem__, passed), default=0)


def _plan(
    options: Tasks, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: dict[str, Any]
) -> RunPlan[_TaskMeasurement]:
    """Return the plan of a `tasks` run: make the prompts, and check that they fit."""
    suite = find_suite(options.suite)
    names = _task_names(options, suite)
    score_by = _score_by(options, suite)
    seed = suite.seed if options.seed is None else options.seed
    text_tokenizer: Any = own_tokenizer(model, needed=True) if tokenizer is None else tokenizer
    documents = load(options.haystack)
    warn_of_unknown(documents, text_tokenizer)
    chat = options.chat_template == "auto" and bool(getattr(text_tokenizer, "chat_template", None))
    encoder = PromptEncoder(text_tokenizer, chat=chat)
    lengths = sorted(set(options.lengths))
    prompt_settings: dict[str, Any] = {
        "count": options.samples,
        "seed": seed,
        "haystack": text_of(documents, text_tokenizer),
        "reserved": encoder.reserved + options.extra_tokens,
    }
    check_tasks(suite, names, lengths, PromptSettings(text_tokenizer, lengths[0], **prompt_settings))
    prompts: dict[Cell, list[TaskPrompt]] = {}
    for length in lengths:
        for index, name in enumerate(names):
            samples = suite.samples(name, text_tokenizer, length=length, **prompt_settings)
            prompts[length, float(index)] = [
                encoder.encode(sample, candidates(sample, samples) if score_by == "rank" else (), options.extra_tokens)
                for sample in samples
            ]
    all_prompts = list(chain.from_iterable(prompts.values()))
    texts = [ids for prompt in all_prompts for ids in (prompt.ids, *prompt.candidates)]
    check_prompts(model, texts, max(prompt.tokens for prompt in all_prompts))
    chance = fmean(1 / len(prompt.candidates) if prompt.candidates else 0.0 for prompt in all_prompts)
    setting = TaskSetting(options.suite, ",".join(names), score_by, seed, encoder.chat, options.extra_tokens, chance)
    stop = stop_tokens(model, text_tokenizer)
    measurement = _TaskMeasurement(setting, prompts, suite.score, encoder.decode, stop, encoder.changes_daily)
    return RunPlan(measurement, f"suite {options.suite} in {documents.source}", **settings)


def _task_names(options: Tasks, suite: Suite) -> tuple[str, ...]:
    """Return the names of the tasks that the user chose, in the suite's order.

    Raises:
        MethodError: a name is unknown, or no task is chosen.
    """
    chosen = suite.tasks if options.tasks is None else options.tasks
    for name in chosen:
        if name not in suite.tasks:
            raise MethodError(
                f"suite {options.suite!r} has no task {short(name)!r}.{did_you_mean(name, suite.tasks)} "
                f"Its tasks: {', '.join(suite.tasks)}"
            )
    names = tuple(name for name in suite.tasks if name in chosen)
    if not names:
        raise MethodError(f"no task was chosen; suite {options.suite!r} has {', '.join(suite.tasks)}")
    return names


def _score_by(options: Tasks, suite: Suite) -> str:
    """Return the way in which answers are scored, "generate" or "rank"."""
    score_by = suite.score_by if options.score is None else options.score
    if score_by not in ("generate", "rank"):
        raise MethodError(f"score must be 'generate' or 'rank', got {short(repr(score_by))}")
    if score_by == "rank" and options.samples < 2:
        raise MethodError(
            f"samples must be at least 2 where answers are ranked, since the wrong answers are those of other prompts; "
            f"got {options.samples}"
        )
    return score_by
