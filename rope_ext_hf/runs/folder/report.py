"""The files of a run that people read: results.json, results.csv, differences.csv, a picture and a page of HTML.

Pages fetch nothing from the network. Since a run's folder may come from somebody else, files are replaced and never
written through a link, and linked pictures are not embedded. The module `comparison` makes the page for several runs.
"""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import FileError, capital, one_line, printable
from rope_ext_hf.files.whole import atomic_file, json_text, write_text
from rope_ext_hf.pictures import html_page as html
from rope_ext_hf.pictures.charts import WIDE, WIDTH
from rope_ext_hf.runs.conclusions.differences import COLUMNS
from rope_ext_hf.runs.conclusions.findings import Findings
from rope_ext_hf.runs.folder.journal import plain_files, read_plain
from rope_ext_hf.runs.folder.run_file import how_to_repeat
from rope_ext_hf.runs.run import Run, RunDisplay
from rope_ext_hf.runs.tables import differences_tables


def write_files(run: Run[Any]) -> None:
    """Write the JSON, the CSV tables, the picture and the page of a run into its folder, each whole or not at all."""
    write_text(run.folder / "results.json", json_text(run.to_dict()) + "\n")
    _write_csv(run.folder / "results.csv", run.columns, run.rows())
    _write_csv(run.folder / "differences.csv", COLUMNS, run.differences())
    _draw(run, run.folder / f"{run.kind.name}.png")
    write_text(run.folder / "report.html", _page(run))


def _write_csv(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a CSV file with a line of column names."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, columns)
    table.writeheader()
    table.writerows(rows)
    write_text(path, text.getvalue())


def _draw(run: Run[Any], path: Path) -> None:
    """Draw the run's chart into a PNG file, if it shows more than the table does and matplotlib is installed."""
    if run.chart is None or not run.chart.adds_to_table:
        return
    try:
        with warnings.catch_warnings(), atomic_file(path) as part:
            warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
            run.chart.draw(part, run.title)
    except ImportError:
        return
    except FileError:
        raise
    except Exception as error:  # matplotlib raises errors of any class where it cannot draw
        warnings.warn(f"the picture {path.name} could not be drawn: {one_line(error)}", stacklevel=3)


def _page(run: Run[Any]) -> str:
    """Return the HTML page of a run."""
    settings, kind = run.settings, run.kind
    items = kind.counted_items(len(settings["items"]))
    chart = run.chart.svg(WIDTH, WIDE) if run.chart is not None and run.chart.adds_to_table else ""
    other_pictures = [path for path in plain_files(run.folder, "*.png") if path.name != f"{kind.name}.png"]
    conclusion = run.conclusion.sentences if run.results else ("Nothing is finished yet.",)
    table, detailed_table = html.html_table(run.table()), html.html_table(run.table(detailed=True))
    details = ""
    if detailed_table != table:
        details = html.collapsed("The table with 95% confidence intervals", detailed_table)
    methods = list({result.key: result.method for result in run.results}.values())
    return html.html_page(
        page_heading(settings, run.lengths, run.kind.asks),
        f"{what_was_read(run)}, {items}. The model is for {run.meant_for}.",
        table,
        chart,
        *map(_embedded, other_pictures),
        details,
        differences_section(run.findings) if run.results else "",
        html.command_section("To repeat or continue it", *how_to_repeat(run.folder)),
        html.collapsed(
            "Everything these numbers depend on",
            html.paragraph(_summary(run)),
            html.as_json(settings | {"methods": methods}),
        ),
        conclusion=conclusion,
    )


def differences_section(findings: Findings) -> str:
    """Return the collapsed part of a page with the differences that its stars rest on; empty where it has no star."""
    tables = [html.html_table(table) for table in differences_tables(findings)]
    return html.collapsed("The differences that the stars rest on", *tables) if tables else ""


def _summary(run: Run[Any]) -> str:
    """Return sentences on the model, the device, the speed and the package versions of a run."""
    settings = run.settings
    model = f"{settings['parameters']:,} parameters in {settings['dtype']}, for {run.meant_for}."
    items = f"{run.kind.counted_items(len(settings['items']))}."
    engine = f"by {settings['engine']} " if "engine" in settings else ""
    speed = run.kind.speed(run)
    reading = f"Read {engine}on {settings['device']}{f' at {speed}' if speed else ''}."
    versions = ", ".join(f"{name} {number}" for name, number in settings["versions"].items())
    return f"{model} {items} {reading} {versions}."


def page_heading(settings: Mapping[str, Any], lengths: Sequence[int], asks: str = RunDisplay.asks) -> str:
    """Return the heading of an HTML page: the question that the page answers, "How well does MODEL read 4,096 tokens?"

    Args:
        settings: the settings of the run, or of any one of several runs of one model.
        lengths: the lengths that were measured, ascending.
        asks: the question, as a kind of run has it.
    """
    longest = f"{lengths[-1]:,} tokens" if lengths else "long inputs"
    return asks.format(model=printable(Path(settings["model"]).name or "the model"), inputs=longest)


def what_was_read(run: Run[Any]) -> str:
    """Return the kind of a run and its text: "Perplexity on stdlib"."""
    return printable(f"{capital(run.kind.name)} on {run.settings['data']}")


def _embedded(path: Path) -> str:
    """Return HTML with the picture itself inside; empty if the file is too large or cannot be read."""
    try:
        return html.embedded_picture(path.stem, read_plain(path, html.MAX_PICTURE_BYTES))
    except FileError:
        return ""
