"""Adapters and the pairing of dims: one that was trained before its base model was converted does not run unnoticed."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import CheckpointError, FingerprintError
from rope_ext_hf.hub import load_empty, load_model
from tests.support.models import build, logits, tokens

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*holds weights in the .* pairing:UserWarning"),
]
LATENT, PLAIN = ["q_b_proj", "kv_a_proj_with_mqa"], ["q_proj", "k_proj"]
TARGETS = {"deepseek_v3": LATENT, "llama": PLAIN, "cohere": PLAIN}
CONVERTED = {"deepseek_v3": "half", "llama": "interleaved", "cohere": "half"}
"""The pairing that models of a family are converted to here; the class of DeepSeek V3 alone runs both."""
UNKNOWN = r"does not state the pairing of its weights, and its base model .* was converted to the {} pairing"


def adapt(model: Any, base: Path, family: str) -> Any:
    import peft

    torch.manual_seed(3)
    settings = peft.LoraConfig(r=4, target_modules=TARGETS[family], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, settings).eval()
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    return adapted


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def of(model: Any) -> Tensor:
    return logits(model.eval(), tokens(40))


def stated(folder: Path) -> Any:
    return json.loads((folder / "adapter_config.json").read_text()).get("rope_pairing")


def state(folder: Path, pairing: str) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_pairing": pairing}))


def convert_in_place(folder: Path, to: str) -> None:
    """Put the converted model where the model was, under its name."""
    rope.convert_checkpoint(folder, folder.with_name("new"), to)
    shutil.rmtree(folder)
    folder.with_name("new").rename(folder)


@pytest.fixture(params=TARGETS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def base(family: str, tmp_path: Path) -> Path:
    build(family).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapter(base: Path, family: str, tmp_path: Path) -> Path:
    adapt(plain(base), base, family).save_pretrained(tmp_path / "adapter")
    assert stated(tmp_path / "adapter") is None
    return tmp_path / "adapter"


def test_an_adapter_from_before_the_conversion_is_refused_everywhere(
    family: str, base: Path, adapter: Path, tmp_path: Path
) -> None:
    to = CONVERTED[family]
    convert_in_place(base, to)
    ways: list[Any] = [rope.from_pretrained] + ([load_model, load_empty] if family == "deepseek_v3" else [])
    for way in (*ways, lambda folder: rope.convert_checkpoint(folder, tmp_path / "out", to)):
        with pytest.raises(CheckpointError, match=UNKNOWN.format(to)):
            way(adapter)
    patch = ["patch", str(adapter), "--method", "yarn", "--factor", "4", "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, patch).exit_code == 2
    assert not (tmp_path / "out").exists()


def test_the_error_says_how_to_convert_it(family: str, base: Path, adapter: Path, tmp_path: Path) -> None:
    before = of(rope.from_pretrained(adapter, dtype=torch.float32))
    assert (before - of(plain(base))).abs().max() > 0.01
    to = CONVERTED[family]
    convert_in_place(base, to)
    with pytest.raises(CheckpointError) as error:
        rope.from_pretrained(adapter)
    command = str(error.value).split("`")[1].split()
    assert command[0] == "rope-ext"
    command[command.index("NEW")] = str(tmp_path / "converted")
    command[2] = str(adapter)  # the message shortens long paths
    outcome = CliRunner().invoke(app, command[1:])
    assert outcome.exit_code == 0, outcome.output
    assert stated(tmp_path / "converted") == to
    if family == "deepseek_v3":  # its class runs both pairings
        after = rope.from_pretrained(tmp_path / "converted", dtype=torch.float32)
        assert (of(after) - before).abs().max() < 1e-4 * before.std()
        after.save_pretrained(tmp_path / "again")
        assert stated(tmp_path / "again") == to


def test_a_model_that_was_converted_back_takes_its_first_adapters(family: str, base: Path, adapter: Path) -> None:
    before = of(rope.from_pretrained(adapter, dtype=torch.float32))
    first = "half" if CONVERTED[family] == "interleaved" else "interleaved"
    convert_in_place(base, CONVERTED[family])
    convert_in_place(base, first)
    assert (of(rope.from_pretrained(adapter, dtype=torch.float32)) == before).all()


@pytest.mark.parametrize("family", ["deepseek_v3"], indirect=True)
@pytest.mark.parametrize(
    "way", ["transformers", "from_pretrained", "load_model", "convert", "convert_adapted", "patched"]
)
def test_an_adapter_from_after_the_conversion_runs(way: str, family: str, base: Path, tmp_path: Path) -> None:
    first = build(family).eval()
    convert_in_place(base, "half")
    if way == "transformers":
        model = adapt(plain(base), base, family)
    elif way == "convert":
        model = adapt(rope.convert(first, "half"), base, family)
    elif way == "convert_adapted":
        model = rope.convert(adapt(first, base, family), "half")
    elif way == "patched":
        model = adapt(rope.patch(plain(base), "yarn", factor=4), base, family)
    else:
        model = adapt(load_model(base) if way == "load_model" else rope.from_pretrained(base), base, family)
    model.save_pretrained(tmp_path / "adapter")
    if way == "transformers":  # PEFT alone has saved it
        with pytest.raises(CheckpointError, match='write "rope_pairing": "half" into its adapter_config'):
            rope.from_pretrained(tmp_path / "adapter")
        state(tmp_path / "adapter", "half")
    assert stated(tmp_path / "adapter") == "half"
    loaded = rope.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert (of(loaded) - of(model)).abs().max() < 1e-5
    convert_in_place(base, "interleaved")
    with pytest.raises((CheckpointError, FingerprintError), match="pairing"):
        rope.from_pretrained(tmp_path / "adapter")


@pytest.mark.parametrize("family", ["deepseek_v3"], indirect=True)
def test_an_adapter_of_a_patched_model_states_its_pairing_in_the_record(
    family: str, base: Path, tmp_path: Path
) -> None:
    model = adapt(rope.patch(plain(base), "yarn", factor=4), base, family)
    before = of(model)
    model.save_pretrained(tmp_path / "adapter")
    assert stated(tmp_path / "adapter") is None
    convert_in_place(base, "half")
    with pytest.raises(FingerprintError, match="interleaved"):
        rope.from_pretrained(tmp_path / "adapter")
    rope.convert_checkpoint(tmp_path / "adapter", tmp_path / "converted", "half")  # from the recorded pairing
    after = of(rope.from_pretrained(tmp_path / "converted", dtype=torch.float32))
    assert (after - before).abs().max() < 1e-4 * before.std()


@pytest.mark.parametrize("family", ["deepseek_v3"], indirect=True)
def test_a_conversion_says_that_adapters_need_it_too(base: Path, adapter: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings(action="error"):
        report = rope.convert_checkpoint(base, tmp_path / "new", "half")
    assert "rope-ext convert ADAPTER NEW --to half --from interleaved" in " ".join(str(report).split())
    assert "ADAPTER" not in str(rope.convert_checkpoint(adapter, tmp_path / "other", "half"))
