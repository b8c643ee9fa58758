"""A small model of the family refuses, in place of one without weights, what `patch` refuses on the loaded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.options.method_choice import LayerChoice
from rope_ext_hf.patches.small_replica import refusal, small_replica
from rope_ext_hf.runs.chosen_methods import apply_choice
from tests.support.every_model import tiny

pytestmark = pytest.mark.filterwarnings("ignore")
REFUSING = ("deepseek_v32", "glm_moe_dsa", "doge", "minimax", "phimoe", "hunyuan_v1_dense", "qwen4_exp", "dory")
TAKING = ("llama", "qwen3", "gpt_oss", "deepseek_v3", "phi3", "gpt_neox", "helium", "diffllama", "dbrx", "bamba")
FAST = ("doge", "phimoe", "llama", "helium")
REMAPPING = [name for name, cls in list_methods().items() if issubclass(cls, RemappingMethod)]
METHODS = (*REMAPPING, "dynamic-ntk", "dynamic-yarn", "yarn", "linear")


def without_weights(model: Any) -> Any:
    with torch.device("meta"):
        return type(model)(model.config)


def long(model: Any) -> int:
    return 4 * int(model.config.get_text_config().max_position_embeddings)


def error_of(apply: Any, model: Any) -> str | None:
    try:
        apply()
    except (MethodError, UnsupportedModelError) as error:
        return str(error)
    rope.unpatch(model)
    return None


@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in (*REFUSING, *TAKING)],
)
def test_a_model_without_weights_is_refused_what_it_is_refused_with_them(model_type: str) -> None:
    model = tiny(model_type)
    empty, length, refusals = without_weights(model), long(model), {}
    for method in METHODS:
        expected = error_of(lambda: rope.patch(model, method, target_length=length), model)  # noqa: B023
        choice = LayerChoice(method=method, target_length=length)
        actual = error_of(lambda: apply_choice(choice, empty), empty)  # noqa: B023
        assert (actual and actual.split()[0]) == (expected and expected.split()[0])  # the class that refuses
        rope.unpatch(empty)
        refusals[method] = expected
    assert bool(refusals["rerope"]) == (model_type in REFUSING)
    assert not refusals["yarn"]


def test_a_family_of_which_no_small_model_is_built_is_not_refused() -> None:
    empty = without_weights(tiny("emu3"))
    config = empty.config.get_text_config()
    assert small_replica(config.to_json_string(use_diff=False)) is None
    apply_choice(LayerChoice(method="rerope", target_length=long(empty)), empty)
    assert rope.describe(empty).method == "rerope"


def test_layers_are_those_of_the_model() -> None:
    """The number of a layer counts in the model, which has more layers than the small one."""
    sizes: dict[str, Any] = {"num_hidden_layers": 12, "layer_types": ["full_attention"] * 12}
    for model_type, refused in (("qwen3", False), ("doge", True)):
        empty = without_weights(tiny(model_type, **sizes if model_type == "qwen3" else {"num_hidden_layers": 12}))
        choice = LayerChoice(method="dca", target_length=long(empty), layers="0,1,2,3,4,5,6,7,8,9,10,11")
        assert bool(error_of(lambda: apply_choice(choice, empty), empty)) == refused  # noqa: B023


def test_a_patch_over_a_patch_is_tried_with_both() -> None:
    for model_type, refused in (("llama", False), ("phimoe", True)):
        empty = rope.patch(without_weights(tiny(model_type)), "linear", factor=2)
        choice = LayerChoice(method="rerope", target_length=2 * long(empty), over="patched")
        assert bool(error_of(lambda: apply_choice(choice, empty), empty)) == refused  # noqa: B023


def test_a_table_of_angles_that_is_a_parameter_stays_as_it_is() -> None:
    """RoFormer's table is a parameter that is not trained; with random numbers in it, every method would be refused."""
    model = tiny("roformer")
    rope.patch(model, "yarn", factor=4)
    assert refusal(rope.unpatch(model).config, "yarn", factor=4.0) is None
