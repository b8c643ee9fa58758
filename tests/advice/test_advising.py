"""The models that people extend most, by their published configs: no two commands contradict each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

import rope_ext_hf as rope
from rope_ext_hf.advice.extending import plan_extension
from rope_ext_hf.advice.questions import Extending
from rope_ext_hf.errors import CheckpointError, MethodError, ServingError, UnsupportedModelError
from rope_ext_hf.serving.audit import audit
from tests.support.models import build
from tests.support.serving_models import FOLDER

K = 1024
MISTRAL = {"num_hidden_layers": 32, "num_key_value_heads": 8}
QWEN = {"rope_scaling": None, "num_attention_heads": 32, "num_key_value_heads": 8}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama 3.1": ("llama-3.1", {}, 128 * K),
    "Llama 3.2": ("llama-3.2", {}, 128 * K),
    "Qwen2.5 7B": ("qwen2.5-7b-yarn", QWEN | {"hidden_size": 3584, "num_hidden_layers": 28}, 32 * K),
    "Qwen3": ("qwen3-8b-yarn", QWEN | {"num_hidden_layers": 36}, 32 * K),
    "Mistral 7B v0.3": ("mistral-7b-v0.3", MISTRAL, 32 * K),
    "Gemma 3": ("gemma-3-4b", {"layer_types": None, "num_hidden_layers": 34}, 128 * K),
    "gpt-oss": ("gpt-oss-20b", {"layer_types": None, "num_hidden_layers": 24}, 128 * K),
    "Phi-3 128k": ("phi-3-mini-128k", {}, 128 * K),
    "DeepSeek-V3": ("deepseek-v3", {"kv_lora_rank": 512}, 160 * K),
    "Qwen3-VL": ("qwen3-vl-8b", {}, 256 * K),
}
"""File, sizes that matter, and the context length: of a plain model the published one, of a scaled one its config's."""
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def folder_of(tmp_path: Path, file: str, **sizes: Any) -> Path:
    config = json.loads((FOLDER / f"{file}.json").read_text(encoding="utf-8"))["config"] | sizes
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("length", [64 * K, 128 * K, 256 * K, 512 * K])
@pytest.mark.parametrize("name", MODELS)
def test_advise_extend_and_serve_config_agree(name: str, length: int, tmp_path: Path) -> None:
    """They agree on what is needed, on the length that is extended, and on the factor."""
    file, sizes, stated = MODELS[name]
    folder = folder_of(tmp_path, file, **sizes)
    advice = rope.advise(folder, length)
    assert advice.context_length == stated
    assert bool(advice.methods) == (length > stated)
    for asked in (extend, serve):
        try:
            found = asked(folder, length)
        except MethodError:  # nothing to extend
            assert length <= stated
        except ServingError:
            assert "vllm" not in advice.served
        else:
            assert length > stated
            assert found == (advice.served["vllm"], length / stated)


def extend(folder: Path, length: int) -> tuple[str, float]:
    plan = plan_extension(str(folder), Extending(target_length=length))
    return plan.method, plan.target_length / plan.context_length


def serve(folder: Path, length: int) -> tuple[str, float]:
    config = rope.serving_config(folder, "vllm", "yarn", target_length=length)
    name, _, factor = config.method.partition(" x")
    return name, float(factor)


@pytest.mark.parametrize(("length", "factor"), [(128 * K, 4.0), (256 * K, 8.0)])
def test_the_published_base_of_qwen3_holds_in_every_command(length: int, factor: float, tmp_path: Path) -> None:
    """32,768 tokens; its config states 40,960."""
    file, sizes, _ = MODELS["Qwen3"]
    folder = folder_of(tmp_path, file, **sizes)
    plan = plan_extension(str(folder), Extending(target_length=length))
    assert (plan.method, plan.context_length) == ("yarn", 32 * K)
    assert ("and not for more" in plan.reason) == (length > 128 * K)
    assert serve(folder, length) == ("yarn", factor)
    assert any("ublished for Qwen3" in note for note in rope.advise(folder, length).notes)
    stated = rope.serving_config(folder, "vllm", "yarn", target_length=length, context_length=40960)
    assert any("not the published one" in note for note in stated.notes)


def test_a_patch_has_the_published_base() -> None:
    theta = {"rope_type": "default", "rope_theta": 1e6}
    shape: dict[str, Any] = {"max_position_embeddings": 40960, "rope_parameters": theta}
    model = rope.patch(build("qwen3", **shape), "yarn", factor=4)
    described = rope.describe(model)
    assert (described.context_length, described.extended_length) == (32 * K, 128 * K)
    assert described.context_rule == "as published"
    assert described.recipe is not None
    assert described.recipe.startswith("This is as published")
    with pytest.warns(UserWarning, match="not the published one"):
        rope.patch(build("qwen3", **shape), "yarn", factor=4, context_length=40960)


def test_a_model_whose_every_layer_sees_a_window_is_refused_everywhere(tmp_path: Path) -> None:
    """Mistral 7B v0.1: 4,096 tokens in each of 32 layers."""
    folder = folder_of(tmp_path, "mistral-7b-v0.3", **MISTRAL, sliding_window=4096, rope_theta=1e4)
    for asked in (
        lambda: rope.advise(folder, 64 * K),
        lambda: plan_extension(str(folder), Extending(target_length=64 * K)),
        lambda: rope.serving_config(folder, "vllm", "yarn", target_length=64 * K),
        lambda: rope.patch(build("mistral", sliding_window=32), "yarn", factor=4),
        lambda: rope.patch(build("mistral", sliding_window=32), "self-extend"),
    ):
        with pytest.raises(UnsupportedModelError, match="every layer of this model has a sliding window of"):
            asked()
    assert rope.describe(build("mistral", sliding_window=32)).rotating_layers == (0, 0)
    forced = rope.patch(build("mistral", sliding_window=32), "yarn", factor=4, layers="sliding_attention")
    assert rope.describe(forced).extended_length == 256
    rope.patch(build("mistral", sliding_window=4096), "yarn", factor=4)  # no input of the model reaches beyond it


def test_what_vllm_alone_cannot_serve_names_its_cause_once_and_the_plug_in(tmp_path: Path) -> None:
    file, sizes, _ = MODELS["gpt-oss"]
    folder = folder_of(tmp_path, file, **sizes)
    with pytest.raises(ServingError, match=r"hands on YaRN's keys alone.* --plugin") as error:
        rope.serving_config(folder, "vllm", "yarn", target_length=256 * K)
    assert str(error.value).count("beta_fast") == 1
    assert rope.serving_config(folder, "vllm", "yarn", target_length=256 * K, plugin=True).length == 256 * K


def test_an_adapter_is_refused_in_one_sentence_by_all(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "base")
    adapter = get_peft_model(build("llama"), LoraConfig(target_modules=["q_proj"]))
    adapter.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapter.save_pretrained(tmp_path / "adapter")
    said = set()
    for asked in (
        lambda path: rope.advise(path, 256),
        lambda path: plan_extension(str(path), Extending(target_length=256)),
        lambda path: rope.serving_config(path, "vllm"),
        audit,
    ):
        with pytest.raises(CheckpointError, match="merge it") as error:
            asked(tmp_path / "adapter")
        said.add(str(error.value))
    assert len(said) == 1
