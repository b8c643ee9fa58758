"""Charts of results, each described once: drawn as SVG in a page, without a library, and by matplotlib as a PNG.

The SVG is as wide as a phone, in the colours of its page. Names may hold anything: they are made safe where drawn.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from rope_ext_hf.errors import multiple_text, printable, short
from rope_ext_hf.pictures import drawing

WIDTH = 360.0  # units across of an SVG, about the pixels that a phone gives a page: text keeps its size there
LINE = 12.0  # units from one line of its text to the next
_LEFT, _RIGHT, _TOP, _BELOW = 38.0, 104.0, 8.0, 32.0
_LOADED = "unpatched"
_MARKERS = "osD^vP*Xhd"


class _Style(NamedTuple):
    """How a line is drawn, in an SVG and by matplotlib."""

    colour: str
    dash: tuple[int, int]  # lengths of dash and gap in units; 0: none
    marker: str  # matplotlib's

    @property
    def settings(self) -> dict[str, Any]:
        width = 2.4 if self.colour == drawing.PLAIN else 1.6
        dash = "-" if self.dash == (0, 0) else (0, tuple(length / 2 for length in self.dash))
        return {"color": self.colour, "linestyle": dash, "linewidth": width, "marker": self.marker, "markersize": 5}


def line_styles(names: Sequence[str]) -> dict[str, _Style]:
    """The style of each method's line by its label; the factors of one method share a colour."""

    def family(name: str) -> str:
        return name.rpartition(" x")[0] or name

    families = list(dict.fromkeys([family(name) for name in names if name != _LOADED]))
    styles = {_LOADED: _Style(drawing.PLAIN, (5, 4), "o")}
    for name in names:
        if name != _LOADED:
            siblings = [other for other in names if family(other) == family(name)]
            which, nth = families.index(family(name)), siblings.index(name)
            dash = ((0, 0), (6, 2), (2, 2))[(len(siblings) - 1 - nth) % 3]
            styles[name] = _Style(
                drawing.COLOURS[which % len(drawing.COLOURS)], dash, _MARKERS[(which + 3 * nth) % len(_MARKERS)]
            )
    return styles


@dataclass(frozen=True)
class LineChart:
    """Values against context lengths, one line per method with its name at its end."""

    points: Mapping[str, Sequence[tuple[int, float]]]
    """(length, value) by the method's label, ascending; without any it is left out."""
    context_length: int  # tokens that the model as loaded is for; a dotted line marks it
    axis: str  # what the values are, and whether higher is better
    threshold: float | None = None  # a value that a dashed line marks: that of effective lengths
    logarithmic: bool = False  # whether the axis of values is; values are above 0 then

    @property
    def _lines(self) -> dict[str, Sequence[tuple[int, float]]]:
        return {name: row for name, row in self.points.items() if row}

    @property
    def _lengths(self) -> list[int]:
        return sorted({length for row in self.points.values() for length, _ in row})

    def svg(self) -> str:
        """A figure element; empty without points."""
        lines, lengths = self._lines, self._lengths
        if not lines:
            return ""
        values = [value for row in lines.values() for _, value in row]
        values += [] if self.threshold is None else [self.threshold]
        height, right = max(180.0, LINE * len(lines)), WIDTH - _RIGHT
        ticks = _round_values(min(values), max(values))
        low, high = min(ticks[0], *values), max(ticks[-1], *values)
        first, octaves = math.log2(lengths[0]), math.log2(lengths[-1] / lengths[0]) or 1.0

        def x(length: float) -> float:
            return _LEFT + (right - _LEFT) * (math.log2(length) - first) / octaves

        def y(value: float) -> float:
            return _TOP + height * (high - value) / (high - low or 1.0)

        drawn = []
        for tick in ticks:
            drawn.append(_text(_LEFT - 4, y(tick) + 4, f"{tick:g}", "end"))
            drawn.append(_rule(f"M{_LEFT} {y(tick):.1f}H{right}", 'stroke-opacity="0.15"'))
        drawn += _length_ticks({length: x(length) for length in lengths}, self.context_length, _TOP + height + 14)
        caption = f"{self.axis}. Across: the context length in tokens"
        if lengths[0] <= self.context_length <= lengths[-1]:
            caption += "; dotted: the length that the model is for"
            drawn.append(_rule(f"M{x(self.context_length):.1f} {_TOP}v{height}", 'stroke-dasharray="1 3"'))
        if self.threshold is not None:
            caption += "; dashed: the threshold of effective lengths"
            drawn.append(_rule(f"M{_LEFT} {y(self.threshold):.1f}H{right}", 'stroke-dasharray="6 3"'))
        upward = sorted(lines, key=lambda name: lines[name][-1][1])
        places = [-place for place in drawing.space_out([-y(lines[name][-1][1]) for name in upward], LINE, -_TOP)]
        styles = line_styles(list(self.points))
        for name, place in reversed(list(zip(upward, places, strict=True))):
            style, at = styles[name], [(x(length), y(value)) for length, value in lines[name]]
            colour = "currentColor" if style.colour == drawing.PLAIN else style.colour
            path = "L".join([f"{across:.1f} {down:.1f}" for across, down in at])
            dots = (f'<circle cx="{across:.1f}" cy="{down:.1f}" r="2.5" fill="{colour}"/>' for across, down in at)
            dash = "none" if style.dash == (0, 0) else f"{style.dash[0]} {style.dash[1]}"
            label = _text(right + 8, place + 4, _safe(name, 18), "start", f' style="fill:{colour}"')
            drawn.append(
                f'<g><title>{_safe(name, 120)}</title><path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" '
                f'stroke-dasharray="{dash}"/>{"".join(dots)}{label}</g>'
            )
        return _figure(f"{caption}.", [_svg(_TOP + height + _BELOW, drawn, caption)])

    def draw(self, path: str | Path | None, title: str) -> Any:
        """As `draw_side_by_side` draws several."""
        return draw_side_by_side([self], path, title)

    def draw_on(self, axes: Any, styles: Mapping[str, _Style]) -> None:
        """Draw on matplotlib's axes, in styles of `line_styles`."""
        lines: list[drawing.Line] = [
            (name, [length for length, _ in row], [value for _, value in row], styles[name].settings)
            for name, row in self._lines.items()
        ]
        if self.threshold is not None:
            axes.axhline(self.threshold, **drawing.RULE | {"linestyle": "--"})
        axes.axvline(self.context_length, **drawing.RULE)
        note, at = "context length of the model as loaded", (self.context_length, 1)
        drawing.write_note(axes, note, at, ("data", "axes fraction"), (4, -4), va="top", fontsize=8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(self._lengths, _tick_texts(self._lengths, self.context_length))
        axes.minorticks_off()
        axes.set_xlabel("context length (tokens)")
        axes.set_ylabel(self.axis)
        axes.grid(visible=True, axis="y", linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        drawing.draw_lines(axes, lines, (None, None), size=8)


def draw_side_by_side(charts: Sequence[LineChart], path: str | Path | None, title: str, note: str = "") -> Any:
    """Draw charts in one picture, as a PNG if there is a path, each method in one style; the matplotlib figure."""
    styles = line_styles(list(dict.fromkeys([name for chart in charts for name in chart.points])))
    with drawing.picture(path, 4 + 4.2 * len(charts), 5.2 if note else 4.8) as figure:
        for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
            chart.draw_on(axes, styles)
        figure.suptitle(drawing.plot_text(title), fontsize=12)
        figure.supxlabel(fill(drawing.plot_text(note, 1000), 75 * len(charts)), fontsize=8.3)
    return figure


class HeatCell(NamedTuple):
    """The share of answers that are right, the mean rank of the right one, and whether that is no better than luck."""

    share: float
    rank: float
    faint: bool = False


@dataclass(frozen=True)
class HeatMaps:
    """Exact answers by depth and context length, a panel per method, the mean rank below each share."""

    panels: Mapping[str, Mapping[tuple[float, int], HeatCell]]
    """By the method's label, then by depth and length; what is missing stays empty."""
    context_length: int  # tokens that the model as loaded is for
    note: str  # what is shown, in a sentence

    @property
    def _depths(self) -> list[float]:
        return sorted({depth for cells in self.panels.values() for depth, _ in cells})

    @property
    def _lengths(self) -> list[int]:
        return sorted({length for cells in self.panels.values() for _, length in cells})

    def _cells(self, name: str) -> Iterable[tuple[int, int, HeatCell]]:
        """Column, row and cell of each result of one method."""
        for (depth, length), cell in self.panels[name].items():
            yield self._lengths.index(length), self._depths.index(depth), cell

    def svg(self) -> str:
        """A figure element; empty without panels."""
        depths, lengths = self._depths, self._lengths
        if not lengths:
            return ""
        wide, high, top = (WIDTH - _LEFT) / len(lengths), 30.0, 20
        bottom = top + high * len(depths)
        middles = {length: _LEFT + (column + 0.5) * wide for column, length in enumerate(lengths)}
        charts = []
        for name in self.panels:
            drawn = [_text(0, 12, _safe(name, 50), "start", ' font-weight="600"')]
            drawn += [
                _text(_LEFT - 4, top + (row + 0.5) * high + 4, f"{depth:.0%}", "end")
                for row, depth in enumerate(depths)
            ]
            for column, row, cell in self._cells(name):
                left, upper = _LEFT + column * wide, top + row * high
                fill = f'fill="#2a9a40" fill-opacity="{0.05 + 0.6 * cell.share:.2f}"'
                drawn.append(
                    f'<rect x="{left:.1f}" y="{upper}" width="{wide - 1.5:.1f}" height="{high - 1.5}" {fill}/>'
                )
                faint = ' opacity="0.6"' if cell.faint else ""
                drawn.append(_text(left + wide / 2, upper + 13, f"{cell.share:.0%}", "middle", faint))
                drawn.append(_text(left + wide / 2, upper + 24, f"{cell.rank:.1f}", "middle", f' font-size="9"{faint}'))
            drawn += _length_ticks(middles, self.context_length, bottom + 12)
            charts.append(_svg(bottom + _BELOW, drawn, f"{name}: {self.note}"))
        return _figure(self.note, charts)

    def draw(self, path: str | Path | None, title: str) -> Any:
        """Draw with matplotlib, as `draw_side_by_side` does."""
        depths, lengths = self._depths, self._lengths
        width, height = 1.6 + len(self.panels) * max(2.0, 0.75 * len(lengths)), 2.1 + 0.5 * len(depths)
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
        depths, lengths = self._depths, self._lengths
        values = [[math.nan] * len(lengths) for _ in depths]
        for column, row, cell in self._cells(name):
            values[row][column] = cell.share
            pale = cell.faint and cell.share < 0.4  # grey would not be seen on a darker green
            ink = "white" if cell.share > 0.7 else "#777777" if pale else "#222222"
            centred = {"ha": "center", "va": "center", "color": ink}
            axes.text(column, row - 0.12, f"{cell.share:.0%}", fontsize=9, **centred)
            axes.text(column, row + 0.25, f"rank {cell.rank:.1f}", fontsize=6, **centred)
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


def _tick_texts(lengths: Sequence[int], context_length: int) -> list[str]:
    return [f"{length:,}\n{multiple_text(length, context_length)}" for length in lengths]


def _round_values(low: float, high: float) -> list[float]:
    """Three to six round values within a range."""
    step = 10.0 ** math.floor(math.log10((high - low) or abs(high) or 1.0))
    step = next(step * share for share in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (step * share) <= 5)
    return [round(n * step, 12) for n in range(math.ceil(low / step), math.floor(high / step) + 1)] or [low]


def _length_ticks(places: Mapping[int, float], context_length: int, top: float) -> list[str]:
    """Lengths, and below them their multiples of the context length; every second or third where they are many."""
    lengths = list(places)[:: math.ceil(len(places) / 8)]
    return [
        _text(places[length], top + LINE * line, text, "middle")
        for length in lengths
        for line, text in enumerate((drawing.short_length(length), multiple_text(length, context_length)))
    ]


def _rule(path: str, style: str) -> str:
    return f'<path d="{path}" stroke="currentColor" {style}/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{text}</text>'


def _safe(text: str, most: int) -> str:
    return html.escape(short(printable(text), most))


def _svg(height: float, parts: Sequence[str], name: str) -> str:
    style = 'style="width: 100%; max-width: 29rem" font-size="11" fill="currentColor"'
    label = f'role="img" aria-label="{_safe(name, 200)}"'
    return f'<svg viewBox="0 0 {WIDTH:g} {height:g}" {style} {label}>{"".join(parts)}</svg>'


def _figure(caption: str, charts: Sequence[str]) -> str:
    return f"<figure><figcaption>{html.escape(printable(caption))}</figcaption>{''.join(charts)}</figure>"
