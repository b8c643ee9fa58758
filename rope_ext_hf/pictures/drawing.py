"""What every picture is drawn with: the figure and its file, axes, marks, and names at the ends of lines.

Names come from files and models and may hold anything: `plot_text` makes them safe to draw.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any
from unicodedata import east_asian_width

from rope_ext_hf.errors import printable, short
from rope_ext_hf.installing import install_command

COLOURS = ("#3151ff", "#ff5f23", "#106e55", "#d668e1", "#b72e18", "#33a863", "#8f34bc", "#83819d")
"""Of lines: told apart by colour-blind readers too, and readable on white and on black."""
PLAIN = "#222222"  # the colour of plain RoPE, and of a model as loaded; in an SVG that of the page's text
RULE: dict[str, Any] = {"color": "#888888", "linewidth": 1, "linestyle": ":"}
_NARROW = " .,:;'()-*\u2020filjrt"
Line = tuple[str, Sequence[float], Sequence[float], dict[str, Any]]
"""Name, x, y, and matplotlib's settings, a colour among them."""


@contextmanager
def picture(path: str | Path | None, width: float, height: float) -> Iterator[Any]:
    """A matplotlib figure, in inches, for a notebook, or a PNG at `path` when the block ends; it needs no display."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"pictures need matplotlib: {install_command('eval')}") from error

    class Shown(Figure):
        def _repr_png_(self) -> bytes:  # IPython shows other figures only once pyplot is imported
            data = io.BytesIO()
            self.savefig(data, format="png")
            return data.getvalue()

    figure = Shown(figsize=(width, height), dpi=150, layout="constrained")
    yield figure
    if path is not None:
        figure.savefig(path, format="png")


def plot_text(text: str, most: int = 120) -> str:
    """A name as matplotlib draws it literally: no mathtext, no control characters, no half surrogate pairs."""
    return short(printable(text), most).replace("$", r"\$")


def space_out(heights: Sequence[float], gap: float, bottom: float, top: float) -> list[float]:
    """Ascending heights moved as little as needed to be `gap` apart, none above `top`; none below `bottom` if all fit.

    They are the closest by least squares: neighbours that are too close stand around their mean.
    """
    groups: list[list[float]] = []  # of heights less their gaps, by ascending means
    for nth, height in enumerate(heights):
        groups.append([height - nth * gap])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    highest = top - (len(heights) - 1) * gap
    means = [fmean(group) for group in groups for _ in group]
    return [min(max(mean, bottom), highest) + nth * gap for nth, mean in enumerate(means)]


def _name_ends(axes: Any, ends: Sequence[tuple[float, str, str]], size: float = 7) -> None:
    """Write the names of lines to the right of their ends, which thin lines lead to; `ends` are (height, name, colour).

    Names are in the colour of text, which is readable at any size; the colour of a line may be too light for that.
    """
    places = sorted(ends)
    # heights as shares of the axes, whatever their scale
    scale = axes.transData + axes.transAxes.inverted()
    shares = [float(scale.transform((axes.get_xlim()[1], height))[1]) for height, _, _ in places]
    points = 72 * axes.bbox.height / axes.figure.dpi
    gap = 1.35 * size / points  # as shares, for lines of text below each other
    for place, share, (_, name, colour) in zip(space_out(shares, gap, 0.0, 1.0), shares, places, strict=True):
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 1, "relpos": (0, 0.5)}
        how = {"fontsize": size, "color": PLAIN, "va": "center", "arrowprops": leader}
        at, to = (1.0, share), (14, points * (place - share))
        axes.annotate(plot_text(name, 40), at, xycoords="axes fraction", xytext=to, textcoords="offset points", **how)


def draw_lines(
    axes: Any, lines: Sequence[Line], limits: tuple[float | None, float | None], *, size: float = 7, last: int = 1
) -> None:
    """Lines with their names at their ends, within the limits that are given.

    A name, of `size` points, stands at the mean of the `last` values: one end of a ragged line says little.
    """
    for _, across, up, style in lines:
        axes.plot(across, up, **style)
    axes.set_ylim(*(own if given is None else given for own, given in zip(axes.get_ylim(), limits, strict=True)))
    _name_ends(axes, [(fmean(up[-last:]), name, style["color"]) for name, _, up, style in lines], size)


def colour_bar(panel: Any, image: Any, axes: Sequence[Any], label: str = "") -> Any:
    """The scale of `image`, to the right of these axes of a figure or a part of one."""
    bar = panel.colorbar(image, ax=list(axes), pad=0.01)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=7.5)
    return bar


def text_width(text: str) -> float:
    """Return about the width of a text in its own size, at least as much as the usual fonts take."""
    return sum(
        1.05 if east_asian_width(c) in "WF" else 0.88 if c in "mwMW@%" or c.isupper() else 0.4 if c in _NARROW else 0.64
        for c in text
    )


def short_length(tokens: int) -> str:
    """4096 as 4k, 1048576 as 1M."""
    for unit, size in (("M", 1024**2), ("k", 1024)):
        if tokens >= size and tokens % (size // 2) == 0:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:,}"
