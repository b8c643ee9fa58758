"""Results as pictures: curves over context lengths, and heat maps of retrieval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rope_ext_hf.errors import multiple_text
from rope_ext_hf.pictures.drawing import COLOURS, LOADED, PLAIN, RULE, Line, colour_bar, draw_lines, picture, plot_text


class RetrievalCell(Protocol):
    """What one cell of a heat map shows.

    Attributes:
        exact_match: share of answers that are right.
        rank: mean rank of the right answer, 1 the best.
        above_chance: whether the rank is better than chance.
    """

    @property
    def exact_match(self) -> float: ...
    @property
    def rank(self) -> float: ...
    @property
    def above_chance(self) -> bool: ...


def method_family(name: str) -> str:
    """The label without its factor."""
    return name.rpartition(" x")[0] or name


def line_styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How the line of each method is drawn; the factors of one method share a colour."""
    families = list(dict.fromkeys(method_family(name) for name in names if name != LOADED))
    markers = "osD^vP*Xhd"
    styles: dict[str, dict[str, Any]] = {}
    for name in names:
        siblings = [other for other in names if method_family(other) == method_family(name)]
        which, nth = families.index(method_family(name)) if name != LOADED else 0, siblings.index(name)
        styles[name] = {
            "marker": markers[(which + 3 * nth) % len(markers)],
            "markersize": 5,
            "linewidth": 2.4 if name == LOADED else 1.6,
            "linestyle": "--" if name == LOADED else ("-", "-.", ":")[(len(siblings) - 1 - nth) % 3],
            "color": PLAIN if name == LOADED else COLOURS[which % len(COLOURS)],
        }
    return styles


def draw_curves(
    axes: Any,
    points: Mapping[str, Sequence[tuple[int, float]]],
    styles: Mapping[str, Mapping[str, Any]],
    context_length: int,
) -> None:
    """One line per method over context lengths, its name at its end; a dotted line marks the model's own length.

    Args:
        points: (length, value) by the method's label, in ascending order; a method without any is left out.
        styles: of `line_styles`, for all labels.
    """
    lines: list[Line] = [
        (name, [length for length, _ in row], [value for _, value in row], dict(styles[name]))
        for name, row in points.items()
        if row
    ]
    axes.axvline(context_length, **RULE)
    axes.annotate(
        "context length of the model as loaded",
        (context_length, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color="#666666",
    )
    lengths = sorted({length for row in points.values() for length, _ in row})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}\n{multiple_text(length, context_length)}" for length in lengths])
    axes.minorticks_off()
    axes.set_xlabel("context length (tokens)")
    axes.grid(visible=True, axis="y", linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    draw_lines(axes, lines, (None, None), size=8)


def curves(
    points: Mapping[str, Sequence[tuple[int, float]]],
    context_length: int,
    path: Path | None,
    title: str,
    up: str,
    threshold: float | None = None,
) -> Any:
    """Draw values against context lengths, one line per method, as a PNG; the factors of one method share a colour.

    Args:
        points: (length, value) by the method's label, in ascending order.
        context_length: the length in tokens that the model as loaded is for; a dotted line marks it.
        path: the file, an existing one is replaced; None: no file.
        title: stands above the picture.
        up: what the values are.
        threshold: a value that a dashed line marks.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    with picture(path, 8.2, 4.8) as figure:
        axes = figure.subplots()
        if threshold is not None:
            axes.axhline(threshold, **RULE | {"linestyle": "--"})
        draw_curves(axes, points, line_styles(list(points)), context_length)
        axes.set_ylabel(up)
        axes.set_title(plot_text(title), fontsize=11)
    return figure


def _draw_heat_map(
    axes: Any,
    rows: Mapping[float, Mapping[int, RetrievalCell]],
    lengths: Sequence[int],
    depths: Sequence[float],
    context_length: int,
) -> Any:
    """One method's exact match by length and depth, the mean rank below each; matplotlib's image is returned.

    Args:
        rows: by depth and length; what is missing stays empty.
    """
    cells = [[rows.get(depth, {}).get(length) for length in lengths] for depth in depths]
    values = [[math.nan if cell is None else cell.exact_match for cell in row] for row in cells]
    image = axes.imshow(values, cmap="YlGn", vmin=0.0, vmax=1.0, aspect="auto")
    for y, row in enumerate(cells):
        for x, cell in enumerate(row):
            if cell is not None:
                pale = not cell.above_chance and cell.exact_match < 0.4  # grey would not be seen on a darker green
                ink = "white" if cell.exact_match > 0.7 else "#777777" if pale else "#222222"
                centred = {"ha": "center", "va": "center", "color": ink}
                axes.text(x, y - 0.12, f"{cell.exact_match:.0%}", fontsize=9, **centred)
                axes.text(x, y + 0.25, f"rank {cell.rank:.1f}", fontsize=6, **centred)
    axes.set_xticks(range(len(lengths)), [f"{n:,}\n{multiple_text(n, context_length)}" for n in lengths], fontsize=8)
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
    axes.set_xticks([x + 0.5 for x in range(len(lengths) - 1)], minor=True)
    axes.set_yticks([y + 0.5 for y in range(len(depths) - 1)], minor=True)
    axes.grid(visible=True, which="minor", color="white", linewidth=1.5)
    axes.tick_params(which="both", length=0)
    axes.spines[:].set_visible(False)
    return image


def heat_map(
    panels: Mapping[str, Mapping[float, Mapping[int, RetrievalCell]]],
    context_length: int,
    path: Path | None,
    title: str,
    note: str,
) -> Any:
    """Draw length x depth as a PNG, one panel per method: the share of exact matches, and the mean rank below.

    Args:
        panels: cells by the method's label, depth and length; at least one.
        context_length: the length in tokens that the model as loaded is for; ticks are multiples of it.
        path: the file, an existing one is replaced; None: no file.
        title: stands above the picture.
        note: stands below it.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    depths = sorted({depth for rows in panels.values() for depth in rows})
    lengths = sorted({length for rows in panels.values() for row in rows.values() for length in row})
    width, height = 1.6 + len(panels) * max(2.0, 0.75 * len(lengths)), 1.9 + 0.5 * len(depths)
    with picture(path, width, height) as figure:
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (name, rows) in zip(grid, panels.items(), strict=True):
            image = _draw_heat_map(axes, rows, lengths, depths, context_length)
            axes.set_title(plot_text(name, 40), fontsize=10)
        grid[0].set_ylabel("depth of the statement (0%: first)", fontsize=8)
        figure.supxlabel(f"context length (tokens)\n{note}", fontsize=8)
        figure.suptitle(plot_text(title), fontsize=11)
        bar = colour_bar(figure, image, grid, "exact match")
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        bar.outline.set_visible(False)
    return figure
