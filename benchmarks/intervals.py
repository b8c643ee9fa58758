"""Measure how often 95% intervals (rope_ext_hf/runs/conclusions/statistics.py) cover the true mean, by number of items.

    python benchmarks/intervals.py

Losses are drawn by the thousand, normal ones and skewed ones (lognormal), and shares of right answers; an interval is
made of each few items. The last line is JSON.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import benchmark_parser, record

from rope_ext_hf.runs.conclusions.statistics import Estimate, estimate, estimate_share, estimate_share_change

Items = NDArray[np.float64]


def _answers(draw: np.random.Generator, shape: tuple[int, int]) -> Items:
    return (draw.random(shape) < 0.8).astype(np.float64)


def _pairs(draw: np.random.Generator, shape: tuple[int, int]) -> Items:
    """Right answers of two methods on the same prompts, 80% and 50%; half of what decides is the prompt."""
    ease, own = draw.random(shape), draw.random((2, *shape))
    same = draw.random(shape) < 0.5
    right = [np.where(same, ease, each) < share for each, share in zip(own, (0.8, 0.5), strict=True)]
    return np.stack(right, axis=-1).astype(np.float64)


def _change(pairs: list[list[float]]) -> Estimate:
    return estimate_share_change([one for one, _ in pairs], [other for _, other in pairs])


# by name: what draws items, their true mean, and the interval
DRAWN: dict[str, tuple[Callable[[np.random.Generator, tuple[int, int]], Items], float, Callable[[Any], Estimate]]]
DRAWN = {
    "losses, normal": (lambda draw, shape: draw.normal(0, 1, shape), 0.0, estimate),
    "losses, skewed": (lambda draw, shape: draw.lognormal(0, 0.5, shape), math.exp(0.125), estimate),
    "losses, very skewed": (lambda draw, shape: draw.lognormal(0, 1, shape), math.exp(0.5), estimate),
    "right answers, 80%": (_answers, 0.8, estimate_share),
    "their paired difference, 30 points": (_pairs, 0.3, _change),
}
ITEMS = (3, 5, 8, 16, 40)


def main() -> None:
    parser = benchmark_parser(__doc__, on_device=False)
    parser.add_argument("--trials", type=int, default=4000, help="of each number of items")
    arguments = parser.parse_args()
    rows = []
    for name, (drawn, mean, interval) in DRAWN.items():
        row: dict[str, object] = {"items": name}
        for items in ITEMS:
            draw = np.random.default_rng(items)
            made = [interval(values.tolist()) for values in drawn(draw, (arguments.trials, items))]
            covered = [
                each.low is not None and each.high is not None and each.low <= mean <= each.high for each in made
            ]
            row[str(items)] = round(float(np.mean(covered)), 4)
        rows.append(row)
        print(row, flush=True)
    record({"benchmark": "intervals", "trials": arguments.trials, "rows": rows}, arguments)


if __name__ == "__main__":
    main()
