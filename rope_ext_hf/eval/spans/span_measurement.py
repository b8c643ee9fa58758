"""The base of measurements of documents: the passes that read their spans, and the sum of the values of spans."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.reading.protocols import Span
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.spans import EvalPlan, Pass, span_passes
from rope_ext_hf.runs.conclusions.labels import label
from rope_ext_hf.runs.kinds import RunKind
from rope_ext_hf.runs.measurement import Cell, Measurement, Reading, Value
from rope_ext_hf.runs.run import Run

__all__ = ["SpanMeasurement", "SpanRuns", "scored_parts"]

T = TypeVar("T")


class _SpanValue(Value, Protocol):
    """The value of one span of a document, or of several spans together."""

    def plus(self, other: Any) -> Any:
        """Return the value of the spans of both."""


V = TypeVar("V", bound=_SpanValue)


class SpanMeasurement(Measurement, Generic[V]):
    """Base class for measurements that read documents in spans (pieces of text); an item is a document.

    Args:
        plan: the documents, and the spans that are read and scored.
    """

    by_layer = True

    def __init__(self, plan: EvalPlan) -> None:
        self.plan = plan
        self.items = [document.name for document, _ in plan.documents]
        self.passes = plan.passes(depends_on_total_length=True)
        # a token that is scored at two lengths counts twice
        self.scored = sum(span.score_to - span.score_from for _, spans in plan.documents for span in spans)

    def passes_under(self, method: RopeMethod | None, rope: ModelRope) -> list[int]:
        """Return the number of tokens in each pass under a method; under some, lengths share passes (`span_passes`)."""
        own = rope.own_length_dependent is not None
        depends_on_total_length = own if method is None else method.depends_on_length(rope.rotary)
        return self.plan.passes(depends_on_total_length=depends_on_total_length, recent=method is None)

    def cells(self, item: int) -> Sequence[Cell]:
        """Return the cells for the document with this index: the context lengths at which it is read."""
        _, spans = self.plan.documents[item]
        return [(length,) for length in sorted({span.length for span in spans})]

    def readings(self, scorer: TokenScorer, item: int, cells: Sequence[Cell]) -> list[Reading]:
        """Return the passes in which a document is read at some lengths; one may score the spans of several lengths."""
        spans = [span for span in self.plan.documents[item][1] if (span.length,) in cells]
        return [
            Reading(item, tuple((span.length,) for span in each.spans), each.stop - each.start, each)
            for each in span_passes(spans, depends_on_total_length=scorer.depends_on_total_length)
        ]

    def together(self, scorer: TokenScorer, readings: Iterable[Reading]) -> Iterable[Sequence[Reading]]:
        """Return the passes in groups: each alone, unless weights of layers wait elsewhere, see `tokens_together`."""

        def same_length(reading: Reading) -> int:
            return reading.what.context if scorer.depends_on_total_length else 0

        return grouped(readings, attrgetter("tokens"), scorer.tokens_together, same_length)

    def score(self, scorer: TokenScorer, reading: Reading) -> Sequence[V]:
        """Read one pass, and return the value of each of its spans."""
        return self.score_together(scorer, [reading])[0]

    @abstractmethod
    def score_together(self, scorer: TokenScorer, readings: Sequence[Reading]) -> list[Sequence[V]]:
        """Read some passes together, and return the value of each span of each pass."""

    def texts(self, readings: Sequence[Reading]) -> list[tuple[Tensor, int]]:
        """Return each pass as a scorer takes it: its token ids, and the position of the first token that is scored."""
        return [
            self.text(reading.item, reading.what.start, reading.what.stop, first_scored(reading.what))
            for reading in readings
        ]

    def text(self, item: int, start: int, stop: int, first: int) -> tuple[Tensor, int]:
        """Return a stretch of a document as a scorer takes it: its token ids, and the position of the first scored one.

        Args:
            item: the index of the document.
            start, stop: the first token that is read, and the one after the last.
            first: the first token that is scored.
        """
        ids, shift = self.plan.input_ids(self.plan.documents[item][0], start, stop)
        return ids, first - shift


def scored_parts(one_pass: Pass, begin: int, count: int) -> Iterator[tuple[Span, slice, int]]:
    """Yield the spans whose targets are among some scored tokens of a pass.

    Args:
        one_pass: the pass.
        begin: the place of the first of these tokens among those from `first_scored` on.
        count: the number of these tokens.

    Yields:
        A span; those of these tokens that are targets of it, as a slice; and the number of targets of the span that
        come before them.
    """
    first = first_scored(one_pass) + begin
    for span in one_pass.spans:
        start, stop = max(span.score_from, first), min(span.score_to, first + count)
        if start < stop:
            yield span, slice(start - first, stop - first), start - span.score_from


def first_scored(one_pass: Pass) -> int:
    """Return the first token of a document that any span of a pass scores."""
    return min(span.score_from for span in one_pass.spans)


def grouped(
    entries: Iterable[T], tokens: Callable[[T], int], most: int, alike: Callable[[T], object] = lambda _: None
) -> Iterator[list[T]]:
    """Yield neighbours in groups of at most `most` tokens, but of one entry at least.

    Args:
        entries: the entries.
        tokens: a function that returns the number of tokens of an entry.
        most: the number of tokens.
        alike: a function whose result is equal for all entries of a group.
    """
    group: list[T] = []
    total = 0
    for entry in entries:
        if group and (total + tokens(entry) > most or alike(entry) != alike(group[0])):
            yield group
            group, total = [], 0
        group.append(entry)
        total += tokens(entry)
    if group:
        yield group


# --- the kind of run ----------------------------------------------------------------------------------------------


class SpanRuns(RunKind):
    """Base class for kinds of run in which a document gets a value for each context length.

    Their results have the attributes `tokens_per_second`, `gpu_bytes` and `nonfinite`.
    """

    item = "document"

    def speed(self, run: Run[Any]) -> str:
        """Return the speed of reading, from the slowest result to the fastest, and the peak of GPU memory, in words."""
        rates = sorted(result.tokens_per_second for result in run.results if result.tokens_per_second)
        if not rates:
            return "not timed"
        slowest, fastest = f"{rates[0]:,.0f}", f"{rates[-1]:,.0f}"
        text = f"{slowest if slowest == fastest else f'{slowest} to {fastest}'} tokens per second"
        peak = max(result.gpu_bytes or 0 for result in run.results)
        return f"{text}, at most {peak / 1e9:.1f} GB of GPU memory" if peak else text

    def not_finite(self, run: Run[Any]) -> list[str]:
        """Name, in words, the documents with a value that is not finite: "yarn x4 at 4096 in war-and-peace"."""
        return sorted(
            f"{label(result.method)} at {result.length} in {name}"
            for result in run.results
            for name in result.nonfinite
        )
