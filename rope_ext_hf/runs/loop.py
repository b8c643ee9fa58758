"""The loop of every measurement: over methods, over documents or prompts, and over the spans that are read of each.

A `Measurement` says what is read and makes values of it, `TokenScorer` reads, and listeners keep and show the values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import Any

from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.runs.measured_methods import MeasuredMethods
from rope_ext_hf.runs.measurement import Cell, Listener, Measurement, Reading, Record


def measure_methods(
    measurement: Measurement,
    methods: MeasuredMethods,
    scorer: TokenScorer,
    listener: Listener,
    *,
    items: Sequence[int],
    done: Container[tuple[str, int, Cell]] = (),
) -> None:
    """Measure documents or prompts under every method, and tell a listener of each value.

    Values are not returned: the journal of a run's folder, or a list in memory, is among the listeners, and
    `RunKind.result` makes the result of a method and length of what it holds.

    Args:
        measurement: the documents or prompts, and how they are scored.
        methods: the methods, in their order; the model is patched with one after the other.
        scorer: reads the tokens.
        listener: is told of each pass and of each value.
        items: the indices of the documents or prompts.
        done: the values that are known already and left out: key of the method, index of the item, cell.
    """
    for method in methods:
        with methods.applied(method):
            left = {item: [c for c in measurement.cells(item) if (method.key, item, c) not in done] for item in items}
            readings = [
                reading
                for item, cells in left.items()  # a document or a prompt, and the lengths that it is read at
                for reading in measurement.readings(scorer, item, cells)  # of a document: its spans
            ]
            if readings:
                listener.begins(method.saved, scorer)
            sums = _Sums(readings)
            for together in measurement.together(scorer, readings):  # one of them, unless weights wait elsewhere
                scorer.take_cost()  # drops the cost of earlier reading, which belongs to none of these
                values = measurement.score_together(scorer, together)
                costs = scorer.take_cost().shares([reading.tokens for reading in together])
                for reading, values_of_reading, cost in zip(together, values, costs, strict=True):
                    for cell, value, cost_of_cell in sums.add(reading, values_of_reading, cost):
                        listener.measured(Record(method.saved, reading.item, cell, value, cost_of_cell))
                    for tokens in (reading.tokens, *reading.further):  # progress is reported once a value is kept
                        listener.passed(method.label, tokens)


class _Sums:
    """The values of items, which are added up until each of their cells is complete.

    A document at one context length, for example, has a value for each of its spans, and a span is read with others.

    `readings`: everything that will be read.
    """

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._left = Counter((reading.item, cell) for reading in readings for cell in reading.cells)
        self._values: dict[tuple[int, Cell], Any] = {}
        self._costs: dict[tuple[int, Cell], Cost] = {}

    def add(self, reading: Reading, values: Sequence[Any], cost: Cost) -> Iterator[tuple[Cell, Any, Cost]]:
        """Add the values of a reading, and yield each cell that is complete, with its value and its cost.

        The cost of a cell is that of all readings with a value for it.
        """
        for cell, value in zip(reading.cells, values, strict=True):
            place = reading.item, cell
            self._values[place] = self._values[place].plus(value) if place in self._values else value
            self._left[place] -= 1
        for cell in sorted({*reading.cells}):
            place = reading.item, cell
            self._costs[place] = self._costs.get(place, Cost()).plus(cost)
            if not self._left[place]:
                yield cell, self._values.pop(place), self._costs.pop(place)
