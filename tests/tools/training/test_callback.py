"""`RopeCallback` in transformers' Trainer: mistakes stop a training, and a right model is trained and measured."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerState, TrainingArguments

import rope_ext_hf as rope
from rope_ext_hf.errors import FingerprintError, MethodError
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.tools.training import RopeCallback
from tests.patches.saved.test_fingerprint import MISTAKES
from tests.support.models import TRAINED, build, tokens

ROOT = Path(__file__).parents[3]
TEXT = [Tokens("made up", tokens(600, seed=9)[0], tuple(range(1, 601)))]


def trainer(model: Any, folder: Path, callback: RopeCallback, steps: int = 4) -> Trainer:
    rows = [{"input_ids": tokens(TRAINED, seed=seed)[0], "labels": tokens(TRAINED, seed=seed)[0]} for seed in range(4)]
    arguments = TrainingArguments(
        str(folder), max_steps=steps, per_device_train_batch_size=1, save_steps=2, report_to=[], use_cpu=True,
        disable_tqdm=True, learning_rate=1e-3,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=rows, callbacks=[callback])


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_stops_the_training_before_it_begins(name: str, tmp_path: Path) -> None:
    expected, actual, _ = MISTAKES[name]
    with pytest.raises(FingerprintError, match="the model that is to be trained does not rotate as expected"):
        trainer(actual(), tmp_path, RopeCallback(expected())).train()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["yarn", "self-extend"])
def test_a_right_model_trains_and_is_measured(method: str, tmp_path: Path) -> None:
    model = rope.patch(build("llama"), method, factor=4)
    callback = RopeCallback(rope.fingerprint(model), data=TEXT, lengths=[TRAINED, 4 * TRAINED], every=2)
    running = trainer(model, tmp_path, callback)
    running.train()
    measured = [entry for entry in running.state.log_history if f"loss_at_{TRAINED}" in entry]
    assert [entry["step"] for entry in measured] == [0, 2, 4]
    assert all(0 < entry[f"loss_at_{4 * TRAINED}"] < 20 for entry in measured)
    assert model.training
    saved = rope.fingerprint(tmp_path / "checkpoint-4" / "rope_fingerprint.json")
    assert saved == callback.expected
    assert saved.differences(rope.fingerprint(tmp_path / "checkpoint-4")) == []
    restored = rope.from_pretrained(tmp_path / "checkpoint-4")
    longer = trainer(restored, tmp_path, RopeCallback(saved), steps=6)
    longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert longer.state.global_step == 6


@pytest.mark.slow
@pytest.mark.parametrize("stated", [True, False], ids=["by the fingerprint", "by the config"])
def test_a_checkpoint_of_another_method_is_not_gone_on_from(stated: bool, tmp_path: Path) -> None:
    trainer(rope.patch(build("llama"), "yarn", factor=4), tmp_path, RopeCallback(), steps=2).train()
    checkpoint = tmp_path / "checkpoint-2"
    if not stated:
        (checkpoint / "rope_fingerprint.json").unlink()
    longer = trainer(rope.patch(build("llama"), "yarn", factor=4), tmp_path, RopeCallback())
    longer.train(resume_from_checkpoint=str(checkpoint))
    assert longer.state.global_step == 4
    other = trainer(rope.patch(build("llama"), "linear", factor=4), tmp_path, RopeCallback())
    message = r"'.*checkpoint-2' was trained under yarn x4 .* model that would continue from it runs linear x4"
    with pytest.raises(FingerprintError, match=message):
        other.train(resume_from_checkpoint=str(checkpoint))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("patched", [True, False])
def test_an_adapter_of_a_model_that_was_made_in_memory_is_trained_and_gone_on_from(
    patched: bool, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    def run(resume: bool | None = None) -> Trainer:
        base = rope.patch(build("llama"), "yarn", factor=4) if patched else build("llama")
        adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        running = trainer(get_peft_model(base, adapter), tmp_path, RopeCallback(), steps=4 if resume else 2)
        running.train(resume_from_checkpoint=resume)
        return running

    run()
    assert run(resume=True).state.global_step == 4
    saved = rope.fingerprint(tmp_path / "checkpoint-4" / "rope_fingerprint.json")
    assert saved == rope.fingerprint(rope.patch(build("llama"), "yarn", factor=4) if patched else build("llama"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "sentence"),
    [("linear", "The scaling is missing"), ("rerope", "The remapping of positions is none instead of rerope")],
)
def test_a_module_that_changes_while_training_stops_at_the_save(method: str, sentence: str, tmp_path: Path) -> None:
    model = rope.patch(build("llama"), method, factor=4)

    class Careless(RopeCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_step_end(*args, **kwargs)
            rope.unpatch(model)

    with pytest.raises(FingerprintError, match=rf"the model that was saved.* {sentence}"):
        trainer(model, tmp_path, Careless()).train()


@pytest.mark.slow
def test_a_folder_that_lost_the_patch_stops_at_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rope.patch(build("llama"), "yarn", factor=4)
    running = trainer(model, tmp_path, RopeCallback())
    save = running._save

    def plainly(folder: str, *args: Any, **kwargs: Any) -> None:
        save(folder, *args, **kwargs)
        build("llama").config.save_pretrained(folder)

    monkeypatch.setattr(running, "_save", plainly)
    with pytest.raises(FingerprintError, match=r"the folder .*checkpoint-2.* The scaling is missing"):
        running.train()


TWO_PROCESSES = """
import os, sys
from pathlib import Path
import rope_ext_hf as rope
from rope_ext_hf.tools.training import RopeCallback
from tests.support.models import build
from tests.tools.training.test_callback import trainer

assert os.environ["WORLD_SIZE"] == "2"
rank, folder, unlike = os.environ["RANK"], Path(sys.argv[1]), sys.argv[2]
model = rope.patch(build("llama"), "yarn", factor=4)

class Careless(RopeCallback):
    def on_save(self, *args, **kwargs):
        if rank == unlike:
            rope.unpatch(model)
        super().on_save(*args, **kwargs)

running = trainer(model, folder, Careless())
running.train()
assert running.args.world_size == 2
print(f"process {rank} trained", flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("unlike", ["none", "0", "1"])
def test_every_process_is_checked_at_a_save(unlike: str, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text(TWO_PROCESSES)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*torchrun, str(tmp_path / "run"), unlike],
        capture_output=True, text=True, timeout=600, env=os.environ | settings, check=False,
    )  # fmt: skip
    if unlike == "none":
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("trained") == 2
        assert (tmp_path / "run" / "checkpoint-2" / "rope_fingerprint.json").is_file()
        return
    assert done.returncode != 0
    assert (
        "FingerprintError: the model that was saved does not rotate as expected: The scaling is missing" in done.stderr
    )
    assert "trained" not in done.stdout


@pytest.mark.slow
def test_a_checkpoint_of_shards_without_a_config_is_no_mistake(tmp_path: Path) -> None:
    model = rope.patch(build("llama"), "yarn", factor=4)
    running = trainer(model, tmp_path, RopeCallback())
    running._save = lambda folder, *args, **kwargs: Path(folder).mkdir(exist_ok=True)
    running.train()
    kept = rope.fingerprint(tmp_path / "checkpoint-4" / "rope_fingerprint.json")
    assert kept.differences(rope.fingerprint(model)) == []


def test_a_measurement_is_in_eval_mode_and_leaves_every_mode_as_it_was() -> None:
    """The model has dropout, and modules that a training keeps in eval mode."""
    model = rope.patch(build("gpt_neox", hidden_dropout=0.5, attention_dropout=0.5), "yarn", factor=2)
    text = [Tokens("a", tokens(150)[0], tuple(range(1, 151)))]
    callback = RopeCallback(data=text, lengths="32,64", tokenizer=None)
    (expected, again) = (TrainerState(), TrainerState())
    callback._measure(model.eval(), expected, {})
    model.train()
    model.get_decoder().layers[0].eval()
    modes = [module.training for module in model.modules()]
    callback._measure(model, again, {})
    assert again.log_history == expected.log_history != []
    assert [module.training for module in model.modules()] == modes


def test_text_and_lengths_belong_together() -> None:
    with pytest.raises(MethodError, match="belong together"):
        RopeCallback(data="stdlib")
    with pytest.raises(MethodError, match="at least 1 step"):
        RopeCallback(every=0)
