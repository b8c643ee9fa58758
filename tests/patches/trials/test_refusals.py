"""TRL's trainers beside a patched model: a reference model that they load by name is compared with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.errors import FingerprintError
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.reference import path

pytestmark = [  # of TRL's own
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:This sequence already has:UserWarning"),
]
METHODS: dict[str, dict[str, Any]] = {"yarn": {"factor": 4}, "dynamic-yarn": {}, "dynamic-ntk": {}, "rerope": {}}
PROMPT = "import os\n" * 4
PAIRS = [{"prompt": PROMPT, "chosen": "def f()", "rejected": "xyz"}]
JUDGED = [{"prompt": PROMPT, "completion": text, "label": good} for text, good in (("def f()", True), ("x", False))]
# What trains, its rows, its own arguments, and what the first step logs where both models are one.
TRAINERS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any], dict[str, float]]] = {
    "DPO": (PAIRS, {"max_length": None}, {}, {"loss": math.log(2), "rewards/margins": 0.0}),
    "KTO": (JUDGED, {"max_length": None}, {}, {"loss": 0.5, "kl": 0.0}),
    "GRPO": ([{"prompt": PROMPT}], {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}, {}, {"kl": 0.0}),
    "RLOO": ([{"prompt": PROMPT}], {"num_generations": 2, "max_completion_length": 4, "beta": 0.1}, {}, {"kl": 0.0}),
}


def trainer(kind: str, model: Any, folder: Path, **more: Any) -> Any:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    rows, own, parts, _ = TRAINERS[kind]
    if "num_generations" in own:
        parts = {"reward_funcs": lambda completions, **_: [float(place) for place, _ in enumerate(completions)]}
    settings = getattr(trl, f"{kind}Config")(
        str(folder / "run"), max_steps=1, logging_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        bf16=False, save_strategy="no", disable_tqdm=True, **own,
    )  # fmt: skip
    data, tokenizer = Dataset.from_list(rows * 2), load_tokenizer(path())
    return getattr(trl, f"{kind}Trainer")(
        model, args=settings, train_dataset=data, processing_class=tokenizer, **parts, **more
    )


def load(method: str | None = None) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32)
    return model if method is None else rope.patch(model, method, **METHODS[method])


def check_first_step(kind: str, running: Any) -> None:
    running.train()
    for name, value in TRAINERS[kind][3].items():
        assert float(running.state.log_history[0][name]) == pytest.approx(value, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_reference_model_without_the_patch_stops_the_training(kind: str, method: str, tmp_path: Path) -> None:
    running = trainer(kind, load(method), tmp_path)
    assert not any(type(module).__module__.startswith("rope_ext_hf") for module in running.ref_model.modules())
    with pytest.raises(FingerprintError, match=rf"the reference model of {kind}Trainer was loaded by the name .*Lora"):
        running.train()
    assert running.state.global_step == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINERS)
def test_an_adapter_needs_no_reference_model(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    running = trainer(kind, load("dynamic-yarn"), tmp_path, peft_config=adapter)
    check_first_step(kind, running)
    assert running.model.peft_config["default"].base_model_name_or_path == str(path())


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_a_patched_reference_model_may_be_given(kind: str, method: str, tmp_path: Path) -> None:
    check_first_step(kind, trainer(kind, load(method), tmp_path, ref_model=load(method)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_folder_that_was_saved_patched_is_loaded_twice(kind: str, tmp_path: Path) -> None:
    load("yarn").save_pretrained(tmp_path / "patched")
    model = rope.from_pretrained(tmp_path / "patched", dtype=torch.float32)
    check_first_step(kind, trainer(kind, model, tmp_path))


@pytest.mark.slow
def test_a_reference_model_of_another_name_is_left_alone(tmp_path: Path) -> None:
    reference = load()
    reference.config.name_or_path = "unpatched"
    running = trainer("DPO", load("yarn"), tmp_path, ref_model=reference)
    running.train()
    assert float(running.state.log_history[0]["loss"]) != pytest.approx(math.log(2), abs=1e-3)


def test_a_model_is_compared_before_it_is_evaluated() -> None:
    """The loop is the user's own and keeps both models as TRL's trainers do; one of them is in a wrapper."""

    class Loop:
        def __init__(self, model: Any, ref_model: Any) -> None:
            self.model, self.ref_model = model, ref_model

        def evaluate(self) -> None:
            self.model.eval()

    model = torch.nn.DataParallel(load("yarn"))
    Loop(model, load("yarn")).evaluate()
    Loop(model, None).evaluate()
    with pytest.raises(FingerprintError, match="The scaling is missing"):
        Loop(model, load()).evaluate()
    Loop(rope.unpatch(model), load()).evaluate()
