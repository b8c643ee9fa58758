"""`finetune`: a longer model from a text, in a folder that loads plainly, and what it reads before and after."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.errors import FileError, MethodError
from rope_ext_hf.reference import path as reference
from rope_ext_hf.training import finetune
from tests.support.models import TRAINED, build, logits, tokens

ROOT = Path(__file__).parents[2]
LONG = 4 * TRAINED
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    build("llama", vocab_size=259).save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(reference()).save_pretrained(tmp_path / "small")
    return tmp_path / "small"


@pytest.mark.slow
@pytest.mark.parametrize("train_all", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_a_run_ends_in_a_folder_that_loads_plainly(train_all: bool, small: Path, tmp_path: Path) -> None:
    said: list[str] = []
    report = finetune(
        small, tmp_path / "run", data="stdlib?max_documents=30", method="yarn", factor=4, steps=3, max_spans=2,
        learning_rate=1e-3, train_all=train_all, control=True, report=said.append,
    )  # fmt: skip
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model").eval()
    ours, ids = rope.from_pretrained(tmp_path / "run" / "model"), tokens(LONG)
    torch.testing.assert_close(logits(plain, ids), logits(ours, ids), atol=1e-4, rtol=0)
    untrained = rope.patch(AutoModelForCausalLM.from_pretrained(small), "yarn", factor=4)
    assert rope.fingerprint(untrained).differences(rope.fingerprint(plain)) == []
    assert float((logits(ours, ids) - logits(untrained, ids)).abs().max()) > 1e-3
    changed = {
        name for name, value in plain.state_dict().items() if not torch.equal(value, untrained.state_dict()[name])
    }
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"} <= changed

    assert (report.context_length, report.target_length) == (TRAINED, LONG)
    assert list(report.losses) == ["as loaded", "patched", "trained", "control", "control, patched"]
    assert list(report.losses["trained"]) == ["64", "128", "256", "512"]
    gain, low, high = report.gains["patched"]["256"]
    assert gain == pytest.approx(report.losses["patched"]["256"] - report.losses["trained"]["256"])
    assert low <= gain <= high
    assert report.training["control"]["steps"] == report.training["trained"]["steps"] == 3
    assert json.loads((tmp_path / "run" / "report.json").read_text())["losses"] == report.losses
    assert "lower than" in str(report)
    assert any("training: control" in line for line in said)

    with pytest.raises(FileError, match="holds a run with other settings: seed"):
        finetune(
            small, tmp_path / "run", data="stdlib?max_documents=30", method="yarn", factor=4, steps=3, max_spans=2,
            learning_rate=1e-3, train_all=train_all, control=True, seed=1,
        )  # fmt: skip


@pytest.mark.thorough
def test_a_killed_command_goes_on_to_the_same_model(small: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "rope_ext_hf", "finetune", str(small), "--method", "yarn", "--factor", "4", "--data",
        "stdlib?max_documents=20", "--steps", "30", "--train-all", "--max-spans", "1", "--device", "cpu", "--out",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen([*command, str(tmp_path / "cut")], env=environment, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 500
    while not (tmp_path / "cut" / "checkpoints of trained" / "checkpoint-20" / "clock.json").exists():
        assert running.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not (tmp_path / "cut" / "model").exists()
    for name in ("cut", "whole"):
        subprocess.run([*command, str(tmp_path / name)], env=environment, check=True, capture_output=True)
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("cut", "whole")]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give one of minutes and steps"),
        ({"minutes": 1, "steps": 1}, "give one of minutes and steps"),
        ({"minutes": 0}, "longer than nothing, got minutes=0"),
        ({"steps": 1, "method": "dynamic-yarn", "factor": None}, "dynamic-yarn states no length to train at"),
    ],
)
def test_refused(given: dict[str, Any], said: str, small: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"method": "yarn", "factor": 4} | given
    with pytest.raises(MethodError, match=said):
        finetune(small, tmp_path / "run", data="stdlib?max_documents=3", **arguments)
