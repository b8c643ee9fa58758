"""The base of measurements of documents: the passes that read their spans, and the sum of the values of spans."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.reading.protocols import Span
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.reading.spans import EvalPlan, Pass, span_passes
from rope_ext_hf.runs.conclusions.labels import label
from rope_ext_hf.runs.kinds import RunKind
from rope_ext_hf.runs.measurement import Cell, Measurement, Passed, Scored, Value
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

    def passes_under(self, method: RopeMethod | None, rotary: Rotary) -> list[int]:
        """Return the number of tokens in each pass under a method; under some, lengths share passes (`span_passes`)."""
        depends_on_total_length = rotary.length_dependent if method is None else method.depends_on_length(rotary)
        return self.plan.passes(depends_on_total_length=depends_on_total_length, recent=method is None)

    def cells(self, item: int) -> Sequence[Cell]:
        """Return the cells for the document with this index: the context lengths at which it is read."""
        _, spans = self.plan.documents[item]
        return [(length,) for length in sorted({span.length for span in spans})]

    def measure(self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Passed) -> Scored[V]:
        """Score one document at some lengths, see `measure_items`."""
        for _, cell, value, cost in self.measure_items(scorer, [(item, cells)], progress):
            yield cell, value, cost

    def measure_items(
        self, scorer: TokenScorer, missing: Iterable[tuple[int, Sequence[Cell]]], progress: Passed
    ) -> Iterator[tuple[int, Cell, V, Cost]]:
        """Score documents at some lengths.

        A pass through the model that scores tokens for several lengths is read once. The cost of a length is that of
        all passes that score tokens for it. Passes that the scorer reads together share their time by their tokens.
        """
        unread = Counter[tuple[int, int]]()  # spans by document and length
        passes: list[tuple[int, Pass]] = []
        for item, cells in missing:
            wanted = [span for span in self.plan.documents[item][1] if (span.length,) in cells]
            unread.update((item, span.length) for span in wanted)
            passes += [
                (item, one_pass)
                for one_pass in span_passes(wanted, depends_on_total_length=scorer.depends_on_total_length)
            ]
        values: dict[tuple[int, int], V] = {}
        costs: dict[tuple[int, int], Cost] = {}

        def tokens_of(entry: tuple[int, Pass]) -> int:
            return entry[1].stop - entry[1].start

        def same_length(entry: tuple[int, Pass]) -> int:
            return entry[1].context if scorer.depends_on_total_length else 0

        for batch in grouped(passes, tokens_of, scorer.tokens_together, same_length):
            scorer.take_cost()  # drops the cost of earlier reading, which belongs to no length
            values_of_passes, cost = self.score(scorer, batch, progress)
            for (item, one_pass), values_of_pass in zip(batch, values_of_passes, strict=True):
                progress(one_pass.stop - one_pass.start)
                for span, value in zip(one_pass.spans, values_of_pass, strict=True):
                    earlier = values.get((item, span.length))
                    values[item, span.length] = value if earlier is None else earlier.plus(value)
                    unread[item, span.length] -= 1
                for length in sorted({span.length for span in one_pass.spans}):
                    entry = item, length
                    costs[entry] = costs.get(entry, Cost()).plus(cost.share(one_pass.stop - one_pass.start))
                    if not unread[entry]:
                        yield item, (length,), values[entry], costs[entry]

    @abstractmethod
    def score(
        self, scorer: TokenScorer, batch: Sequence[tuple[int, Pass]], progress: Passed
    ) -> tuple[list[list[V]], Cost]:
        """Read some passes together, and return the values of their spans.

        Args:
            scorer: reads the tokens.
            batch: the passes, each with the index of its document.
            progress: called with the number of tokens of anything that is read besides the passes.

        Returns:
            For each pass a list with the value of each of its spans; and the cost of the passes, without that of
            anything else that was read.
        """

    def texts(self, batch: Sequence[tuple[int, Pass]]) -> list[tuple[Tensor, int]]:
        """Return the text of each pass as a scorer takes it: its token ids, and the position of the first scored one.

        `batch` holds the passes, each with the index of its document.
        """
        return [self.text(item, one_pass.start, one_pass.stop, first_scored(one_pass)) for item, one_pass in batch]

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
