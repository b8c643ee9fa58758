"""The files of runs for people: tables, pictures and self-contained pages, of one run and of several of one model.

Pages fetch nothing. A folder may come from somebody else: files are replaced, never written through a link, and linked
pictures are not embedded. Runs of different kinds have no numbers in common; each kind says what its own are
(`RunKind.measures`).
"""

from __future__ import annotations

import csv
import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import FileError, multiple_text, one_line, printable
from rope_ext_hf.files import atomic_file, json_text, write_text
from rope_ext_hf.pictures import html_page as html
from rope_ext_hf.pictures.charts import WIDE, WIDTH, draw_side_by_side
from rope_ext_hf.runs.charts import line_chart
from rope_ext_hf.runs.conclusions import Conclusion, conclude
from rope_ext_hf.runs.findings import Findings
from rope_ext_hf.runs.folder import read_run
from rope_ext_hf.runs.journal import plain_files, read_plain
from rope_ext_hf.runs.measures import Measure
from rope_ext_hf.runs.merging import findings_of_runs
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.run_file import how_to_repeat
from rope_ext_hf.runs.tables import BEST_NOTE, BEYOND, BEYOND_NOTE, results_table
from rope_ext_hf.runs.wording import capital

_SAME = ("weights", "basis", "over", "context_length", "loaded")  # settings in which runs of a model agree


def write_files(run: Run[Any]) -> None:
    """Write results.json, results.csv, a picture and report.html into the run's folder, each whole or not at all."""
    write_text(run.folder / "results.json", json_text(run.to_dict()) + "\n")
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, run.columns)
    table.writeheader()
    table.writerows(run.rows())
    write_text(run.folder / "results.csv", text.getvalue())
    _draw(run, run.folder / f"{run.kind.name}.png")
    write_text(run.folder / "report.html", _page(run))


def _draw(run: Run[Any], path: Path) -> None:
    """Draw the picture, where there is something to draw, and a way to."""
    if run.chart is None:
        return
    try:
        with warnings.catch_warnings(), atomic_file(path) as part:
            warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
            run.chart.draw(part, run.title)
    except ImportError:
        return
    except FileError:
        raise
    except Exception as error:  # matplotlib raises anything on what it cannot draw
        warnings.warn(f"the picture {path.name} could not be drawn: {one_line(error)}", stacklevel=3)


def _page(run: Run[Any]) -> str:
    settings, kind = run.settings, run.kind
    others = [path for path in plain_files(run.folder, "*.png") if path.name != f"{kind.name}.png"]
    versions = ", ".join([f"{name} {number}" for name, number in settings["versions"].items()])
    speed = kind.speed(run)
    by = f"by {settings['engine']} on" if "engine" in settings else "on"
    summary = (
        f"{settings['parameters']:,} parameters in {settings['dtype']}, for {run.meant_for}. "
        f"{len(settings['items'])} {kind.items}. Read {by} {settings['device']}{speed and f' at {speed}'}. {versions}."
    )
    methods = list({result.key: result.method for result in run.results}.values())
    plain, detailed = html.html_table(run.table()), html.html_table(run.table(detailed=True))
    return html.html_page(
        _question(run.settings, run.lengths),
        f"{_what_was_read(run)}, {len(settings['items'])} {kind.items}. The model is for {run.meant_for}.",
        plain,
        "" if run.chart is None else run.chart.svg(WIDTH, WIDE),
        *map(_embedded, others),
        html.paragraph(str(run.conclusion) if run.results else "Nothing is finished yet."),
        html.collapsed("The table with 95% confidence intervals", detailed) if detailed != plain else "",
        html.command_section("To repeat or continue it", *how_to_repeat(run.folder)),
        html.collapsed(
            "Everything these numbers depend on", html.paragraph(summary), html.as_json(settings | {"methods": methods})
        ),
    )


def _question(settings: Mapping[str, Any], lengths: Sequence[int]) -> str:
    """Return what a page answers, for its heading."""
    longest = f" {lengths[-1]:,} tokens" if lengths else " long inputs"
    return f"How well does {printable(Path(settings['model']).name or 'the model')} read{longest}?"


def _what_was_read(run: Run[Any]) -> str:
    return printable(f"{capital(run.kind.name)} on {run.settings['data']}")


def _embedded(path: Path) -> str:
    try:
        return html.embedded_picture(path.stem, read_plain(path, html.MAX_PICTURE_BYTES))
    except FileError:
        return ""


# --- several runs -----------------------------------------------------------------------------------------------------


class _Agreement(NamedTuple):
    """How alike two measures rank the methods at one length, by Kendall's tau-b."""

    one: str
    other: str
    length: int
    methods: int
    tau: float


def compare_runs(folders: Sequence[str | Path], unit: str | None = None) -> Comparison:
    """Read runs of one model, finished or not, in any order.

    Args:
        folders: of the runs.
        unit: in which losses are shown, see `Run.in_unit`; default: perplexity.

    Raises:
        FileError: a folder holds no run, or none of its results, or the runs are of different models.
    """
    runs = sorted((read_run(folder) for folder in folders), key=lambda run: (run.kind.name, run.folder.name))
    if unit is not None and not any(unit in run.kind.units for run in runs):
        runs[0].in_unit(unit)  # raises, naming the units there are
    runs = [run.in_unit(unit) if unit is not None and unit in run.kind.units else run for run in runs]
    for run in runs:
        if not run.results:
            raise FileError(f"{str(run.folder)!r} has no result yet; the command that began it continues it")
        for key in _SAME:
            if run.settings.get(key) != runs[0].settings.get(key):
                raise FileError(
                    f"{str(run.folder)!r} is a run of another model than {str(runs[0].folder)!r}: they differ in "
                    f"{key!r}. A comparison is of runs of one model, loaded in one dtype"
                )
    return Comparison(runs)


@dataclass(frozen=True)
class Comparison:
    """Runs of one model, side by side; each has at least one result."""

    runs: Sequence[Run[Any]]

    @cached_property
    def findings(self) -> Findings:
        """What the runs found; those that read the same text alike count as one."""
        return findings_of_runs(self.runs)

    @cached_property
    def conclusion(self) -> Conclusion:
        """Which method, up to what length, at what cost, in a few sentences."""
        return conclude(self.findings)

    @property
    def measures(self) -> list[Measure]:
        """Those of all runs, the one closest to use first; those that decide nothing last."""
        return self.findings.ordered

    def agreements(self) -> list[_Agreement]:
        """Each pair of measures at each length beyond the context length where both have three methods or more."""
        rows = []
        for one, other in combinations(self.findings.informative, 2):
            lengths = {n for row in one.items.values() for n in row} & {n for row in other.items.values() for n in row}
            for length in sorted(n for n in lengths if n > self.findings.context_length):
                keys = [key for key in one.measured(length) if key in other.measured(length)]
                if len(keys) >= 3:
                    rows.append(_agreement(one, other, length, keys))
        return rows

    # --- for people ---------------------------------------------------------------------------------------------------

    def table(self, *, detailed: bool = False) -> Table:
        """One row per method; of each measure, its value at the context length and at its longest length.

        `detailed` adds 95% confidence intervals in a second line.
        """
        columns = [column for measure in self.measures for column in self._columns(measure, detailed)]
        marks = "".join(cell for _, cells in columns for cell in cells.values())
        notes = {
            BEST_NOTE: "*" in marks,
            BEYOND_NOTE: BEYOND in marks,
            "in parentheses: 95% confidence interval": detailed,
        }
        caption = "\n".join(note for note, shown in notes.items() if shown)
        view = results_table(f"{self._title}, by method", caption, "method", *(head for head, _ in columns))
        for key, name in self.findings.names.items():
            view.add_row(Text(name), *(Text(cells.get(key, "")) for _, cells in columns))
        return view

    def _columns(self, measure: Measure, detailed: bool) -> list[tuple[str, Mapping[str, str]]]:
        """Head and cells by method key, of each column that a measure has in the table."""
        known, here, columns = self.findings, self.findings.context_length, list[tuple[str, Mapping[str, str]]]()
        for length in dict.fromkeys((here, measure.longest)):
            starred, values = known.starred(measure, length), {}
            for key in measure.measured(length):
                mark = ("*" if key in starred else " ") + (BEYOND if known.beyond(key, length) else "")
                value = measure.estimate(key, length)
                values[key] = f"{measure.text(value.value)}{mark}"
                values[key] += value.line_below(measure.text) if detailed else ""
            if values:
                head = f"{measure.name}\n{length:,} ({multiple_text(length, here)})"
                columns.append((head, values))
        if measure.reaches:
            reaches = {key: str(reach) for key, reach in measure.reaches.items()}
            columns.append(("effective length\n(95% interval)", reaches))
        return columns

    def agreement_table(self) -> Table | None:
        """Whether the measures rank the methods alike; None where no two of them can be compared."""
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
        """JSON-ready: the conclusion, every value with its interval, effective lengths, agreements, and the runs."""
        return {
            "conclusion": str(self.conclusion),
            "best": None if self.conclusion.best is None else self.findings.names[self.conclusion.best],
            "no_significant_difference": [self.findings.names[key] for key in self.conclusion.equal],
            "measures": [self._measure_dict(measure) for measure in self.measures],
            "agreements": [row._asdict() for row in self.agreements()],
            "runs": [str(run.path) for run in self.runs],
        }

    def _measure_dict(self, measure: Measure) -> dict[str, Any]:
        known = self.findings
        values = [
            {"method": name, "length": length, **measure.estimate(key, length)._asdict()}
            | {"extended_length": known.extended.get(key), "beyond": known.beyond(key, length)}
            for key, name in self.findings.names.items()
            for length in measure.lengths(key)
        ]
        reaches = {self.findings.names[key]: reach._asdict() for key, reach in measure.reaches.items()}
        about = {"name": measure.name, "unit": measure.unit, "higher_is_better": measure.higher_is_better}
        return about | {"flaw": measure.flaw, "values": values, "effective_lengths": reaches}

    def write_page(self, path: str | Path) -> Path:
        """Write one self-contained HTML page, which fetches nothing; FileError: anything the disk refuses."""
        lengths = sorted({length for run in self.runs for length in run.lengths})
        charts = [line_chart(self.findings, measure) for measure in self.measures]
        alone = len(charts) == 1
        read = "; ".join(dict.fromkeys(map(_what_was_read, self.runs)))
        page = html.html_page(
            _question(self.runs[0].settings, lengths),
            f"{read}. The model is for {self.runs[0].meant_for}.",
            html.html_table(self.table()),
            html.side_by_side(chart.svg(WIDTH, *[WIDE] * alone) for chart in charts),
            html.paragraph(str(self.conclusion)),
            html.collapsed("The table with 95% confidence intervals", html.html_table(self.table(detailed=True))),
            html.collapsed("Do the measures agree?", agreement)
            if (agreement := html.html_table(self.agreement_table()))
            else "",
            *map(_run_section, self.runs),
        )
        return write_text(Path(path), page)

    def _repr_html_(self) -> str:
        return html.paragraph(str(self.conclusion)) + html.html_table(self.table(detailed=True))

    @property
    def _title(self) -> str:
        return printable(Path(self.runs[0].settings["model"]).name or "model")

    def draw(self, path: str | Path | None = None, title: str = "") -> Any:
        """Draw the measures side by side, one line per method, and the first sentence of the conclusion below.

        Args:
            path: a PNG, an existing one is replaced; default: none.
            title: default: the model's name.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        charts = [line_chart(self.findings, measure) for measure in self.findings.informative or self.measures]
        sentence = re.split(r"(?<=\.) ", str(self.conclusion), maxsplit=1)[0]
        return draw_side_by_side(charts, path, title or self._title, sentence)


def _agreement(one: Measure, other: Measure, length: int, keys: Sequence[str]) -> _Agreement:
    from scipy.stats import kendalltau

    values = [
        [measure.value(key, length) * (1 if measure.higher_is_better else -1) for key in keys]
        for measure in (one, other)
    ]
    return _Agreement(one.name, other.name, length, len(keys), float(kendalltau(*values).statistic))


def _run_section(run: Run[Any]) -> str:
    """A run on the page: what it says by itself, its commands, and what its numbers depend on."""
    return html.collapsed(
        f"{capital(run.kind.name)}: {run.title}, {run.folder}",
        html.paragraph(str(run.conclusion)),
        html.html_table(run.table(detailed=True)),
        html.command_section("To repeat or continue it", *how_to_repeat(run.folder)),
        html.as_json(run.settings),
    )
