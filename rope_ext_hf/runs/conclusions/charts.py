"""Charts for a measure such as perplexity: one line per method, over the context length."""

from __future__ import annotations

import math

from rope_ext_hf.errors import capital
from rope_ext_hf.pictures.charts import LineChart
from rope_ext_hf.runs.conclusions.findings import Findings
from rope_ext_hf.runs.conclusions.labels import short_labels
from rope_ext_hf.runs.conclusions.measures import Measure


def line_chart(findings: Findings, measure: Measure) -> LineChart:
    """Return a chart of one measure over the context length, with a line for each method.

    Lines are named by the methods' short labels. Shares are in percent, a perplexity has a logarithmic axis, and values
    that are not finite are left out.
    """
    scale = 100 if measure.shares else 1
    keys = [key for key in findings.names if key in measure.items]
    lines = []
    for key in keys:
        points = [(length, scale * measure.value(key, length)) for length in measure.lengths(key)]
        lines.append([(length, value) for length, value in points if math.isfinite(value)])
    names = short_labels(findings.names[key] for key in keys)
    unit = "percent" if measure.shares else measure.unit
    better = "higher" if measure.higher_is_better else "lower"
    axis = f"{capital(measure.name)}{f', {unit}' if unit else ''} ({better} is better)"
    return LineChart(
        dict(zip(names, lines, strict=True)),
        findings.context_length,
        axis,
        None if measure.threshold is None else scale * measure.threshold,
        logarithmic=measure.exponential,
    )
