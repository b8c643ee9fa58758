"""What is peculiar to vLLM's model files; checks/vllm_engine.py compares the rules with vLLM itself."""

from __future__ import annotations

import dataclasses
import json

import pytest

from rope_ext_hf.errors import (
    ServingError,
)
from rope_ext_hf.tools.engines.base import find_engine
from rope_ext_hf.tools.engines.keys import Computed
from rope_ext_hf.tools.serving.configs import make_target, open_model
from tests.support.every_model import tiny
from tests.tools.support.serving_models import serve, served_model

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_composite_config_is_overridden_inside_text_config() -> None:
    config = find_engine("vllm").config_for(make_target(served_model("Qwen3-VL"), "yarn", factor=4.0))
    assert config.overrides is not None
    settings = config.overrides["text_config"]["rope_parameters"]
    assert settings["mrope_section"] == [24, 20, 20]
    assert settings["original_max_position_embeddings"] == 262144
    assert settings["rope_theta"] == 5_000_000
    assert json.loads(config.command[-1]) == config.overrides
    assert config.command[:5] == ("vllm", "serve", "Qwen3-VL", "--max-model-len", "1048576")


def test_the_ramp_of_an_older_multimodal_family_is_quadrupled_by_vllm() -> None:
    target = make_target(served_model("Qwen3-VL"), "yarn", factor=4.0)
    older = dataclasses.replace(target, config={**target.config, "model_type": "qwen2_5_vl_text"})
    config = find_engine("vllm").config_for(older)
    assert config.overrides is not None
    settings = config.overrides["text_config"]["rope_parameters"]
    assert settings["original_max_position_embeddings"] == 262144 // 4


def test_a_linear_factor_is_applied_to_the_length_once() -> None:
    config = find_engine("vllm").config_for(make_target(served_model("Mistral"), "linear", factor=4.0))
    assert config.overrides is not None
    assert "max_position_embeddings" not in config.overrides
    assert config.computed is not None
    assert config.computed.length == 4 * 32768


@pytest.mark.parametrize("model_type", ["mimo_v2_flash", "minimax_m3_vl_text"])
def test_a_file_of_vllm_that_hands_on_theta_alone_serves_theta_alone(model_type: str) -> None:
    model = open_model(tiny(model_type.removesuffix("_text"), rope_parameters=None))
    assert serve("vllm", make_target(model))[0] is not None
    config, refusal = serve("vllm", make_target(model, "yarn", factor=4))
    assert config is None, refusal
    with pytest.raises(ServingError, match="hands on theta alone"):
        find_engine("vllm").with_plugin().config_for(make_target(model, "yarn", factor=4))


@pytest.mark.parametrize(("model_type", "runs_it"), [("llama", True), ("olmo2", False), ("starcoder2", False)])
def test_two_lists_are_not_those_of_the_classes_of_transformers_in_vllm(model_type: str, runs_it: bool) -> None:
    short, long = [1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0]
    settings = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 4.0}
    config = {"model_type": model_type, "max_position_embeddings": 256, "head_dim": 8}

    def computed(**lists: list[float]) -> Computed:
        return find_engine("vllm").computes(config | {"rope_parameters": settings | lists}, 256)

    same = computed(short_factor=long, long_factor=long)
    if runs_it:
        assert computed(short_factor=short, long_factor=long).inv_freq == same.inv_freq
    else:
        with pytest.raises(ServingError, match="takes the list of the longest input of a batch"):
            computed(short_factor=short, long_factor=long)
