"""Charts of results, each described once and drawn in two ways: as SVG for a page, and by matplotlib as a PNG.

An SVG is as wide as a phone or as a page, and takes the colours of its page. Names may contain anything: they are made
safe where they are drawn.
"""

from __future__ import annotations

import html
import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from rope_ext_hf.errors import multiple_text, printable, short
from rope_ext_hf.pictures import drawing

WIDTH = 360.0  # width of an SVG in its units, about the pixels that a phone gives a page: text keeps its size there
WIDE = 720.0  # width of a chart that has the width of a page to itself
LINE = 12.0  # units from one line of text to the next
_LABEL = 28  # the most characters of a method's label at the end of its line
_TOP = 8.0  # units above a plot
_BELOW = 36.0  # units below a plot, for two lines of text
_KEY = 19.0  # units from the end of a plot to a label; a leader and a marker stand between them
_NARROWEST = 165.0  # the smallest width of a plot; if labels beside it leave less, they go below it
_LOADED = "unpatched"
_TRAINED = "trained length"
_MARKERS = {
    "o": "M-3 0A3 3 0 1 0 3 0A3 3 0 1 0-3 0Z",
    "s": "M-2.7-2.7H2.7V2.7H-2.7Z",
    "^": "M0-3.6L3.4 2.6H-3.4Z",
    "D": "M0-3.8L3.8 0L0 3.8L-3.8 0Z",
    "v": "M0 3.6L3.4-2.6H-3.4Z",
    "P": "M-1.2-3.6H1.2V-1.2H3.6V1.2H1.2V3.6H-1.2V1.2H-3.6V-1.2H-1.2Z",
    "X": "M-3.4-1.9L-1.9-3.4L0-1.5L1.9-3.4L3.4-1.9L1.5 0L3.4 1.9L1.9 3.4L0 1.5L-1.9 3.4L-3.4 1.9L-1.5 0Z",
    "*": "M0-4.4L1.1-1.4L4.2-1.4L1.7.5L2.6 3.6L0 1.8L-2.6 3.6L-1.7.5L-4.2-1.4L-1.1-1.4Z",
    "<": "M-3.6 0L2.6-3.4V3.4Z",
    "p": "M0-3.6L3.4-1.1L2.1 2.9H-2.1L-3.4-1.1Z",
}
"""Outlines of markers as paths of SVG, by matplotlib's letters."""


_DASHES = ((), (8, 3), (2, 2), (8, 3, 2, 3), (14, 4), (8, 3, 2, 3, 2, 3))
"""Lengths of dashes and gaps in units; empty: a solid line."""


class _Style(NamedTuple):
    """The style of a line, for an SVG and for matplotlib."""

    colour: str
    dash: tuple[int, ...]  # as in _DASHES
    marker: str  # a key of _MARKERS

    @property
    def settings(self) -> dict[str, Any]:
        """The style as arguments of matplotlib's `plot`."""
        width = 2.4 if self.colour == drawing.PLAIN else 1.6
        dash = (0, tuple(length / 2 for length in self.dash)) if self.dash else "-"
        return {"color": self.colour, "linestyle": dash, "linewidth": width, "marker": self.marker, "markersize": 5}


def line_styles(names: Sequence[str]) -> dict[str, _Style]:
    """Return a line style for each method, by its label.

    Labels of one method with several factors share a colour. Dashes and markers differ from line to line, for readers
    who see no colours.
    """
    plain, *markers = _MARKERS
    styles = {_LOADED: _Style(drawing.PLAIN, (5, 4), plain)}
    families: list[str] = []
    for number, name in enumerate(name for name in names if name != _LOADED):
        family = name.rpartition(" x")[0] or name
        if family not in families:
            families.append(family)
        colour = drawing.COLOURS[families.index(family) % len(drawing.COLOURS)]
        styles[name] = _Style(colour, _DASHES[number % len(_DASHES)], markers[number % len(markers)])
    return styles


class _Frame(NamedTuple):
    """The place and the scales of the plot in the SVG of a line chart, in SVG units; y grows downward."""

    width: float  # that of the SVG
    left: float
    right: float
    height: float
    lengths: tuple[int, int]  # the shortest and the longest length
    values: tuple[float, float]  # the lowest and the highest value
    logarithmic: bool  # whether the axis of values is
    labels_below: bool  # whether the labels of lines stand below the plot, not beside it

    @property
    def bottom(self) -> float:
        return _TOP + self.height

    def x(self, length: float) -> float:
        shortest, longest = self.lengths
        octaves = math.log2(longest / shortest) or 1.0
        return self.left + 8 + (self.right - self.left - 16) * (math.log2(length) - math.log2(shortest)) / octaves

    def y(self, value: float) -> float:
        scale = math.log if self.logarithmic else float
        low, high = self.values
        share = (scale(high) - scale(value)) / (scale(high) - scale(low) or 1.0)
        return _TOP + 5 + (self.height - 10) * share


@dataclass(frozen=True)
class LineChart:
    """A line chart of values over context lengths, with one line per method and its label at the end of the line."""

    points: Mapping[str, Sequence[tuple[int, float]]]
    """(length, value), ascending, by the method's label; a method without points is left out."""
    context_length: int  # the length in tokens that the unpatched model is for, marked below the axis
    axis: str  # the name of the values, and whether higher is better
    threshold: float | None = None  # the value of a dashed line, the threshold of effective lengths; None: no line
    logarithmic: bool = False  # whether the axis of values is logarithmic; values must be above 0 then

    @property
    def adds_to_table(self) -> bool:
        """True if there are more than two lengths: a line between two numbers says no more than a table of them."""
        return len(self._lengths) > 2

    @property
    def is_empty(self) -> bool:
        """True if no method has points."""
        return not self._lines

    @property
    def _lines(self) -> dict[str, Sequence[tuple[int, float]]]:
        return {name: row for name, row in self.points.items() if row}

    @property
    def _lengths(self) -> list[int]:
        return sorted({length for row in self.points.values() for length, _ in row})

    @property
    def _values(self) -> list[float]:
        values = [value for row in self.points.values() for _, value in row]
        return values if self.threshold is None else [*values, self.threshold]

    @property
    def _ticks(self) -> list[float]:
        """Round numbers within the range of the values."""
        low, high = min(self._values), max(self._values)
        return _round_factors(low, high) if self.logarithmic else _round_values(low, high)

    @property
    def _shows_trained(self) -> bool:
        return self._lengths[0] <= self.context_length <= self._lengths[-1]

    def svg(self, *widths: float) -> str:
        """Return an HTML figure element with the chart in each of these widths; empty if there are no points.

        The default is the width of a phone. If there are two charts, the style of the page shows the one that fits.
        """
        if self.is_empty:
            return ""
        caption = f"{self.axis}{', on a logarithmic axis' * self.logarithmic}, by context length in tokens."
        if self.threshold is not None:
            caption += " Dashed: the threshold of effective lengths."
        return _figure(caption, [self._drawn(width, caption) for width in widths or (WIDTH,)])

    def _drawn(self, width: float, caption: str) -> str:
        """Return this chart as an SVG element of this width, with a caption."""
        lines, frame = self._lines, self._frame(width)
        drawn = self._axes_drawn(frame)
        bottom = frame.bottom + _BELOW
        if self._shows_trained:
            x, half = frame.x(self.context_length), _width(_TRAINED) / 2
            drawn.append(f'<path d="M{x:.1f} {frame.bottom + 1}l3.5 5h-7z"/>')
            drawn.append(_text(min(max(x, half), width - half), bottom + 6, _TRAINED, "middle"))
            bottom += LINE
        if self.threshold is not None:
            dashed = f"M{frame.left:.1f} {frame.y(self.threshold):.1f}H{frame.right:.1f}"
            drawn.append(_rule(dashed, 'stroke-opacity="0.6" stroke-dasharray="6 3"'))
        upward = sorted(lines, key=lambda name: lines[name][-1][1])
        if frame.labels_below:
            places = [bottom + LINE * (len(lines) - nth) for nth in range(len(lines))]
            bottom = places[0] + LINE / 2
        else:
            ends = [-frame.y(lines[name][-1][1]) for name in upward]
            places = [-place for place in drawing.space_out(ends, LINE, 4 - frame.bottom, -_TOP)]
        styles = line_styles(list(self.points))
        for name, place in reversed(list(zip(upward, places, strict=True))):
            drawn.append(self._line_drawn(frame, name, styles[name], place))
        return _svg(bottom + 4, drawn, caption, width)

    def _frame(self, width: float) -> _Frame:
        """Return the place and the scales of the plot in an SVG of this width."""
        lines, lengths, ticks = self._lines, self._lengths, self._ticks
        left = 6 + max(_width(_tick_text(tick)) for tick in ticks)
        right = width - _KEY - max(_width(short(printable(name), _LABEL)) for name in lines)
        labels_below = right - left < _NARROWEST
        if labels_below:
            right = width - 16
        height = max(180.0 if width < WIDE else 270.0, LINE * (len(lines) + 1))
        values = min(ticks[0], *self._values), max(ticks[-1], *self._values)
        return _Frame(width, left, right, height, (lengths[0], lengths[-1]), values, self.logarithmic, labels_below)

    def _axes_drawn(self, frame: _Frame) -> list[str]:
        """Return the axes as SVG elements: values with lines across the plot, and lengths with their multiples."""
        drawn = [_rule(f"M{frame.left:.1f} {frame.bottom}H{frame.right:.1f}", 'stroke-opacity="0.5"')]
        for tick in self._ticks:
            y = frame.y(tick)
            drawn.append(_text(frame.left - 4, y + 4, _tick_text(tick), "end"))
            drawn.append(_rule(f"M{frame.left:.1f} {y:.1f}H{frame.right:.1f}", 'stroke-opacity="0.15"'))
        places = {length: frame.x(length) for length in self._lengths}
        return drawn + _length_ticks(places, self.context_length, frame.bottom + 17)

    def _line_drawn(self, frame: _Frame, name: str, style: _Style, place: float) -> str:
        """Return the line of one method as an SVG element, with its markers and its label.

        `place`: the height of the label.
        """
        points = [(frame.x(length), frame.y(value)) for length, value in self._lines[name]]
        colour = "currentColor" if style.colour == drawing.PLAIN else style.colour
        dash = " ".join(map(str, style.dash)) or "none"
        path = "L".join([f"{x:.1f} {y:.1f}" for x, y in points])
        parts = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>']
        parts += [_marker(style.marker, point, colour) for point in points]
        start = frame.left + 8 if frame.labels_below else frame.right + 12
        reaches_the_end = self._lines[name][-1][0] == frame.lengths[1]
        if reaches_the_end and not frame.labels_below:
            x, y = points[-1]
            leader = f"M{x + 4:.1f} {y:.1f}L{start - 4:.1f} {place:.1f}"
            parts.append(f'<path d="{leader}" fill="none" stroke="{colour}"/>')
        parts.append(_marker(style.marker, (start, place), colour, "key"))
        label = _safe(name, 40 if frame.labels_below else _LABEL)
        parts.append(_text(start + 7, place + 4, label, "start"))
        return f"<g><title>{_safe(name, 120)}</title>{''.join(parts)}</g>"

    def draw(self, path: str | Path | None, title: str) -> Any:
        """Return a matplotlib figure with this chart, and save it as a PNG if there is a path."""
        return draw_side_by_side([self], path, title)

    def draw_on(self, axes: Any, styles: Mapping[str, _Style]) -> None:
        """Draw this chart on matplotlib's axes; `styles` are those that `line_styles` returns."""
        lines: list[drawing.Line] = [
            (name, [length for length, _ in row], [value for _, value in row], styles[name].settings)
            for name, row in self._lines.items()
        ]
        if self.threshold is not None:
            axes.axhline(self.threshold, **drawing.RULE | {"linestyle": "--"})
        dashed = "" if self.threshold is None else "; dashed: threshold of effective lengths"
        axes.set_xscale("log", base=2)
        if self.logarithmic:
            axes.set_yscale("log")
        lengths = self._lengths
        shares = {length: math.log2(length / lengths[0]) for length in lengths}
        whole = 300 / (max(shares.values()) or 1.0)  # units across, as in an SVG
        ticks = _apart({length: share * whole for length, share in shares.items()}, self.context_length)
        if self._shows_trained:
            on_axis = axes.get_xaxis_transform()
            axes.plot([self.context_length], [-0.015], "^", color=drawing.PLAIN, ms=5, transform=on_axis, clip_on=False)
            below = {"xytext": (0, -37), "textcoords": "offset points", "ha": "center", "va": "top"}
            axes.annotate(_TRAINED, (self.context_length, 0), xycoords=on_axis, **below)
        axes.set_xticks(ticks, _tick_texts(ticks, self.context_length))
        axes.tick_params(axis="x", pad=7)
        axes.margins(x=0.02)
        axes.set_xlabel(f"context length (tokens){dashed}", labelpad=18 if self._shows_trained else 4)
        axes.set_ylabel(self.axis)
        axes.grid(visible=True, axis="y", linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        drawing.draw_lines(axes, lines, (None, None), size=8)
        axes.set_yticks(self._ticks, [_tick_text(tick) for tick in self._ticks])
        axes.minorticks_off()


def draw_side_by_side(charts: Sequence[LineChart], path: str | Path | None, title: str, note: str = "") -> Any:
    """Return a matplotlib figure with charts side by side, and save it as a PNG if there is a path.

    Each method has one style in all charts. `note`: a sentence below them.
    """
    styles = line_styles(list(dict.fromkeys([name for chart in charts for name in chart.points])))
    with drawing.picture(path, 4 + 4.2 * len(charts), 5.2 if note else 4.8) as figure:
        for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
            chart.draw_on(axes, styles)
        figure.suptitle(drawing.plot_text(title), fontsize=12)
        figure.supxlabel(fill(drawing.plot_text(note, 1000), 75 * len(charts)), fontsize=8.3)
    return figure


class HeatCell(NamedTuple):
    """One cell of a heat map: how well a method answered at one depth in the text and one context length."""

    share: float  # the share of right answers
    rank: float  # the mean rank of the right answer
    faint: bool = False  # whether the value is not better than chance
    loss: float | None = None  # the loss of the right answer, in nats per token; None where it is not known


@dataclass(frozen=True)
class HeatMaps:
    """Heat maps of the share of right answers by depth and context length, one per method, with ranks and losses."""

    panels: Mapping[str, Mapping[tuple[float, int], HeatCell]]
    """Cells by the method's label, then by depth and length; the place of a missing cell stays empty."""
    context_length: int  # the length in tokens that the unpatched model is for
    note: str  # a sentence that says what the maps show

    @property
    def adds_to_table(self) -> bool:
        """True: colours by depth and length show at a glance where answers fail, which a table does not."""
        return True

    @property
    def is_empty(self) -> bool:
        """True if no method has cells."""
        return not self._lengths

    @property
    def _depths(self) -> list[float]:
        return sorted({depth for cells in self.panels.values() for depth, _ in cells})

    @property
    def _lengths(self) -> list[int]:
        return sorted({length for cells in self.panels.values() for _, length in cells})

    @property
    def _any_loss(self) -> bool:
        return any(cell.loss is not None for cells in self.panels.values() for cell in cells.values())

    def _cells(self, name: str) -> Iterable[tuple[int, int, HeatCell]]:
        """Yield the column, the row and the cell of each result in the map of one method."""
        for (depth, length), cell in self.panels[name].items():
            yield self._lengths.index(length), self._depths.index(depth), cell

    def svg(self, *widths: float) -> str:
        """Return an HTML figure element with one map per method; empty if there are none.

        A single method has a map for each width, as in `LineChart.svg`; the maps of several methods stand side by side.
        """
        if self.is_empty:
            return ""
        if len(self.panels) > 1 or not widths:
            widths = (WIDTH,)
        return _figure(self.note, [self._panel(name, width) for name in self.panels for width in widths])

    def _panel(self, name: str, width: float) -> str:
        """Return the map of one method as an SVG element."""
        depths, lengths, left, top = self._depths, self._lengths, 38.0, 20
        high = 41.0 if self._any_loss else 30.0
        wide, bottom = (width - left) / len(lengths), top + high * len(depths)
        middles = {length: left + (column + 0.5) * wide for column, length in enumerate(lengths)}
        drawn = [_text(0, 12, _safe(name, 44), "start", ' font-weight="600"')]
        drawn += [
            _text(left - 4, top + (row + 0.5) * high + 4, f"{depth:.0%}", "end") for row, depth in enumerate(depths)
        ]
        for column, row, cell in self._cells(name):
            across, upper = left + column * wide, top + row * high
            filled = f'fill="#2a9a40" fill-opacity="{0.05 + 0.6 * cell.share:.2f}"'
            drawn.append(
                f'<rect x="{across:.1f}" y="{upper}" width="{wide - 1.5:.1f}" height="{high - 1.5}" {filled}/>'
            )
            faint = ' opacity="0.6"' if cell.faint else ""
            drawn.append(_text(across + wide / 2, upper + 13, f"{cell.share:.0%}", "middle", faint))
            small = f' font-size="9"{faint}'
            drawn.append(_text(across + wide / 2, upper + 24, f"{cell.rank:.1f}", "middle", small))
            if cell.loss is not None:
                drawn.append(_text(across + wide / 2, upper + 35, loss_text(cell.loss), "middle", ' font-size="9"'))
        drawn += _length_ticks(middles, self.context_length, bottom + 12)
        return _svg(bottom + _BELOW, drawn, f"{name}: {self.note}", width)

    def draw(self, path: str | Path | None, title: str) -> Any:
        """Return a matplotlib figure with the maps side by side, and save it as a PNG if there is a path."""
        depths, lengths = self._depths, self._lengths
        width = 1.6 + len(self.panels) * max(2.0, 0.75 * len(lengths))
        height = 2.1 + (0.6 if self._any_loss else 0.5) * len(depths)
        with drawing.picture(path, width, height) as figure:
            grid = figure.subplots(1, len(self.panels), sharey=True, squeeze=False)[0]
            for axes, name in zip(grid, self.panels, strict=True):
                image = self._draw_on(axes, name)
            grid[0].set_ylabel("depth of the statement (0%: first)", fontsize=8)
            note = fill(drawing.plot_text(self.note, 1000), round(15 * width))
            figure.supxlabel(f"context length (tokens)\n{note}", fontsize=8)
            figure.suptitle(drawing.plot_text(title), fontsize=11)
            bar = drawing.colour_bar(figure, image, grid, "exact match")
            bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            bar.outline.set_visible(False)
        return figure

    def _draw_on(self, axes: Any, name: str) -> Any:
        """Draw the map of one method on matplotlib's axes, and return its image."""
        depths, lengths = self._depths, self._lengths
        values = [[math.nan] * len(lengths) for _ in depths]
        for column, row, cell in self._cells(name):
            values[row][column] = cell.share
            ink = "#222222"
            if cell.share > 0.7:
                ink = "white"
            elif cell.faint and cell.share < 0.4:  # grey would not be seen on a darker green
                ink = "#777777"
            centred = {"ha": "center", "va": "center", "color": ink}
            upper, lower = (-0.22, 0.12) if self._any_loss else (-0.12, 0.25)
            axes.text(column, row + upper, f"{cell.share:.0%}", fontsize=9, **centred)
            axes.text(column, row + lower, f"rank {cell.rank:.1f}", fontsize=6, **centred)
            if cell.loss is not None:
                axes.text(column, row + 0.34, f"loss {loss_text(cell.loss)}", fontsize=6, **centred)
        image = axes.imshow(values, cmap="YlGn", vmin=0.0, vmax=1.0, aspect="auto")
        axes.set_xticks(range(len(lengths)), _tick_texts(lengths, self.context_length), fontsize=8)
        axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
        axes.set_xticks([x + 0.5 for x in range(len(lengths) - 1)], minor=True)
        axes.set_yticks([y + 0.5 for y in range(len(depths) - 1)], minor=True)
        axes.grid(visible=True, which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(drawing.plot_text(name, 40), fontsize=10)
        return image


Chart = LineChart | HeatMaps


def loss_text(loss: float) -> str:
    """Return the loss of an answer, in nats per token, as short text for a cell."""
    return f"{loss:.2f}" if math.isfinite(loss) else "inf"


def _tick_texts(lengths: Sequence[int], context_length: int) -> list[str]:
    return [f"{length:,}\n{multiple_text(length, context_length)}" for length in lengths]


def _round_values(low: float, high: float) -> list[float]:
    """Return three to six round values between `low` and `high`, for an axis."""
    power = 10.0 ** math.floor(math.log10((high - low) or abs(high) or 1.0))
    step = next(power * share for share in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (power * share) <= 5)
    return [round(n * step, 12) for n in range(math.ceil(low / step), math.floor(high / step) + 1)] or [low]


def _round_factors(low: float, high: float) -> list[float]:
    """Return three to nine round values (1, 2, 5, 10, 20 ...) between `low` and `high`, for a logarithmic axis.

    In a wide range they are powers of ten, or every second one, or every third; in a narrow range they are as on a
    linear axis.
    """
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high))
    powers = range(first, last + 1)
    candidates = [[factor * 10.0**power for power in powers for factor in (1, 2, 5)]]
    candidates += [[10.0**power for power in powers if power % step == 0] for step in range(1, len(powers) + 1)]
    for values in candidates:
        within = [value for value in values if low <= value <= high]
        if len(within) <= 9:
            break
    return within if len(within) >= 3 else _round_values(low, high)


def _tick_text(value: float) -> str:
    """Return a value of an axis as text: "2.5", "100", "20k", "5M"."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if 10 * size <= 10 * value < 1e10 and value >= max(size, 1e4):
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _apart(places: Mapping[int, float], context_length: int) -> list[int]:
    """Return the context lengths whose texts fit beside each other on an axis, ascending.

    The context length is kept first, then the longest length, and then the others from the longest on, where they fit.

    Args:
        places: the place of each length on the axis, in units.
        context_length: the length that the second line of each text is a multiple of.
    """

    def half_width(length: int) -> float:
        texts = (drawing.short_length(length), multiple_text(length, context_length))
        return max(map(_width, texts)) / 2 + 2

    kept: list[int] = []
    for length in sorted(places, key=lambda n: (n != context_length, n != max(places), -n)):
        index = bisect(kept, length)
        neighbours = kept[max(index - 1, 0) : index + 1]
        if all(abs(places[length] - places[other]) >= half_width(length) + half_width(other) for other in neighbours):
            kept.insert(index, length)
    return kept


def _length_ticks(places: Mapping[int, float], context_length: int, top: float) -> list[str]:
    """Return the texts below the axis of context lengths as SVG elements, for as many lengths as fit.

    Below each length stands the multiple of the context length that it is. `top`: the height of the first line.
    """
    texts = []
    for length in _apart(places, context_length):
        texts.append(_text(places[length], top, drawing.short_length(length), "middle"))
        texts.append(_text(places[length], top + LINE, multiple_text(length, context_length), "middle"))
    return texts


def _width(text: str) -> float:
    """Return an upper bound for the width of a text in an SVG, in SVG units."""
    return 11 * drawing.text_width(text) + 2


def _marker(kind: str, point: tuple[float, float], colour: str, name: str = "point") -> str:
    x, y = point
    return f'<path class="{name}" d="{_MARKERS[kind]}" transform="translate({x:.1f} {y:.1f})" fill="{colour}"/>'


def _rule(path: str, style: str) -> str:
    return f'<path d="{path}" stroke="currentColor" {style}/>'


def _text(x: float, y: float, text: str, anchor: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attributes}>{text}</text>'


def _safe(text: str, most: int) -> str:
    """Return at most `most` characters of a name, safe to put into an SVG."""
    return html.escape(short(printable(text), most))


def _svg(height: float, parts: Sequence[str], name: str, width: float) -> str:
    style = f'style="width: 100%; max-width: {width / 12.4:.0f}rem" font-size="11" fill="currentColor"'
    label = f'class="of-{width:g}" role="img" aria-label="{_safe(name, 200)}"'
    return f'<svg viewBox="0 0 {width:g} {height:g}" {style} {label}>{"".join(parts)}</svg>'


def _figure(caption: str, charts: Sequence[str]) -> str:
    return f"<figure><figcaption>{html.escape(printable(caption))}</figcaption>{''.join(charts)}</figure>"
