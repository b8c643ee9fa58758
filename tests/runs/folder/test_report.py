"""The files of a run for people: tables, CSV, pictures, the HTML page; of folders with any names in them."""

from __future__ import annotations

import base64
import csv
import json
import math
import os
import shlex
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rope_ext_hf.eval.retrieval.retrieval_runs import Retrieval
from rope_ext_hf.eval.spans.perplexity_measurement import DocumentLoss
from rope_ext_hf.eval.spans.perplexity_runs import PerplexityRuns, Result
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.static import Yarn
from rope_ext_hf.pictures import charts, drawing
from rope_ext_hf.reading.spans import Setting
from rope_ext_hf.runs.conclusions.labels import label, labels
from rope_ext_hf.runs.folder.report import write_files
from rope_ext_hf.runs.folder.run_file import RunFile, how_to_repeat
from rope_ext_hf.runs.kinds import run_kind
from rope_ext_hf.runs.run import Run

SETTING = Setting("matched", 5, 256, False, 0)
PNG = b"\x89PNG\r\n\x1a\n"
HOSTILE = "$a$ $$ <script>alert(1)</script> [/red] [bold] \x1b[31m \ud800 \N{HANGUL SYLLABLE HAN}"
HOSTILE_FILE = os.fsdecode(b"$x$ \xff\xfe.txt")


def result(
    length: int, loss: float, method: dict[str, Any] | None = None, names: Sequence[str] = ("one", "two")
) -> Result:
    documents = [DocumentLoss(name, loss * 10, 10, 12, 1) for name in names]
    return PerplexityRuns().result(method, SETTING, (length,), documents)


def a_run(folder: Path, results: Sequence[Any], **settings: Any) -> Run[Any]:
    folder.mkdir(exist_ok=True)
    common: dict[str, Any] = {
        **{"model": "model", "parameters": 1, "dtype": "float32", "device": "cpu", "data": "text"},
        **{
            "kind": "perplexity",
            "context_length": 64,
            "tokens": 10,
            "versions": {"torch": "2"},
            "over": "own",
            "loaded": None,
        },
        **{"items": ["one", "two"], "cells": [[64], [128]], "per_cell": [2, 2]},
    }
    every = common | settings
    return Run(folder, every, results, run_kind(every["kind"]))


YARN = Yarn(factor=4.0).to_dict()
RESULTS = [result(n, loss, m) for m, loss in ((None, 2.0), (YARN, 1.5)) for n in (64, 128)]
WITH_A_PICTURE = [*RESULTS, result(256, 2.0), result(256, 1.5, YARN)]


class Page(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.images: list[bytes] = []
        self.text = ""
        self.drawn: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.images.append(base64.b64decode((dict(attrs)["src"] or "").partition("base64,")[2]))

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.tags[-1:] == ["text"]:
            self.drawn.append(data)


def page_of(run: Run[Any]) -> Page:
    """The page of a run, which is written with its other files."""
    write_files(run)
    return Page(run.folder / "report.html")


def printed(run: Run[Any]) -> str:
    console = Console(width=200, force_terminal=True, color_system=None)
    with console.capture() as captured:
        console.print(run.table())
    return captured.get()


@pytest.mark.slow
def test_every_file_is_written(tmp_path: Path) -> None:
    run = a_run(tmp_path, [result(n, loss, m) for m, loss in ((None, 2.0), (YARN, 1.5)) for n in (64, 128, 256)])
    write_files(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("differences.csv", "perplexity.png", "report.html", "results.csv", "results.json")
    ]
    assert list(run.folder.glob("*.png"))
    page = Page(run.folder / "report.html")
    assert page.images == []  # a chart in the page's own colours instead
    assert page.tags.count("svg") == 2  # one for a phone and one for a wide window
    assert {"yarn x4", "unpatched"} <= set(page.drawn)
    assert len(json.loads((run.folder / "results.json").read_text(encoding="utf-8"))["results"]) == 6
    with (run.folder / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["length"]) for row in rows] == [
        (method, length) for method in ("unpatched", "yarn x4") for length in ("64", "128", "256")
    ]
    assert [row["loss_increase_at_context_length_nats"] for row in rows] == [""] * 3 + ["-0.5"] * 3


@pytest.mark.slow
def test_a_run_of_retrieval_has_the_same_files(tmp_path: Path) -> None:
    results = [
        Retrieval(m, n, "code", 1, d, 10, 19, 0.9, 1.5, 0.9, 0.05, ())
        for m in (None, YARN)
        for n in (64, 128)
        for d in (0, 1)
    ]
    run = a_run(tmp_path, results, kind="passkey")
    write_files(run)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("differences.csv", "passkey.png", "report.html", "results.csv", "results.json")
    ]
    page = Page(run.folder / "report.html")
    assert page.text.count("90%  1.5") == 8
    assert page.tags.count("svg") == 2  # methods
    assert page.drawn.count("90%") == 8
    assert page.drawn.count("1.5") == 8
    with (run.folder / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["depth"] for row in rows] == ["0", "1"] * 4
    assert {(row["task"], row["keys"]) for row in rows} == {("code", "1")}
    assert printed(run).count("90%  1.5") == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", [HOSTILE, HOSTILE_FILE, "$", "$$", r"\$", "$\\frac{", "x" * 5000])
def test_any_name_can_be_shown(tmp_path: Path, name: str) -> None:
    method = {"method": name, "factor": 2.0}  # of a plug-in that is not installed here
    results = [result(n, 2.0, m, ("one", name)) for m in (None, method) for n in (64, 128, 256)]
    run = a_run(tmp_path, [*results, result(512, math.nan, None, (name,))], model=name, data=name, device=name)
    write_files(run)
    page = Page(run.folder / "report.html")
    assert "script" not in page.tags
    assert "svg" in page.tags
    assert list(run.folder.glob("*.png"))
    for text in (
        (run.folder / "report.html").read_text(encoding="utf-8"),
        (run.folder / "results.csv").read_text(encoding="utf-8"),
        printed(run),
    ):
        assert "\x1b" not in text
    if name == HOSTILE:
        assert "[/red] [bold]" in printed(run)  # as text, not as markup


@pytest.mark.slow
@pytest.mark.parametrize("loss", [709.5, 1e6, math.inf])
def test_a_loss_beyond_what_a_float_holds_the_exp_of(tmp_path: Path, loss: float) -> None:
    run = a_run(tmp_path, [result(64, loss), result(128, 2.0)])
    text = page_of(run).text
    assert "not finite" in text
    assert run.results[0].perplexity == math.inf
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))["results"][0]["perplexity"] is None
    assert "7.39" in printed(run)


def test_a_picture_that_fails_costs_the_picture_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no font")

    run = a_run(tmp_path, WITH_A_PICTURE)
    write_files(run)
    monkeypatch.setattr(charts.LineChart, "draw", broken)
    with pytest.warns(UserWarning, match=r"perplexity\.png could not be drawn: no font"):
        write_files(run)
    assert not (tmp_path / "perplexity.png").exists() or Page(run.folder / "report.html").images == []
    assert (run.folder / "results.csv").exists()


def test_without_matplotlib_there_is_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise ImportError("matplotlib")

    monkeypatch.setattr(drawing, "picture", missing)
    write_files(a_run(tmp_path, WITH_A_PICTURE))
    assert list(tmp_path.glob("*.png")) == []


def test_two_lengths_are_not_drawn(tmp_path: Path) -> None:
    write_files(a_run(tmp_path, RESULTS))
    assert list(tmp_path.glob("*.png")) == []


def test_nothing_finished_yet(tmp_path: Path) -> None:
    run = a_run(tmp_path, [])
    assert "Nothing is finished yet" in page_of(run).text
    assert run.table() is None


# --- a folder of somebody else's


def test_links_are_replaced_not_written_through(tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    names = ["results.csv", "differences.csv", "results.json", "report.html", "perplexity.png"]
    for name in names:
        for there in (name, f"{name}.part"):
            (outside / there).write_bytes(b"untouched")
            (folder / there).symlink_to(outside / there)
    write_files(a_run(folder, WITH_A_PICTURE))
    assert all((outside / n).read_bytes() == b"untouched" for n in [*names, *(f"{n}.part" for n in names)])
    assert all((folder / name).is_file() and not (folder / name).is_symlink() for name in names)


def test_only_plain_pictures_are_embedded(tmp_path: Path) -> None:
    folder, secret = tmp_path / "run", tmp_path / "secret.png"
    secret.write_bytes(PNG + b"secret")
    run = a_run(folder, RESULTS)
    (folder / "x.png").symlink_to(secret)
    os.mkfifo(folder / "fifo.png")
    (folder / "folder.png").mkdir()
    (folder / "text.png").write_bytes(b"no picture")
    (folder / "own.png").write_bytes(PNG + b"own")
    assert page_of(run).images == [PNG + b"own"]


# --- what the page says


def test_the_page_begins_with_a_conclusion(tmp_path: Path) -> None:
    """Two documents are too few to compare methods, three are not. Two lengths need no chart."""
    few = page_of(a_run(tmp_path, RESULTS))
    assert "2 documents are too few to compare methods." in few.text
    assert "svg" not in few.tags
    names = ("one", "two", "three")
    results = [result(n, loss, m, names) for m, loss in ((None, 2.0), (YARN, 1.5)) for n in (64, 128)]
    page = page_of(a_run(tmp_path, results))
    verdict = page.text.index("Best at 128 tokens (2x): yarn x4, perplexity 4.48 (unpatched 7.39).")
    assert page.text.index("How well does model read 128 tokens?") < verdict < page.text.index("method")


def test_results_beyond_the_extended_length_are_marked_everywhere(tmp_path: Path) -> None:
    basis: dict[str, Any] = {"rotary": Rotary(16, 10000.0, 64).to_dict(), "layers": None, "below": []}
    names = ("one", "two", "three")
    results = [result(n, loss, m, names) for m, loss in ((None, 2.0), (YARN, 1.5)) for n in (64, 256, 512)]
    run = a_run(tmp_path, results, basis=basis)
    write_files(run)
    rows = list(csv.DictReader((run.folder / "results.csv").read_text(encoding="utf-8").splitlines()))
    expected = [("64", "False"), ("256", "True"), ("512", "True"), ("64", "False"), ("256", "False"), ("512", "True")]
    assert [(row["length"], row["beyond_extended_length"]) for row in rows] == expected
    assert [row["extended_length"] for row in rows] == ["64"] * 3 + ["256"] * 3
    assert [each["beyond"] for each in json.loads((run.folder / "results.json").read_text())["results"]] == [
        b == "True" for _, b in expected
    ]
    console = Console(width=200)
    with console.capture() as captured:
        console.print(run.table())
    assert captured.get().count("\N{DAGGER}") == 3 + 1  # and the caption's
    page = Page(run.folder / "report.html").text
    assert page.count("\N{DAGGER}") == 2 * (3 + 1)  # in the table and in that with intervals
    assert "\N{DAGGER} beyond the length that this method was set for" in page


def test_a_folder_that_carries_a_patch_is_for_the_length_of_the_patch(tmp_path: Path) -> None:
    basis: dict[str, Any] = {"rotary": Rotary(16, 10000.0, 64).to_dict(), "layers": None, "below": []}
    results = [result(n, 2.0, YARN) for n in (64, 256, 512)]
    run = a_run(tmp_path, results, basis=basis, loaded=YARN, patches=[{"method": YARN}])
    assert set(run.extended_lengths.values()) == {256}
    assert [run.beyond(each) for each in run.results] == [False, False, True]


def test_the_page_has_the_methods_and_how_to_repeat_the_run(tmp_path: Path) -> None:
    run = a_run(tmp_path, RESULTS)
    assert "To repeat" not in page_of(run).text
    for data in ("my text.txt", "<b>", "my text.txt"):
        RunFile("ppl", "model", {"data": data}).write(tmp_path, beside_others=True)
    text = page_of(run).text
    assert "To repeat or continue it" in text
    assert f"rope-ext run {shlex.quote(str(tmp_path / 'run.yaml'))}" in text
    assert text.count("data: my text.txt") == 1
    assert "data: <b>" in text
    assert json.loads(text[text.index('{\n "') :])["methods"] == [None, YARN]


@pytest.mark.parametrize(
    "held", ["; reboot", '"reboot"', "[1]", "\xff", "[" * 10_000, "{}", "a: !!python/name:os.system"]
)
def test_a_damaged_run_file_of_somebody_else_is_left_out(tmp_path: Path, held: str) -> None:
    (tmp_path / "run.yaml").write_bytes(held.encode("latin-1"))
    assert how_to_repeat(tmp_path) == ("", "")


def test_the_command_that_repeats_a_run_is_quoted(tmp_path: Path) -> None:
    (folder := tmp_path / "; reboot `reboot`").mkdir()
    RunFile("ppl", "model", {}).write(folder)
    command, _ = how_to_repeat(folder)
    assert (
        subprocess.run(
            ["sh", "-c", command.replace("rope-ext", "printf '%s|'", 1)], capture_output=True, text=True, check=True
        ).stdout
        == f"run|{folder / 'run.yaml'}|"
    )
    (folder / "run.yaml").rename(tmp_path / "other.yaml")
    (folder / "run.yaml").symlink_to(tmp_path / "other.yaml")
    assert how_to_repeat(folder) == ("", "")


# --- labels


def test_labels_are_the_methods_own() -> None:
    assert label(None) == "unpatched"
    assert label(YARN) == "yarn x4"
    assert label({"method": "dynamic-ntk"}) == "dynamic-ntk paper"
    assert label({"method": "of somebody else", "factor": 2}) == "of somebody else"
    assert label({"method": "yarn", "odd": []}) == "yarn"


def test_equal_labels_get_what_tells_them_apart(tmp_path: Path) -> None:
    plain, other = ({"method": "plug-in", "knob": knob} for knob in (1, 2))
    assert list(labels([plain, None, other]).values()) == ["plug-in (knob=1)", "unpatched", "plug-in (knob=2)"]
    results = [result(64, loss, method) for loss, method in ((1.0, plain), (2.0, other))]
    table = a_run(tmp_path, results).table()
    assert table is not None
    assert table.row_count == 2


def test_columns_count_in_context_lengths_of_the_model(tmp_path: Path) -> None:
    run = a_run(tmp_path, RESULTS, context_length=128)
    text = printed(run)
    assert "0.5x" in text
    assert "1x" in text
    assert "0.5x" in page_of(run).text
