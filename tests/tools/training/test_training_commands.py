"""The command `finetune` on a tiny model: folders that stock transformers loads, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.commands import run
from tests.support.inputs import write_inputs

TEXT = ("--data", "texts/*.txt", "--eval-data", "held-out/*.txt", "--device", "cpu", "--max-spans", "1")


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a model for 64 tokens and texts to the folder that commands run in."""
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_finetune_ends_in_a_trained_model_that_loads_plainly(inputs: Path) -> None:
    command = ("finetune", "model", *TEXT, "--method", "linear", "--factor", "4", "--steps", "1", "--train-all")
    code, out, err = run(*command, "--accumulate", "1", "--guard", "0", "--out", "run", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert (report["context_length"], report["target_length"]) == (64, 256)
    assert report["training"]["trained"]["steps"] == 1
    assert json.loads((inputs / "run" / "report.json").read_text())["losses"] == report["losses"]
    rotary_emb = AutoModelForCausalLM.from_pretrained("run/model").model.rotary_emb
    assert float(rotary_emb.inv_freq[0]) == pytest.approx(1 / 4)
    before, after = (load_file(inputs / folder / "model.safetensors") for folder in ("model", "run/model"))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name], after[name]) for name in before if "proj" in name)
    assert run(*command, "--accumulate", "2", "--guard", "0", "--out", "run")[0] == 2  # a run with other settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0", "--method", "yarn"], "--steps"),
        (["--minutes", "0", "--method", "yarn"], "minutes"),
        (["--method", "yarn"], "give either minutes or steps"),
        (["--steps", "1", "--method", "yran"], "Did you mean 'yarn'"),
        (["--steps", "1", "--method", "yarn", "--device-map", "auto"], "leave out --device-map"),
    ],
)
def test_finetune_refuses(options: list[str], message: str, inputs: Path) -> None:
    code, out, err = run("finetune", "model", *TEXT, "--factor", "4", "--out", "run", *options)
    assert (code, out) == (2, "")
    assert message.lower() in err.lower()
    assert not (inputs / "run" / "model").exists()
