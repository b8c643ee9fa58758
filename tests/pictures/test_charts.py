"""Charts of results: the SVG, parsed as XML, and matplotlib's figure have the same lines and texts."""

from __future__ import annotations

import math
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from rope_ext_hf.pictures.charts import LINE, WIDTH, HeatCell, HeatMaps, LineChart, draw_side_by_side, line_styles
from rope_ext_hf.pictures.drawing import COLOURS, space_out

POINTS = {"unpatched": [(256, 1.0), (1024, 5.0)], "yarn x4": [(256, 1.25), (512, 1.5), (1024, 2.0)]}


def numbers(element: ElementTree.Element, *names: str) -> list[float]:
    return [float(element.attrib[name]) for name in names]


def marks(element: ElementTree.Element, kind: str = "point") -> list[tuple[float, float]]:
    """Return the places of the markers of this kind."""
    places = [path.attrib["transform"] for path in element.iter("path") if path.get("class") == kind]
    return [(float(x), float(y)) for x, y in (place[len("translate(") : -1].split() for place in places)]


def axis_texts(figure: ElementTree.Element) -> dict[str, float]:
    """Return the texts of the axis of values, with their heights."""
    (svg,) = figure.iter("svg")
    return {
        str(text.text): numbers(text, "y")[0] - 4 for text in svg.findall("text") if text.get("text-anchor") == "end"
    }


def test_points_stand_where_their_values_are() -> None:
    figure = ElementTree.fromstring(LineChart(POINTS, 256, "Bits per byte").svg())
    assert str(figure.findtext("figcaption")).startswith("Bits per byte, by context length")
    groups = {group.findtext("title"): group for group in figure.iter("g")}
    assert set(groups) == set(POINTS)
    where = {
        (name, n, value): place
        for name, row in POINTS.items()
        for (n, value), place in zip(row, marks(groups[name]), strict=True)
    }
    assert len({*where.values()}) == 5
    across = {n: x for (_, n, _), (x, _) in where.items()}
    assert across[512] - across[256] == pytest.approx(across[1024] - across[512], abs=0.2)  # octaves
    (_, low), (_, high) = where["unpatched", 256, 1.0], where["unpatched", 1024, 5.0]
    for (_, _, value), (_, y) in where.items():
        assert y == pytest.approx(low + (high - low) * (value - 1) / 4, abs=0.1)


def test_heights_are_moved_as_little_as_needed() -> None:
    assert space_out([0, 10, 20], 5, 0, 100) == [0, 10, 20]
    assert space_out([50, 50, 50], 10, 0, 100) == [40, 50, 60]  # around their mean
    assert space_out([0, 0, 90], 10, 0, 100) == [0, 10, 90]  # not below the bottom
    assert space_out([99, 99], 10, 0, 100) == [90, 100]
    assert space_out([], 10, 0, 100) == []


def test_names_do_not_cover_each_other() -> None:
    """They do not, however close the lines end, and however many there are."""
    points = {f"method {i}": [(256, 1.0), (512, 1.0 + i / 1000)] for i in range(24)}
    figure = ElementTree.fromstring(LineChart(points, 256, "").svg())
    heights = sorted(numbers(text, "y")[0] for group in figure.iter("g") for text in group.iter("text"))
    assert all(b - a >= LINE - 0.11 for a, b in pairwise(heights))
    (svg,) = figure.iter("svg")
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    assert width == WIDTH
    assert heights[0] > 0
    assert heights[-1] < height


@pytest.mark.parametrize("value", [1.0, 0.0, 1e-9, 1e300])
def test_one_value_alone_is_drawn(value: float) -> None:
    figure = ElementTree.fromstring(LineChart({"unpatched": [(256, value)]}, 64, "").svg())
    ((across, down),) = marks(figure)
    assert math.isfinite(across)
    assert math.isfinite(down)


def test_without_points_there_is_no_chart() -> None:
    assert LineChart({"unpatched": []}, 256, "").svg() == HeatMaps({}, 256, "").svg() == ""


def test_a_heat_map_has_a_cell_per_depth_and_length() -> None:
    rows = {(0.0, 256): HeatCell(1.0, 1.0), (0.0, 512): HeatCell(0.25, 3.5), (1.0, 256): HeatCell(0.5, 9.0, faint=True)}
    figure = ElementTree.fromstring(HeatMaps({"yarn x4": rows, "unpatched": rows}, 256, "Exact answers.").svg())
    charts = list(figure.iter("svg"))
    assert len(charts) == 2
    rects = list(charts[0].iter("rect"))
    assert [float(rect.attrib["fill-opacity"]) for rect in rects] == [0.65, 0.2, 0.35]
    texts = [text.text for text in charts[0].iter("text")]
    assert [text for text in texts if text in ("100%", "25%", "50%", "1.0", "3.5", "9.0")] == [
        *("100%", "100%", "1.0", "25%", "3.5", "50%", "9.0")  # the first 100% is a depth
    ]


def test_names_are_text() -> None:
    name = "</svg><script>alert(1)</script>\x1b"
    for chart in (LineChart({name: [(1, 1.0)]}, 1, name), HeatMaps({name: {(0.5, 1): HeatCell(1.0, 1.0)}}, 1, name)):
        assert "script" not in {element.tag for element in ElementTree.fromstring(chart.svg()).iter()}
        assert "\x1b" not in chart.svg()


def test_a_method_keeps_its_colour_and_its_factors_share_one() -> None:
    styles = line_styles(["unpatched", "yarn x4", "yarn x8", "rerope"])
    assert styles["yarn x4"].colour == styles["yarn x8"].colour != styles["rerope"].colour
    assert styles["yarn x4"].dash != styles["yarn x8"].dash


def test_each_method_has_a_colour_and_a_marker_of_its_own() -> None:
    styles = line_styles(["unpatched", *(f"method {i}" for i in range(8))])
    assert len({style.colour for style in styles.values()}) == 9
    assert len({style.marker for style in styles.values()}) == 9


def test_lines_differ_without_their_colours() -> None:
    names = ["unpatched", "yarn x2", "yarn x4", "yarn x8", "ntk x4", "rerope", "dca"]
    styles = line_styles(names)
    assert len({style.marker for style in styles.values()}) == len({style.dash for style in styles.values()}) == 7


@pytest.mark.slow
def test_the_png_has_the_lines_and_marks_of_the_page() -> None:
    (axes,) = LineChart(POINTS, 256, "Bits per byte", 3.5).draw(None, "a title").axes
    assert [list(zip(*line.get_data(), strict=True)) for line in axes.lines[2:]] == list(POINTS.values())
    assert axes.lines[0].get_ydata()[0] == 3.5
    assert axes.lines[1].get_xdata() == [256]
    assert "trained length" in [text.get_text() for text in axes.texts]
    assert axes.get_ylabel() == "Bits per byte"


def lines_to(*values: float) -> LineChart:
    return LineChart(
        {"unpatched": [(256 * 2**nth, value) for nth, value in enumerate(values)]}, 256, "", logarithmic=True
    )


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ((1.91, 23.38), ["2", "5", "10", "20"]),
        ((2.01, 2.73), ["2.2", "2.4", "2.6"]),  # narrow: as on a linear axis
        ((1.5, 900.0), ["2", "5", "10", "20", "50", "100", "200", "500"]),
        ((1.5, 3e6), ["10", "100", "1000", "10k", "100k", "1M"]),
        ((3.0, 3.0), ["3"]),
    ],
)
def test_a_logarithmic_axis_has_plain_round_values(values: tuple[float, ...], texts: list[str]) -> None:
    """The page and the picture have the same values, at logarithmic heights."""
    chart = lines_to(*values)
    figure = ElementTree.fromstring(chart.svg())
    heights = axis_texts(figure)
    assert list(heights) == texts
    (_, low), (_, high) = marks(figure)
    for text, height in heights.items():
        if values[0] != values[1]:
            value = float(text.replace("k", "e3").replace("M", "e6"))
            share = math.log(value / values[0]) / math.log(values[1] / values[0])
            assert height == pytest.approx(low + (high - low) * share, abs=0.2)
    (axes,) = chart.draw(None, "").axes
    assert axes.get_yscale() == "log"
    assert [label.get_text() for label in axes.get_yticklabels()] == texts
    assert list(axes.yaxis.get_minorticklocs()) == []


def test_the_trained_length_is_marked_below_the_axis() -> None:
    for context, marked in ((256, True), (300, True), (64, False)):
        chart = LineChart(POINTS, context, "")
        assert ("trained length" in chart.svg()) is marked
        figure = ElementTree.fromstring(chart.svg())
        lowest = max(y for _, y in marks(figure))
        texts = [numbers(text, "y")[0] for text in figure.iter("text") if text.text == "trained length"]
        assert all(y > lowest + 40 for y in texts)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 10])
def test_the_texts_of_a_png_do_not_overlap(count: int) -> None:
    """Names stand at the ends of lines, and some lengths are close together."""
    lengths = [256, 300, 512, 1000, 1024, 2048, 4096, 8192, 16384]
    points = {f"method {i} of somebody's plug-in": [(n, 2 + i / 1000) for n in lengths] for i in range(count)}
    chart = LineChart(points, 256, "Perplexity (lower is better)", logarithmic=True)
    figure = draw_side_by_side([chart, chart], None, "A title", "One sentence.")
    drawn = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    boxes = {text: Text.get_window_extent(text, drawn) for text in texts}
    assert len(boxes) > 2 * count
    for one, other in combinations(texts, 2):
        assert not boxes[one].padded(-1).overlaps(boxes[other].padded(-1)), (one.get_text(), other.get_text())
    assert all(figure.bbox.padded(1).contains(*corner) for box in boxes.values() for corner in box.corners())


# Machado, Oliveira and Fernandes 2009 (doi 10.1109/TVCG.2009.113), severity 1, for linear RGB
SEEN_BY = {
    "everybody else": torch.eye(3),
    "protanopes": torch.tensor(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopes": torch.tensor(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopes": torch.tensor(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def linear_rgb(colour: str) -> torch.Tensor:
    part = torch.tensor([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return torch.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)


def oklab(rgb: torch.Tensor) -> torch.Tensor:
    """Return a colour in Oklab (Ottosson 2020, https://bottosson.github.io/posts/oklab)."""
    to_lms = [[0.412221, 0.536333, 0.051446], [0.211903, 0.680700, 0.107397], [0.088302, 0.281719, 0.629979]]
    to_lab = [[0.210454, 0.793618, -0.004072], [1.977998, -2.428592, 0.450594], [0.025904, 0.782772, -0.808676]]
    return torch.tensor(to_lab) @ (torch.tensor(to_lms) @ rgb.clamp(0, 1)).clamp(min=0) ** (1 / 3)


@pytest.mark.parametrize("seen_by", SEEN_BY)
def test_lines_are_told_apart_by_the_colour_blind(seen_by: str) -> None:
    seen = [oklab(SEEN_BY[seen_by] @ linear_rgb(colour)) for colour in COLOURS]
    closest = min((one - other).norm() for one, other in combinations(seen, 2))
    # 0.02 is about what a trained eye just notices
    assert closest > (0.17 if seen_by == "everybody else" else 0.09)


def test_lines_are_readable_on_white_and_on_black() -> None:
    for colour in COLOURS:
        luminance = float(linear_rgb(colour) @ torch.tensor([0.2126, 0.7152, 0.0722]))
        assert 1.05 / (luminance + 0.05) >= 3  # asked of graphics by WCAG 2.1, 1.4.11
        dark = float(linear_rgb("#121212") @ torch.tensor([0.2126, 0.7152, 0.0722]))  # pages in browsers
        assert (luminance + 0.05) / (dark + 0.05) >= 3
