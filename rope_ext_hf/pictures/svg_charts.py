"""Charts as SVG inside a page, drawn for the width of a phone, in the page's own colours and without a library.

Names come from files and models and may hold anything: they are escaped here.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from rope_ext_hf.errors import multiple_text, printable, short
from rope_ext_hf.pictures.drawing import COLOURS, LOADED, short_length, space_out
from rope_ext_hf.pictures.result_plots import RetrievalCell, method_family

WIDTH = 360.0
"""Units across, about the pixels that a phone gives a page: text keeps its size there."""
_LEFT, _RIGHT, _TOP, _BELOW, LINE = 38.0, 104.0, 8.0, 32.0, 12.0
_DASHES = ("none", "6 2", "2 2")


def line_chart(
    points: Mapping[str, Sequence[tuple[int, float]]], context_length: int, caption: str, threshold: float | None = None
) -> str:
    """One line per method over context lengths, its name at its end; a dotted line marks the context length.

    Args:
        points: (length, value) by the method's label, in ascending order; a method without any is left out.
        context_length: the length in tokens that the model as loaded is for.
        caption: a sentence that stands above.
        threshold: a value that a dashed line marks.

    Returns:
        A figure element; empty without points.
    """
    lines = {name: row for name, row in points.items() if row}
    if not lines:
        return ""
    lengths = sorted({length for row in lines.values() for length, _ in row})
    values = [value for row in lines.values() for _, value in row] + ([] if threshold is None else [threshold])
    height = max(180.0, LINE * len(lines))
    ticks = _ticks(min(values), max(values))
    low, high = min(ticks[0], *values), max(ticks[-1], *values)
    first, octaves = math.log2(lengths[0]), math.log2(lengths[-1] / lengths[0]) or 1.0

    def x(length: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (math.log2(length) - first) / octaves

    def y(value: float) -> float:
        return _TOP + height * (high - value) / (high - low or 1.0)

    drawn = [
        _text(_LEFT - 4, y(tick) + 4, f"{tick:g}", "end") + _rule(_LEFT, y(tick), WIDTH - _RIGHT) for tick in ticks
    ]
    drawn += _length_ticks({length: x(length) for length in lengths}, context_length, _TOP + height + 14)
    if lengths[0] <= context_length <= lengths[-1]:
        across = x(context_length)
        drawn.append(f'<path d="M{across:.1f} {_TOP}v{height}" stroke="currentColor" stroke-dasharray="1 3"/>')
    if threshold is not None:
        path = f"M{_LEFT} {y(threshold):.1f}H{WIDTH - _RIGHT}"
        drawn.append(f'<path d="{path}" stroke="currentColor" stroke-dasharray="6 3"/>')
    ends = sorted(lines, key=lambda name: -lines[name][-1][1])  # downward
    places = [-place for place in space_out([-y(lines[name][-1][1]) for name in ends[::-1]], LINE, -_TOP)][::-1]
    colours = _colours(lines)
    for name, place in zip(ends, places, strict=True):
        row, (colour, dash) = lines[name], colours[name]
        path = "L".join(f"{x(length):.1f} {y(value):.1f}" for length, value in row)
        title = f"<title>{_safe(name, 120)}</title>"
        drawn.append(
            f'<g>{title}<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
            + "".join(f'<circle cx="{x(n):.1f}" cy="{y(value):.1f}" r="2.5" fill="{colour}"/>' for n, value in row)
            + _text(WIDTH - _RIGHT + 8, place + 4, _safe(name, 18), "start", f' style="fill:{colour}"')
            + "</g>"
        )
    return _figure(caption, [_svg(_TOP + height + _BELOW, drawn, caption)])


def heat_charts(
    panels: Mapping[str, Mapping[float, Mapping[int, RetrievalCell]]], context_length: int, caption: str
) -> str:
    """Length x depth, one chart per method: the share of exact answers, and below it the mean rank.

    Args:
        panels: cells by the method's label, depth and length.
        context_length: the length in tokens that the model as loaded is for.
        caption: a sentence that stands above.

    Returns:
        A figure element; empty without panels.
    """
    depths = sorted({depth for rows in panels.values() for depth in rows})
    lengths = sorted({length for rows in panels.values() for row in rows.values() for length in row})
    if not lengths:
        return ""
    wide, high = (WIDTH - _LEFT) / len(lengths), 30.0
    charts = []
    for name, rows in panels.items():
        drawn = [_text(0, 12, _safe(name, 50), "start", ' font-weight="600"')]
        for index, depth in enumerate(depths):
            top = 20 + index * high
            drawn.append(_text(_LEFT - 4, top + high / 2 + 4, f"{depth:.0%}", "end"))
            for column, length in enumerate(lengths):
                if (cell := rows.get(depth, {}).get(length)) is None:
                    continue
                left = _LEFT + column * wide
                fill = f'fill="#2a9a40" fill-opacity="{0.05 + 0.6 * cell.exact_match:.2f}"'
                drawn.append(f'<rect x="{left:.1f}" y="{top}" width="{wide - 1.5:.1f}" height="{high - 1.5}" {fill}/>')
                faint = "" if cell.above_chance else ' opacity="0.6"'
                drawn.append(_text(left + wide / 2, top + 13, f"{cell.exact_match:.0%}", "middle", faint))
                drawn.append(_text(left + wide / 2, top + 24, f"{cell.rank:.1f}", "middle", f' font-size="9"{faint}'))
        bottom = 20 + high * len(depths)
        middles = {length: _LEFT + (column + 0.5) * wide for column, length in enumerate(lengths)}
        drawn += _length_ticks(middles, context_length, bottom + 12)
        charts.append(_svg(bottom + _BELOW, drawn, f"{name}: {caption}"))
    return _figure(caption, charts)


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round values within a range."""
    step = 10.0 ** math.floor(math.log10((high - low) or abs(high) or 1.0))
    step = next(step * share for share in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (step * share) <= 5)
    return [round(n * step, 12) for n in range(math.ceil(low / step), math.floor(high / step) + 1)] or [low]


def _colours(names: Mapping[str, object]) -> dict[str, tuple[str, str]]:
    """Colour and dashes of each line; the factors of one method share a colour."""
    families = list(dict.fromkeys(method_family(name) for name in names if name != LOADED))
    colours: dict[str, tuple[str, str]] = {LOADED: ("currentColor", "5 4")}
    for name in names:
        if name != LOADED:
            siblings = [other for other in names if method_family(other) == method_family(name)]
            dash = _DASHES[(len(siblings) - 1 - siblings.index(name)) % len(_DASHES)]
            colours[name] = COLOURS[families.index(method_family(name)) % len(COLOURS)], dash
    return colours


def _length_ticks(places: Mapping[int, float], context_length: int, top: float) -> list[str]:
    """Lengths, and below them their multiples of the context length; every second or third where they are many."""
    lengths = list(places)[:: math.ceil(len(places) / 8)]
    return [
        _text(places[length], top + 12 * line, text, "middle")
        for length in lengths
        for line, text in enumerate((short_length(length), multiple_text(length, context_length)))
    ]


def _rule(left: float, y: float, right: float) -> str:
    return f'<path d="M{left} {y:.1f}H{right}" stroke="currentColor" stroke-opacity="0.15"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{text}</text>'


def _safe(text: str, most: int) -> str:
    return html.escape(short(printable(text), most))


def _svg(height: float, parts: Sequence[str], name: str) -> str:
    label = _safe(name, 200)
    style = 'style="width: 100%; max-width: 29rem" font-size="11" fill="currentColor"'
    return f'<svg viewBox="0 0 {WIDTH:g} {height:g}" {style} role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _figure(caption: str, charts: Sequence[str]) -> str:
    return f"<figure><figcaption>{html.escape(printable(caption))}</figcaption>{''.join(charts)}</figure>"
