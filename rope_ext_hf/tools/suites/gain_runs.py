"""Runs that measure whether a model uses its context: how much evidence in it lowers the loss of an answer.

    {"context": "... The bridge opened in 1937. ...", "evidence": "The bridge opened in 1937.",
     "question": "\\nThe bridge opened in", "answer": " 1937"}

Each prompt is read as it is, and with other text of as many tokens in place of the evidence: the gain is by how much
the loss is higher without. Between evidence and answer stand as many tokens as asked for: first the text that follows.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from rope_ext_hf.errors import CorpusError, MethodError, short
from rope_ext_hf.reading.corpora import load, stdlib_held_out
from rope_ext_hf.reading.documents import utf8_bytes
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.reading.spans import check_prompts, encode, encode_answer, own_tokenizer, prefix_tokens, text_of
from rope_ext_hf.runs.journal import Cell
from rope_ext_hf.runs.kinds import RunKind, register_run_kind
from rope_ext_hf.runs.labels import Method, MethodResult, label
from rope_ext_hf.runs.measurement import Measurement, Passed, RunPlan, Scored
from rope_ext_hf.runs.measures import Evidence, Measure
from rope_ext_hf.runs.outcomes import Outcome
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.statistics import estimate
from rope_ext_hf.runs.tables import beyond_mark, two_column_table
from rope_ext_hf.runs.verdicts import verdict
from rope_ext_hf.tools.suites.questions import Gain

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DOCSTRINGS = "docstrings"  # the name of the rows that need no file
_COLUMNS = ("context", "evidence", "question", "answer")
_LEAST_LINE = 20  # characters of a docstring's first line that is asked for


@dataclass(frozen=True)
class GainSetting:
    """How many rows were read, and how many were too long for the shortest length and the distances in it."""

    rows: int
    too_long: int


class AnswerLoss(NamedTuple):
    """The loss of one answer, in nats summed over its tokens, with the evidence and without it."""

    with_evidence: float
    without_evidence: float
    tokens: int

    @property
    def gain(self) -> float:
        return self.without_evidence - self.with_evidence

    def to_record(self) -> list[float]:
        return list(self)


@dataclass(frozen=True)
class ContextGain(MethodResult):
    """The gain from evidence at one distance in one context length; every answer token weighs the same.

    Attributes:
        method: `RopeMethod.to_dict` of the RoPE method, or None for the model as loaded.
        length: of prompt and answer together, in tokens.
        distance: tokens between the evidence and the answer.
        gain: the loss of the answers without the evidence less that with it, nats per token.
        low, high: its 95% interval over rows; None with fewer than three.
        with_evidence, without_evidence: the losses, nats per token.
        outcome: better where the gain is surely above 0, worse where it is surely below.
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
    """The gain from evidence; a cell is a context length and a distance in tokens."""

    name = "gain"
    setting = GainSetting
    items = "rows"
    columns = ("length", "distance", "gain", "low", "high", "outcome", "with_evidence", "without_evidence")

    def plan(
        self, question: Gain, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **settings: Any
    ) -> RunPlan[Any]:
        return _plan(question, model, tokenizer, settings)

    def parse(self, item: str, value: Any) -> AnswerLoss:
        match value:
            case [int() | float() as given, int() | float() as missing, int(tokens)] if 1 <= tokens < 2**63:
                return AnswerLoss(float(given), float(missing), tokens)
        raise ValueError(f"expected [with evidence, without, tokens], got {short(repr(value))}")

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
        """One row per method and distance, one column per length: the gain, `detailed` with its interval."""
        setting: Mapping[str, int] = run.settings["setting"]
        title = "Gain from evidence in the context, nats per token of the answer"
        left = f", {setting['too_long']} too long and left out" if setting["too_long"] else ""
        caption = (
            f"the loss without the evidence less that with it, {setting['rows']} rows{left}\n"
            "? no significant difference from 0"
        )
        cell = partial(_gain_cell, run, detailed=detailed)
        return two_column_table(run, title, caption, "distance", "{:,}".format, cell)

    def measures(self, run: Run[ContextGain]) -> Sequence[Measure]:
        """The gain; an item is a row, at all distances of a length together."""
        items = run.items(
            lambda results: (
                (sum(each.gain for each in answers), float(sum(each.tokens for each in answers)))
                for answers in zip(*(result.answers for result in results), strict=True)
            )
        )
        return [Measure("gain from evidence", "nats per token", Evidence.GAIN, True, items, "row")]

    def not_finite(self, run: Run[ContextGain]) -> list[str]:
        bad = [result for result in run.results if not math.isfinite(result.with_evidence + result.without_evidence)]
        return [f"{label(result.method)} at {result.length}, distance {result.distance}" for result in bad]


def _gain_cell(run: Run[ContextGain], result: ContextGain, detailed: bool) -> Text:
    unsure = "?" if result.outcome is Outcome.NO_DIFFERENCE else " "
    ends = "" if result.low is None or not detailed else f"\n{result.low:+.2f} to {result.high:+.2f}"
    style = "green" if result.outcome is Outcome.BETTER else ""
    return Text(f"{result.gain:+.2f}{unsure}{beyond_mark(run, result)}{ends}", style=style)


@dataclass(frozen=True)
class _Row:
    """A row as token ids, and what fills its prompts."""

    head: Tensor  # what every prompt begins with: a BOS token, or nothing
    before: Tensor
    evidence: Tensor
    after: Tensor
    question: Tensor
    answer: Tensor
    others: tuple[Tensor, ...]  # texts without the evidence, in the order in which they follow its context

    def prompts(self, length: int, distance: int) -> tuple[Tensor, Tensor, int]:
        """The prompt with the evidence and the one without, (length - A,) each, and how many tokens both begin with."""
        backwards = [text.flip(0) for text in reversed(self.others)]
        neutral = _filled(cycle(self.others[len(self.others) // 2 :] + self.others), len(self.evidence))
        after = _filled(chain([self.after], cycle(self.others)), distance - len(self.question))
        room = length - len(self.head) - len(self.evidence) - distance - len(self.answer)
        before = _filled(chain([self.before.flip(0)], cycle(backwards)), room).flip(0)
        shared = torch.cat([self.head, before])
        given, missing = (torch.cat([shared, part, after, self.question]) for part in (self.evidence, neutral))
        return given, missing, len(shared)


def _filled(texts: Iterable[Tensor], count: int) -> Tensor:
    """The first `count` tokens of some texts end to end."""
    pieces = []
    for text in texts:
        pieces.append(text[:count])
        count -= len(pieces[-1])
        if not count:
            break
    return torch.cat(pieces)


class _GainMeasurement(Measurement):
    """The losses of the rows' answers at every length and distance; these fit all rows."""

    kind = "gain"

    def __init__(self, setting: GainSetting, rows: Mapping[str, _Row], cells: Sequence[tuple[int, int]]) -> None:
        self.setting, self.items, self._rows, self.all_cells = setting, list(rows), list(rows.values()), cells
        self.passes = [
            size
            for row in self._rows
            for length, distance in cells
            for size in (length, len(row.evidence) + distance + len(row.answer))
        ]
        self.scored = 2 * len(cells) * sum(len(row.answer) for row in self._rows)
        # The answer is a pass of its own; one of a few tokens takes as long as one of 16: it reads all weights.
        self.after_each_pass = max(16, *(len(row.answer) for row in self._rows))

    def digested(self, cell: Cell) -> Iterable[bytes]:
        yield repr(cell).encode()
        for row in self._rows:
            for ids in (*row.prompts(*map(int, cell))[:2], row.answer):
                yield f"{len(ids)}".encode() + ids.numpy().tobytes()

    def measure(self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Passed) -> Scored[AnswerLoss]:
        """Read one row's prompts with the evidence and without it; what both begin with is read once."""
        row = self._rows[item]
        for cell in cells:
            length, distance = map(int, cell)
            *prompts, shared = row.prompts(length, distance)
            nats: list[float] = []
            for again, prompt in enumerate(prompts):
                losses, _ = scorer.candidates(prompt, row.answer[None], length=length, shared=shared, again=bool(again))
                nats.append(losses.double().sum().item())
                progress(length - shared if again else length)
            yield cell, AnswerLoss(nats[0], nats[1], len(row.answer)), scorer.take_cost()


def _plan(
    question: Gain, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, settings: dict[str, Any]
) -> RunPlan[_GainMeasurement]:
    """Read the rows, choose those that fit, and check them."""
    reader: Any = own_tokenizer(model, needed=True) if tokenizer is None else tokenizer
    bundled = isinstance(question.data, str) and question.data == _DOCSTRINGS
    columns = [load(docstring_rows() if bundled else question.data, column=name) for name in _COLUMNS]
    texts = {row[0].name: _texts(*row) for row in zip(*columns, strict=False)}
    lengths = sorted(set(question.lengths))
    distances = sorted(set(question.distances or [max(1, length // 2) for length in lengths]))
    if distances[-1] >= lengths[-1]:
        raise MethodError(f"distance {distances[-1]} is not below the longest length, {lengths[-1]}")
    cells = [(length, distance) for length in lengths for distance in distances if distance < length]

    ids_of = partial(torch.tensor, dtype=torch.int64)
    head = ids_of(prefix_tokens(reader, None))

    @cache
    def tokens(text: str) -> Tensor:
        return ids_of(encode(reader, text))

    room = min(length - distance for length, distance in cells) - len(head)
    asked = {name: [*map(ids_of, encode_answer(reader, *each[3:]))] for name, each in texts.items()}
    sizes = {name: (len(tokens(each[1])) + len(asked[name][1]), len(asked[name][0])) for name, each in texts.items()}
    fitting = [name for name, (size, asks) in sizes.items() if size <= room and asks <= distances[0]]
    if not fitting:
        raise MethodError(
            f"no row fits: these lengths and distances leave {room} tokens for evidence and answer, where the shortest "
            f"take {min(sizes.values())[0]}, and {distances[0]} for a question; give longer lengths"
        )
    count = min(question.samples, len(fitting))
    contexts = list(dict.fromkeys("".join(each[:3]) for each in texts.values()))
    hay = None if question.haystack is None else [text_of([each], reader) for each in load(question.haystack)]

    def others(context: str, evidence: str) -> Iterator[Tensor]:
        """What follows a context, in order, until there is more than enough of it."""
        place, left = contexts.index(context), 2 * lengths[-1]
        for text in contexts[place + 1 :] + contexts[:place] if hay is None else hay:
            if left > 0 and evidence not in text and len(ids := tokens(text)):
                left -= len(ids)
                yield ids

    rows = {}
    for name in (fitting[(2 * n + 1) * len(fitting) // (2 * count)] for n in range(count)):
        parts = texts[name][:3]
        before, evidence, after = map(tokens, parts)
        asks, answer = asked[name]
        rows[name] = _Row(head, before, evidence, after, asks, answer, tuple(others("".join(parts), parts[1])))
        if not rows[name].others:
            raise CorpusError(f"{name}: no other row has a context without its evidence; give text with --haystack")
    every = [ids for row in rows.values() for ids in (row.prompts(*cells[0])[0], row.answer, *row.others)]
    check_prompts(model, every, lengths[-1])
    setting = GainSetting(len(rows), len(texts) - len(fitting))
    return RunPlan(_GainMeasurement(setting, rows, cells), _DOCSTRINGS if bundled else columns[0].source, **settings)


def _texts(context: Any, evidence: Any, question: Any, answer: Any) -> tuple[str, str, str, str, str]:
    """A row's text before the evidence, the evidence, the text after it, the question and the answer."""
    for column, each in zip(_COLUMNS, (context, evidence, question, answer), strict=True):
        if each.name != context.name or each.ids is not None or not utf8_bytes(each.name, each.text):
            raise CorpusError(f"{context.name}: the column {column!r} has no text")
    before, *after = context.text.split(evidence.text)
    if len(after) != 1:
        times = "does not stand" if not after else f"stands {len(after)} times"
        raise CorpusError(
            f"{context.name}: the evidence {short(evidence.text)!r} {times} in the context; once is right"
        )
    return before, evidence.text, after[0], question.text, answer.text


def docstring_rows() -> list[dict[str, str]]:
    """Rows made of the docstrings of modules that the bundled model was not trained on.

    A context is a docstring after the name of what it documents, its first line is the evidence, and that line is asked
    for by the name. A first line that stands in two docstrings is not asked for.
    """
    documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for module in stdlib_held_out() for node in ast.walk(ast.parse(module.text))]
    entries = {node.name: text for node in nodes if isinstance(node, documented) and (text := ast.get_docstring(node))}
    lines = {name: text.partition("\n")[0] for name, text in entries.items()}
    times = Counter(lines.values())
    return [
        {
            "context": f"{name}: {entries[name]}\n\n",
            "evidence": f"{name}: {line}",
            "question": f"\n\n{name}:",
            "answer": f" {line}",
        }
        for name, line in lines.items()
        if times[line] == 1 and len(line) >= _LEAST_LINE
    ]
