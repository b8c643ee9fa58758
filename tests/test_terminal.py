"""Text for terminals of any width: nothing is lost, and nothing is wider."""

from __future__ import annotations

import pytest

import rope_ext_hf as rope
from rope_ext_hf.serving.configs import as_text
from rope_ext_hf.terminal import terminal_width, text_table, wrapped
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


def test_what_commands_print_is_readable_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    advice = str(rope.advise("reference", 4096))
    assert len(advice.splitlines()) < 135
    config = as_text(rope.serving_config("reference", "vllm", "yarn", factor=4))
    remarks = "\n".join(line for line in config.splitlines() if line.startswith("#"))
    for text in (advice, str(rope.audit(rope.reference.path())), remarks):
        assert max(len(line) for line in text.splitlines() if "/" not in line.strip() or " " in line.strip()) <= 80
