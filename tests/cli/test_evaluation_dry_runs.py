"""`--dry-run`: what a run would take, of a model whose folder has no weights; nothing is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_run_files import KINDS
from tests.support.commands import run
from tests.support.inputs import write_inputs


def write_inputs_without_weights(folder: Path) -> int:
    """Write the inputs, and remove the weights of the model; their bytes."""
    write_inputs(folder)
    weights = folder / "model" / "model.safetensors"
    size = weights.stat().st_size
    weights.unlink()
    return size


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A folder of a model without its weights, and texts; the bytes of the weights."""
    monkeypatch.chdir(tmp_path)
    return write_inputs_without_weights(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(3)
def test_a_dry_run_reads_no_weights_and_writes_nothing(kind: str, inputs: int, tmp_path: Path) -> None:
    size = inputs // 2 if kind == "sweep" else inputs  # in bfloat16
    check_dry_run((kind, "model", *KINDS[kind]), tmp_path, size, None)


def check_dry_run(words: tuple[str, ...], folder: Path, weights: int, written: int | None) -> None:
    """A dry run must name the bytes of the weights, and write nothing; `written`: those of a model it would write."""
    before = sorted(folder.rglob("*"))
    code, out, err = run(*words, "--dry-run")
    assert code == 0, err
    assert "Nothing was run, and no weights were read." in out
    assert all(f"\n{name}" in out for name in ("time ", "memory ", "gpu ", "disk "))
    code, out, err = run(*words, "--dry-run", "--json")
    assert code == 0, err
    taken = json.loads(out)
    taken = taken.get("forecast", taken)
    held = taken["memory"]
    assert held["total"] == sum(value for name, value in held.items() if name not in ("total", "offloaded"))
    assert held["weights"] == pytest.approx(weights, rel=0.05)
    assert (taken["disk"] > 0.9 * (written or weights)) == (written is not None)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_a_dry_run_counts_the_tokens_that_a_run_reads(inputs: int, tmp_path: Path) -> None:
    asked = ("ppl", "model", "--data", "texts/0.txt", "--device", "cpu", "--lengths", "32,64", "--max-spans", "2")
    code, out, err = run(*asked, "--method", "yarn", "--factor", "2", "--dry-run", "--json")
    assert code == 0, err
    assert json.loads(out)["tokens"] == 2 * 2 * (32 + 64)


@pytest.mark.slow
def test_a_dry_run_of_a_file_finds_what_does_not_fit(inputs: int, tmp_path: Path) -> None:
    (tmp_path / "file.yaml").write_text("run: ppl\nmodel: model\nlengths: 64\ndata: texts/*.txt\ndevice: cpu\n")
    assert "Nothing was run" in run("run", "file.yaml", "--dry-run")[1]
    assert run("run", "file.yaml", "--dry-run", "--lengths", "64k")[0] == 2  # no such document


@pytest.mark.slow
def test_a_model_that_does_not_fit_is_still_described(inputs: int, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"hidden_size": 2**15, "intermediate_size": 2**17, "num_hidden_layers": 80}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    code, out, err = run("ppl", "model", *KINDS["ppl"], "--dry-run")
    assert code == 0, err
    assert "NOT ENOUGH" in out
