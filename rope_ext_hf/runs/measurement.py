"""The items that a run reads and how each is scored, and the plan that joins them with methods."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.runs.journal import Cell, RunContents, Value

T = TypeVar("T")
M_co = TypeVar("M_co", bound="Measurement", covariant=True)
Passed = Callable[[int], None]
"""A function that is called after each pass, with the number of tokens that were read."""
Scored = Iterator[tuple[Cell, T, Cost]]
"""Values of one item: the cell, the value, and what it cost."""


class Measurement(ABC):
    """The measurement that is made with each method: the items, and how one item is scored.

    Attributes:
        kind: the name of the kind of run, see `kinds.RunKind`.
        items: the names of the documents or trials.
        setting: how the items are read, as results record it; an instance of `RunKind.setting`.
        passes: the tokens of each pass through the model, with one method.
        scored: the number of tokens that go through the model's head, with one method.
        after_each_pass: the number of tokens that are read from the cache of each pass, for estimates of the time.
        all_cells: the cells of every item, where all items have the same.
    """

    kind: ClassVar[str]
    items: Sequence[str]
    setting: Any
    passes: Sequence[int]
    scored: int
    after_each_pass: int = 0
    all_cells: Sequence[Cell]

    def cells(self, item: int) -> Sequence[Cell]:
        """Return the cells that the item of this index has values for; by default `all_cells`."""
        return self.all_cells

    @abstractmethod
    def measure(self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Passed) -> Scored[Value]:
        """Score one item in some of its cells.

        Args:
            scorer: reads the tokens, with the method that is measured.
            item: index of the item.
            cells: the cells to score.
            progress: called with the number of tokens read, after each pass.

        Yields:
            (cell, value, cost), as soon as a cell is complete.
        """

    @abstractmethod
    def digested(self, cell: Cell) -> Iterable[bytes]:
        """Return what the values of a cell depend on: the token ids that are read, their bytes, how they are scored."""

    @property
    def contents(self) -> RunContents:
        """The items of a complete run, and the number of values in each cell."""
        counts = Counter(cell for item in range(len(self.items)) for cell in self.cells(item))
        return RunContents(tuple(self.items), dict(sorted(counts.items())))

    @cached_property
    def cell_fingerprints(self) -> dict[Cell, str]:
        """A SHA-256 digest of each cell; where two runs have the same one, they read the same items in the same way."""
        return {cell: hashlib.sha256(b"".join(self.digested(cell))).hexdigest() for cell in self.contents.counts}

    def fingerprint(self) -> str:
        """Return a SHA-256 digest of all cells."""
        return hashlib.sha256(repr(sorted(self.cell_fingerprints.items())).encode()).hexdigest()

    @property
    def computed_by(self) -> tuple[str, ...]:
        """The names of the modules whose code makes the numbers, besides the library's; part of a run's identity."""
        return (type(self).__module__,)


@dataclass(frozen=True)
class RunPlan(Generic[M_co]):
    """Plan of a run: its measurement and its methods, made and checked before any weights are read.

    Attributes:
        measurement: the items, and how they are scored.
        data: what the text is called.
        methods: in the order in which they are measured and shown; None is the model as it is. Empty: the model is
            measured with the method that it has.
        over, context_length: what the methods extend, as `rope_ext_hf.patch` takes them.
        chunk, offload_cache: as `TokenScorer` takes them.
        scorer: a function of the model and the keyword arguments of `TokenScorer`, which returns what reads the text;
            default: `TokenScorer` itself.
        unit: the unit in which results are shown, see `Run.in_unit`; default: that of the kind of run.
        reader: what the run's settings say about a scorer other than the default.
        reader_modules: the names of the modules of such a scorer, whose code makes the numbers.
    """

    measurement: M_co
    data: str
    methods: tuple[RopeMethod | None, ...] = ()
    over: str = "own"
    context_length: int | None = None
    chunk: int | None = None
    offload_cache: bool = False
    scorer: Callable[..., Any] | None = None
    unit: str | None = None
    reader: dict[str, str] = field(default_factory=dict)
    reader_modules: tuple[str, ...] = ()
