"""A run's files for people: results.json, results.csv, a picture, and one self-contained HTML page.

    write_files(read_run("rope-ext-results/reference-perplexity-1a2b3c4d5e"))

The page fetches nothing. A folder may come from somebody else: files are replaced, never written through a link, and
linked pictures are not embedded.
"""

from __future__ import annotations

import csv
import html
import io
import json
import math
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
    perplexity_from_loss,
)
from rope_ext_hf.eval.run_folder import Run
from rope_ext_hf.eval.tables import (
    best_of_lengths,
    by_method,
    by_method_and_depth,
    loss_lines,
    perplexity_text,
    retrieval_caption,
    scored_text,
    throughput_text,
)
from rope_ext_hf.files import atomic_file, json_text
from rope_ext_hf.pictures.html_page import MAX_PICTURE_BYTES, embedded_picture, html_page, provenance
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
        f"{settings['parameters']:,} parameters in {settings['dtype']}, for {run.context_length:,} tokens as loaded. "
        f"{len(settings['items'])} {view.items}. Read on {settings['device']}{view.speed(run)}. {versions}."
    )
    return html_page(
        _title(run),
        summary,
        *(_embedded(path) for path in [*([picture] if picture else []), *others]),
        f"<h2>{view.heading}</h2>",
        f'<div class="wide">{view.table(run)}</div>',
        f"<p><small>{html.escape(view.caption(run) if run.results else 'Nothing is finished yet.')}</small></p>",
        provenance("Everything these numbers depend on", settings),
    )


def _embedded(path: Path) -> str:
    try:
        return embedded_picture(path.stem, read_plain(path, MAX_PICTURE_BYTES))
    except FileError:
        return ""


def _lengths_head(run: Run[Any]) -> tuple[list[int], str]:
    lengths = sorted({result.length for result in run.results})
    return lengths, "".join(f"<th>{n:,}<br><small>{n / run.context_length:g}x</small></th>" for n in lengths)


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


def _perplexity_html(run: Run[Result]) -> str:
    lengths, head = _lengths_head(run)
    best = best_of_lengths(run.results)
    rows = []
    for name, row in by_method(run.results).items():
        at = {result.length: result for result in row}
        cells = "".join(_perplexity_cell(at.get(n), best[n]) for n in lengths)
        increase = run.loss_increase(row[0].method)
        shown = ""
        if increase is not None:
            shown = f"{increase[0]:+.3f}<br><small>{increase[1]:+.3f} to {increase[2]:+.3f}</small>"
        rows.append(f"<tr><td>{html.escape(name)}</td>{cells}<td>{shown}</td></tr>")
    head += f"<th>loss increase<br>at {run.context_length:,}</th>"
    return f"<table><tr><th>method</th>{head}</tr>{''.join(rows)}</table>"


def _perplexity_cell(result: Result | None, best: float) -> str:
    if result is None:
        return "<td></td>"
    if not math.isfinite(result.loss):
        names = ", ".join(result.nonfinite)
        return f'<td class="bad">not finite<br><small>{html.escape(printable(names))}</small></td>'
    mark = ' class="best"' if result.loss == best else ""
    low, high = (perplexity_text(perplexity_from_loss(bound)) for bound in (result.low, result.high))
    return (
        f"<td{mark}>{perplexity_text(result.perplexity)}"
        f"<br><small>{result.bits_per_byte:.3f} b/B<br>{low} to {high}</small></td>"
    )


# --- retrieval --------------------------------------------------------------------------------------------------------


def _retrieval_rows(run: Run[Retrieval]) -> Iterable[list[Any]]:
    names = labels(result.method for result in run.results)
    for r in run.results:
        yield [
            *(names[method_key(r.method)], r.task, r.keys, r.length, r.depth, r.top1, r.rank, r.exact_match, r.trials),
            *(r.distractors, r.chance, r.chance_rank, json.dumps(r.method)),
        ]


def _retrieval_html(run: Run[Retrieval]) -> str:
    lengths, head = _lengths_head(run)
    rows = [
        f"<tr><td>{html.escape(name)}</td><td>{depth:.0%}</td>"
        + "".join(_retrieval_cell(row.get(length)) for length in lengths)
        + "</tr>"
        for name, depths in by_method_and_depth(run.results).items()
        for depth, row in depths.items()
    ]
    return f"<table><tr><th>method</th><th>depth</th>{head}</tr>{''.join(rows)}</table>"


def _luck(one: Retrieval) -> str:
    return (
        f"{one.trials} prompts per cell; rank among {one.distractors + 1} answers (luck: {one.chance_rank:g}), "
        "grey where no better than chance"
    )


def _retrieval_cell(result: Retrieval | None) -> str:
    if result is None:
        return "<td></td>"
    mark = ' class="best"' if result.above_chance else ""
    return f"<td{mark}>{result.exact_match:.0%}<br><small>rank {result.rank:.1f}</small></td>"


# --- kinds of runs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _View:
    """How one kind of run is shown."""

    heading: str
    items: str
    columns: Sequence[str]
    rows: Callable[[Run[Any]], Iterable[list[Any]]]
    picture: str
    draw: Callable[[Run[Any], Path], None]
    table: Callable[[Run[Any]], str]
    caption: Callable[[Run[Any]], str]
    speed: Callable[[Run[Any]], str]


_VIEWS = {
    "perplexity": _View(
        heading="Perplexity by context length",
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
        table=_perplexity_html,
        caption=lambda run: (
            f"{scored_text(run.results[0])}. Below each perplexity: bits per byte, and the 95% interval of the "
            "perplexity over documents. Loss increase: the loss of a method minus that of the model as loaded, at the "
            "context length of the latter, in nats per token, with its interval paired by document."
        ),
        speed=lambda run: f" at {throughput_text(run.results)}",
    ),
    "passkey": _View(
        heading="Retrieval by depth and context length",
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
        table=_retrieval_html,
        caption=lambda run: (
            f"Exact match; below: mean rank. {retrieval_caption(run.results[0])}. Green: mean "
            "rank better than chance by 3 standard errors."
        ),
        speed=lambda run: "",
    ),
}
