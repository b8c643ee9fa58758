"""Runs and the kinds of runs: what a run's folder holds, what measures it, and how its results are shown.

A run measures methods on items (documents, or prompts). Each item has a value per cell: a context length, or a context
length and a depth. A result is made of the values of all items of its cell.

A kind of run is one file: a `RunKind` for the results, and a `Measurement` for what is read and scored. An entry point
of the group rope_ext_hf.run_kinds names the class, so that the results of an earlier process can be shown, too.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from rich.table import Table

from rope_ext_hf.errors import MethodError, did_you_mean, printable, short
from rope_ext_hf.method_choice import MethodChoice
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import method_from_dict, rotary_from_dict
from rope_ext_hf.pictures.charts import Chart
from rope_ext_hf.pictures.html_page import html_table, paragraph
from rope_ext_hf.plug_ins import plug_in, plug_in_names
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.runs.chosen_methods import resolve_choice
from rope_ext_hf.runs.journal import Cell, RunContents, Value
from rope_ext_hf.runs.labels import MethodResult, labels, method_key, short_labels
from rope_ext_hf.runs.measures import Measure
from rope_ext_hf.runs.verdicts import Conclusion, Findings, conclude, listed
from rope_ext_hf.terminal import table_text, wrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

R = TypeVar("R", bound=MethodResult)
R_co = TypeVar("R_co", bound=MethodResult, covariant=True)
M_co = TypeVar("M_co", bound="Measurement", covariant=True)
K = TypeVar("K", bound="type[RunKind]")
T = TypeVar("T")
Passed = Callable[[int], None]  # see `Measurement.measure`, also for what it yields
Scored = Iterator[tuple[Cell, T, Cost]]
_OF_WHAT = {"original": " without its own scaling", "patched": " with its present patch"}
"""What methods extend, in words, by `over`."""


@dataclass(frozen=True, repr=False)
class Run(Generic[R_co]):
    """What a run's folder holds.

    Attributes:
        path: the folder; None for a run that was measured without files.
        settings: everything the numbers depend on, provenance among it.
        results: per method and cell that is complete.
        unit: the unit in which losses are shown to people: "perplexity", "nats" (per token) or "bits" (per byte).
    """

    path: Path | None
    settings: dict[str, Any]
    results: Sequence[R_co]
    unit: str = "perplexity"

    @property
    def folder(self) -> Path:
        """Where its files are; ValueError: it was measured without files."""
        if self.path is None:
            raise ValueError("this run was measured without files; give out=... to keep it in a folder")
        return self.path

    @cached_property
    def kind(self) -> RunKind:
        """What was measured, and how it is shown."""
        return run_kind(self.settings["kind"])

    @property
    def context_length(self) -> int:
        """The length in tokens that what the methods extend is for: by default the model as loaded."""
        return int(self.settings["context_length"])

    @property
    def meant_for(self) -> str:
        """`context_length` in words, with what it is the length of: the model without its own scaling, for example."""
        return f"{self.context_length:,} tokens{_OF_WHAT.get(self.settings['over'], '')}"

    def extended_length(self, method: Mapping[str, Any] | None) -> int | None:
        """The length in tokens that the model is for under a method; None: it has no end, or is not known.

        `method` is `RopeMethod.to_dict`, or None for the model as loaded.
        """
        if method_key(method) == method_key(self.settings["loaded"]) and not self.settings.get("patches"):
            return self.context_length
        try:
            rotary = rotary_from_dict(self.settings["basis"]["rotary"])
            return method_from_dict(method or {}).extended_length(rotary)
        except (KeyError, TypeError, ValueError, MethodError):  # of another version, or a method that is not here
            return None

    @cached_property
    def extended_lengths(self) -> dict[str, int | None]:
        """`extended_length` of each method that has results, by its key."""
        methods = {result.key: result.method for result in self.results}
        return {key: self.extended_length(method) for key, method in methods.items()}

    @cached_property
    def lengths(self) -> list[int]:
        """The context lengths of the results, ascending."""
        return sorted({result.length for result in self.results})

    @cached_property
    def names(self) -> dict[str, str]:
        """The label of each method that has results, by its key."""
        return labels([result.method for result in self.results])

    @cached_property
    def by_label(self) -> dict[str, list[R_co]]:
        """The results by the label of their method, in the order they came."""
        rows: dict[str, list[R_co]] = {}
        for result in self.results:
            rows.setdefault(self.names[result.key], []).append(result)
        return rows

    @cached_property
    def by_length(self) -> dict[str, dict[int, list[R_co]]]:
        """The results by the method's key and the length: one each, or one per depth, distance or task."""
        rows: dict[str, dict[int, list[R_co]]] = {}
        for result in self.results:
            rows.setdefault(result.key, {}).setdefault(result.length, []).append(result)
        return rows

    def items(self, made_of: Callable[[Sequence[R_co]], Iterable[T]]) -> dict[str, dict[int, list[T]]]:
        """What is made of the results of each method at each length, by its key and the length; empty ones left out."""
        rows = {
            key: {length: made for length, results in sorted(row.items()) if (made := list(made_of(results)))}
            for key, row in self.by_length.items()
        }
        return {key: row for key, row in rows.items() if row}

    def beyond(self, result: Any) -> bool:
        """Whether a result is of a longer input than the model is for under its method."""
        return bool(result.length > (self.extended_lengths[result.key] or result.length))

    @cached_property
    def any_beyond(self) -> bool:
        """Whether `beyond` holds for any result."""
        return any(map(self.beyond, self.results))

    @cached_property
    def findings(self) -> Findings:
        """What was measured, as conclusions follow from it."""
        return findings_of_runs([self])

    @cached_property
    def conclusion(self) -> Conclusion:
        """What it comes to, in sentences."""
        return conclude(self.findings)

    def in_unit(self, unit: str) -> Run[R_co]:
        """Return the same run, shown in another unit; MethodError names the units that its kind has."""
        if unit not in self.kind.units:
            known = listed(map(repr, self.kind.units)) or "none to choose from"
            raise MethodError(f"unit must be one of those of a {self.kind.name} run ({known}), got {short(repr(unit))}")
        return replace(self, unit=unit)

    def select(self, methods: Sequence[Mapping[str, Any] | None]) -> Run[R_co]:
        """The same run with the results of these methods alone, in this order."""
        by_method: dict[str, list[R_co]] = {method_key(method): [] for method in methods}
        for result in self.results:
            by_method.get(result.key, []).append(result)
        chosen = [result for results in by_method.values() for result in results]
        return self if chosen == self.results else replace(self, results=chosen)

    def table(self, *, detailed: bool = False) -> Table | None:
        """The results as a table of a terminal, `detailed` as in the HTML page; None where nothing is complete."""
        return self.kind.table(self, detailed=detailed) if self.results else None

    @cached_property
    def chart(self) -> Chart | None:
        """The results as a chart; None where nothing is complete or finite, or the kind has none."""
        chart = self.kind.chart(self) if self.results else None
        return chart if chart is not None and chart.svg() else None

    @property
    def title(self) -> str:
        """The model, and what it read."""
        return printable(f"{Path(self.settings['model']).name or 'model'} on {self.settings['data']}")

    def rows(self) -> list[dict[str, Any]]:
        """The results as results.csv has them: per result the values of its columns."""
        return [
            {"method": self.names[result.key]}
            | dict(zip(self.kind.columns, row, strict=True))
            | {"extended_length": self.extended_lengths[result.key]}
            | {"beyond_extended_length": self.beyond(result), "parameters": json.dumps(result.method)}
            for result, row in zip(self.results, self.kind.rows(self), strict=True)
        ]

    @property
    def columns(self) -> list[str]:
        """The names of what `rows` holds, in order."""
        return ["method", *self.kind.columns, "extended_length", "beyond_extended_length", "parameters"]

    def to_dataframe(self) -> Any:
        """The results as a pandas DataFrame, a row per result, with the columns of results.csv; pandas is needed."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise ImportError("to_dataframe() needs pandas: pip install pandas") from error
        return DataFrame(self.rows(), columns=self.columns)

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the results, as the PNG in a run's folder shows them.

        Args:
            path: a PNG to write; default: none.

        Returns:
            The matplotlib figure, which a notebook shows.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: there are no results, or the kind of run has no picture.
        """
        if not self.results:
            raise ValueError("there is nothing to plot: no result is complete")
        if self.chart is None:
            raise ValueError(f"runs of the kind {self.kind.name!r} have no picture")
        return self.chart.draw(path, self.title)

    def __repr__(self) -> str:
        return f"<Run: {self.kind.name} of {self.title}>"

    def __str__(self) -> str:
        """The table and the conclusion, as wide as the terminal."""
        if (table := self.table()) is None:
            return "Nothing is finished yet."
        return f"{table_text(table)}\n\n{wrapped(str(self.conclusion))}".rstrip()

    def _repr_html_(self) -> str:
        """What a notebook shows: the conclusion, the chart and the table of the HTML page."""
        if (table := self.table(detailed=True)) is None:
            return paragraph("Nothing is finished yet.")
        return paragraph(str(self.conclusion)) + (self.chart.svg() if self.chart else "") + html_table(table)

    def to_dict(self) -> dict[str, Any]:
        """Settings and results, as results.json has them."""
        results = [
            result.to_dict() | {"extended_length": self.extended_lengths[result.key], "beyond": self.beyond(result)}
            for result in self.results
        ]
        conclusion = str(self.conclusion) if self.results else ""
        return {"provenance": self.settings, "conclusion": conclusion, "results": results} | self.kind.summary(self)


class Results(list[R]):
    """The results of one call, a list; a notebook shows them as the `run` that they are of."""

    def __init__(self, run: Run[R]) -> None:
        super().__init__(run.results)
        self.run = run

    def to_dataframe(self) -> Any:
        """As `Run.to_dataframe`."""
        return self.run.to_dataframe()

    def plot(self, path: str | Path | None = None) -> Any:
        """As `Run.plot`."""
        return self.run.plot(path)

    def __repr__(self) -> str:
        return repr(self.run)

    def __str__(self) -> str:
        return str(self.run)

    def _repr_html_(self) -> str:
        return self.run._repr_html_()


class RunKind(ABC):
    """The results of one kind of run, and how they are shown."""

    name: ClassVar[str]  # in run.json, and in the names of folder and picture
    setting: ClassVar[type]  # dataclass of plain values that says how items are read
    items: ClassVar[str]  # what the items are, in words
    columns: ClassVar[Sequence[str]]  # of results.csv, between the method's label and its parameters
    units: ClassVar[Sequence[str]] = ()  # in which its numbers can be shown, the default first; empty: in one alone

    def fit(self, question: Any, model: PreTrainedModel, methods: MethodChoice) -> tuple[Any, list[RopeMethod]]:
        """Return the question, and every method with every factor; without one, fitted to the longest length."""
        return question, resolve_choice(methods, model, max(question.lengths))

    def plan(
        self, question: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **settings: Any
    ) -> RunPlan[Any]:
        """Return what a run reads and scores to answer a question of this kind; no weights are read.

        Args:
            question: a `rope_ext_hf.eval.questions.LengthsQuestion` whose `kind` is this one's name.
            model: may be on the meta device.
            tokenizer: default: the one beside the model's weights.
            **settings: further fields of `RunPlan`: methods, over, context_length, chunk, offload_cache.

        Raises:
            MethodError, CorpusError: the question cannot be asked of this model, or with this text.
        """
        raise MethodError(f"runs of the kind {self.name!r} answer no question of their own")

    @abstractmethod
    def parse(self, item: str, value: Any) -> Value:
        """The value of an item of this name, from the JSON of a journal's record; raises ValueError."""

    @abstractmethod
    def result(
        self, method: dict[str, Any] | None, setting: Any, cell: Cell, values: Sequence[Any], costs: Sequence[Cost]
    ) -> MethodResult:
        """The result of one method and cell, from the values of all items and what each cost."""

    def rows(self, run: Run[Any]) -> Iterable[Sequence[Any]]:
        """The values of `columns`, per result; by default the result's attributes of these names."""
        return ([getattr(result, name) for name in self.columns] for result in run.results)

    @abstractmethod
    def table(self, run: Run[Any], *, detailed: bool = False) -> Table:
        """The table of a run with at least one result."""

    def chart(self, run: Run[Any]) -> Chart | None:
        """A run with at least one result as a chart: of its first measure; None: this kind of run has none."""
        measures = self.measures(run)
        return run.findings.chart(measures[0]) if measures else None

    def measures(self, run: Run[Any]) -> Sequence[Measure]:
        """What this run says of each method at each length; conclusions follow from it."""
        return ()

    def summary(self, run: Run[Any]) -> dict[str, Any]:
        """What results.json holds besides settings and results, JSON-ready."""
        return {}

    def outcome(self, run: Run[Any]) -> str:
        """Return what a run came to, in one line, where another run goes on with it."""
        return f"written to {run.folder}"

    def speed(self, run: Run[Any]) -> str:
        """How fast the text was read, in words; empty where it was not timed."""
        return ""

    def not_finite(self, run: Run[Any]) -> list[str]:
        """Where a loss is not finite, in words."""
        return []


class Measurement(ABC):
    """What is measured with each method: the items, and how one item is scored."""

    kind: ClassVar[str]  # the name of its `RunKind`
    items: Sequence[str]  # names of the documents or trials
    setting: Any  # how the items are read, as results record it: a `RunKind.setting`
    passes: Sequence[int]  # tokens of each pass through the model, with one method
    scored: int  # tokens that go through the model's head, with one method
    after_each_pass: int = 0  # tokens that are read from the cache of each pass, which estimates of time count in
    all_cells: Sequence[Cell]  # the cells of every item, where all have the same

    def cells(self, item: int) -> Sequence[Cell]:
        """The cells that one item has values for; by default `all_cells`."""
        return self.all_cells

    @abstractmethod
    def digested(self, cell: Cell) -> Iterable[bytes]:
        """What a cell's digest is made of: the token ids that are read, their bytes, and how they are scored."""

    @cached_property
    def cell_fingerprints(self) -> dict[Cell, str]:
        """The digest of each cell; cells of two runs with the same one are of the same items, read alike."""
        return {cell: hashlib.sha256(b"".join(self.digested(cell))).hexdigest() for cell in self.contents.counts}

    def fingerprint(self) -> str:
        """A digest of all cells."""
        return hashlib.sha256(repr(sorted(self.cell_fingerprints.items())).encode()).hexdigest()

    @abstractmethod
    def measure(self, scorer: TokenScorer, item: int, cells: Sequence[Cell], progress: Passed) -> Scored[Value]:
        """Score one item at some of its cells.

        Args:
            scorer: reads the tokens.
            item: index of the item.
            cells: the cells to score.
            progress: called with the number of tokens read, after each pass.

        Yields:
            (cell, value, cost), as soon as a cell is complete.
        """

    @property
    def computed_by(self) -> tuple[str, ...]:
        """The names of the modules whose code makes the numbers, besides the library's: a run's identity has them."""
        return (type(self).__module__,)

    @property
    def contents(self) -> RunContents:
        """Items and cells of a complete run."""
        counts = Counter(cell for item in range(len(self.items)) for cell in self.cells(item))
        return RunContents(tuple(self.items), dict(sorted(counts.items())))


@dataclass(frozen=True)
class RunPlan(Generic[M_co]):
    """What a run measures, made and checked before any weights are read."""

    measurement: M_co
    data: str  # what the text is called
    # in the order in which they are measured and shown, None for the model as it is; of none, the model is measured
    # with the method that it has
    methods: tuple[RopeMethod | None, ...] = ()
    # over, context_length: what the methods extend, as `patch` takes them
    over: str = "own"
    context_length: int | None = None
    # chunk, offload_cache: as `TokenScorer` takes them
    chunk: int | None = None
    offload_cache: bool = False
    # makes what reads the text, from the model and the arguments of `TokenScorer`; default: that class
    scorer: Callable[..., Any] | None = None
    unit: str | None = None  # in which results are shown, see `Run.in_unit`; default: that of the kind of run
    reader: dict[str, str] = field(default_factory=dict)  # what the run's settings say of it, where it is another one
    reader_modules: tuple[str, ...] = ()  # the modules of another one, whose code makes the numbers


def findings_of_runs(runs: Sequence[Run[Any]]) -> Findings:
    """What runs of one model found, in any order; those of one kind that read the same items alike count as one."""
    first, *_ = runs = sorted(runs, key=lambda run: (json.dumps(run.settings, sort_keys=True), str(run.path)))
    loaded = first.settings["loaded"]
    names = labels([loaded, *[result.method for run in runs for result in run.results]])
    extended = {key: length for run in runs for key, length in run.extended_lengths.items()}
    every = [(m, run) for run in _merged(runs) for m in run.kind.measures(run) if any(m.items.values())]
    return Findings(
        names=dict(zip(names, short_labels(names.values()), strict=True)),
        loaded=method_key(loaded),
        context_length=first.context_length,
        measures=_with_names_of_their_own(every),
        extended={key: length for key, length in extended.items() if length},
    )


def _merged(runs: Sequence[Run[Any]]) -> list[Run[Any]]:
    """The runs, those joined that share a cell and differ in none; a method counts once in each cell."""
    groups: list[list[Run[Any]]] = []
    for run in runs:
        texts = _cell_texts(run)
        for group in groups:
            others = [_cell_texts(other) for other in group]
            shared = {cell for other in others for cell in texts.keys() & other.keys()}
            same = all(other.get(cell, text) == text for other in others for cell, text in texts.items())
            if shared and same and group[0].settings["kind"] == run.settings["kind"]:
                group.append(run)
                break
        else:
            groups.append([run])
    return [replace(group[0], results=_joined(group)) for group in groups]


def _cell_texts(run: Run[Any]) -> dict[str, str]:
    """Return a digest per cell; older runs have one digest for all cells."""
    return run.settings.get("cell_texts") or {"": run.settings.get("text", str(id(run)))}


def _joined(runs: Sequence[Run[Any]]) -> list[Any]:
    results: dict[Any, Any] = {}
    for run in runs:
        taken = set(results)
        for result in run.results:  # a cell is a length alone, or with a depth, a distance or a task
            further = [getattr(result, name, None) for name in ("depth", "distance", "task")]
            place = (result.key, result.length, *further)
            if place not in taken:
                results[place] = result
    return list(results.values())


def _with_names_of_their_own(measures: Sequence[tuple[Measure, Run[Any]]]) -> list[Measure]:
    """Make the names of measures unique by adding the text, the longest length or a number."""
    made = [measure for measure, _ in measures]
    for index in range(3):
        count, seen = Counter(measure.name for measure in made), Counter[str]()
        for place, (measure, (_, run)) in enumerate(zip(made, measures, strict=True)):
            if count[measure.name] > 1:
                seen[measure.name] += 1
                additions = (printable(run.settings["data"]), f"to {measure.longest:,} tokens", f"{seen[measure.name]}")
                made[place] = replace(measure, name=f"{measure.name}, {additions[index]}")
    return made


_KINDS: dict[str, RunKind] = {}


def register_run_kind(kind: K) -> K:
    """Make a kind of run known by its name, a decorator; ValueError where the name is taken."""
    if kind.name in _KINDS:
        raise ValueError(f"there is a kind of run called {kind.name!r} already")
    _KINDS[kind.name] = kind()
    return kind


def run_kind(name: str) -> RunKind:
    """Return the kind of run of this name, loading the entry point that names it where needed.

    Raises:
        ValueError: no kind of run has this name; the message names the nearest one.
    """
    if name not in _KINDS:
        plug_in("run_kinds", name)  # its module registers it
    if name not in _KINDS:
        raise ValueError(f"unknown kind {short(name)!r}.{did_you_mean(name, {*_KINDS, *plug_in_names('run_kinds')})}")
    return _KINDS[name]
