"""Published recipes: which configs they fit, what transformers computes from their entries, what users are told."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import rope_ext_hf as rope
from rope_ext_hf.models.recipes import Recipe, find_recipe, recipes
from tests.support.tiers import needs_family
from tests.support.wrapped_text import unwrapped

FOLDER = Path(__file__).parents[2] / "conformance" / "configurations"
pytestmark = pytest.mark.filterwarnings("ignore:Unrecognized keys")
BY_NAME = {recipe.name: recipe for recipe in recipes()}
PLAIN = {"rope_scaling": None}
FITTING: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5-7b-yarn": ("Qwen2.5 (7B and larger)", PLAIN | {"hidden_size": 3584}),
    "qwen3-8b-yarn": ("Qwen3", PLAIN),
    "qwen3-vl-8b": ("Qwen3-VL", {}),
    "llama-3.1": ("Llama 3.1, 3.2 and 3.3", {}),
    "llama-3.2": ("Llama 3.1, 3.2 and 3.3", {}),
    "qwen3.5-9b": ("Qwen3.5 and Qwen3.6", {}),
    "qwen4_exp_text": ("Qwen3.8-Flash-Next", {"max_position_embeddings": 262144}),
    "glm_moe_dsa": ("GLM-5", {}),
    "gemma-3-4b": ("Gemma 3 (4B and larger)", {}),
    "gpt-oss-20b": ("gpt-oss", {}),
    "deepseek-v3": ("DeepSeek-V3", {}),
    "phi-3-mini-128k": ("Phi-3 128k and Phi-4-mini", {}),
    "qwen2.5-7b-yarn ": ("", PLAIN),  # another size
    "qwen3-8b-yarn ": ("", {}),  # the entry stands in it already
    "mistral-7b-v0.3": ("", {}),
    "vicuna-7b-16k": ("", {}),
    "ministral-3": ("", {}),
}
"""Published configs, the recipe of each, and what of the file is changed; without a file, the defaults of a class."""


def config_of(file: str, changes: dict[str, Any]) -> Any:
    path = FOLDER / f"{file.strip()}.json"
    published = json.loads(path.read_text(encoding="utf-8"))["config"] if path.exists() else {"model_type": file}
    values = published | changes
    needs_family(values["model_type"])
    return AutoConfig.for_model(values.pop("model_type"), **values).get_text_config()


def published(recipe: Recipe) -> Any:
    """Return the published config that a recipe is for."""
    file, changes = next((file, changes) for file, (name, changes) in FITTING.items() if name == recipe.name)
    return config_of(file, changes)


def qwen3(**changes: Any) -> Any:
    """A tiny model with the context of Qwen/Qwen3-8B."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of("qwen3-8b-yarn", PLAIN | changes))


@pytest.mark.parametrize("file", FITTING)
def test_recipes_fit_published_configs(file: str) -> None:
    name, changes = FITTING[file]
    actual = find_recipe(config_of(file, changes))
    assert (actual.name if actual else "") == name


def test_every_recipe_states_what_it_needs() -> None:
    assert len(BY_NAME) == len(recipes())
    for recipe in recipes():
        assert recipe.source.startswith("https://")
        assert (recipe.entry is None) == (recipe.extended_length is None)
        assert "max_position_embeddings" in recipe.where
        if recipe.entry:
            assert recipe.entry["original_max_position_embeddings"] == recipe.context_length
            assert (recipe.extended_length or 0) > recipe.context_length


@pytest.mark.parametrize("name", [name for name, recipe in BY_NAME.items() if recipe.entry])
def test_the_arguments_give_what_transformers_computes_from_the_entry(name: str) -> None:
    recipe = BY_NAME[name]
    assert recipe.entry is not None
    config = published(recipe)
    assert find_recipe(config) is recipe
    with torch.device("meta"):
        model = AutoModel.from_config(copy.deepcopy(config))
    actual = rope.describe(rope.patch(model, **recipe.arguments(config.max_position_embeddings)))
    config.rope_parameters = config.rope_parameters | recipe.entry
    inv_freq, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    torch.testing.assert_close(2 * torch.pi / torch.tensor(actual.wavelengths), inv_freq, rtol=2e-6, atol=0)
    assert actual.attention_factor == pytest.approx(magnitude, rel=1e-6)


def test_a_model_is_described_with_its_recipe() -> None:
    model = qwen3()
    expected = "yarn with factor 4 over 32,768 tokens, for 131,072. "
    expected += "To get that: method='yarn', context_length=32768, target_length=131072."
    assert expected in (rope.describe(model).recipe or "")
    assert expected in unwrapped(rope.describe(model))
    with pytest.warns(UserWarning, match="this patch is not the published one.*context_length=32768"):
        rope.patch(model, "yarn", target_length=131072, context_length=40960)  # factor 3.2
    assert expected in (rope.describe(model).recipe or "")
    with pytest.warns(UserWarning, match="not the published one"):
        rope.patch(model, "yarn", factor=4, context_length=40960)  # for 163,840
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rope.patch(model, "yarn", target_length=65536)  # the published base
        rope.patch(model, "yarn", target_length=131072)
    assert rope.describe(model).recipe == f"This is as published for Qwen3: {BY_NAME['Qwen3'].source}"
    rope.unpatch(model)
    assert expected in (rope.describe(model).recipe or "")
    assert rope.describe(qwen3(max_position_embeddings=4096)).recipe is None


def test_a_config_that_states_more_than_its_publisher_is_named() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("deepseek-v3", {}))
        llama = AutoModelForCausalLM.from_config(config_of("llama-3.1", {}))
    stated = rope.describe(model).recipe or ""
    assert "131,072 tokens; its config states 163,840. To extend from there: context_length=131072." in stated
    assert rope.describe(llama).recipe is None
