"""The parts of a run: a measurement, a plan (a measurement with the methods to compare), and listeners.

A `Measurement` says which documents or prompts are read and how they are scored; `loop.measure_methods` goes over them.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from rope_ext_hf.errors import short
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.runs.conclusions.labels import Method

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__all__ = ["Cell", "Listener", "Measurement", "Reading", "Record", "RunContents", "RunPlan", "Value"]

M_co = TypeVar("M_co", bound="Measurement", covariant=True)
Cell = tuple[float, ...]
"""A context length in tokens, alone or with a depth from 0 to 1, a distance in tokens or the index of a task."""


class Value(Protocol):
    """The measured value for one item in one cell, such as the loss of a document at one context length."""

    def to_record(self) -> list[Any]:
        """Return the value as JSON values, in the form that a journal stores."""


class Reading(NamedTuple):
    """The text that is read of one item in one go, and the cells that it gives values for.

    Attributes:
        item: index of the document or prompt.
        cells: the cell of each value. Where several readings have values for a cell, or one has several, they are
            added up, by a method `plus` of the value.
        tokens: the number of tokens of the text.
        what: what the measurement needs to know of it, such as the spans of a document.
        further: the number of tokens in each further pass that belongs to it.
    """

    item: int
    cells: tuple[Cell, ...]
    tokens: int
    what: Any = None
    further: tuple[int, ...] = ()


class Record(NamedTuple):
    """A value that was measured, as a listener is told of it, and as one line of a journal holds it.

    Attributes:
        method: `RopeMethod.to_dict` of the method, or None for the model as loaded.
        item: index of the document or prompt.
        cell: a context length, alone or with a depth, a distance or a task.
        value: the value, as the run's `RunKind` parses it.
        cost: tokens, seconds and memory that it took.
    """

    method: dict[str, Any] | None
    item: int
    cell: Cell
    value: Value
    cost: Cost


@dataclass(frozen=True)
class RunContents:
    """The contents that a run has when it is complete.

    Attributes:
        items: the names of the documents or prompts.
        counts: the number of items that have a value, by cell (a context length, alone or with a depth or task).
    """

    items: tuple[str, ...]
    counts: dict[Cell, int]

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> RunContents:
        """Return the contents from the settings `items`, `cells` and `per_cell`; ValueError if one of them is wrong."""
        for key in ("items", "cells", "per_cell"):
            if not isinstance(value := settings.get(key), list):
                raise ValueError(f"{key!r} must be a list, got {short(repr(value))}")
        items, cells, counts = settings["items"], settings["cells"], settings["per_cell"]
        if {*map(type, items)} != {str}:
            raise ValueError("'items' must be a list of names")
        if len(cells) != len(counts) or not cells:
            raise ValueError("'cells' and 'per_cell' must be lists of the same length")
        if not all(type(count) is int and 1 <= count <= len(items) for count in counts):
            raise ValueError(f"'per_cell' must hold numbers from 1 to {len(items)}")
        return cls(tuple(items), dict(zip(map(cell_from_json, cells), counts, strict=True)))


def cell_from_json(value: Any) -> Cell:
    """Return a cell (a context length, alone or with a depth or task) from JSON; ValueError if it is not a cell."""
    match value:
        case [int(length)] if 1 <= length < 2**63:
            return (length,)
        case [int(length), int() | float() as place] if 1 <= length < 2**63 and 0 <= place < 2**20:
            return (length, float(place))
    raise ValueError(f"expected a cell [length] or [length, depth or task], got {short(repr(value))}")


class Measurement(ABC):
    """Base class for a measurement: the documents or prompts that are read, and the way in which each is scored.

    Attributes:
        kind: the name of the kind of run, see `kinds.RunKind`.
        items: the names of the documents or prompts.
        setting: how the items are read, as results record it; an instance of `RunKind.setting`.
        passes: for each pass through the model with one method, its number of tokens.
        scored: the number of tokens that go through the model's head, with one method.
        short_passes: the number of passes over a few tokens, such as an answer, that follow each pass and continue from
            its cache; for estimates of the time.
        by_layer: whether it takes losses alone (`TokenScorer.losses`), so that a model may be read layer by layer.
        takes_outputs: whether it takes the outputs of the decoder (`TokenScorer.outputs_together`), which an engine in
            place of transformers does not give.
        weight_bytes: the size of weights that it holds on the model's device beside those of the model.
        changes_daily: why the same call reads another text on another day; empty: it does not.
        listeners: what follows a run of this measurement, beside its journal and its progress.
        all_cells: the cells of every item, if all items have the same. A cell is a context length, alone or with a
            depth, a distance or a task.
    """

    kind: ClassVar[str]
    items: Sequence[str]
    setting: Any
    passes: Sequence[int]
    scored: int
    short_passes: int = 0
    by_layer: ClassVar[bool] = False
    takes_outputs: bool = False
    weight_bytes: int = 0
    changes_daily: str = ""
    listeners: Sequence[Listener] = ()
    all_cells: Sequence[Cell]

    def passes_under(self, method: RopeMethod | None, rope: ModelRope) -> Sequence[int]:
        """Return for each pass under one method its number of tokens, for estimates and progress; by default `passes`.

        A measurement that reads less text under some methods overrides it.

        Args:
            method: the method; None: the model as it is.
            rope: the rope of the model, which the methods extend.
        """
        return self.passes

    def stored_bytes(self, model: PreTrainedModel, dtype: torch.dtype, methods: int) -> int:
        """Return the bytes that are written into the run's folder besides results, for the number of methods; 0 here.

        Args:
            model: the model, which may be on the meta device.
            dtype: the dtype of its weights once it is loaded.
            methods: the number of methods.
        """
        return 0

    def cells(self, item: int) -> Sequence[Cell]:
        """Return the cells in which the item with this index gets a value; by default `all_cells`.

        A cell is a context length, alone or with a depth, a distance or a task.
        """
        return self.all_cells

    def readings(self, scorer: TokenScorer, item: int, cells: Sequence[Cell]) -> Iterable[Reading]:
        """Return what is read of one item (a document or prompt), in order; by default one text for each cell.

        Args:
            scorer: reads the tokens through the model, patched with the method that is measured.
            item: index of the item.
            cells: the cells to score, each a context length, alone or with a depth, a distance or a task.
        """
        return [Reading(item, (cell,), int(cell[0])) for cell in cells]

    @abstractmethod
    def score(self, scorer: TokenScorer, reading: Reading) -> Sequence[Any]:
        """Read some text of one item, and return the value for each of `reading.cells`.

        Args:
            scorer: reads the tokens through the model, patched with the method that is measured.
            reading: one of `readings`; they come in their order.
        """

    def together(self, scorer: TokenScorer, readings: Iterable[Reading]) -> Iterable[Sequence[Reading]]:
        """Return the readings in groups that `score_together` reads at once; by default each is read alone."""
        return ([reading] for reading in readings)

    def score_together(self, scorer: TokenScorer, readings: Sequence[Reading]) -> list[Sequence[Any]]:
        """Return the values of several readings, each as `score` returns them.

        A measurement that gives the scorer several texts at once overrides it.
        """
        return [self.score(scorer, reading) for reading in readings]

    @abstractmethod
    def digested(self, cell: Cell) -> Iterable[bytes]:
        """Return bytes for a digest of everything that the values in a cell depend on.

        These are the token ids that are read, the number of bytes of text that each token stands for if the values
        depend on it, and the way in which the tokens are scored.
        """

    @property
    def contents(self) -> RunContents:
        """The items that a complete run has, and the number of values in each of its cells."""
        counts = Counter(cell for item in range(len(self.items)) for cell in self.cells(item))
        return RunContents(tuple(self.items), dict(sorted(counts.items())))

    @cached_property
    def cell_fingerprints(self) -> dict[Cell, str]:
        """SHA-256 digests by cell; two runs with the same digest for a cell read the same items in the same way."""
        return {cell: hashlib.sha256(b"".join(self.digested(cell))).hexdigest() for cell in self.contents.counts}

    def fingerprint(self) -> str:
        """Return a SHA-256 digest of everything that the run reads, over all cells."""
        return hashlib.sha256(repr(sorted(self.cell_fingerprints.items())).encode()).hexdigest()

    @property
    def computed_by(self) -> tuple[str, ...]:
        """The names of the Python modules, besides the library's, whose code makes the numbers of the measurement."""
        return (type(self).__module__,)


class Listener:
    """Base class of what follows a run as it goes on, whose methods do nothing.

    Listeners show the progress of a run, keep its journal, or store hidden states. A run calls their methods in the
    order in which they stand here.
    """

    def planned(self, model: PreTrainedModel, plan: RunPlan[Any], rope: ModelRope) -> None:
        """Take note that the run begins; nothing has been read yet.

        Args:
            model: the model that is measured.
            plan: the plan of the run.
            rope: the rope of the model, for `RunPlan.passes`.
        """

    def started(self, folder: Path, done: int, units: int) -> None:
        """Take note that the run's folder exists, with `done` of the `units` values that this process measures.

        It is not called for a run without files.
        """

    def reading(self, scorer: Any) -> None:
        """Take note that the first pass follows.

        `scorer`: what reads, a `TokenScorer` or what `RunPlan.scorer` makes; its property `reading` says how.
        """

    def begins(self, method: Method, scorer: Any) -> None:
        """Take note that a method follows, for which something is to be measured; the model is patched with it.

        Args:
            method: `RopeMethod.to_dict` of the method, or None for the model as loaded.
            scorer: as in `reading`.
        """

    def passed(self, method: str, tokens: int) -> None:
        """Take note of one pass through the model; `method` is the label of the method, `tokens` the number it read."""

    def measured(self, record: Record) -> None:
        """Take note of a value that is complete; `Measurement.listeners` hear of it before the journal does."""

    def close(self) -> None:
        """Take note that the run is complete, or has failed."""


@dataclass(frozen=True)
class RunPlan(Generic[M_co]):
    """Plan for a run: the measurement and the methods, made and checked before any weights are read.

    Attributes:
        measurement: the items, and how they are scored.
        data: the name of the text.
        methods: the methods, in the order in which they are measured and shown; None stands for the model as it is.
            Empty: only the model as it is.
        over, context_length: what the methods extend, as `rope_ext_hf.patch` takes them.
        chunk, offload_cache: as `TokenScorer` takes them.
        scorer: a function that takes the model and the keyword arguments of `TokenScorer`, and returns an object that
            reads and scores the text; default: `TokenScorer` itself.
        unit: the unit in which results are shown, see `Run.in_unit`; default: that of the kind of run.
        reader: an entry for the run's settings that describes a scorer other than the default.
        reader_modules: the names of the Python modules with the code of such a scorer.
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

    def scorer_of(self, model: PreTrainedModel) -> TokenScorer:
        """Return the object that reads tokens through a model and scores them."""
        longest = max(self.measurement.passes, default=1)
        options: dict[str, Any] = {"chunk": self.chunk, "offload_cache": self.offload_cache, "longest": longest}
        scorer: TokenScorer = (self.scorer or TokenScorer)(model, **options)
        return scorer

    def passes(self, rope: ModelRope) -> list[int]:
        """Return for each pass of the run, with all of its methods, the number of tokens.

        `rope` is that of the model that is measured, for a patch with the `over` and `context_length` of the plan.
        """
        return [tokens for method in self.methods or (None,) for tokens in self.measurement.passes_under(method, rope)]
