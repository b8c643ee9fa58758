"""A run: the settings and results of one measurement, the conclusions from them, and ways to show both.

A run measures methods on items (documents, or prompts). Each item has a value per cell; a cell is a context length,
alone or with a depth, a distance or a task. A result is made from the values of all items in one cell under one method.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from rich.table import Table

from rope_ext_hf.errors import MethodError, counted, listed, printable, short
from rope_ext_hf.methods.registry import method_from_dict, rotary_from_dict
from rope_ext_hf.pictures.charts import Chart
from rope_ext_hf.pictures.html_page import html_table, paragraph
from rope_ext_hf.runs.conclusions.charts import line_chart
from rope_ext_hf.runs.conclusions.conclusions import Conclusion, conclude
from rope_ext_hf.runs.conclusions.differences import differences
from rope_ext_hf.runs.conclusions.findings import Findings, collect_findings
from rope_ext_hf.runs.conclusions.labels import Method, MethodResult, labels, method_key
from rope_ext_hf.runs.conclusions.measures import Measure
from rope_ext_hf.terminal import table_text, wrapped

R_co = TypeVar("R_co", bound=MethodResult, covariant=True)
T = TypeVar("T")

_NOTHING_FINISHED = "Nothing is finished yet."
_WHAT_IS_EXTENDED = {"original": " without its own scaling", "patched": " with its present patch"}
"""What the methods of a run extend where that is not the model as loaded, by the setting `over`."""


class RunDisplay(ABC):
    """The part of a kind of run that shows its results; the base class of `kinds.RunKind`.

    Attributes:
        name: the name of the kind, in run.json and in the names of folders and pictures.
        item: the noun for an item, such as "document".
        per: what follows the noun after a number, such as " per length and depth".
        columns: the columns of results.csv between the method's labels and its parameters.
        units: the units in which the numbers can be shown, the default first; empty: there is no choice.
        asks: the question that the page of a run answers, with the places {model} and {inputs}.
    """

    name: ClassVar[str]
    item: ClassVar[str]
    per: ClassVar[str] = ""
    columns: ClassVar[Sequence[str]]
    units: ClassVar[Sequence[str]] = ()
    asks: ClassVar[str] = "How well does {model} read {inputs}?"

    def counted_items(self, count: int) -> str:
        """Return a number of items with its noun: "1 document", "4 prompts per length and depth"."""
        return f"{counted(count, self.item)}{self.per}"

    @abstractmethod
    def table(self, run: Run[Any], *, detailed: bool = False) -> Table:
        """Return the table for a run with at least one result.

        `detailed`: with everything that the HTML page shows, such as confidence intervals.
        """

    def rows(self, run: Run[Any]) -> Iterable[Sequence[Any]]:
        """Return a row for each result: the values for the columns of results.csv that `columns` names.

        By default these are the attributes of the result with the same names.
        """
        return ([getattr(result, name) for name in self.columns] for result in run.results)

    def chart(self, run: Run[Any]) -> Chart | None:
        """Return the chart for a run with at least one result, by default of its first measure; None if it has none."""
        measures = self.measures(run)
        return line_chart(run.findings, measures[0]) if measures else None

    def measures(self, run: Run[Any]) -> Sequence[Measure]:
        """Return the results as measures, which conclusions are drawn from; by default there are none."""
        return ()

    def conclude(self, run: Run[Any]) -> Conclusion:
        """Return the conclusion from a run, by default which method is best, at what cost, and up to which length."""
        return conclude(run.findings)

    def summary(self, run: Run[Any]) -> dict[str, Any]:
        """Return further entries for results.json, besides settings and results, as JSON values."""
        return {}

    def outcome(self, run: Run[Any]) -> str:
        """Return the outcome of a run in one line, for commands that continue with another run."""
        return f"written to {run.folder}"

    def speed(self, run: Run[Any]) -> str:
        """Return the speed at which the text was read, in words; empty if the reading was not timed."""
        return ""

    def not_finite(self, run: Run[Any]) -> list[str]:
        """Return a text (method, length and document) for each loss that is not finite."""
        return []


@dataclass(frozen=True, repr=False)
class Run(Generic[R_co]):
    """Results of one or several methods on the same text or prompts, with everything that they depend on.

    Printing a run shows its table and its conclusion; a notebook shows the chart as well.

    Attributes:
        path: the run's folder; None for a run that was measured without files.
        settings: everything that the numbers depend on: model, text, protocol, versions. run.json holds it.
        results: one result for each method and cell (a context length, alone or with a depth or task) that is complete.
        kind: the kind of run, such as perplexity; it makes the tables, charts and pictures of the results.
        unit: the unit in which losses are shown: "perplexity", "nats" (per token) or "bits" (per byte).
    """

    path: Path | None
    settings: dict[str, Any]
    results: Sequence[R_co]
    kind: RunDisplay = field(compare=False)
    unit: str = "perplexity"

    @property
    def folder(self) -> Path:
        """The folder with the files of the run; ValueError if the run was measured without files."""
        if self.path is None:
            raise ValueError("this run was measured without files; give out=... to keep it in a folder")
        return self.path

    @property
    def title(self) -> str:
        """A title for the run: the name of the model and the name of the text."""
        return printable(f"{Path(self.settings['model']).name or 'model'} on {self.settings['data']}")

    @property
    def context_length(self) -> int:
        """The length in tokens that the methods extend; by default, the length that the unpatched model is for."""
        return int(self.settings["context_length"])

    @property
    def meant_for(self) -> str:
        """`context_length` in words: "4,096 tokens", or "4,096 tokens without its own scaling"."""
        return f"{self.context_length:,} tokens{_WHAT_IS_EXTENDED.get(self.settings['over'], '')}"

    # --- methods and lengths ------------------------------------------------------------------------------------------

    @cached_property
    def names(self) -> dict[str, str]:
        """The label of each method that has results, by its key."""
        return labels([result.method for result in self.results])

    @cached_property
    def lengths(self) -> list[int]:
        """The context lengths of the results in tokens, ascending."""
        return sorted({result.length for result in self.results})

    @cached_property
    def extended_lengths(self) -> dict[str, int | None]:
        """The length in tokens that the model is for with each method that has results, by the key of the method.

        None: the method works at any length, or its length is not known.
        """
        methods = {result.key: result.method for result in self.results}
        return {key: self._extended_length(method) for key, method in methods.items()}

    def _extended_length(self, method: Method) -> int | None:
        """Return the length that the model is for with a method; None as in `extended_lengths`."""
        unpatched = method_key(method) == method_key(self.settings["loaded"]) and not self.settings.get("patches")
        if unpatched:
            return self.context_length
        try:
            rotary = rotary_from_dict(self.settings["basis"]["rotary"])
            return method_from_dict(method or {}).extended_length(rotary)
        except (KeyError, TypeError, ValueError, MethodError):
            return None  # a run of an earlier version, or a method that is not installed here

    def beyond(self, result: Any) -> bool:
        """Return whether the input of a result is longer than the model is for with that result's method."""
        extended = self.extended_lengths[result.key]
        return extended is not None and bool(result.length > extended)

    @cached_property
    def by_label(self) -> dict[str, list[R_co]]:
        """The results, grouped by the label of their method; the order of results is kept."""
        rows: dict[str, list[R_co]] = {}
        for result in self.results:
            rows.setdefault(self.names[result.key], []).append(result)
        return rows

    @cached_property
    def by_length(self) -> dict[str, dict[int, list[R_co]]]:
        """The results by the key of their method and by length; several per length if there are depths or tasks."""
        rows: dict[str, dict[int, list[R_co]]] = {}
        for result in self.results:
            rows.setdefault(result.key, {}).setdefault(result.length, []).append(result)
        return rows

    def items(self, items_of: Callable[[Sequence[R_co]], Iterable[T]]) -> dict[str, dict[int, list[T]]]:
        """Collect items (pairs of a sum and a weight) for a `Measure`, by the key of each method, and by length.

        Args:
            items_of: returns the items from all results of one method at one length. Lengths without any item are left
                out, and so are methods that are left without lengths.
        """
        rows: dict[str, dict[int, list[T]]] = {}
        for key, by_length in self.by_length.items():
            row = {length: list(items_of(results)) for length, results in sorted(by_length.items())}
            row = {length: items for length, items in row.items() if items}
            if row:
                rows[key] = row
        return rows

    # --- what follows -------------------------------------------------------------------------------------------------

    @cached_property
    def findings(self) -> Findings:
        """The measures in this run, and the comparisons of methods that follow from them."""
        text = printable(self.settings["data"])
        return collect_findings(
            [(measure, text) for measure in self.kind.measures(self)],
            methods=[result.method for result in self.results],
            loaded=self.settings["loaded"],
            context_length=self.context_length,
            extended=self.extended_lengths,
        )

    @cached_property
    def conclusion(self) -> Conclusion:
        """The conclusion in a few sentences: most often which method is best, at what cost, and up to which length."""
        return self.kind.conclude(self)

    # --- other views of the same run ----------------------------------------------------------------------------------

    def in_unit(self, unit: str) -> Run[R_co]:
        """Return this run shown in another unit; MethodError for a unit that this kind of run does not have."""
        if unit not in self.kind.units:
            if not self.kind.units:
                raise MethodError(f"a {self.kind.name} run has one unit only; leave out unit={short(repr(unit))}")
            known = listed(map(repr, self.kind.units))
            raise MethodError(f"unit must be one of those of a {self.kind.name} run ({known}), got {short(repr(unit))}")
        return replace(self, unit=unit)

    def select(self, methods: Sequence[Mapping[str, Any] | None]) -> Run[R_co]:
        """Return this run with only the results of the given methods, in their order.

        Args:
            methods: `RopeMethod.to_dict` of each method, or None for the model as loaded.
        """
        by_method: dict[str, list[R_co]] = {method_key(method): [] for method in methods}
        for result in self.results:
            if result.key in by_method:
                by_method[result.key].append(result)
        selected = [result for results in by_method.values() for result in results]
        return self if selected == self.results else replace(self, results=selected)

    # --- tables, pictures and data ------------------------------------------------------------------------------------

    def table(self, *, detailed: bool = False) -> Table | None:
        """Return the results as a table (of the package rich); None if no result is complete.

        Args:
            detailed: add what the HTML page shows as well, such as 95% confidence intervals.
        """
        return self.kind.table(self, detailed=detailed) if self.results else None

    @cached_property
    def chart(self) -> Chart | None:
        """The results as a chart; None where no result is complete or finite, or the kind of run has no chart."""
        if not self.results:
            return None
        chart = self.kind.chart(self)
        return None if chart is None or chart.is_empty else chart

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the results with matplotlib, as in the PNG file in the run's folder.

        Args:
            path: a PNG file to write; default: none.

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

    @property
    def columns(self) -> list[str]:
        """The names of the columns of results.csv, in order."""
        return ["method", "label", *self.kind.columns, "extended_length", "beyond_extended_length", "parameters"]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of results.csv: a dict for each result, with its values by column name."""
        rows = []
        for result, values in zip(self.results, self.kind.rows(self), strict=True):
            row: dict[str, Any] = {"method": self.names[result.key], "label": self.findings.names[result.key]}
            row |= dict(zip(self.kind.columns, values, strict=True))
            row["extended_length"] = self.extended_lengths[result.key]
            row["beyond_extended_length"] = self.beyond(result)
            row["parameters"] = json.dumps(result.method)
            rows.append(row)
        return rows

    def differences(self) -> list[dict[str, Any]]:
        """Return the rows of differences.csv: the paired differences between methods that stars rest on."""
        return [difference.to_dict() for difference in differences(self.findings)] if self.results else []

    def to_dataframe(self) -> Any:
        """Return the results as a pandas DataFrame, one row per result, with the columns of results.csv.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise ImportError("to_dataframe() needs pandas: pip install pandas") from error
        return DataFrame(self.rows(), columns=self.columns)

    def to_dict(self) -> dict[str, Any]:
        """Return the content of results.json: settings, conclusion and results, as JSON values."""
        results = []
        for result in self.results:
            extended = {"extended_length": self.extended_lengths[result.key], "beyond": self.beyond(result)}
            results.append(result.to_dict() | extended | {"label": self.findings.names[result.key]})
        conclusion = str(self.conclusion) if self.results else ""
        content = {"provenance": self.settings, "conclusion": conclusion, "results": results}
        content["differences"] = self.differences()
        return content | self.kind.summary(self)

    def __repr__(self) -> str:
        return f"<Run: {self.kind.name} of {self.title}>"

    def __str__(self) -> str:
        """Return the table and the conclusion, as wide as the terminal."""
        table = self.table()
        if table is None:
            return _NOTHING_FINISHED
        return f"{table_text(table)}\n\n{wrapped(str(self.conclusion))}".rstrip()

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the conclusion, the chart, and the table of the HTML page."""
        table = self.table(detailed=True)
        if table is None:
            return paragraph(_NOTHING_FINISHED)
        chart = self.chart.svg() if self.chart and self.chart.adds_to_table else ""
        return paragraph(str(self.conclusion)) + chart + html_table(table)


# --- results as a list --------------------------------------------------------------------------------------------


R = TypeVar("R", bound=MethodResult)


class Results(list[R]):
    """The results of one measurement, as a list. Printed, or shown in a notebook, it shows the run with its table.

    Attributes:
        run: the run that the results belong to.
    """

    def __init__(self, run: Run[R]) -> None:
        super().__init__(run.results)
        self.run = run

    def to_dataframe(self) -> Any:
        """Return the results as a pandas DataFrame, one row per result, see `Run.to_dataframe`."""
        return self.run.to_dataframe()

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the results with matplotlib, see `Run.plot`."""
        return self.run.plot(path)

    def __repr__(self) -> str:
        return repr(self.run)

    def __str__(self) -> str:
        return str(self.run)

    def _repr_html_(self) -> str:
        return self.run._repr_html_()
