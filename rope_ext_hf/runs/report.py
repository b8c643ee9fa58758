"""A run's files for people: results.json, results.csv, a picture, and one self-contained HTML page.

The page fetches nothing. A folder may come from somebody else: files are replaced, never written through a link, and
linked pictures are not embedded.
"""

from __future__ import annotations

import csv
import io
import warnings
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import FileError, one_line
from rope_ext_hf.files import atomic_file, json_text, write_text
from rope_ext_hf.pictures import html_page as html
from rope_ext_hf.runs.journal import plain_files, read_plain
from rope_ext_hf.runs.kinds import Run
from rope_ext_hf.runs.labels import method_key
from rope_ext_hf.runs.run_file import how_to_repeat


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


# --- the page ---------------------------------------------------------------------------------------------------------


def _page(run: Run[Any]) -> str:
    settings, kind = run.settings, run.kind
    others = [path for path in plain_files(run.folder, "*.png") if path.name != f"{kind.name}.png"]
    versions = ", ".join(f"{name} {number}" for name, number in settings["versions"].items())
    speed = kind.speed(run)
    by = f"by {settings['engine']} on" if "engine" in settings else "on"
    summary = (
        f"{settings['parameters']:,} parameters in {settings['dtype']}, for {run.meant_for}. "
        f"{len(settings['items'])} {kind.items}. Read {by} {settings['device']}{speed and f' at {speed}'}. {versions}."
    )
    methods = list({method_key(result.method): result.method for result in run.results}.values())
    return html.html_page(
        run.title,
        str(run.conclusion) if run.results else "Nothing is finished yet.",
        "" if run.chart is None else run.chart.svg(),
        *(_embedded(path) for path in others),
        html.html_table(run.table(detailed=True)),
        html.paragraph(summary),
        html.command_section("To repeat or continue it", *how_to_repeat(run.folder)),
        html.provenance_section("Everything these numbers depend on", settings | {"methods": methods}),
    )


def _embedded(path: Path) -> str:
    try:
        return html.embedded_picture(path.stem, read_plain(path, html.MAX_PICTURE_BYTES))
    except FileError:
        return ""
