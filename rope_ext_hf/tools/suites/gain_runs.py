"""Runs that measure how much a model uses its context: the amount by which evidence in it lowers the loss of an answer.

A row's answer is scored after its prompt with the evidence, and after the same prompt with other text of as many tokens
in place of the evidence. The gain is the second loss less the first. `gain_rows` makes the prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import MethodError, short
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.reading.spans import check_prompts
from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import own_tokenizer, text_of, warn_of_unknown
from rope_ext_hf.runs.conclusions.labels import Method, MethodResult, label
from rope_ext_hf.runs.conclusions.measures import Evidence, Measure
from rope_ext_hf.runs.conclusions.statistics import estimate
from rope_ext_hf.runs.conclusions.verdicts import Outcome, verdict
from rope_ext_hf.runs.kinds import RunKind, register_run_kind
from rope_ext_hf.runs.measurement import Cell, Measurement, Reading, RunPlan
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.tables import beyond_mark, two_column_table
from rope_ext_hf.tools.suites.gain_rows import RowTokenizer, TextRow, TokenRow, docstring_rows, read_rows
from rope_ext_hf.tools.suites.suite_options import Gain

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DOCSTRINGS = "docstrings"  # the name of the rows that need no file


@dataclass(frozen=True)
class GainSetting:
    """The number of rows that a run of the `gain` measurement reads, and of rows that are too long for it."""

    rows: int  # rows that are read
    too_long: int  # rows that do not fit into every length and distance


class AnswerLoss(NamedTuple):
    """The loss of one answer after a prompt with the evidence and after one without it.

    Losses are in nats, summed over the answer's tokens.
    """

    with_evidence: float
    without_evidence: float
    tokens: int

    @property
    def gain(self) -> float:
        """The amount, in nats, by which the evidence in the prompt lowers the loss of the answer."""
        return self.without_evidence - self.with_evidence

    def to_record(self) -> list[float]:
        return list(self)


@dataclass(frozen=True)
class ContextGain(MethodResult):
    """The gain from evidence, measured at one context length and one distance between evidence and answer.

    The gain is the amount by which evidence in the prompt lowers the loss of the answer. Every answer token weighs the
    same.

    Attributes:
        method: `RopeMethod.to_dict` of the RoPE method, or None for the model as loaded.
        length: tokens of prompt and answer together.
        distance: tokens between the evidence and the answer.
        gain: the loss of the answers without the evidence less their loss with it, in nats per token.
        low, high: the gain's 95% confidence interval over rows; None with fewer than three rows.
        with_evidence, without_evidence: the losses, in nats per token.
        outcome: better where the gain is significantly above 0, worse where it is significantly below 0.
        answers: the losses of each row's answer.
    """

    distance: int
    gain: float
    low: float | None
    high: float | None
    with_evidence: float
    without_evidence: float
    outcome: Outcome
    answers: tuple[AnswerLoss, ...]


@register_run_kind
class GainRuns(RunKind):
    """Runs that measure the gain from evidence: how much the answer's loss falls when its evidence is in the context.

    A cell is a context length and a distance from the evidence to the answer, both in tokens.
    """

    name = "gain"
    setting = GainSetting
    item = "row"
    columns = ("length", "distance", "gain", "low", "high", "outcome", "with_evidence", "without_evidence")

    def plan(
        self, options: Gain, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **settings: Any
    ) -> RunPlan[Any]:
        return _plan(options, model, tokenizer, settings)

    def parse(self, item: str, value: Any) -> AnswerLoss:
        match value:
            case [int() | float() as with_evidence, int() | float() as without_evidence, int(tokens)] if (
                1 <= tokens < 2**63
            ):
                return AnswerLoss(float(with_evidence), float(without_evidence), tokens)
        raise ValueError(f"expected [loss with evidence, loss without, tokens], got {short(repr(value))}")

    def result(
        self, method: Method, setting: GainSetting, cell: Cell, values: Sequence[AnswerLoss], costs: Sequence[Cost]
    ) -> ContextGain:
        tokens = [value.tokens for value in values]
        change = estimate([value.gain for value in values], tokens)
        return ContextGain(
            method=method,
            length=int(cell[0]),
            distance=int(cell[1]),
            gain=change.value,
            low=change.low,
            high=change.high,
            with_evidence=math.fsum(value.with_evidence for value in values) / sum(tokens),
            without_evidence=math.fsum(value.without_evidence for value in values) / sum(tokens),
            outcome=verdict(change, higher_is_better=True).outcome,
            answers=tuple(values),
        )

    def table(self, run: Run[ContextGain], *, detailed: bool = False) -> Table:
        """Return the gains from evidence as a table: a row per method and distance, and a column per length.

        `detailed` adds the confidence intervals.
        """
        setting: Mapping[str, int] = run.settings["setting"]
        title = "Gain from evidence in the context, nats per token of the answer"
        left_out = f", {setting['too_long']} too long and left out" if setting["too_long"] else ""
        caption = (
            f"the loss without the evidence less the loss with it, {setting['rows']} rows{left_out}\n"
            "? no significant difference from 0"
        )
        cell = partial(_gain_cell, run, detailed=detailed)
        return two_column_table(run, title, caption, "distance", "{:,}".format, cell)

    def measures(self, run: Run[ContextGain]) -> Sequence[Measure]:
        """Return the gain from evidence as a measure, so that methods can be compared row by row of the data set.

        A row counts once for each length, with all distances together.
        """

        def gains_and_tokens(results: Sequence[ContextGain]) -> list[tuple[float, float]]:
            answers_by_row = zip(*(result.answers for result in results), strict=True)
            return [
                (sum(answer.gain for answer in answers), float(sum(answer.tokens for answer in answers)))
                for answers in answers_by_row
            ]

        items = run.items(gains_and_tokens)
        return [Measure("gain from evidence", "nats per token", Evidence.GAIN, True, items, "row")]

    def not_finite(self, run: Run[ContextGain]) -> list[str]:
        bad = [result for result in run.results if not math.isfinite(result.with_evidence + result.without_evidence)]
        return [f"{label(result.method)} at {result.length}, distance {result.distance}" for result in bad]


def _gain_cell(run: Run[ContextGain], result: ContextGain, detailed: bool) -> Text:
    """Return the text in a cell of the table: the gain with its marks, and below it the interval if `detailed`."""
    unsure = "?" if result.outcome is Outcome.NO_DIFFERENCE else " "
    interval = "" if result.low is None or not detailed else f"\n{result.low:+.2f} to {result.high:+.2f}"
    style = "green" if result.outcome is Outcome.BETTER else ""
    return Text(f"{result.gain:+.2f}{unsure}{beyond_mark(run, result)}{interval}", style=style)


class _GainMeasurement(Measurement):
    """The measurement of the losses of the rows' answers, with evidence and without, at every length and distance.

    Rows that do not fit into every length and distance are not among them.
    """

    kind = "gain"

    def __init__(self, setting: GainSetting, rows: Mapping[str, TokenRow], cells: Sequence[tuple[int, int]]) -> None:
        self.setting, self.items, self._rows, self.all_cells = setting, list(rows), list(rows.values()), cells
        self.passes = [tokens for row in self._rows for cell in cells for tokens in self._passes(row, cell)]
        self.scored = 2 * len(cells) * sum(len(row.answer) for row in self._rows)
        self.short_passes = 1  # the answer is a forward of its own

    def digested(self, cell: Cell) -> Iterable[bytes]:
        yield repr(cell).encode()
        length, distance = map(int, cell)
        for row in self._rows:
            prompts = row.prompts(length, distance)
            for ids in (prompts.with_evidence, prompts.without_evidence, row.answer):
                yield f"{len(ids)}".encode() + ids.numpy().tobytes()

    def readings(self, scorer: TokenScorer, item: int, cells: Sequence[Cell]) -> list[Reading]:
        passes = {cell: self._passes(self._rows[item], cell) for cell in cells}
        return [Reading(item, (cell,), first, further=(second,)) for cell, (first, second) in passes.items()]

    def score(self, scorer: TokenScorer, reading: Reading) -> list[AnswerLoss]:
        """Compute the loss of one row's answer with the evidence and without it, for one length and distance.

        The beginning that both prompts share is read once.
        """
        row, [cell] = self._rows[reading.item], reading.cells
        length, distance = map(int, cell)
        prompts = row.prompts(length, distance)
        loss = partial(scorer.candidates, answers=row.answer[None], length=length, shared=prompts.shared)
        with_evidence, _ = loss(prompts.with_evidence)
        without_evidence, _ = loss(prompts.without_evidence, again=True)
        sums = with_evidence.double().sum().item(), without_evidence.double().sum().item()
        return [AnswerLoss(*sums, len(row.answer))]

    def _passes(self, row: TokenRow, cell: Cell) -> tuple[int, int]:
        """Return the number of tokens in the two passes for a row: the second prompt is read from where it differs."""
        length, distance = map(int, cell)
        return length, len(row.evidence) + distance + len(row.answer)


def _plan(
    options: Gain, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: dict[str, Any]
) -> RunPlan[_GainMeasurement]:
    """Return the plan of a `gain` run: read the rows, choose among those that fit, and check their prompts."""
    text_tokenizer: Any = own_tokenizer(model, needed=True) if tokenizer is None else tokenizer
    bundled = isinstance(options.data, str) and options.data == _DOCSTRINGS
    rows, source = read_rows(docstring_rows() if bundled else options.data)
    cells = _cells(options)
    longest = max(options.lengths)
    tokenizer_of_rows = RowTokenizer(text_tokenizer)
    fitting = _fitting(rows.values(), cells, tokenizer_of_rows)
    count = min(options.samples, len(fitting))
    chosen = [fitting[(2 * n + 1) * len(fitting) // (2 * count)] for n in range(count)]

    contexts = list(dict.fromkeys(row.context for row in rows.values()))
    haystack: list[str] | None = None
    if options.haystack is not None:
        haystack = [text_of([document], text_tokenizer) for document in load(options.haystack)]
    warn_of_unknown([Document("", text) for text in (*contexts, *(haystack or ()))], text_tokenizer)
    token_rows = {}
    for row in chosen:
        place = contexts.index(row.context)
        following = contexts[place + 1 :] + contexts[:place]
        token_rows[row.name] = tokenizer_of_rows.row(
            row, following if haystack is None else haystack, enough=2 * longest
        )
    texts = []
    for token_row in token_rows.values():
        texts += [token_row.prompts(*cells[0]).with_evidence, token_row.answer, *token_row.fillers]
    check_prompts(model, texts, longest)
    setting = GainSetting(len(token_rows), len(rows) - len(fitting))
    return RunPlan(_GainMeasurement(setting, token_rows, cells), _DOCSTRINGS if bundled else source, **settings)


def _cells(options: Gain) -> list[tuple[int, int]]:
    """Return the pairs of length and distance to measure, ascending."""
    lengths = sorted(set(options.lengths))
    distances = sorted(set(options.distances or [max(1, length // 2) for length in lengths]))
    if distances[-1] >= lengths[-1]:
        raise MethodError(
            f"distance {distances[-1]} is not below the longest length, {lengths[-1]}; give shorter distances or a "
            "longer length"
        )
    return [(length, distance) for length in lengths for distance in distances if distance < length]


def _fitting(rows: Iterable[TextRow], cells: Sequence[tuple[int, int]], tokenizer: RowTokenizer) -> list[TextRow]:
    """Return the rows that fit into every context length and distance (`cells`).

    Raises:
        MethodError: no row fits.
    """
    room = min(length - distance for length, distance in cells) - len(tokenizer.head)
    question_room = min(distance for _, distance in cells)
    fitting, sizes = [], []
    for row in rows:
        options, answer = tokenizer.question_and_answer(row)
        sizes.append(len(tokenizer.tokens(row.evidence)) + len(answer))
        if sizes[-1] <= room and len(options) <= question_room:
            fitting.append(row)
    if not fitting:
        raise MethodError(
            f"no row fits: these lengths and distances leave {room} tokens for evidence and answer, where the shortest "
            f"row needs {min(sizes)}, and {question_room} tokens for the question; give longer lengths"
        )
    return fitting
