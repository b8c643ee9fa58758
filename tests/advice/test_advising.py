"""The models that people extend most, by their published configs: no two commands contradict each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

import rope_ext_hf as rope
from docs.figures.recipes import published_config
from rope_ext_hf.advice.extending import plan_extension
from rope_ext_hf.advice.questions import Extending
from rope_ext_hf.errors import CheckpointError, MethodError, ServingError, UnsupportedModelError
from rope_ext_hf.hub import load_empty
from rope_ext_hf.patches.recipes import Recipe, recipes
from rope_ext_hf.serving.audit import audit
from tests.support.models import build
from tests.support.serving_models import PUBLISHED

K = 1024
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.mark.parametrize("length", [64 * K, 128 * K, 256 * K, 512 * K])
@pytest.mark.parametrize("name", PUBLISHED)
def test_need_advise_extend_and_serve_config_agree(name: str, length: int, tmp_path: Path) -> None:
    """They agree on what is needed, on the length that is extended, and on the factor."""
    stated, folder = PUBLISHED[name].context_length, PUBLISHED[name].write(tmp_path)
    advice = rope.advise(folder, length)
    assert (
        advice.context_length == stated == rope.describe(load_empty(folder)).context_length
    )  # what `need` starts from
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
    folder = PUBLISHED["Qwen3"].write(tmp_path)
    plan = plan_extension(str(folder), Extending(target_length=length))
    assert (plan.method, plan.context_length) == ("yarn", 32 * K)
    assert ("and not for more" in plan.reason) == (length > 128 * K)
    assert serve(folder, length) == ("yarn", factor)
    assert any("ublished for Qwen3" in note for note in rope.advise(folder, length).notes)
    stated = rope.serving_config(folder, "vllm", "yarn", target_length=length, context_length=40960)
    assert any("not the published one" in note for note in stated.notes)


@pytest.mark.parametrize("recipe", [each for each in recipes() if each.entry], ids=lambda recipe: recipe.name)
def test_no_command_misses_a_published_recipe(recipe: Recipe, tmp_path: Path) -> None:
    """At the published length, each leads to the published entry and names who published it."""
    length = recipe.arguments(recipe.stated_length).get("target_length") or 2 * recipe.context_length
    published_config(recipe).save_pretrained(tmp_path)
    entry = recipe.entry or {}
    advice = rope.advise(tmp_path, length)
    assert advice.context_length == recipe.context_length
    assert any(f"ublished for {recipe.name}" in note for note in advice.notes)
    assert f"as published for {recipe.name}" in advice.commands
    assert entry["rope_type"] in advice.choices["to serve it without training"]
    plan = plan_extension(str(tmp_path), Extending(target_length=length))
    assert plan.reason.startswith(f"yarn over {recipe.context_length:,} tokens is published for {recipe.name}")
    assert (plan.method, plan.context_length) == (entry["rope_type"], recipe.context_length)
    served = rope.serving_config(tmp_path, "vllm", **recipe.arguments(recipe.stated_length))
    written = served.overrides or served.config_keys
    rope_parameters = written.get("text_config", written)["rope_parameters"]
    assert {key: rope_parameters[key] for key in entry} == entry
    assert not any("not the published one" in note for note in served.notes)


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
    mistral = PUBLISHED["Mistral 7B"]
    folder = mistral._replace(sizes=mistral.sizes | {"sliding_window": 4096, "rope_theta": 1e4}).write(tmp_path)
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
    folder = PUBLISHED["gpt-oss"].write(tmp_path)
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
