"""The chart of README.md: a real model's perplexity by length, unpatched and under some methods, as an SVG file."""

from __future__ import annotations

import re

from docs.figures import gpu
from docs.figures.registry import ROOT
from rope_ext_hf.pictures.charts import WIDE, LineChart

CHART = ROOT / "docs" / "real-model.svg"
METHODS = ("unpatched", "ntk x4", "yarn x8", "yarn x4", "rerope", "dynamic-self-extend", "dca")
"""The lines of the chart, as benchmarks/gpu_real_model.py names its methods; all of them would hide each other."""
_HEAD = (
    f'xmlns="http://www.w3.org/2000/svg" width="{WIDE:g}" font-family="DejaVu Sans, Helvetica, Arial, sans-serif" '
    'style="background:#ffffff;color:#1a1a1a"'
)
"""Of a picture that stands alone: a page gives its own colours and letters to the pictures inside it."""


def real_model_chart() -> str:
    """Return the chart as an SVG that stands alone, on white."""
    record = gpu.real_model_record()
    _, trained, _ = gpu.real_model(record)
    by_method = gpu.losses(record)
    points = {
        method: [(length, gpu.perplexity(losses)) for length, losses in by_method[method].items()] for method in METHODS
    }
    chart = LineChart(points, trained, "perplexity (lower is better)", logarithmic=True)
    figure = chart.svg(WIDE)
    drawn = figure[figure.index("<svg") : figure.index("</svg>") + len("</svg>")]
    return re.sub('style="[^"]*"', _HEAD, drawn, count=1) + "\n"
