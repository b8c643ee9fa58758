"""`ppl`, `sweep`, `report`, `passkey` and `tasks` on the bundled model, the losses against their definition."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_ext_hf.reference import path
from tests.support.commands import run, run_json
from tests.support.oracles import nats
from tests.support.texts import ONE_MODULE

TEXT = "".join(f"def add_{i}(first, second):\n    return first + second * {i}\n" for i in range(40))
QUICK = ("--dtype", "float32", "--max-spans", "2")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (file := tmp_path / "text.txt").write_text(TEXT)
    return file


def stock(**rope_parameters: Any) -> Any:
    """The bundled model as transformers builds it from rope settings."""
    settings = {"rope_type": "default", "rope_theta": 10000.0} | rope_parameters
    return AutoModelForCausalLM.from_pretrained(path(), rope_parameters=settings, dtype=torch.float32).eval()


@pytest.mark.slow
def test_the_losses_of_ppl_are_those_of_transformers(text: Path, tmp_path: Path) -> None:
    found = run_json(
        *("ppl", "reference", "--method", "linear", "--factor", "2", "--lengths", "128,512", "--data", text),
        *("--protocol", "truncate", "--out", tmp_path / "runs", *QUICK),
    )
    ids = torch.tensor(AutoTokenizer.from_pretrained(path())(TEXT, add_special_tokens=False).input_ids)
    models = {"null": stock(), "linear": stock(rope_type="linear", factor=2.0)}
    measured = {((each["method"] or {}).get("method", "null"), each["length"]): each for each in found["results"]}
    assert measured.keys() == {(name, length) for name in models for length in (128, 512)}
    for (name, length), each in measured.items():
        loss = nats(models[name], ids[:length], range(1, length)) / (length - 1)
        assert each["loss"] == pytest.approx(loss, abs=1e-5)
        assert each["bits_per_byte"] == pytest.approx(loss / math.log(2), abs=1e-5)  # a token is a byte


@pytest.mark.slow
def test_a_sweep_that_is_typed_again_measures_what_is_new_and_report_rebuilds_it(text: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    asked = ("sweep", "reference", "--lengths", "256,512", "--data", text, "--out", runs, *QUICK, "--factor", "2")
    first = run_json(*asked, "--method", "ntk")
    (folder,) = runs.iterdir()
    journal = (folder / "records.0.jsonl").read_bytes()
    assert run_json(*asked, "--method", "ntk")["results"] == first["results"]
    assert (folder / "records.0.jsonl").read_bytes() == journal
    both = run_json(*asked, "--method", "ntk,linear")
    assert [each for each in both["results"] if each in first["results"]] == first["results"]
    assert (folder / "records.0.jsonl").read_bytes().startswith(journal)
    assert list(runs.iterdir()) == [folder]

    made = {file: file.read_bytes() for file in folder.iterdir() if file.suffix in (".json", ".csv")}
    for name in ("results.json", "results.csv", "report.html"):
        (folder / name).unlink()
    code, out, err = run("report", folder)
    assert code == 0, err
    assert "linear x2" in out
    assert {file: file.read_bytes() for file in made} == made
    with (folder / "results.csv").open(encoding="utf-8") as file:
        assert [float(row["loss_nats"]) for row in csv.DictReader(file)] == [r["loss"] for r in both["results"]]


@pytest.mark.slow
def test_passkey_finds_within_the_trained_length_and_not_at_twice(tmp_path: Path) -> None:
    found = run_json(
        *("passkey", "reference", "--task", "key-value", "--lengths", "256,512", "--depths", "0.5", "--trials", "2"),
        *("--haystack", ONE_MODULE, "--out", tmp_path, "--dtype", "float32"),
    )
    assert [(each["length"], each["trials"]) for each in found["results"]] == [(256, 2), (512, 2)]
    near, far = found["results"]
    assert near["exact_match"] == 1.0
    assert far["exact_match"] < 1.0


def test_nothing_is_written_where_the_text_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short")
    code, _, err = run(
        "ppl", "reference", "--lengths", "256", "--data", tmp_path / "text.txt", "--out", tmp_path / "runs"
    )
    assert (code, err.splitlines()[-1].startswith("rope-ext: no document has 256 tokens")) == (2, True), err
    assert not (tmp_path / "runs").exists()
