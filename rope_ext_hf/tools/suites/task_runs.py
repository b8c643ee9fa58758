"""Runs that measure task suites: scores by context length and task, effective lengths, and how they are shown.

Answers are generated greedily and searched for the references; for models too small to answer, the right answer is
ranked among others by likelihood. The suites are files: see `rope_ext_hf.tools.suites`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile, zip_longest
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rope_ext_hf.errors import MethodError, did_you_mean, printable, short
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.scorer import Cost, TokenScorer, check_numbers
from rope_ext_hf.reading.spans import check_prompts, encode, own_tokenizer, prefix_tokens, text_of
from rope_ext_hf.runs.journal import Cell
from rope_ext_hf.runs.kinds import RunKind, register_run_kind
from rope_ext_hf.runs.labels import Method, MethodResult, method_key
from rope_ext_hf.runs.measurement import Measurement, Passed, RunPlan, Scored
from rope_ext_hf.runs.measures import EffectiveLength, Evidence, Measure
from rope_ext_hf.runs.outcomes import Outcome
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.statistics import Estimate, estimate_share
from rope_ext_hf.runs.tables import beyond_mark, length_table
from rope_ext_hf.runs.verdicts import verdict
from rope_ext_hf.runs.wording import listed
from rope_ext_hf.tools.suites.base import PromptSettings, Sample, Suite, TooShortError, count_tokens
from rope_ext_hf.tools.suites.base import suite as find_suite
from rope_ext_hf.tools.suites.questions import Tasks

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_THRESHOLD = 0.85  # of the score at the shortest length, which counts as reading well, as in NoLiMa (arXiv 2502.05167)
_ROUNDING = 1e-6  # below this, scores differ by rounding alone
_RANKED = 20  # answers that the right one is ranked among, itself counted


@dataclass(frozen=True)
class TaskSetting:
    """How prompts were made and answers scored."""

    suite: str
    tasks: str  # names of the suite's tasks, by a comma; a cell's second number is an index of them
    score: str  # "generate" or "rank"
    seed: int
    chat: bool  # whether the tokenizer's chat template was applied
    extra: int  # tokens that may be generated beyond each task's own budget
    chance: float = 0.0  # the score by luck, where answers are ranked; 0: not known


class TaskScore(NamedTuple):
    """One prompt's share of a result: its score from 0 to 1, and the generated answer."""

    score: float
    answer: str

    def to_record(self) -> list[Any]:
        return list(self)


@dataclass(frozen=True)
class TaskResult(MethodResult):
    """The score of one task at one context length.

    Attributes:
        method: `RopeMethod.to_dict` of the RoPE method, or None for the model as loaded.
        length: of prompt and generation together, in tokens, at most.
        samples: prompts.
        score: mean over prompts, from 0 to 1; scores: of each.
    """

    suite: str
    task: str
    samples: int
    score: float
    scores: tuple[float, ...]


@register_run_kind
class TaskRuns(RunKind):
    """Scores of a suite of tasks; a cell is a context length and the index of a task."""

    name = "tasks"
    setting = TaskSetting
    items = "prompts per task and length"
    columns = (
        *("suite", "task", "length", "score", "samples", "suite_score"),
        *("effective_length", "effective_length_low", "effective_length_high"),
    )

    def plan(
        self, question: Tasks, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **settings: Any
    ) -> RunPlan[Any]:
        return _plan(question, model, tokenizer, settings)

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
        for r in run.results:
            key = r.key
            mean = means.get(key, {}).get(r.length)
            row = [r.suite, r.task, r.length, r.score, r.samples, fmean(mean) if mean else ""]
            yield [*row, *lengths.get(key, ("", "", ""))]

    def table(self, run: Run[TaskResult], *, detailed: bool = False) -> Table:
        """One row per method with the suite's score at each length; `detailed` with a row per task."""
        one, lengths, means = run.results[0], effective_lengths(run), _suite_scores(run)
        how = "share of the right answers" if run.settings["setting"]["score"] == "generate" else "right answer first"
        title = f"Suite {short(printable(one.suite))}: {how}, in percent; the model is for {run.meant_for}"
        chance = run.settings["setting"].get("chance")
        luck = f", {chance:.1%} by luck" if chance else ""
        caption = f"{one.samples} prompts per task and length{luck}. {_MEANING}"
        view = length_table(run, title, caption, "method", *(("task",) if detailed else ()))
        view.add_column("effective\nlength", justify="right", overflow="fold")
        for name, row in run.by_label.items():
            key = row[0].key
            mean, reach = means.get(key, {}), lengths.get(key)
            marks = {result.length: beyond_mark(run, result) for result in row}
            best = [f"{fmean(mean[n]):.1%}{marks[n]}" if n in mean else "" for n in run.lengths]
            middle = ("all",) if detailed else ()
            view.add_row(Text(name), *middle, *best, "" if reach is None else str(reach), end_section=not detailed)
            for task in dict.fromkeys(result.task for result in row) if detailed else ():
                at = {each.length: f"{each.score:.1%}{marks[each.length]}" for each in row if each.task == task}
                view.add_row("", Text(printable(task)), *(at.get(n, "") for n in run.lengths), "")
        return view

    def measures(self, run: Run[TaskResult]) -> Sequence[Measure]:
        items = {
            key: {length: [(score, 1.0) for score in scores] for length, scores in row.items()}
            for key, row in _suite_scores(run).items()
        }
        name, chance = f"score of {short(printable(run.results[0].suite))}", run.settings["setting"].get("chance", 0.0)
        plain, reaches = _suite_scores(run).get(method_key(run.settings["loaded"])), effective_lengths(run)
        threshold = _THRESHOLD * fmean(plain[min(plain)]) if plain else None
        return [Measure(name, "%", Evidence.ANSWERS, True, items, "prompt", reaches, threshold, chance)]

    def summary(self, run: Run[TaskResult]) -> dict[str, Any]:
        """The mean over tasks by length, and effective lengths with their intervals, by the method's label."""
        means, reaches = _suite_scores(run), effective_lengths(run)
        names = {name: row[0].key for name, row in run.by_label.items()}
        return {
            "suite_scores": {name: {n: fmean(s) for n, s in means.get(key, {}).items()} for name, key in names.items()},
            "effective_lengths": {name: reaches[key]._asdict() for name, key in names.items() if key in reaches},
        }


_MEANING = (
    f"Effective length: up to it, the score at every length is at least {_THRESHOLD:.0%} of the score of the model as "
    "loaded at the shortest length; in parentheses its 95% confidence interval over prompts"
)


@dataclass(frozen=True)
class _TaskPrompt:
    """One prompt as token ids, with strings that a right answer holds, and wrong answers."""

    ids: Tensor  # (tokens,) int32
    budget: int  # tokens to generate at most
    references: tuple[str, ...]
    # (tokens,) int32 each, answers that are ranked, the right one first; empty: answers are generated
    candidates: tuple[Tensor, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.ids) + max(map(len, self.candidates), default=self.budget)


class _TaskMeasurement(Measurement):
    """The scores of a suite's tasks; an item is one prompt of every task and length."""

    kind = "tasks"

    def __init__(
        self,
        setting: TaskSetting,
        prompts: Mapping[Cell, Sequence[_TaskPrompt]],  # by (context length, index of the task), as many of each
        score: Callable[[str, Sequence[str], Sequence[str]], float],  # of an answer, the references and the others
        decode: Callable[[Tensor], str],
        stop: Collection[int],  # token ids that end an answer
    ) -> None:
        self.setting, self.prompts = setting, dict(sorted(prompts.items()))
        self.all_cells = list(self.prompts)
        self.score, self.decode, self.stop = score, decode, stop
        every = [prompt for of_cell in self.prompts.values() for prompt in of_cell]
        self.items = [f"sample {index}" for index in range(len(every) // len(self.prompts))]
        self.passes = [prompt.tokens for prompt in every]
        answers = [sum(map(len, prompt.candidates)) or prompt.budget for prompt in every]
        self.scored, self.after_each_pass = sum(answers), math.ceil(fmean(answers))

    @property
    def computed_by(self) -> tuple[str, ...]:
        return (*super().computed_by, type(find_suite(self.setting.suite)).__module__)  # which scores the answers

    def digested(self, cell: Cell) -> Iterable[bytes]:
        yield repr((self.setting, sorted(self.stop))).encode()
        for prompt in self.prompts[cell]:
            yield repr((prompt.budget, prompt.references, prompt.others)).encode()
            for ids in (prompt.ids, *prompt.candidates):
                yield f"{len(ids)}".encode() + ids.numpy().tobytes()

    def measure(self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Passed) -> Scored[TaskScore]:
        for cell in cells:
            prompt = self.prompts[cell][item]
            if prompt.candidates:
                value = TaskScore(_ranks_first(scorer, prompt), "")
            else:
                answer = self.decode(scorer.generate(prompt.ids.long(), prompt.budget, stop=self.stop))
                value = TaskScore(self.score(answer, prompt.references, prompt.others), answer)
            progress(prompt.tokens)
            yield cell, value, scorer.take_cost()


def _ranks_first(scorer: TokenScorer, prompt: _TaskPrompt) -> float:
    """Whether the right answer has the highest likelihood per token; among several of the same, its share."""
    # Padded by the last token: what follows an answer does not change its likelihood.
    longest = max(map(len, prompt.candidates))
    answers = torch.stack([torch.cat([ids, ids[-1:].expand(longest - len(ids))]).long() for ids in prompt.candidates])
    losses, _ = scorer.candidates(prompt.ids.long(), answers)  # (candidates, longest)
    means = torch.stack([row[: len(ids)].double().mean() for row, ids in zip(losses, prompt.candidates, strict=True)])
    check_numbers(means, prompt.tokens)
    return float(means[0] <= means.min()) / int((means == means.min()).sum())


def _suite_scores(run: Run[TaskResult]) -> dict[str, dict[int, list[float]]]:
    """The mean over tasks of each prompt, by the method's key and length, where every task is complete."""
    tasks = run.settings["setting"]["tasks"].split(",")

    def means(results: Sequence[TaskResult]) -> Iterable[float]:
        complete = len(results) == len(tasks)
        return map(fmean, zip(*(result.scores for result in results), strict=True)) if complete else ()

    return run.items(means)


def effective_lengths(run: Run[TaskResult]) -> dict[str, EffectiveLength]:
    """Up to which length each method keeps `_THRESHOLD` of the score of the model as loaded at the shortest length.

    The interval is over prompts: up to its low end, the score of every length is significantly above that threshold; up
    to its high end, none is significantly below. The threshold itself counts as known, as in NoLiMa.

    None are stated where one length was measured, or where the score at the shortest length is not significantly
    better than luck. A method without a score at the shortest length is left out. Where the unpatched model was not
    measured, each method is compared with itself.
    """
    means = _suite_scores(run)
    shortest = min((length for row in means.values() for length in row), default=0)
    plain, chance = means.get(method_key(run.settings["loaded"]), {}), run.settings["setting"].get("chance", 0.0)
    lengths = {}
    for key, row in means.items():
        known = (plain if shortest in plain else row).get(shortest)
        if shortest not in row or len(row) < 2 or known is None:
            continue
        base = estimate_share(known)
        if verdict(base, than=chance, higher_is_better=True).outcome is not Outcome.BETTER:
            continue
        scores = {n: estimate_share(each) for n, each in row.items()}
        if row[shortest] is known:
            scores[shortest] = Estimate(1.0, 1.0, 1.0, base.items)  # it is what the others are compared with
        least = _THRESHOLD * base.value
        outcomes = {n: verdict(each, than=least, higher_is_better=True).outcome for n, each in scores.items()}
        lengths[key] = EffectiveLength(
            _reach({n: each.value >= least - _ROUNDING for n, each in scores.items()}),
            _reach({n: outcome is Outcome.BETTER for n, outcome in outcomes.items()}),
            _reach({n: outcome is not Outcome.WORSE for n, outcome in outcomes.items()}),
        )
    return lengths


def _reach(passed: dict[int, bool]) -> int:
    """The length up to which every one passes, of ascending ones; 0 where the first does not."""
    return max(takewhile(passed.__getitem__, passed), default=0)


def _plan(
    question: Tasks, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: dict[str, Any]
) -> RunPlan[_TaskMeasurement]:
    """Make the prompts and check them."""
    suite, samples, extra_tokens = question.suite, question.samples, question.extra_tokens
    chosen = find_suite(suite)
    score = chosen.score_by if question.score is None else question.score
    wanted = chosen.tasks if question.tasks is None else question.tasks
    if unknown := next((name for name in wanted if name not in chosen.tasks), None):
        raise MethodError(
            f"suite {suite!r} has no task {short(unknown)!r}.{did_you_mean(unknown, chosen.tasks)} "
            f"Its tasks: {', '.join(chosen.tasks)}"
        )
    names = tuple(name for name in chosen.tasks if name in wanted)
    if not names:
        raise MethodError(f"no task was chosen; those of suite {suite!r} are {', '.join(chosen.tasks)}")
    if score not in ("generate", "rank"):
        raise MethodError(f"score must be 'generate' or 'rank', got {short(repr(score))}")
    if score == "rank" and samples < 2:
        raise MethodError(f"samples must be a whole number of at least 2 where answers are ranked, got {samples}")
    chosen_seed = chosen.seed if question.seed is None else question.seed
    reader: Any = own_tokenizer(model, needed=True) if tokenizer is None else tokenizer
    documents = load(question.haystack)
    text = text_of(documents, reader)
    encode = _Encoder(reader, chat=question.chat_template == "auto" and bool(getattr(reader, "chat_template", None)))
    prompts: dict[Cell, list[_TaskPrompt]] = {}
    lengths = sorted(set(question.lengths))
    reserved = encode.reserved + extra_tokens
    made_with: dict[str, Any] = {"count": samples, "seed": chosen_seed, "haystack": text, "reserved": reserved}
    _check_tasks(chosen, names, lengths, PromptSettings(reader, lengths[0], **made_with))
    for length in lengths:
        for name in names:
            made = chosen.samples(name, reader, length=length, **made_with)
            prompts[length, float(names.index(name))] = [
                encode(sample, _candidates(sample, made) if score == "rank" else (), extra_tokens) for sample in made
            ]
    every = [prompt for of_cell in prompts.values() for prompt in of_cell]
    check_prompts(model, [ids for each in every for ids in (each.ids, *each.candidates)], max(p.tokens for p in every))
    chance = fmean(1 / len(each.candidates) if each.candidates else 0.0 for each in every)
    setting = TaskSetting(suite, ",".join(names), score, chosen_seed, encode.chat, extra_tokens, chance)
    measurement = _TaskMeasurement(setting, prompts, chosen.score, encode.decode, _stop_tokens(model, reader))
    return RunPlan(measurement, f"suite {suite} in {documents.source}", **settings)


def _check_tasks(suite: Suite, names: Sequence[str], lengths: Sequence[int], wanted: PromptSettings) -> None:
    """Raise MethodError where a task does not fit into every length, with all such tasks and with those that do fit."""
    too_short: dict[str, list[tuple[int, int | None]]] = {}  # by task: a length, and one that is long enough
    reasons: dict[str, str] = {}
    for name in names:
        for length in lengths:
            settings = replace(wanted, length=length)
            try:
                suite.check(name, settings)
            except TooShortError as error:
                reasons[name] = error.reason
                too_short.setdefault(name, []).append((length, suite.least_length(name, settings)))
    if not too_short:
        return
    needs = {name: pairs[-1][1] for name, pairs in too_short.items()}
    known = {name: need for name, need in needs.items() if need is not None}
    at_none = [name for name in known if len(too_short[name]) == len(lengths)]
    at_some = [name for name in known if name not in at_none]
    kinds = {
        "": [f"{name} needs {known[name]:,} tokens" for name in at_none],
        "at some of these lengths: ": [f"{name} needs {known[name]:,} tokens" for name in at_some],
        "at any length: ": [f"{name} ({reasons[name]})" for name in needs if name not in known],
    }
    clauses = "; ".join(f"{kind}{', '.join(each)}" for kind, each in kinds.items() if each)
    fitting = [name for name in names if name not in too_short]
    if fitting:
        works = [*lengths]
    else:  # the tasks that fit at some length, at those lengths that all of them fit into
        fitting, least = [*known], max(known.values(), default=0)
        works = [length for length in lengths if length >= least] or [least]
    then = f"Try: --suite {suite.name} --lengths {','.join(map(str, works))} --tasks {','.join(fitting)}"
    raise MethodError(
        f"{len(too_short)} of {len(names)} tasks do not fit into {listed(f'{length:,}' for length in lengths)} tokens "
        f"with this tokenizer: {clauses}. {then if fitting else 'Take another suite'}"
    )


def _candidates(sample: Sample, made: Sequence[Sample]) -> tuple[str, ...]:
    """The first right answer, and wrong ones: those of its prompt first, then the right ones of other prompts."""
    elsewhere = chain.from_iterable(other.references for other in made)
    wrong = (
        text
        for text in dict.fromkeys([*sample.others, *(() if sample.closed else elsewhere)])
        if text not in sample.references
    )
    return sample.references[0], *[text for _, text in zip(range(_RANKED - 1), wrong, strict=False)]


def template_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the chat template around a user's message; 0 without one."""
    return count_tokens(tokenizer, _as_message(tokenizer, "")) if getattr(tokenizer, "chat_template", None) else 0


def _as_message(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    message: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return str(message)


class _Encoder:
    """Samples as token ids, with the tokenizer's chat template or without it, which takes `reserved` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> None:
        self.tokenizer, self.chat = tokenizer, chat
        self.first = () if chat else prefix_tokens(tokenizer, None)
        self.reserved = template_tokens(tokenizer) if chat else max(0, len(self.first) - 1)  # suites do not count BOS

    def __call__(self, sample: Sample, candidates: Sequence[str], extra: int) -> _TaskPrompt:
        text = (_as_message(self.tokenizer, sample.prompt) if self.chat else sample.prompt) + sample.prefix
        ids = [*self.first, *encode(self.tokenizer, text)]
        gap = "" if not text or text[-1].isspace() else " "
        answers = [[*self.first, *encode(self.tokenizer, f"{text}{gap}{answer}")] for answer in candidates]
        # A tokenizer may merge the end of the prompt with an answer: what all have in common is the prompt.
        shared = next((i for i, some in enumerate(zip_longest(ids, *answers)) if len(set(some)) > 1), len(ids))
        shared = min(shared, len(ids))
        return _TaskPrompt(
            torch.tensor(ids[:shared], dtype=torch.int32),
            sample.budget + extra,
            sample.references,
            tuple(torch.tensor(answer[shared:], dtype=torch.int32) for answer in answers),
            sample.others,
        )

    def decode(self, ids: Tensor) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def _stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end an answer: of the model's generation config and of the tokenizer."""
    given = getattr(getattr(model, "generation_config", None), "eos_token_id", None)  # some classes have none
    tokens = {*(given if isinstance(given, list) else [given]), tokenizer.eos_token_id}
    return frozenset(int(token) for token in tokens if token is not None)
