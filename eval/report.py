"""A run's files for people: results.json, results.csv, a picture, and one self-contained HTML page.

    write_files(read_run("rope-ext-results/reference-perplexity-1a2b3c4d5e"))

The page fetches nothing. A folder may come from somebody else: files are replaced, never written through a link, and
linked pictures are not embedded.
"""

from __future__ import annotations

import csv
import io
import json
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import FileError, one_line, printable
from rope_ext_hf.eval.journal import plain_files, read_plain
from rope_ext_hf.eval.results import (
    Result,
    Retrieval,
    labels,
    method_key,
)
from rope_ext_hf.eval.run_folder import Run
from rope_ext_hf.eval.tables import by_method_and_depth, loss_lines, run_table, throughput_text
from rope_ext_hf.files import atomic_file, json_text
from rope_ext_hf.pictures.html_page import MAX_PICTURE_BYTES, embedded_picture, html_page, html_table, provenance
from rope_ext_hf.pictures.result_plots import curves, heat_map

__all__ = ["write_files"]


@dataclass(frozen=True)
class Files:
    """What `write_files` wrote: JSON, CSV, the HTML page, and the picture (None: there is none)."""

    json: Path
    csv: Path
    page: Path
    picture: Path | None


def write_files(run: Run[Any]) -> Files:
    """Write results.json, results.csv, a picture and report.html into the run's folder, each whole or not at all.

    A picture that cannot be drawn costs the picture only: a warning says why.

    Raises:
        FileError: anything the disk refuses.
    """
    view = _VIEWS[run.kind]
    results = _write(run.folder / "results.json", json_text(run.to_dict()) + "\n")
    rows = io.StringIO(newline="")
    csv.writer(rows).writerows([view.columns, *view.rows(run)])
    table = _write(run.folder / "results.csv", rows.getvalue())
    picture = _draw(run, view)
    page = _write(run.folder / "report.html", _page(run, view, picture))
    return Files(results, table, page, picture)


def _write(path: Path, text: str) -> Path:
    with atomic_file(path) as part:
        part.write_bytes(text.encode("utf-8", errors="backslashreplace"))
    return path


def _title(run: Run[Any]) -> str:
    return printable(f"{Path(run.settings['model']).name or 'model'} on {run.settings['data']}")


def _draw(run: Run[Any], view: _View) -> Path | None:
    """The picture's path; None where there is nothing to draw, or no way to."""
    path = run.folder / view.picture
    if not run.results:
        return None
    try:
        with warnings.catch_warnings(), atomic_file(path) as part:
            warnings.filterwarnings("ignore", message="Glyph .* missing from", category=UserWarning)
            view.draw(run, part)
    except ImportError:
        return None
    except FileError:
        raise
    except Exception as error:  # matplotlib raises anything on what it cannot draw
        warnings.warn(f"the picture {view.picture} could not be drawn: {one_line(error)}", stacklevel=3)
        return None
    return path


# --- the page ---------------------------------------------------------------------------------------------------------


def _page(run: Run[Any], view: _View, picture: Path | None) -> str:
    settings = run.settings
    others = [path for path in plain_files(run.folder, "*.png") if path.name != view.picture]
    versions = ", ".join(f"{name} {number}" for name, number in settings["versions"].items())
    summary = (
        f"{settings['parameters']:,} parameters in {settings['dtype']}, for {run.meant_for}. "
        f"{len(settings['items'])} {view.items}. Read on {settings['device']}{view.speed(run)}. {versions}."
    )
    table = run_table(run, detailed=True)
    return html_page(
        _title(run),
        summary,
        *(_embedded(path) for path in [*([picture] if picture else []), *others]),
        "<p>Nothing is finished yet.</p>" if table is None else html_table(table),
        provenance("Everything these numbers depend on", settings),
    )


def _embedded(path: Path) -> str:
    try:
        return embedded_picture(path.stem, read_plain(path, MAX_PICTURE_BYTES))
    except FileError:
        return ""


# --- perplexity -------------------------------------------------------------------------------------------------------


def _perplexity_rows(run: Run[Result]) -> Iterable[list[Any]]:
    names = labels(result.method for result in run.results)
    for r in run.results:
        increase = run.loss_increase(r.method)
        yield [
            *(names[method_key(r.method)], r.length, r.perplexity, r.loss, r.low, r.high, r.bits_per_token),
            *(r.bits_per_byte, r.tokens, r.spans, len(r.documents), increase[0] if increase else ""),
            *(r.tokens_per_second, r.gpu_bytes, json.dumps(r.method)),
        ]


# --- retrieval --------------------------------------------------------------------------------------------------------


def _retrieval_rows(run: Run[Retrieval]) -> Iterable[list[Any]]:
    names = labels(result.method for result in run.results)
    for r in run.results:
        yield [
            *(names[method_key(r.method)], r.task, r.keys, r.length, r.depth, r.top1, r.rank, r.exact_match, r.trials),
            *(r.distractors, r.chance, r.chance_rank, json.dumps(r.method)),
        ]


def _luck(one: Retrieval) -> str:
    return (
        f"{one.trials} prompts per cell; rank among {one.distractors + 1} answers (luck: {one.chance_rank:g}), "
        "grey where no better than chance"
    )


# --- kinds of runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """How one kind of run is shown."""

    items: str
    columns: Sequence[str]
    rows: Callable[[Run[Any]], Iterable[list[Any]]]
    picture: str
    draw: Callable[[Run[Any], Path], None]
    speed: Callable[[Run[Any]], str]


_VIEWS = {
    "perplexity": _View(
        items="documents",
        columns=(
            *("method", "length", "perplexity", "loss_nats", "low_nats", "high_nats", "bits_per_token"),
            *("bits_per_byte", "tokens", "spans", "documents", "loss_increase_at_context_length_nats"),
            *("tokens_per_second", "gpu_bytes", "parameters"),
        ),
        rows=_perplexity_rows,
        picture="perplexity.png",
        draw=lambda run, path: curves(
            loss_lines(run.results), run.context_length, path, _title(run), "bits per byte (lower is better)"
        ),
        speed=lambda run: f" at {throughput_text(run.results)}",
    ),
    "passkey": _View(
        items="prompts per length and depth",
        columns=(
            *("method", "task", "keys", "length", "depth", "top1", "rank", "exact_match", "trials", "distractors"),
            *("chance", "chance_rank", "parameters"),
        ),
        rows=_retrieval_rows,
        picture="passkey.png",
        draw=lambda run, path: heat_map(
            by_method_and_depth(run.results), run.context_length, path, _title(run), _luck(run.results[0])
        ),
        speed=lambda run: "",
    ),
}
