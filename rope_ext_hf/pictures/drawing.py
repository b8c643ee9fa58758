"""What every picture here is drawn with: the figure, axes, texts, and names at the ends of lines.

Names come from files and models and may hold anything: `plot_text` makes them safe to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rope_ext_hf.errors import printable, short

__all__ = ["finish_axes", "name_ends", "new_figure", "plot_text", "short_length"]


def new_figure(width: float, height: float) -> Any:
    """An empty matplotlib figure, in inches, that is saved without any window system.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: install this package with its extra [eval]") from error
    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def plot_text(text: str, most: int = 120) -> str:
    """A name as matplotlib draws it literally: no mathtext, no control characters, no half surrogate pairs."""
    return short(printable(text), most).replace("$", r"\$")


def space_out(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Ascending heights moved as little as needed to be `gap` apart, none above `top`."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], placed[i + 1] - gap if i + 1 < len(placed) else top)
    return placed


def name_ends(axes: Any, ends: Sequence[tuple[float, str, str]], size: float = 7) -> None:
    """Write the names of lines to the right of their ends; `ends` are (height, name, colour)."""
    places = sorted(ends)
    # heights as shares of the axes, whatever their scale
    scale = axes.transData + axes.transAxes.inverted()
    shares = [float(scale.transform((1, height))[1]) for height, _, _ in places]
    for share, (_, name, colour) in zip(space_out(shares, size / 180, 1.0), places, strict=True):
        axes.annotate(
            plot_text(name, 40), (1.015, share), xycoords="axes fraction", fontsize=size, color=colour, va="center"
        )


def finish_axes(axes: Any, title: str, across: str, up: str) -> None:
    """Title, labels, a light grid and small type."""
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(across, fontsize=8)
    axes.set_ylabel(up, fontsize=8)
    axes.tick_params(which="both", labelsize=7.5)
    axes.grid(visible=True, linewidth=0.4, alpha=0.6)
    axes.spines["top"].set_visible(False)


def short_length(tokens: int) -> str:
    """4096 as 4k, 1048576 as 1M."""
    for unit, size in (("M", 1024**2), ("k", 1024)):
        if tokens >= size and tokens % (size // 2) == 0:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:,}"
