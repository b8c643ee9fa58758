"""A run as one self-contained HTML page: curves, table, further pictures, provenance; nothing is fetched.

from rope_ext_hf.eval.report import write_report
write_report(read_run("rope-ext-results/reference-1a2b3c4d5e"))
"""

from __future__ import annotations

import base64
import html
import json
import math
from contextlib import suppress
from pathlib import Path

from rope_ext_hf.eval.plots import curves
from rope_ext_hf.eval.results import Result
from rope_ext_hf.eval.sweeps import Run
from rope_ext_hf.eval.tables import best_of_lengths, by_method, perplexity_text, scored, throughput_text

__all__ = ["write_report"]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --best: #2a7d2a; --bad: #b3261e; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; }}
h1 {{ font-size: 1.4rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
img {{ width: 100%; height: auto; background: #fff; border-radius: 4px; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }}
th, td {{ padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }}
th:first-child, td:first-child {{ text-align: left; position: sticky; left: 0; background: Canvas; }}
td small {{ color: GrayText; }}
.best {{ color: var(--best); font-weight: 600; }} .bad {{ color: var(--bad); }}
pre {{ overflow-x: auto; font-size: .8rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
{figures}
<h2>Perplexity by context length</h2>
<div class="wide">{table}</div>
<p><small>{caption}</small></p>
<h2>Provenance</h2>
<details><summary>Everything these numbers depend on</summary><pre>{provenance}</pre></details>
</body>
</html>
"""


def write_report(run: Run) -> Path:
    """Write report.html (and, where matplotlib is there, curves.png) into the run's folder."""
    title = f"{Path(run.settings['model']).name} on {run.settings['data']}"
    if run.results:
        with suppress(ImportError):  # without matplotlib the table tells the same
            curves(run.results, run.trained_length, run.folder / "curves.png", title)
    pictures = [*run.folder.glob("curves.png"), *sorted(p for p in run.folder.glob("*.png") if p.name != "curves.png")]
    versions = ", ".join(f"{name} {number}" for name, number in run.settings["versions"].items())
    page = _PAGE.format(
        title=html.escape(title),
        summary=html.escape(
            f"{run.settings['parameters']:,} parameters in {run.settings['dtype']}, trained at "
            f"{run.trained_length:,} tokens. {len(run.settings['documents'])} documents. "
            f"Read on {run.settings['device']} at {throughput_text(run.results)}. {versions}."
        ),
        figures="\n".join(_figure(path) for path in pictures),
        table=_table(run),
        caption=html.escape(
            (f"{scored(run.results[0])}. " if run.results else "Nothing is finished yet. ")
            + "Below each perplexity: bits per byte, and the 95% interval of the perplexity over documents. Loss "
            "increase: loss at the trained length minus that of the model as loaded, in nats per token, with its "
            "interval paired by document."
        ),
        provenance=html.escape(json.dumps(run.settings, indent=1)),
    )
    path = run.folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _figure(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<p><img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}"></p>'


def _table(run: Run) -> str:
    lengths = sorted({result.length for result in run.results})
    best = best_of_lengths(run.results)
    head = "".join(f"<th>{n:,}<br><small>{n / run.trained_length:g}x</small></th>" for n in lengths)
    rows = []
    for name, row in by_method(run.results).items():
        found = {result.length: result for result in row}
        cells = "".join(_cell(found.get(n), best[n]) for n in lengths)
        increase = run.loss_increase(row[0].method)
        shown = (
            "" if increase is None else f"{increase[0]:+.3f}<br><small>{increase[1]:+.3f} to {increase[2]:+.3f}</small>"
        )
        rows.append(f"<tr><td>{html.escape(name)}</td>{cells}<td>{shown}</td></tr>")
    head += f"<th>loss increase at<br>{run.trained_length:,}</th>"
    return f"<table><tr><th>method</th>{head}</tr>{''.join(rows)}</table>"


def _cell(result: Result | None, best: float) -> str:
    if result is None:
        return "<td></td>"
    if not math.isfinite(result.loss):
        return f'<td class="bad">not finite<br><small>{html.escape(", ".join(result.nonfinite))}</small></td>'
    mark = ' class="best"' if result.loss == best else ""
    interval = f"{perplexity_text(math.exp(result.low))} to {perplexity_text(math.exp(result.high))}"
    return (
        f"<td{mark}>{perplexity_text(result.perplexity)}"
        f"<br><small>{result.bits_per_byte:.3f} b/B<br>{interval}</small></td>"
    )
