"""Results go to standard output; what a library prints there goes to standard error."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
from rich.table import Table

from rope_ext_hf.cli.console import print_error, print_note, print_table, print_text, results_to
from rope_ext_hf.errors import FileError


def test_prints_of_libraries_are_kept_out_of_the_results(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name")
    table.add_row("yarn")
    with results_to():
        print("a library's remark")
        print_text('{"loss": 1.0}')
        print_table(table)
        with results_to(sys.stderr):
            print_text("a step")
        print_text("the end")
    print_text("after")
    results, others = capsys.readouterr()
    assert results.startswith('{"loss": 1.0}\n')
    assert "yarn" in results
    assert results.endswith("the end\nafter\n")
    assert others == "a library's remark\na step\n"


def test_standard_output_is_restored_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="stopped"), results_to():
        raise ValueError("stopped")
    print("here")
    assert capsys.readouterr().out == "here\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_under_the_results_is_one_error() -> None:
    table = Table("method")
    for print_results in (partial(print_text, "a result"), partial(print_table, table)):
        with (
            Path("/dev/full").open("w") as full,
            results_to(full),
            pytest.raises(FileError, match="the results could not be printed: No space left"),
        ):
            print_results()


def test_results_may_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    print_text("a result")
    print_table(Table("method"))


@pytest.mark.parametrize("terminal", [False, True])
def test_asides_end_between_words_on_a_terminal_alone(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    print_note("run", "rope-ext-results/a-folder-with-a-name-of-its-own is where")
    print_error("no such file: " + "words " * 9)
    lines = capsys.readouterr().err.splitlines()
    if terminal:
        path = "         rope-ext-results/a-folder-with-a-name-of-its-own"  # whole, so that it can be copied
        assert lines[:4] == ["run", path, "         is where", "rope-ext: no such file: words words"]
        assert lines[4:] == ["         words words words words words", "         words words"]
    else:
        assert lines == [
            "run      rope-ext-results/a-folder-with-a-name-of-its-own is where",
            "rope-ext: no such file: words words words words words words words words words",
        ]
