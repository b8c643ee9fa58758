"""The chart of README.md: a real model's perplexity by length, unpatched and under some methods, as an SVG file."""

from __future__ import annotations

import re

from docs.figures import gpu
from docs.figures.registry import ROOT
from rope_ext_hf.pictures.charts import LineChart

CHART = ROOT / "docs" / "real-model.svg"
METHODS = ("unpatched", "ntk x4", "yarn x8", "yarn x4", "rerope", "dynamic-self-extend", "dca")
"""The lines of the chart, as benchmarks/gpu_real_model.py names its methods; all of them would hide each other."""
_WIDTH, _TITLE = 480, 18
"""Width of the chart and height of an axis title, in units: a unit is three quarters of a pixel on a telephone."""
_SHOWN = 720
"""Width on a page that has room for it, in pixels."""


def real_model_chart() -> str:
    """Return the chart as an SVG that stands alone, on white, with a title on each axis."""
    record = gpu.real_model_record()
    _, trained, _ = gpu.real_model(record)
    by_method = gpu.losses(record)
    points = {
        method: [(length, gpu.perplexity(losses)) for length, losses in by_method[method].items()] for method in METHODS
    }
    figure = LineChart(points, trained, "perplexity (lower is better)", logarithmic=True).svg(_WIDTH)
    drawn = re.search(r'<svg viewBox="0 0 [\d.]+ ([\d.]+)" style="[^"]*"(.*</svg>)', figure)
    assert drawn is not None
    height = float(drawn[1])
    titles = (
        f'<text x="4" y="{-_TITLE / 3:g}">perplexity, on a logarithmic axis (lower is better)</text>'
        f'<text x="{_WIDTH * 0.44:g}" y="{height - 10:g}" text-anchor="middle">context length (tokens)</text>'
    )
    # A page gives its own colours and letters to the pictures inside it; this one stands alone.
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_SHOWN}" '
        f'viewBox="0 {-_TITLE} {_WIDTH} {height + _TITLE:g}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" style="background:#ffffff;color:#1a1a1a"'
    )
    return head + drawn[2].replace("</svg>", f"{titles}</svg>\n")
