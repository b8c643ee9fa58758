"""Curves of bits per byte against context length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rope_ext_hf.eval.results import Result
from rope_ext_hf.eval.tables import by_method

__all__ = ["curves", "spread"]


def spread(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Ascending heights moved as little as needed to be `gap` apart, none above `top`."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], placed[i + 1] - gap if i + 1 < len(placed) else top)
    return placed


def _family(name: str) -> str:
    """The label without its factor."""
    return name.rpartition(" x")[0] or name


def curves(results: Sequence[Result], trained_length: int, path: Path, title: str) -> None:
    """Loss against context length, one line per method, as a PNG; the factors of one method share a colour.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.2, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lengths = sorted({result.length for result in results})
    markers = "osD^vP*Xhd"
    ends: list[tuple[float, str, str]] = []
    methods = by_method(results)
    families = list(dict.fromkeys(_family(name) for name in methods if name != "as loaded"))
    for name, row in methods.items():
        points = [(r.length, r.bits_per_byte) for r in row if math.isfinite(r.loss)]
        if not points:
            continue
        which = families.index(_family(name)) if name != "as loaded" else 0
        siblings = [other for other in methods if _family(other) == _family(name)]
        nth = siblings.index(name)
        colour = "#222222" if name == "as loaded" else f"C{which % 10}"
        axes.plot(
            *zip(*points, strict=True),
            marker=markers[(which + 3 * nth) % len(markers)],
            markersize=5,
            linewidth=2.4 if name == "as loaded" else 1.6,
            linestyle="--" if name == "as loaded" else ("-", "-.", ":")[(len(siblings) - 1 - nth) % 3],
            color=colour,
            label=name,
        )
        ends.append((points[-1][1], name, colour))
    axes.axvline(trained_length, color="#888888", linewidth=1, linestyle=":")
    axes.annotate(
        "trained length",
        (trained_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color="#666666",
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel("bits per byte of held-out text (lower is better)")
    axes.set_title(title, fontsize=11)
    axes.grid(visible=True, axis="y", linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    low, high = axes.get_ylim()
    ends.sort()
    heights = spread([value for value, _, _ in ends], (high - low) / 22, high)
    for height, (_, name, colour) in zip(heights, ends, strict=True):
        axes.annotate(
            name,
            (1.01, height),
            xycoords=("axes fraction", "data"),
            fontsize=8,
            color=colour,
            va="center",
            annotation_clip=False,
        )
    figure.savefig(path)
