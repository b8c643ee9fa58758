"""Tools for drawing pictures with matplotlib: the figure and its file, colours, and names at the ends of lines.

Names come from files and models and may contain anything: `plot_text` makes them safe to draw.
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
"""Colours of lines, which colour-blind readers can distinguish, too, and which can be seen on white and on black."""
PLAIN = "#222222"  # the colour of plain RoPE and of the unpatched model; in an SVG it is that of the page's text
RULE: dict[str, Any] = {"color": "#888888", "linewidth": 1, "linestyle": ":"}
"""The style of a line that marks a value, as arguments of matplotlib."""
_NARROW = " .,:;'()-*\u2020filjrt"  # characters that take little width
Line = tuple[str, Sequence[float], Sequence[float], dict[str, Any]]
"""The name, the x and the y of a line, and its arguments of matplotlib's `plot`, among them a colour."""


@contextmanager
def picture(path: str | Path | None, width: float, height: float) -> Iterator[Any]:
    """Yield a matplotlib figure of a width and height in inches, which is saved as a PNG at the end of the block.

    A notebook shows the figure; no display is needed. `path`: the file to save it to; None: it is not saved.

    Raises:
        ImportError: matplotlib is not installed; the message says how to install it.
    """
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
    """Return a name in a form that matplotlib draws as it is: no mathtext, control characters or half surrogates."""
    return short(printable(text), most).replace("$", r"\$")


def space_out(heights: Sequence[float], gap: float, bottom: float, top: float) -> list[float]:
    """Return ascending heights moved as little as possible, by least squares, so that they are at least `gap` apart.

    No height is above `top`, and if all fit, none is below `bottom`. Neighbours that are too close stand around their
    mean.
    """
    groups: list[list[float]] = []  # heights less their gaps, in groups with ascending means
    for nth, height in enumerate(heights):
        groups.append([height - nth * gap])
        while len(groups) > 1 and fmean(groups[-2]) > fmean(groups[-1]):
            groups[-2:] = [groups[-2] + groups[-1]]
    highest = top - (len(heights) - 1) * gap
    means = [fmean(group) for group in groups for _ in group]
    return [min(max(mean, bottom), highest) + nth * gap for nth, mean in enumerate(means)]


def _name_ends(axes: Any, ends: Sequence[tuple[float, str, str]], size: float = 7) -> None:
    """Write the name of each line in a plot to the right of its end; a thin line leads from the end to the name.

    Names are in the colour of text, which is readable at any size; the colour of a line may be too light for that.

    Args:
        axes: matplotlib's axes.
        ends: the height, name and colour of the end of each line.
        size: the size of the text in points.
    """
    places = sorted(ends)
    # Heights as shares of the axes, whatever their scale.
    scale = axes.transData + axes.transAxes.inverted()
    shares = [float(scale.transform((axes.get_xlim()[1], height))[1]) for height, _, _ in places]
    points = 72 * axes.bbox.height / axes.figure.dpi
    gap = 1.35 * size / points  # the height of a line of text as a share of the axes
    for place, share, (_, name, colour) in zip(space_out(shares, gap, 0.0, 1.0), shares, places, strict=True):
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 1, "relpos": (0, 0.5)}
        axes.annotate(
            plot_text(name, 40),
            (1.0, share),
            xycoords="axes fraction",
            xytext=(14, points * (place - share)),
            textcoords="offset points",
            fontsize=size,
            color=PLAIN,
            va="center",
            arrowprops=leader,
        )


def draw_lines(
    axes: Any, lines: Sequence[Line], limits: tuple[float | None, float | None], *, size: float = 7, last: int = 1
) -> None:
    """Draw lines in a plot, with the name of each line at its end.

    Args:
        axes: matplotlib's axes.
        lines: the lines.
        limits: the lowest and the highest value of the axis; None: matplotlib's choice.
        size: the size of the names in points.
        last: the number of values at the end of a line whose mean is the height of its name; a single value of a ragged
            line says little.
    """
    for _, x, y, style in lines:
        axes.plot(x, y, **style)
    low, high = axes.get_ylim()
    axes.set_ylim(low if limits[0] is None else limits[0], high if limits[1] is None else limits[1])
    _name_ends(axes, [(fmean(y[-last:]), name, style["color"]) for name, _, y, style in lines], size)


def colour_bar(panel: Any, image: Any, axes: Sequence[Any], label: str = "") -> Any:
    """Draw the colour scale of `image` to the right of these axes of `panel`, a figure or a part of one."""
    bar = panel.colorbar(image, ax=list(axes), pad=0.01)
    bar.set_label(label, fontsize=8)
    bar.ax.tick_params(labelsize=7.5)
    return bar


def text_width(text: str) -> float:
    """Return the approximate width of a text in multiples of its font size, at least as much as usual fonts take."""
    return sum(map(_character_width, text))


def _character_width(character: str) -> float:
    if east_asian_width(character) in "WF":
        return 1.05
    if character in "mwMW@%" or character.isupper():
        return 0.88
    return 0.4 if character in _NARROW else 0.64


def short_length(tokens: int) -> str:
    """Return a length in tokens as a short text: "4k" for 4096, "1M" for 1048576.

    It is written out if no short form is exact: "1,000".
    """
    for unit, size in (("M", 1024**2), ("k", 1024)):
        if tokens >= size and tokens % (size // 2) == 0:
            return f"{tokens / size:g}{unit}"
    return f"{tokens:,}"
