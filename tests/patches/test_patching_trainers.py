"""Trainers on patched models: what they save, resume and build anew; several processes; sharded weights."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import rope_ext_hf as rope
from tests.support.models import TRAINED, build, logits, tokens

ROOT = Path(__file__).parents[2]
LONG = 2 * TRAINED
METHODS: list[tuple[str, dict[str, Any]]] = [("yarn", {"factor": 4}), ("dynamic-yarn", {})]
either = pytest.mark.parametrize(
    ("method", "params"),
    [pytest.param(method, params, marks=[pytest.mark.thorough] * (method == "yarn")) for method, params in METHODS],
)


def rows() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": tokens(LONG, seed=seed)[0], "labels": tokens(LONG, seed=seed)[0]} for seed in range(4)]


def arguments(folder: Path, steps: int, **more: Any) -> TrainingArguments:
    common: dict[str, Any] = {
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), max_steps=steps, **common | more)


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.slow
@either
def test_training_goes_on_from_a_checkpoint(method: str, params: dict[str, Any], tmp_path: Path) -> None:
    """Four steps at once equal two, a process that ends there, and two from its checkpoint."""
    once = rope.patch(build("llama"), method, **params)
    Trainer(once, arguments(tmp_path / "once", 4), train_dataset=rows()).train()
    half = rope.patch(build("llama"), method, **params)
    Trainer(half, arguments(tmp_path / "half", 2), train_dataset=rows()).train()
    checkpoint = tmp_path / "half" / "checkpoint-2"
    resumed = rope.from_pretrained(checkpoint, dtype=torch.float32)
    assert rope.describe(resumed).method == method
    trainer = Trainer(resumed, arguments(tmp_path / "resumed", 4), train_dataset=rows())
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert rope.describe(resumed).method == method
    torch.testing.assert_close(weights(resumed), weights(once), atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@either
def test_a_trainer_that_builds_its_model_anew(method: str, params: dict[str, Any], tmp_path: Path) -> None:
    trainer = Trainer(
        model_init=lambda: rope.patch(build("llama"), method, **params),
        args=arguments(tmp_path / "run", 1, save_steps=1),
        train_dataset=rows(),
    )
    trainer.train()
    assert rope.describe(trainer.model).method == method
    folder = tmp_path / "run" / "checkpoint-1"
    expected = logits(trainer.model.eval(), tokens(LONG))
    assert torch.equal(logits(rope.from_pretrained(folder), tokens(LONG)), expected)
    if method == "yarn":  # what another trainer builds from the folder alone runs the method, or does not start
        torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(folder), tokens(LONG)), expected)
    else:
        with pytest.raises(KeyError, match="rope_ext_hf"):
            AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.slow
@either
def test_the_best_model_is_loaded_at_the_end(method: str, params: dict[str, Any], tmp_path: Path) -> None:
    """Weights of the first checkpoint come back into the patched model."""
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    model = rope.patch(build("llama"), method, **params)
    settings = arguments(tmp_path / "run", 2, metric_for_best_model="eval_loss", greater_is_better=True, **best)
    trainer = Trainer(model, settings, train_dataset=rows(), eval_dataset=rows()[:1])
    trainer.train()
    chosen = trainer.state.best_model_checkpoint
    assert chosen is not None
    assert rope.describe(model).method == method
    expected = logits(rope.from_pretrained(chosen, dtype=torch.float32), tokens(LONG))
    torch.testing.assert_close(logits(model.eval(), tokens(LONG)), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.thorough)])
@either
def test_gradient_checkpoints_change_nothing(
    method: str, params: dict[str, Any], reentrant: bool, tmp_path: Path
) -> None:
    trained = []
    for checkpointing in (False, True):
        model = rope.patch(build("llama"), method, **params)
        if checkpointing:
            name = "activation_checkpointing_enable"  # its name since transformers 5.20 or so
            enable = getattr(model, name, None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
        Trainer(model, arguments(tmp_path / str(checkpointing), 2), train_dataset=rows()).train()
        trained.append(weights(model))
    torch.testing.assert_close(trained[1], trained[0], atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_sft_trainer(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    data = Dataset.from_list([{"input_ids": tokens(LONG, seed=seed)[0].tolist()} for seed in range(4)])
    settings = trl.SFTConfig(
        str(tmp_path / "run"),
        max_steps=1,
        per_device_train_batch_size=1,
        save_steps=1,
        max_length=LONG,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    )
    from rope_ext_hf.hub import load_tokenizer
    from rope_ext_hf.reference import path

    model = rope.patch(AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32), "dynamic-yarn")
    trainer = trl.SFTTrainer(model, settings, train_dataset=data, processing_class=load_tokenizer(path()))
    trainer.train()
    assert rope.describe(trainer.model).method == "dynamic-yarn"
    loaded = rope.from_pretrained(tmp_path / "run" / "checkpoint-1", dtype=torch.float32)
    torch.testing.assert_close(logits(loaded, tokens(LONG)), logits(trainer.model.eval(), tokens(LONG)))


@pytest.mark.slow
@pytest.mark.parametrize("checks", [["sticky"], pytest.param([], marks=pytest.mark.thorough)])
def test_two_processes(checks: list[str], tmp_path: Path) -> None:
    """Accelerate, FSDP2 and tensor parallelism under torchrun; the script asserts that there are two."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "tests.support.two_processes", *checks],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
        | {"TEST_FOLDER": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for index in range(2):  # both write to one stream: their lines may run into each other
        assert done.stdout.count(f"process {index} of 2: equal") == 1


def test_a_copy_trains_apart() -> None:
    model = rope.patch(build("llama"), "yarn", factor=4)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    assert torch.equal(logits(model, tokens(40)), logits(rope.patch(build("llama"), "yarn", factor=4), tokens(40)))
