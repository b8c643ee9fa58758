"""Pages of HTML: their conclusion, and tables that say to programs, too, which head belongs to which cell."""

from __future__ import annotations

from xml.etree import ElementTree

from rich.text import Text

from rope_ext_hf.pictures.html_page import html_page, html_table, side_by_side
from rope_ext_hf.runs.tables import results_table


def parsed(*heads: str, rows: list[list[str]]) -> ElementTree.Element:
    """Return an HTML table with these heads and rows as XML."""
    view = results_table("A title", "", "method", *heads)
    for row in rows:
        view.add_row(*map(Text, row))
    page = html_table(view).replace("<br>", "<br/>")
    return ElementTree.fromstring(page[page.index("<table") : page.index("</table>") + len("</table>")])


def texts(row: ElementTree.Element) -> list[str]:
    return ["".join(cell.itertext()) for cell in row]


def test_columns_of_one_measure_share_its_head() -> None:
    table = parsed("exact match\n64 (1x)", "exact match\n256 (4x)", "perplexity\n256 (4x)", rows=[["yarn"] + ["1"] * 3])
    upper, lower = table.findall("thead/tr")
    assert texts(upper) == ["method", "exact match", "perplexity256 (4x)"]
    assert texts(lower) == ["64 (1x)", "256 (4x)"]
    assert [(head.get("scope"), head.get("colspan", "1"), head.get("rowspan", "1")) for head in upper] == [
        *(("col", "1", "2"), ("colgroup", "2", "1"), ("col", "1", "2"))
    ]
    assert [group.get("span") for group in table.findall("colgroup")] == ["1", "2", "1"]
    (row,) = table.findall("tbody/tr")
    assert [(cell.tag, cell.get("scope")) for cell in row] == [("th", "row"), *[("td", None)] * 3]
    assert [cell.get("data-head") for cell in row][1:] == [
        *("exact match 64 (1x)", "exact match 256 (4x)", "perplexity 256 (4x)")
    ]


def test_heads_of_lengths_are_one_row() -> None:
    table = parsed("64\n1x", "256\n4x", rows=[["yarn", "1", "2"]])
    assert [texts(row) for row in table.findall("thead/tr")] == [["method", "641x", "2564x"]]
    assert table.findall("colgroup") == []
    assert table.get("aria-label") == "A title"


def test_a_head_counts_by_its_longest_word() -> None:
    row = [["yarn", "1.00", "2.00"]]
    assert parsed("one two three four five six", "seven", rows=row).get("class") == "from-24"
    assert parsed("onetwothreefourfivesix", "seven", rows=row).get("class") == "from-30"


def test_a_table_that_is_too_wide_for_any_window_scrolls() -> None:
    for columns, scrolls in ((8, False), (12, True)):
        view = results_table("A <title>", "", "method", *[f"{n},000,000 tokens" for n in range(columns)])
        assert (
            '<div class="scrolls" tabindex="0" role="region" aria-label="A &lt;title&gt;">' in html_table(view)
        ) is (scrolls)


def test_the_conclusion_stands_between_title_and_summary() -> None:
    page = html_page("A title", "A summary.", "<hr>", conclusion=("A <verdict>.", "Why.", "But."))
    assert (
        '<h1>A title</h1>\n<p class="verdict">A &lt;verdict&gt;.</p>\n<p>Why. But.</p>\n'
        '<p class="about">A summary.</p>\n<hr>\n'
    ) in page
    assert 'class="verdict"' not in html_page("A title", "A summary.")


def test_no_charts_leave_nothing() -> None:
    assert side_by_side([]) == ""
    assert side_by_side(["<svg/>"]) == '<div class="charts"><svg/></div>'
