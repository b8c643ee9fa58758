"""A kind of run that is defined in this file alone, taken through everything that runs go through."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from rich.table import Table
from torch import Tensor
from typer.testing import CliRunner

from rope_ext_hf.cli.app import app
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.static import Yarn
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.pictures.charts import Chart, LineChart
from rope_ext_hf.reading.scorer import Cost, TokenScorer
from rope_ext_hf.runs import kinds
from rope_ext_hf.runs.conclusions.labels import MethodResult, label
from rope_ext_hf.runs.folder.folder import read_run
from rope_ext_hf.runs.kinds import RunKind, register_run_kind, run_kind
from rope_ext_hf.runs.measurement import Cell, Measurement, Reading, RunPlan
from rope_ext_hf.runs.run import Run
from rope_ext_hf.runs.runner import carry_out
from tests.support.models import build

# --- the definition -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GuessSetting:
    """How many tokens are guessed."""

    guessed: int


class Guesses(NamedTuple):
    """How many of the tokens of one text were likelier than all others together."""

    right: int

    def to_record(self) -> list[Any]:
        return list(self)


@dataclass(frozen=True)
class GuessShare(MethodResult):
    """The share of right guesses at one length."""

    share: float


class GuessRuns(RunKind):
    """Guesses of the last tokens of texts."""

    name = "guesses"
    setting = GuessSetting
    item = "text"
    columns = ("length", "share")

    def parse(self, item: str, value: Any) -> Guesses:
        return Guesses(*value)

    def result(
        self,
        method: dict[str, Any] | None,
        setting: GuessSetting,
        cell: Cell,
        values: Sequence[Guesses],
        costs: Sequence[Cost],
    ) -> GuessShare:
        return GuessShare(method, int(cell[0]), sum(v.right for v in values) / len(values) / setting.guessed)

    def rows(self, run: Run[GuessShare]) -> Iterable[Sequence[Any]]:
        return ([result.length, result.share] for result in run.results)

    def table(self, run: Run[GuessShare], *, detailed: bool = False) -> Table:
        table = Table("method", "length", "share")
        for result in run.results:
            table.add_row(label(result.method), str(result.length), f"{result.share:.0%}")
        return table

    def chart(self, run: Run[GuessShare]) -> Chart:
        points: dict[str, list[tuple[int, float]]] = {label(result.method): [] for result in run.results}
        for result in run.results:
            points[label(result.method)].append((result.length, result.share))
        return LineChart(points, run.context_length, "Share of good guesses; higher is better")


class GuessMeasurement(Measurement):
    """Texts of equal length, whose last tokens are guessed."""

    kind = "guesses"

    def __init__(self, texts: Sequence[Tensor], lengths: Sequence[int]) -> None:
        self.texts, self.lengths = texts, lengths
        self.items = [f"text {index}" for index in range(len(texts))]
        self.setting = GuessSetting(8)
        self.passes = [*lengths] * len(texts)
        self.scored = 8 * len(self.passes)

    def cells(self, item: int) -> Sequence[Cell]:
        return [(length,) for length in self.lengths]

    def digested(self, cell: Cell) -> Iterator[bytes]:
        yield repr([text[-int(cell[0]) :].tolist() for text in self.texts]).encode()

    def score(self, scorer: TokenScorer, reading: Reading) -> list[Guesses]:
        losses = scorer.losses(self.texts[reading.item][-reading.tokens :], reading.tokens - 8)
        return [Guesses(int((losses < 4.5).sum()))]


# --- its uses -----------------------------------------------------------------------------------------------------


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> RunPlan[GuessMeasurement]:
    monkeypatch.setattr(kinds, "_KINDS", dict(kinds._KINDS))
    register_run_kind(GuessRuns)
    texts = torch.randint(3, 90, (3, 128), generator=torch.Generator().manual_seed(0))
    yarn: RopeMethod = ModelRope.of_model(build("llama")).bind(Yarn(factor=2.0), 128)
    return RunPlan(GuessMeasurement(list(texts), [64, 128]), "random tokens", methods=(None, yarn))


def test_it_is_measured_reported_and_read_back(plan: RunPlan[GuessMeasurement], tmp_path: Path) -> None:
    run = carry_out(build("llama"), plan, out=tmp_path)
    assert run.folder.name.startswith("model-guesses-")
    assert read_run(run.folder) == run
    assert carry_out(build("llama"), plan).results == run.results  # without files
    model = build("llama").eval()
    right = 0
    for text in plan.measurement.texts:
        with torch.no_grad():
            losses = -model(text[None]).logits[0].log_softmax(-1)[-9:-1].gather(-1, text[-8:, None])
        right += int((losses < 4.5).sum())
    assert 0 < right < 24
    assert [(label(r.method), r.length) for r in run.results] == [
        *(("unpatched", 64), ("unpatched", 128), ("yarn x2", 64), ("yarn x2", 128))
    ]
    assert run.results[1].share == right / 24
    assert {path.name for path in run.folder.iterdir()} >= {
        *("run.json", "records.0.jsonl", "results.json", "results.csv", "report.html")
    }
    with (run.folder / "results.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["share"]) for row in rows] == [result.share for result in run.results]
    assert "3 texts" in (run.folder / "report.html").read_text(encoding="utf-8")


def test_it_is_continued(plan: RunPlan[GuessMeasurement], tmp_path: Path) -> None:
    folder = carry_out(build("llama"), plan, out=tmp_path).folder
    journal = folder / "records.0.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    journal.write_text("".join(lines[:5]), encoding="utf-8")
    assert len(read_run(folder).results) < 4
    assert carry_out(build("llama"), plan, out=tmp_path) == read_run(folder)
    again = journal.read_text(encoding="utf-8").splitlines()
    assert [json.loads(a)["value"] for a in again] == [json.loads(b)["value"] for b in lines]


def test_the_command_line_reports_it(plan: RunPlan[GuessMeasurement], tmp_path: Path) -> None:
    folder = carry_out(build("llama"), plan, out=tmp_path).folder
    printed = CliRunner().invoke(app, ["report", str(folder)])
    assert printed.exit_code == 0
    assert "share" in printed.output
    assert "yarn x2" in printed.output


def test_a_name_is_given_once(plan: RunPlan[GuessMeasurement]) -> None:
    assert [run_kind(name).name for name in ("perplexity", "passkey", "guesses")] == [
        "perplexity",
        "passkey",
        "guesses",
    ]
    with pytest.raises(ValueError, match=r"unknown kind 'gueses'.*Did you mean 'guesses'"):
        run_kind("gueses")
    with pytest.raises(ValueError, match="a kind of run called 'guesses' already"):
        register_run_kind(GuessRuns)


def test_a_run_without_files_has_no_folder(plan: RunPlan[GuessMeasurement]) -> None:
    with pytest.raises(ValueError, match="measured without files"):
        _ = carry_out(build("llama"), plan).folder
