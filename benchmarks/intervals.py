"""How often 95% intervals over a few documents hold the mean of all documents.

    python benchmarks/intervals.py

Losses are drawn by the thousand, normal ones and lognormal ones, and an interval is made of each few by the method of
`rope_ext_hf.runs.statistics`, by Student's t, and by three bootstraps of 1,000 draws each. The last line is JSON.

Source of the comparison's methods: Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 12 to 14.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from record import benchmark_parser, record
from scipy import stats

from rope_ext_hf.runs.statistics import estimate

Losses = NDArray[np.float64]
DISTRIBUTIONS: dict[str, tuple[Callable[[np.random.Generator, tuple[int, int]], Losses], float]] = {
    "normal": (lambda draw, shape: draw.normal(0, 1, shape), 0.0),
    "lognormal, sigma 0.5": (lambda draw, shape: draw.lognormal(0, 0.5, shape), math.exp(0.125)),
    "lognormal, sigma 1": (lambda draw, shape: draw.lognormal(0, 1, shape), math.exp(0.5)),
}
ITEMS = (3, 5, 8, 16, 32, 64)
DRAWS = 1000


def ours(row: Losses, draw: np.random.Generator) -> tuple[float, float]:
    """The interval of this package."""
    found = estimate(row.tolist())
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def students(row: Losses, draw: np.random.Generator) -> tuple[float, float]:
    """The interval of Student's t."""
    low, high = stats.t.interval(0.95, len(row) - 1, row.mean(), stats.sem(row))
    return float(low), float(high)


def percentile(row: Losses, draw: np.random.Generator) -> tuple[float, float]:
    """The percentile bootstrap."""
    low, high = np.quantile(row[draw.integers(len(row), size=(DRAWS, len(row)))].mean(1), [0.025, 0.975])
    return float(low), float(high)


def bootstrap_t(row: Losses, draw: np.random.Generator) -> tuple[float, float]:
    """The bootstrap of Student's ratio."""
    drawn = row[draw.integers(len(row), size=(DRAWS, len(row)))]
    errors = np.maximum(stats.sem(drawn, axis=1), 1e-12)
    low, high = np.quantile((drawn.mean(1) - row.mean()) / errors, [0.025, 0.975])
    error = float(stats.sem(row))
    return float(row.mean() - high * error), float(row.mean() - low * error)


def bca(row: Losses, draw: np.random.Generator) -> tuple[float, float]:
    """The bootstrap corrected for bias and acceleration."""
    means, mean = row[draw.integers(len(row), size=(DRAWS, len(row)))].mean(1), row.mean()
    below = np.clip(((means < mean).mean() + (means <= mean).mean()) / 2, 1 / DRAWS, 1 - 1 / DRAWS)
    bias, left_out = stats.norm.ppf(below), (row.sum() - row) / (len(row) - 1)
    apart = left_out.mean() - left_out
    acceleration = (apart**3).sum() / (6 * (apart**2).sum() ** 1.5)
    ends = bias + stats.norm.ppf([0.025, 0.975])
    low, high = np.quantile(means, stats.norm.cdf(bias + ends / (1 - acceleration * ends)))
    return float(low), float(high)


INTERVALS = {"here": ours, "Student's t": students, "bootstrap-t": bootstrap_t, "BCa": bca, "percentile": percentile}


def main() -> None:
    parser = benchmark_parser(__doc__, on_device=False)
    parser.add_argument("--trials", type=int, default=4000, help="of each number of documents")
    arguments = parser.parse_args()
    rows = []
    for name, (losses, mean) in DISTRIBUTIONS.items():
        for items in ITEMS:
            draw = np.random.default_rng(items)
            values = losses(draw, (arguments.trials, items))
            row: dict[str, object] = {"losses": name, "documents": items}
            for method, interval in INTERVALS.items():
                ends = np.array([interval(each, draw) for each in values])
                held = (ends[:, 0] <= mean) & (mean <= ends[:, 1])
                row[method] = {
                    "held": round(float(held.mean()), 4),
                    "width": round(float(np.median(np.ptp(ends, 1))), 3),
                }
            rows.append(row)
            print(row, flush=True)
    record({"benchmark": "intervals", "trials": arguments.trials, "rows": rows}, arguments)


if __name__ == "__main__":
    main()
