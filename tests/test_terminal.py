"""Text for terminals of any width: nothing is lost, and nothing is wider."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

import rope_ext_hf as rope
from rope_ext_hf.errors import printable
from rope_ext_hf.hub import load_empty
from rope_ext_hf.terminal import as_wide_as, terminal_width, text_table, wrapped
from tests.support.wrapped_text import unwrapped

SENTENCE = "The same tokens are read at every length, each length with its own amount of context before them. " * 3


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_sentences_keep_their_words_and_their_place(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = wrapped(SENTENCE, "  note  ")
    assert unwrapped(text) == f"note {SENTENCE.strip()}"
    assert max(map(len, text.splitlines())) <= min(int(columns), 110)
    assert all(line.startswith("        ") for line in text.splitlines()[1:])
    assert all(line.startswith("# ") for line in wrapped(SENTENCE, "# ", "# ").splitlines())


def test_a_path_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    path = "/" + "folder-of-a-model/" * 5
    assert path in wrapped(f"The model is in {path} now.")


def test_columns_are_aligned_and_cells_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [("nats", "256", "1,024"), ("[red]yarn[/red]", "1.5", "2.25")]
    assert text_table(rows, "lr").splitlines() == ["nats             256  1,024", "[red]yarn[/red]  1.5   2.25"]
    narrow = text_table([("yarn", SENTENCE)])
    assert max(map(len, narrow.splitlines())) <= 80
    assert unwrapped(narrow) == f"yarn {SENTENCE.strip()}"


def test_a_pipe_is_160_columns_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)
    assert terminal_width() == 160


def test_text_for_a_file_is_as_wide_wherever_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with as_wide_as(100):
        assert 80 < max(map(len, wrapped(SENTENCE).splitlines())) <= 100
    assert max(map(len, wrapped(SENTENCE).splitlines())) <= 40


# --- what notebooks show ----------------------------------------------------------------------------------------------

HOSTILE = "<script>alert('\x1b')</script>"


class Cells(HTMLParser):
    """A parser that collects the rows of cells in HTML, and every tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.rows[-1][-1] += data


def check_notebook(kind: str, answer: Any) -> None:
    """Check that a notebook shows an answer with HOSTILE in a field as text, in a table."""
    text = Cells(answer._repr_html_())
    assert text.tags <= {"div", "table", "tr", "th", "td", "pre"}, kind
    assert any(HOSTILE.replace("\x1b", "\\x1b") in cell for row in text.rows for cell in row), kind
    assert repr(answer).startswith(f"<{kind}: ")
    assert repr(answer).isprintable()


def check_cells(kind: str, answer: Any, text: str) -> None:
    """Check that the text has every cell that a notebook shows, but for the serving commands of single engines."""
    rows = [row for row in Cells(answer._repr_html_()).rows if not row[0].startswith("serve with")]
    cells = [cell for row in rows for cell in row[1:] if row[0] != "engine"]
    assert len(cells) > 3
    assert not [cell for cell in cells if unwrapped(cell) not in unwrapped(printable(text))], kind


def test_notebooks_show_a_description_as_the_terminal_does() -> None:
    described = replace(rope.describe(load_empty("reference")), notes=(HOSTILE,))
    check_notebook("Description", described)
    with as_wide_as(10_000):
        check_cells("Description", described, str(described))
