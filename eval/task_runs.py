"""Runs that measure task suites: scores by context length and task, effective lengths, and how they are shown."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rope_ext_hf.errors import printable, short
from rope_ext_hf.eval.journal import Cell
from rope_ext_hf.eval.measures import EffectiveLength, Evidence, Measure
from rope_ext_hf.eval.results import Cost, method_key
from rope_ext_hf.eval.runs import Measurement, Run, RunKind, register_run_kind
from rope_ext_hf.eval.scorer import TokenScorer
from rope_ext_hf.eval.tables import AS_LOADED, by_method, length_table, length_text, loaded_label
from rope_ext_hf.pictures.result_plots import curves
from rope_ext_hf.pictures.svg_charts import line_chart

__all__ = ["TaskMeasurement", "TaskPrompt", "TaskResult", "TaskSetting", "effective_lengths"]

THRESHOLD = 0.85
"""The share of the score at the shortest length that counts as reading well, as in NoLiMa (arXiv 2502.05167)."""
DRAWS = 2000
EQUAL = 1e-6
"""Below this, scores differ by rounding alone."""


@dataclass(frozen=True)
class TaskSetting:
    """How prompts were made and answers scored.

    Attributes:
        suite: its name.
        tasks: names of its tasks, by a comma; a cell's second number is an index of them.
        score: "generate" or "rank".
        seed: of the prompts.
        chat: whether the tokenizer's chat template was applied.
        extra: tokens that may be generated beyond each task's own budget.
        chance: the score by luck, where answers are ranked; 0: not known.
    """

    suite: str
    tasks: str
    score: str
    seed: int
    chat: bool
    extra: int
    chance: float = 0.0


class TaskScore(NamedTuple):
    """One prompt's share of a result: its score from 0 to 1, and what was generated."""

    score: float
    answer: str

    def to_record(self) -> list[Any]:
        """As a journal holds it."""
        return list(self)


@dataclass(frozen=True)
class TaskResult:
    """The score of one task at one context length.

    Attributes:
        method: `RopeMethod.to_dict` of the RoPE method, or None for the model as loaded.
        suite, task: their names.
        length: of prompt and generation together, in tokens, at most.
        samples: prompts.
        score: mean over prompts, from 0 to 1.
        scores: of each prompt.
    """

    method: dict[str, Any] | None
    suite: str
    task: str
    length: int
    samples: int
    score: float
    scores: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


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

    def parse(self, item: str, value: Any) -> TaskScore:
        match value:
            case [int() | float() as score, str(answer)] if 0 <= score <= 1 and not isinstance(score, bool):
                return TaskScore(float(score), answer)
        raise ValueError(f"expected [score, answer], got {short(repr(value))}")

    def result(
        self, method: dict[str, Any] | None, setting: TaskSetting, cell: Cell, values: Sequence[TaskScore], cost: Cost
    ) -> TaskResult:
        scores = tuple(value.score for value in values)
        task = setting.tasks.split(",")[int(cell[1])]
        return TaskResult(method, setting.suite, task, int(cell[0]), len(scores), fmean(scores), scores)

    def rows(self, run: Run[TaskResult]) -> Iterable[Sequence[Any]]:
        lengths, means = effective_lengths(run), suite_scores(run)
        for r in run.results:
            key = method_key(r.method)
            reach = lengths.get(key, ("", "", ""))
            mean = means[key].get(r.length)
            yield [r.suite, r.task, r.length, r.score, r.samples, fmean(mean) if mean else "", *reach]

    def table(self, run: Run[TaskResult], *, detailed: bool = False) -> Table:
        """One row per method with the suite's score at each length; `detailed` with a row per task."""
        one, lengths, means = run.results[0], effective_lengths(run), suite_scores(run)
        how = "share of the right answers" if run.settings["setting"]["score"] == "generate" else "right answer first"
        title = f"Suite {short(printable(one.suite))}: {how}, in percent; the model is for {run.meant_for}"
        chance = run.settings["setting"].get("chance")
        luck = f", {chance:.1%} by luck" if chance else ""
        caption = f"{one.samples} prompts per task and length{luck}. {_MEANING}"
        view = length_table(run, title, caption, "method", *(("task",) if detailed else ()))
        view.add_column("effective\nlength", justify="right", overflow="fold")
        every = sorted({result.length for result in run.results})
        for name, row in by_method(run.results).items():
            key = method_key(row[0].method)
            mean, reach = means[key], lengths.get(key)
            best = [f"{fmean(mean[n]):.1%}" if n in mean else "" for n in every]
            middle = ("all",) if detailed else ()
            view.add_row(Text(name), *middle, *best, "" if reach is None else str(reach), end_section=not detailed)
            for task in dict.fromkeys(result.task for result in row) if detailed else ():
                at = {result.length: f"{result.score:.1%}" for result in row if result.task == task}
                view.add_row("", Text(printable(task)), *(at.get(n, "") for n in every), "")
        return view

    def draw(self, run: Run[TaskResult], path: Path | None, title: str) -> Any:
        up = f"score of {short(printable(run.results[0].suite))}, percent (higher is better)"
        return curves(_lines(run), run.context_length, path, title, up, threshold=_threshold(run))

    def chart(self, run: Run[TaskResult]) -> str:
        caption = (
            "Score by context length, in percent, higher is better. The dotted line is the length that the model is "
            f"for, the dashed one {THRESHOLD:.0%} of the score at the shortest length."
        )
        return line_chart(_lines(run), run.context_length, caption, threshold=_threshold(run))

    def measures(self, run: Run[TaskResult]) -> Sequence[Measure]:
        items = {
            key: {length: [(score, 1.0) for score in scores] for length, scores in row.items()}
            for key, row in suite_scores(run).items()
        }
        name = f"score of {short(printable(run.results[0].suite))}"
        threshold = _threshold(run)
        return [
            Measure(
                name,
                "%",
                Evidence.ANSWERS,
                True,
                items,
                effective_lengths(run),
                None if threshold is None else threshold / 100,
                run.settings["setting"].get("chance", 0.0),
            )
        ]

    def summary(self, run: Run[TaskResult]) -> dict[str, Any]:
        """The mean over tasks by length, and effective lengths with their intervals, by the method's label."""
        means, reaches = suite_scores(run), effective_lengths(run)
        names = {name: method_key(row[0].method) for name, row in by_method(run.results).items()}
        return {
            "suite_scores": {name: {n: fmean(s) for n, s in means[key].items()} for name, key in names.items()},
            "effective_lengths": {name: reaches[key]._asdict() for name, key in names.items() if key in reaches},
        }

    def conclusion(self, run: Run[TaskResult]) -> str:
        """The method with the longest effective length, and the best one at the longest length."""
        names = {method_key(row[0].method): name for name, row in by_method(run.results).items()}
        means, reaches = suite_scores(run), effective_lengths(run)
        longest = max((length for row in means.values() for length in row), default=0)
        there = {key: fmean(row[longest]) for key, row in means.items() if longest in row}
        if not there:
            return "No length has the scores of all tasks yet."

        def called(key: str) -> str:
            return AS_LOADED if names[key] == loaded_label(run) else names[key]

        best = max(there, key=lambda key: (there[key], reaches[key].length if key in reaches else 0))
        context = run.context_length
        text = f"At {length_text(longest, context)}, {called(best)} has the highest score, {there[best]:.1%}"
        plain = method_key(run.settings["loaded"])
        text += f"; {AS_LOADED} has {there[plain]:.1%}." if plain in there and plain != best else "."
        if not reaches:
            return f"{text} No effective length is stated: nothing is right at the shortest length."
        far = max(reaches, key=lambda key: (reaches[key].length, there.get(key, 0.0)))
        if not reaches[far].length:
            return f"{text} No method has an effective length among those measured."
        text += f" The longest effective length is {reaches[far]} tokens, of {called(far)}"
        if plain in reaches and plain != far:
            text += f"; {AS_LOADED} has {reaches[plain]}"
        return f"{text}."


_MEANING = (
    f"Effective length: up to it, the score at every length is at least {THRESHOLD:.0%} of the score of the model as "
    "loaded at the shortest length; in brackets the 95% interval over prompts"
)


@dataclass(frozen=True)
class TaskPrompt:
    """One prompt as token ids.

    Attributes:
        ids: (tokens,) int32.
        budget: tokens to generate at most.
        references: strings that a right answer holds.
        candidates: (tokens,) int32 each, answers that are ranked, the right one first; empty where answers are
            generated.
        others: wrong answers.
    """

    ids: Tensor
    budget: int
    references: tuple[str, ...]
    candidates: tuple[Tensor, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.ids) + max(map(len, self.candidates), default=self.budget)


class TaskMeasurement(Measurement):
    """The scores of a suite's tasks; an item is one prompt of every task and length.

    Args:
        prompts: by (context length, index of the task), as many of each.
        score: the score of an answer, from 0 to 1, by its text, the references and the wrong answers.
        decode: token ids to text.
        stop: token ids that end an answer.
    """

    kind = "tasks"

    def __init__(
        self,
        setting: TaskSetting,
        prompts: Mapping[Cell, Sequence[TaskPrompt]],
        score: Callable[[str, Sequence[str], Sequence[str]], float],
        decode: Callable[[Tensor], str],
        stop: Collection[int],
    ) -> None:
        self.setting, self.prompts = setting, dict(sorted(prompts.items()))
        self.score, self.decode, self.stop = score, decode, stop
        every = [prompt for of_cell in self.prompts.values() for prompt in of_cell]
        self.items = [f"sample {index}" for index in range(len(every) // len(self.prompts))]
        self.passes = [prompt.tokens for prompt in every]
        answers = [sum(map(len, prompt.candidates)) or prompt.budget for prompt in every]
        self.scored, self.after_each_pass = sum(answers), math.ceil(fmean(answers))

    def cells(self, item: int) -> Sequence[Cell]:
        return list(self.prompts)

    def fingerprint(self) -> str:
        digest = hashlib.sha256(repr(sorted(self.stop)).encode())
        for prompt in (prompt for prompts in self.prompts.values() for prompt in prompts):
            digest.update(repr((prompt.budget, prompt.references, prompt.others)).encode())
            for ids in (prompt.ids, *prompt.candidates):
                digest.update(f"{len(ids)}".encode() + ids.numpy().tobytes())
        return digest.hexdigest()

    def measure(
        self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Callable[[int], None]
    ) -> Iterator[tuple[Cell, TaskScore, Cost]]:
        """Answer one prompt of every length and task asked for."""
        scorer.take_cost()
        for cell in cells:
            prompt = self.prompts[cell][item]
            if prompt.candidates:
                value = TaskScore(_ranks_first(scorer, prompt), "")
            else:
                answer = self.decode(scorer.generate(prompt.ids.long(), prompt.budget, stop=self.stop))
                value = TaskScore(self.score(answer, prompt.references, prompt.others), answer)
            progress(prompt.tokens)
            yield cell, value, scorer.take_cost()


def _ranks_first(scorer: TokenScorer, prompt: TaskPrompt) -> float:
    """Whether the right answer has the highest likelihood per token; among several of the same, its share."""
    longest = max(map(len, prompt.candidates))
    answers = torch.stack([_padded(ids, longest) for ids in prompt.candidates])
    losses, _ = scorer.candidates(prompt.ids.long(), answers)  # (candidates, longest)
    means = torch.stack([row[: len(ids)].double().mean() for row, ids in zip(losses, prompt.candidates, strict=True)])
    means = means.nan_to_num(nan=math.inf, posinf=math.inf)
    return float(means[0] <= means.min()) / int((means == means.min()).sum())


def _padded(ids: Tensor, length: int) -> Tensor:
    """Token ids, and the last one again: what follows an answer does not change its likelihood."""
    return torch.cat([ids, ids[-1:].expand(length - len(ids))]).long()


def suite_scores(run: Run[TaskResult]) -> dict[str, dict[int, list[float]]]:
    """The mean over tasks of each prompt, by the method's key and length, where every task is complete."""
    tasks = run.settings["setting"]["tasks"].split(",")
    rows: dict[str, dict[int, list[TaskResult]]] = {}
    for result in run.results:
        rows.setdefault(method_key(result.method), {}).setdefault(result.length, []).append(result)
    return {
        key: {
            length: [fmean(scores) for scores in zip(*(result.scores for result in results), strict=True)]
            for length, results in sorted(row.items())
            if len(results) == len(tasks)
        }
        for key, row in rows.items()
    }


def effective_lengths(run: Run[TaskResult], draws: int = DRAWS, seed: int = 0) -> dict[str, EffectiveLength]:
    """Up to which length each method keeps `THRESHOLD` of the score of the model as loaded at the shortest length.

    Args:
        run: with results of the kind "tasks".
        draws: of prompts with replacement, for the interval; those of one length are drawn for all methods alike.
        seed: of the draws.

    Returns:
        By the method's key. A method without a score at the shortest length is left out; so are all where nothing was
        right there. Where the model as loaded was not measured, each method is compared with itself.
    """
    means = {key: row for key, row in suite_scores(run).items() if row}
    shortest = min((length for row in means.values() for length in row), default=0)
    generator, drawn = torch.Generator().manual_seed(seed), dict[int, Tensor]()
    for length, scores in sorted({n: scores for row in means.values() for n, scores in row.items()}.items()):
        drawn[length] = torch.randint(len(scores), (draws, len(scores)), generator=generator)
    plain = means.get(method_key(run.settings["loaded"]), {})
    lengths = {}
    for key, row in means.items():
        base = (plain if shortest in plain else row).get(shortest)
        if shortest not in row or base is None or not any(base):
            continue
        by_draw = {n: torch.tensor(scores, dtype=torch.float64)[drawn[n]].mean(1) for n, scores in row.items()}
        of_base = THRESHOLD * torch.tensor(base, dtype=torch.float64)[drawn[shortest]].mean(1)
        passed = {n: (values >= of_base - EQUAL).tolist() for n, values in by_draw.items()}
        reached = sorted(_reach({n: values[draw] for n, values in passed.items()}) for draw in range(draws))
        low, high = reached[int(0.025 * draws)], reached[math.ceil(0.975 * draws) - 1]
        held = {n: fmean(scores) >= THRESHOLD * fmean(base) - EQUAL for n, scores in row.items()}
        lengths[key] = EffectiveLength(_reach(held), low, high)
    return lengths


def _reach(passed: dict[int, bool]) -> int:
    """The length up to which every one passes, of ascending ones; 0 where the first does not."""
    return max(takewhile(passed.__getitem__, passed), default=0)


def _lines(run: Run[TaskResult]) -> dict[str, list[tuple[int, float]]]:
    """Scores in percent, as (length, value) by label."""
    means = suite_scores(run)
    return {
        name: [(length, 100 * fmean(scores)) for length, scores in means[method_key(row[0].method)].items()]
        for name, row in by_method(run.results).items()
    }


def _threshold(run: Run[TaskResult]) -> float | None:
    """What effective lengths are measured by, in percent; None where the model as loaded was not measured."""
    row = suite_scores(run).get(method_key(run.settings["loaded"]))
    return 100 * THRESHOLD * fmean(row[min(row)]) if row else None
