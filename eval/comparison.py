"""Several runs of one model on one page: which method, up to what length, at what cost.

    comparison = compare_runs(["results/llama-perplexity-1a2b", "results/llama-tasks-3c4d"])
    print(comparison.conclusion())
    comparison.write_page("comparison.html")

Runs of different kinds have no numbers in common; each kind says what its own are (`RunKind.measures`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rope_ext_hf.errors import FileError, multiple_text, printable
from rope_ext_hf.eval.measures import Measure, kendall_tau
from rope_ext_hf.eval.results import interval, labels, method_key, short_labels
from rope_ext_hf.eval.run_commands import read_commands
from rope_ext_hf.eval.run_folder import read_run
from rope_ext_hf.eval.runs import Run
from rope_ext_hf.eval.tables import AS_LOADED, length_text
from rope_ext_hf.files import atomic_file
from rope_ext_hf.pictures.drawing import picture, plot_text
from rope_ext_hf.pictures.html_page import (
    as_json,
    collapsed,
    commands_section,
    heading,
    html_page,
    html_table,
    paragraph,
    side_by_side,
)
from rope_ext_hf.pictures.result_plots import draw_curves, line_styles
from rope_ext_hf.pictures.svg_charts import line_chart

__all__ = ["Comparison", "compare_runs"]

_SAME = ("weights", "basis", "over", "context_length", "loaded")
"""Settings of which a difference makes methods of one name different ones."""


class Agreement(NamedTuple):
    """How alike two measures rank the methods at one length: Kendall's tau-b with its 95% interval over items."""

    one: str
    other: str
    length: int
    methods: int
    tau: float
    low: float
    high: float


def compare_runs(folders: Sequence[str | Path]) -> Comparison:
    """Read runs of one model, of any kinds, finished or not.

    Raises:
        FileError: not the folder of a run, a damaged one, a run without results, or one of another model.
    """
    runs = [read_run(folder) for folder in folders]
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
    """Runs of one model, side by side.

    Attributes:
        runs: each has at least one result.
    """

    runs: Sequence[Run[Any]]

    @cached_property
    def names(self) -> dict[str, str]:
        """The label of each method by its key; the model as loaded first."""
        loaded = self.runs[0].settings["loaded"]
        names = labels([loaded, *(result.method for run in self.runs for result in run.results)])
        return dict(zip(names, short_labels(names.values()), strict=True))

    @cached_property
    def measures(self) -> list[Measure]:
        """Those of all runs, the one closest to use first; those that decide nothing last."""
        every = [(m, run) for run in self.runs for m in run.kind.measures(run) if any(m.items.values())]
        names = [measure.name for measure, _ in every]
        told = [
            replace(m, name=f"{m.name}, {printable(run.settings['data'])}") if names.count(m.name) > 1 else m
            for m, run in every
        ]
        return sorted(told, key=lambda measure: (bool(measure.flaw), measure.evidence))

    @cached_property
    def informative(self) -> list[Measure]:
        """Those that can decide something."""
        return [measure for measure in self.measures if not measure.flaw]

    @property
    def _loaded(self) -> str:
        return method_key(self.runs[0].settings["loaded"])

    @property
    def _context(self) -> int:
        return self.runs[0].context_length

    @cached_property
    def choice(self) -> tuple[str, list[str]]:
        """The key of the best method, and those of the methods that no measure tells from it.

        The measure closest to use decides, at its longest length; methods that its interval does not tell from the best
        one are told apart by the next measure.
        """
        among, best = list(self.names), self._loaded
        for measure in self.informative:
            found, equal = measure.best(measure.longest, among)
            if found is not None:
                best, among = found, equal
        return best, among

    @cached_property
    def _timed(self) -> dict[tuple[str, int], Any]:
        """The results that were timed, by method key and length."""
        return {
            (method_key(r.method), r.length): r
            for run in self.runs
            for r in run.results
            if getattr(r, "tokens_per_second", None)
        }

    def cost(self, key: str) -> tuple[float, float | None] | None:
        """A method's seconds per token and its GPU memory as shares of those of the model as loaded.

        At the longest length at which both were timed; None where none was.
        """
        timed = self._timed
        both = [n for other, n in timed if other == key and (self._loaded, n) in timed]
        if not both:
            return None
        mine, plain = timed[key, max(both)], timed[self._loaded, max(both)]
        memory = mine.gpu_bytes / plain.gpu_bytes if mine.gpu_bytes and plain.gpu_bytes else None
        return plain.tokens_per_second / mine.tokens_per_second, memory

    def agreements(self) -> list[Agreement]:
        """Each pair of measures at each length beyond the context length where both have three methods or more."""
        rows = []
        for one, other in combinations(self.informative, 2):
            lengths = {n for row in one.items.values() for n in row} & {n for row in other.items.values() for n in row}
            for length in sorted(n for n in lengths if n > self._context):
                keys = [key for key in one.measured(length) if key in other.measured(length)]
                if len(keys) >= 3:
                    rows.append(_agreement(one, other, length, keys))
        return rows

    # --- for people ---------------------------------------------------------------------------------------------------

    def conclusion(self) -> str:
        """Which method, up to what length, at what cost, in a few sentences."""
        best, equal = self.choice
        measures = self.informative
        longest = max((measure.longest for measure in measures), default=0)
        values = [self._value_text(m, best, longest) for m in measures if best in m.measured(m.longest)]
        where = length_text(longest, self._context)
        text = f"At {where}, {self._called(best)} reads best: {', '.join(values)}." if values else "No method is best."
        if others := [self.names[key] for key in equal if key != best]:
            text += f" These measures do not tell it from {', '.join(others)}."
        for measure in measures:
            if best in measure.reaches:
                plain = measure.reaches.get(self._loaded)
                text += f" Its effective length by the {measure.name} is {measure.reaches[best]} tokens"
                text += f"; as loaded {plain}." if plain and best != self._loaded else "."
        if best != self._loaded:
            text += self._price(best)
        for measure in measures:
            found, same = measure.best(measure.longest, list(self.names))
            if found is not None and best not in same:
                text += f" By the {measure.name} alone it would be {self._called(found)}."
        for measure in self.measures:
            if measure.flaw:
                text += f" The {measure.name} {measure.flaw}, and decides nothing."
        return text

    def _price(self, key: str) -> str:
        """What a method costs at the context length, and in time and memory."""
        text = ""
        changes = [
            f"the {measure.name} by {measure.change_text(change)}"
            for measure in self.informative
            if (change := self._change_at_context(measure, key)) is not None
        ]
        if changes:
            text += f" At {length_text(self._context, self._context)} it changes {' and '.join(changes)}."
        if (cost := self.cost(key)) is not None:
            memory = f" and {cost[1]:.2f} times its GPU memory" if cost[1] else ""
            text += f" It takes {cost[0]:.2f} times as long as the model as loaded{memory}."
        return text

    def table(self, *, detailed: bool = False) -> Table:
        """One row per method: each measure at its longest length and its change at the context length.

        `detailed` with 95% intervals in a second line.
        """
        caption = (
            f"Below each measure the length; 1x: {self._context:,} tokens, where the change against the model as "
            "loaded stands. * best of a column, and all that its 95% interval does not tell from it"
        )
        view = Table(title=Text(f"{self._title}, by method"), caption=Text(caption), box=SIMPLE_HEAD, pad_edge=False)
        view.add_column("method", overflow="fold")
        columns = [column for measure in self.measures for column in self._columns(measure, detailed)]
        costs = {key: self.cost(key) for key in self.names}
        if any(costs.values()):
            cells = {key: f"{cost[0]:.2f}x" for key, cost in costs.items() if cost}
            columns.append(("time per token\nas loaded: 1", cells))
        for head, _ in columns:
            view.add_column(head, justify="right", overflow="fold")
        for key, name in self.names.items():
            view.add_row(Text(name), *(Text(cells.get(key, "")) for _, cells in columns))
        return view

    def _columns(self, measure: Measure, detailed: bool) -> list[tuple[str, Mapping[str, str]]]:
        """Head and cells by method key, of each column that a measure has in the table."""
        far, keys = measure.longest, list(self.names)
        equal = measure.best(far, keys)[1] if not measure.flaw else []
        values = {
            key: measure.text(measure.value(key, far)) + ("*" if key in equal else " ") for key in measure.measured(far)
        }
        if detailed:
            bounds = {key: interval(measure.drawn([key], far)[:, 0]) for key in values}
            for key, pair in bounds.items():
                values[key] += "\n" + " to ".join(map(measure.text, pair))
        head = f"{measure.name}\n{far:,} ({multiple_text(far, self._context)})"
        columns: list[tuple[str, Mapping[str, str]]] = [(head, values)]
        changes = {key: self._change_at_context(measure, key) for key in keys}
        shown = {
            key: measure.signed(change[0]) + ("\n" + " to ".join(map(measure.signed, change[1:])) if detailed else "")
            for key, change in changes.items()
            if change is not None
        }
        if shown:
            columns.append((f"{measure.name}\nchange at 1x", shown))
        if measure.reaches:
            columns.append(
                ("effective length\n[95% interval]", {k: str(reach) for k, reach in measure.reaches.items()})
            )
        return columns

    def agreement_table(self) -> Table | None:
        """Whether the measures rank the methods alike; None where no two of them can be compared."""
        rows = self.agreements()
        if not rows:
            return None
        caption = (
            "Kendall's tau-b: 1 the same order of methods, 0 no relation, -1 the reverse order. In brackets its 95% "
            "interval over documents and prompts"
        )
        title = "Do the measures agree beyond the context length?"
        view = Table(title=Text(title), caption=Text(caption), box=SIMPLE_HEAD, pad_edge=False)
        for index, head in enumerate(("measures", "length", "methods", "tau")):
            view.add_column(head, justify="right" if index else "left", overflow="fold")
        for row in rows:
            tau = "not defined" if math.isnan(row.tau) else f"{row.tau:.2f} [{row.low:.2f} to {row.high:.2f}]"
            view.add_row(Text(f"{row.one} and {row.other}"), f"{row.length:,}", str(row.methods), tau)
        return view

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the conclusion, every value with its interval, effective lengths, agreements, and the runs."""
        return {
            "conclusion": self.conclusion(),
            "best": self.names[self.choice[0]],
            "measures": [self._measure_dict(measure) for measure in self.measures],
            "agreements": [row._asdict() for row in self.agreements()],
            "runs": [str(run.path) for run in self.runs],
        }

    def _measure_dict(self, measure: Measure) -> dict[str, Any]:
        values = []
        for key in self.names:
            for length in measure.lengths(key):
                low, high = interval(measure.drawn([key], length)[:, 0])
                value = {"length": length, "value": measure.value(key, length), "low": low, "high": high}
                values.append({"method": self.names[key]} | value)
        reaches = {self.names[key]: reach._asdict() for key, reach in measure.reaches.items()}
        about = {"name": measure.name, "unit": measure.unit, "higher_is_better": measure.higher_is_better}
        about["flaw"] = measure.flaw
        return about | {"values": values, "effective_lengths": reaches}

    def write_page(self, path: str | Path) -> Path:
        """Write one self-contained HTML page; it fetches nothing.

        Raises:
            FileError: anything the disk refuses.
        """
        agreement = self.agreement_table()
        page = html_page(
            self._title,
            self.conclusion(),
            html_table(self.table(detailed=True)),
            side_by_side(map(self._chart, self.measures)),
            "" if agreement is None else html_table(agreement),
            heading("The runs"),
            *map(_run_section, self.runs),
        )
        with atomic_file(Path(path)) as part:
            part.write_bytes(page.encode("utf-8", errors="backslashreplace"))
        return Path(path)

    def _repr_html_(self) -> str:
        return paragraph(self.conclusion()) + html_table(self.table(detailed=True))

    @property
    def _title(self) -> str:
        return printable(Path(self.runs[0].settings["model"]).name or "model")

    def draw(self, path: str | Path | None = None, title: str = "") -> Any:
        """Draw the measures side by side, one line per method, with the conclusion below; the matplotlib figure.

        Args:
            path: a PNG, an existing one is replaced; default: none.
            title: default: the model's name.

        Raises:
            ImportError: matplotlib is not installed.
        """
        measures = self.informative or self.measures
        styles = line_styles(list(dict.fromkeys(name for measure in measures for name in self._points(measure))))
        with picture(path, 6.2 * len(measures), 5.2) as figure:
            for axes, measure in zip(figure.subplots(1, len(measures), squeeze=False)[0], measures, strict=True):
                draw_curves(axes, self._points(measure), styles, self._context)
                axes.set_ylabel(_axis_text(measure))
            figure.suptitle(plot_text(title or self._title), fontsize=13)
            figure.supxlabel(fill(plot_text(self.conclusion(), 1000), 75 * len(measures)), fontsize=8.3)
        return figure

    def _points(self, measure: Measure) -> dict[str, list[tuple[int, float]]]:
        """Finite values by label, shares in percent; labels are short where that tells the measure's methods apart."""
        scale = 100 if measure.unit == "%" else 1
        keys = [key for key in self.names if key in measure.items]
        rows = [[(n, scale * measure.value(key, n)) for n in measure.lengths(key)] for key in keys]
        finite = [[(n, value) for n, value in row if math.isfinite(value)] for row in rows]
        return dict(zip(short_labels(self.names[key] for key in keys), finite, strict=True))

    def _chart(self, measure: Measure) -> str:
        threshold = None if measure.threshold is None else measure.threshold * (100 if measure.unit == "%" else 1)
        return line_chart(self._points(measure), self._context, f"{_axis_text(measure)}.", threshold=threshold)

    def _called(self, key: str) -> str:
        return AS_LOADED if key == self._loaded else self.names[key]

    def _value_text(self, measure: Measure, key: str, longest: int) -> str:
        """A method's value at the measure's longest length, which is named where it is not `longest`."""
        length = measure.longest
        text = f"{measure.name} {measure.text(measure.value(key, length))}{measure.behind}"
        if key != self._loaded and self._loaded in measure.measured(length):
            text += f" (as loaded {measure.text(measure.value(self._loaded, length))})"
        return text if length == longest else f"{text} at {length_text(length, self._context)}"

    def _change_at_context(self, measure: Measure, key: str) -> tuple[float, float, float] | None:
        at = measure.measured(self._context)
        known = key in at and self._loaded in at and key != self._loaded
        return measure.change(key, self._loaded, self._context) if known else None


def _axis_text(measure: Measure) -> str:
    unit = "percent" if measure.unit == "%" else measure.unit
    better = "higher" if measure.higher_is_better else "lower"
    return f"{measure.name[0].upper()}{measure.name[1:]}, {unit}; {better} is better"


def _agreement(one: Measure, other: Measure, length: int, keys: Sequence[str]) -> Agreement:
    signs = [1 if measure.higher_is_better else -1 for measure in (one, other)]
    values = [
        sign * torch.tensor([measure.value(key, length) for key in keys], dtype=torch.float64)
        for sign, measure in zip(signs, (one, other), strict=True)
    ]
    # Different items, so different draws: the two measures vary on their own.
    drawn = [
        sign * measure.drawn(keys, length, seed=seed)
        for seed, (sign, measure) in enumerate(zip(signs, (one, other), strict=True))
    ]
    taus = kendall_tau(*drawn)
    taus = taus[~taus.isnan()]
    low, high = interval(taus) if len(taus) else (math.nan, math.nan)
    return Agreement(one.name, other.name, length, len(keys), kendall_tau(*values).item(), low, high)


def _run_section(run: Run[Any]) -> str:
    """A run on the page: what it says by itself, its commands, and what its numbers depend on."""
    table = run.table(detailed=True)
    return collapsed(
        f"{run.kind.name}: {run.title}, {run.folder}",
        paragraph(run.kind.conclusion(run)),
        "" if table is None else html_table(table),
        commands_section("To repeat or continue it", read_commands(run.folder)),
        as_json(run.settings),
    )
