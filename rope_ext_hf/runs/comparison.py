"""Comparison of several runs of one model: their common conclusion, table, charts and HTML page.

Runs of different kinds have no numbers in common; each kind of run says which measures it has (`RunDisplay.measures`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import FileError, capital, multiple_text, printable
from rope_ext_hf.files.whole import write_text
from rope_ext_hf.pictures import html_page as html
from rope_ext_hf.pictures.charts import WIDE, WIDTH, draw_side_by_side
from rope_ext_hf.runs.conclusions.charts import line_chart
from rope_ext_hf.runs.conclusions.conclusions import Conclusion, conclude
from rope_ext_hf.runs.conclusions.differences import differences
from rope_ext_hf.runs.conclusions.findings import Findings, collect_findings
from rope_ext_hf.runs.conclusions.measures import Measure
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.runs.folder.report import differences_section, page_heading, what_was_read
from rope_ext_hf.runs.folder.run_file import how_to_repeat
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.tables import BEST_NOTE, BEYOND, BEYOND_NOTE, results_table

_SETTINGS_OF_MODEL = ("weights", "basis", "over", "context_length", "loaded")
"""The settings that runs of one model have in common."""
_FEWEST_METHODS = 3  # an order of two methods says too little


def compare_runs(folders: Sequence[str | Path], unit: str | None = None) -> Comparison:
    """Read the folders of several runs of one model, finished or not, and compare the methods in them.

    Args:
        folders: the folders of the runs, in any order.
        unit: the unit in which losses are shown, see `Run.in_unit`; default: perplexity.

    Raises:
        FileError: a folder does not hold a run, a run has no result yet, or the runs are of different models.
        MethodError: no run can be shown in this unit.
    """
    runs = sorted((read_run(folder) for folder in folders), key=lambda run: (run.kind.name, run.folder.name))
    if unit is not None and not any(unit in run.kind.units for run in runs):
        runs[0].in_unit(unit)  # raises an error that names the units there are
    runs = [run.in_unit(unit) if unit is not None and unit in run.kind.units else run for run in runs]
    for run in runs:
        if not run.results:
            raise FileError(f"{str(run.folder)!r} has no result yet; the command that began it continues it")
        for key in _SETTINGS_OF_MODEL:
            if run.settings.get(key) != runs[0].settings.get(key):
                raise FileError(
                    f"{str(run.folder)!r} is a run of another model than {str(runs[0].folder)!r}: they differ in "
                    f"{key!r}. Compare runs of one model, loaded in one dtype"
                )
    return Comparison(runs)


class _Agreement(NamedTuple):
    """Agreement between two measures about the ranking of the methods at one length.

    Attributes:
        one, other: the names of the measures.
        length: the length, in tokens.
        methods: the number of methods that both measures have a value for.
        tau: Kendall's tau-b, from -1 for the reverse order to 1 for the same order; NaN where it is not defined.
    """

    one: str
    other: str
    length: int
    methods: int
    tau: float


@dataclass(frozen=True)
class Comparison:
    """Runs of one model, side by side.

    Attributes:
        runs: the runs, each with at least one result.
    """

    runs: Sequence[Run[Any]]

    @cached_property
    def findings(self) -> Findings:
        """The measures of all runs, with what follows from them; runs that read the same text count as one."""
        return findings_of_runs(self.runs)

    @cached_property
    def conclusion(self) -> Conclusion:
        """The conclusion in at most four sentences: which method is best, at what cost, and up to which length."""
        return conclude(self.findings)

    @property
    def measures(self) -> list[Measure]:
        """The measures of all runs, the one closest to practical use first; last are those that cannot compare."""
        return self.findings.ordered

    def agreements(self) -> list[_Agreement]:
        """Return how similarly each two measures rank the methods, at each length beyond the context length.

        Pairs of measures are left out at lengths where they have fewer than three methods in common.
        """
        rows = []
        for one, other in combinations(self.findings.informative, 2):
            for length in sorted({*one.all_lengths} & {*other.all_lengths}):
                keys = [key for key in one.measured(length) if key in other.measured(length)]
                if length > self.findings.context_length and len(keys) >= _FEWEST_METHODS:
                    rows.append(_agreement(one, other, length, keys))
        return rows

    # --- for people ---------------------------------------------------------------------------------------------------

    def table(self, *, detailed: bool = False) -> Table:
        """Return a table (of the package rich) with a row for each method.

        Each measure has a column at the context length, one at its longest length, and one for effective lengths where
        it has any.

        Args:
            detailed: add 95% confidence intervals in a second line.
        """
        columns = [column for measure in self.measures for column in self._columns(measure, detailed)]
        cells_text = "".join(cell for _, cells in columns for cell in cells.values())
        notes = self._directions
        if "*" in cells_text:
            notes.append(BEST_NOTE)
        if BEYOND in cells_text:
            notes.append(BEYOND_NOTE)
        if detailed:
            notes.append("in parentheses: 95% confidence interval")
        heads = [head for head, _ in columns]
        view = results_table(f"{self._title}, by method", "\n".join(notes), "method", *heads)
        for key, name in self.findings.names.items():
            view.add_row(Text(name), *(Text(cells.get(key, "")) for _, cells in columns))
        return view

    @property
    def _directions(self) -> list[str]:
        """Lines that say by which measures higher or lower values are better, with the unit of each measure."""
        names: dict[str, list[str]] = {"higher": [], "lower": []}
        for measure in self.measures:
            unit = f", {measure.unit}" if measure.unit and not measure.shares else ""
            names["higher" if measure.higher_is_better else "lower"].append(f"{measure.name}{unit}")
        return [f"{which} is better: {'; '.join(called)}" for which, called in names.items() if called]

    def _columns(self, measure: Measure, detailed: bool) -> list[tuple[str, Mapping[str, str]]]:
        """Return a measure's columns for the table: each with its head, and its cells by the keys of the methods."""
        findings = self.findings
        columns: list[tuple[str, Mapping[str, str]]] = []
        for length in dict.fromkeys((findings.context_length, measure.longest)):
            starred = findings.starred(measure, length)
            cells = {}
            for key in measure.measured(length):
                value = measure.estimate(key, length)
                star = "*" if key in starred else " "
                dagger = BEYOND if findings.beyond(key, length) else ""
                interval = value.line_below(measure.text) if detailed else ""
                cells[key] = f"{measure.text(value.value)}{star}{dagger}{interval}"
            if cells:
                multiple = multiple_text(length, findings.context_length)
                columns.append((f"{measure.name}\n{length:,} ({multiple})", cells))
        if measure.reaches:
            reaches = {key: str(reach) for key, reach in measure.reaches.items()}
            columns.append(("effective length\n(95% interval)", reaches))
        return columns

    def agreement_table(self) -> Table | None:
        """Return a table of how similarly the measures rank the methods; None where no two measures can be compared."""
        rows = self.agreements()
        if not rows:
            return None
        caption = "Kendall's tau-b: 1 the same order of methods, 0 no relation, -1 the reverse order"
        title = "Do the measures agree beyond the context length?"
        view = results_table(title, caption, "measures", "length", "methods", "tau")
        for row in rows:
            tau = "not defined" if math.isnan(row.tau) else f"{row.tau:.2f}"
            view.add_row(Text(f"{row.one} and {row.other}"), f"{row.length:,}", str(row.methods), tau)
        return view

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON values: conclusion, all measured values with intervals, agreements and runs."""
        names, conclusion = self.findings.names, self.conclusion
        return {
            "conclusion": str(conclusion),
            "best": None if conclusion.best is None else names[conclusion.best],
            "no_significant_difference": [names[key] for key in conclusion.equal],
            "differences": [difference.to_dict() for difference in differences(self.findings)],
            "measures": [self._measure_dict(measure) for measure in self.measures],
            "agreements": [row._asdict() for row in self.agreements()],
            "runs": [str(run.path) for run in self.runs],
        }

    def _measure_dict(self, measure: Measure) -> dict[str, Any]:
        """Return one measure with all its values, as JSON values."""
        findings = self.findings
        values = []
        for key, name in findings.names.items():
            for length in measure.lengths(key):
                value = {"method": name, "length": length, **measure.estimate(key, length)._asdict()}
                value["extended_length"] = findings.extended.get(key)
                value["beyond"] = findings.beyond(key, length)
                values.append(value)
        return {
            "name": measure.name,
            "unit": measure.unit,
            "higher_is_better": measure.higher_is_better,
            "flaw": measure.flaw,
            "values": values,
            "effective_lengths": {findings.names[key]: reach._asdict() for key, reach in measure.reaches.items()},
        }

    def write_page(self, path: str | Path) -> Path:
        """Write one self-contained HTML page, which fetches nothing.

        Returns:
            The path.

        Raises:
            FileError: the file cannot be written.
        """
        lengths = sorted({length for run in self.runs for length in run.lengths})
        texts = "; ".join(dict.fromkeys(what_was_read(run) for run in self.runs))
        charts = [chart for measure in self.measures if (chart := line_chart(self.findings, measure)).adds_to_table]
        widths = (WIDTH, WIDE) if len(charts) == 1 else (WIDTH,)
        agreement = html.html_table(self.agreement_table())
        page = html.html_page(
            page_heading(self.runs[0].settings, lengths),
            f"{texts}. The model is for {self.runs[0].meant_for}.",
            html.html_table(self.table()),
            html.side_by_side(chart.svg(*widths) for chart in charts),
            html.collapsed("The table with 95% confidence intervals", html.html_table(self.table(detailed=True))),
            differences_section(self.findings),
            html.collapsed("Do the measures agree?", agreement) if agreement else "",
            *map(_run_section, self.runs),
            conclusion=self.conclusion.sentences,
        )
        return write_text(Path(path), page)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the conclusion, and the table with intervals."""
        return html.paragraph(str(self.conclusion)) + html.html_table(self.table(detailed=True))

    @property
    def _title(self) -> str:
        """The name of the model."""
        return printable(Path(self.runs[0].settings["model"]).name or "model")

    def draw(self, path: str | Path | None = None, title: str = "") -> Any:
        """Draw the measures side by side, with a line per method, and the conclusion's first sentence below.

        Args:
            path: a PNG file to write, or to replace; default: none.
            title: default: the model's name.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        charts = [line_chart(self.findings, measure) for measure in self.findings.informative or self.measures]
        verdict = "".join(self.conclusion.sentences[:1])
        return draw_side_by_side(charts, path, title or self._title, verdict)


def _agreement(one: Measure, other: Measure, length: int, keys: Sequence[str]) -> _Agreement:
    """Return how similarly two measures rank the methods with these keys at one length."""
    from scipy.stats import kendalltau

    values_of_one, values_of_other = (
        [measure.value(key, length) * (1 if measure.higher_is_better else -1) for key in keys]
        for measure in (one, other)
    )
    tau = float(kendalltau(values_of_one, values_of_other).statistic)
    return _Agreement(one.name, other.name, length, len(keys), tau)


def _run_section(run: Run[Any]) -> str:
    """Return the section of the HTML page about one run: its conclusion, table, commands and settings."""
    return html.collapsed(
        f"{capital(run.kind.name)}: {run.title}, {run.folder}",
        html.paragraph(str(run.conclusion)),
        html.html_table(run.table(detailed=True)),
        html.command_section("To repeat or continue it", *how_to_repeat(run.folder)),
        html.as_json(run.settings),
    )


# --- runs over the same text as one -------------------------------------------------------------------------------


def findings_of_runs(runs: Sequence[Run[Any]]) -> Findings:
    """Return the findings from several runs of one model; the order of the runs does not matter.

    Runs of one kind that read the same items in the same way are merged, so that their methods are compared.
    """
    runs = sorted(runs, key=lambda run: (json.dumps(run.settings, sort_keys=True), str(run.path)))
    measures = []
    for run in _merged(runs):
        text = printable(run.settings["data"])
        measures += [(measure, text) for measure in run.kind.measures(run)]
    return collect_findings(
        measures,
        methods=[result.method for run in runs for result in run.results],
        loaded=runs[0].settings["loaded"],
        context_length=runs[0].context_length,
        extended={key: length for run in runs for key, length in run.extended_lengths.items()},
    )


def _merged(runs: Sequence[Run[Any]]) -> list[Run[Any]]:
    """Merge those runs of one kind that read the same items, and leave the others as they are.

    Two runs are merged if the digests of at least one cell (a context length, alone or with a depth or task) are equal
    in both, and no cell that both have differs.
    """
    groups: list[list[Run[Any]]] = []
    for run in runs:
        for group in groups:
            if run.settings["kind"] == group[0].settings["kind"] and _read_alike(run, group):
                group.append(run)
                break
        else:
            groups.append([run])
    return [replace(group[0], results=_merged_results(group)) for group in groups]


def _read_alike(run: Run[Any], group: Sequence[Run[Any]]) -> bool:
    """Return whether a run shares a cell with a group of runs, and no cell that both have was read differently."""
    digests = _cell_digests(run)
    shared = False
    for other in group:
        for cell, digest in _cell_digests(other).items():
            if cell not in digests:
                continue
            if digests[cell] != digest:
                return False
            shared = True
    return shared


def _cell_digests(run: Run[Any]) -> dict[str, str]:
    """Return a digest for each cell (a context length, maybe with a depth); older runs have one for all cells."""
    return run.settings.get("cell_texts") or {"": run.settings.get("text", str(id(run)))}


def _merged_results(runs: Sequence[Run[Any]]) -> list[Any]:
    """Return the results from several runs; if two runs have one for the same method and cell, the first counts.

    A result that lacks a value, as those of earlier versions may, counts only if no run has a complete one.
    """
    results: dict[Any, Any] = {}
    for run in runs:
        earlier = set(results)
        for result in run.results:
            # a cell is a length, alone or with a depth, a distance or a task
            rest_of_cell = [getattr(result, name, None) for name in ("depth", "distance", "task")]
            place = (result.key, result.length, *rest_of_cell)
            if place not in earlier or (result.complete and not results[place].complete):
                results[place] = result
    return list(results.values())
