"""What `advise` names is what `patch` takes: its candidates against living models, method by method."""

from __future__ import annotations

from typing import Any

import pytest

from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.models.model_classes import empty_model
from rope_ext_hf.patches.patching import patch, unpatch
from rope_ext_hf.patches.small_replica import small_replica
from rope_ext_hf.tools.advice.advising import advise
from rope_ext_hf.tools.advice.guidance import guidance_of
from tests.support.every_model import tiny

pytestmark = pytest.mark.filterwarnings("ignore")
REFUSING = ("qwen4_exp", "deepseek_v32", "glm_moe_dsa", "doge", "minimax", "phimoe", "hunyuan_v1_dense")
TAKING = ("llama", "qwen3", "gpt_oss", "deepseek_v3", "gemma3_text", "phi3", "mistral4")


def refused(model: Any, method: str, length: int) -> bool:
    try:
        patch(model, method, target_length=length)
    except (MethodError, UnsupportedModelError):
        return True
    unpatch(model)
    return False


@pytest.mark.parametrize("model_type", [*REFUSING, *TAKING])
def test_advise_names_no_method_that_patch_refuses(model_type: str) -> None:
    try:
        model = tiny(model_type)
    except StopIteration:
        pytest.skip("this transformers has no such family")
    length = 4 * model.config.get_text_config().max_position_embeddings
    advice = advise(empty_model(model.config), length)
    named = {each.method for each in advice.methods if each.kind}
    chosen = {name for names in advice.choices.values() for name in names} | set(advice.served.values())
    guided = {name for name in list_methods() if (known := guidance_of(name)) and not known.unrotated}
    taken = {name for name in guided if not refused(model, name, length)}
    assert chosen <= taken
    assert taken == named
    if model_type in REFUSING:
        assert not {"rerope", "dca", "jet-long"} & named


@pytest.mark.parametrize("model_type", [*REFUSING, *TAKING])
def test_a_stand_in_is_small_and_of_the_class_of_its_config(model_type: str) -> None:
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers has no such family")
    config = transformers.CONFIG_MAPPING[model_type]().get_text_config()
    model = small_replica(config.to_json_string(use_diff=False))
    if model is None:
        assert model_type == "qwen4_exp"  # whose published sizes are in no default
        return
    assert sum(each.numel() for each in model.parameters()) < 50_000_000
    assert model.config.model_type == config.model_type
    kinds = set(getattr(config, "layer_types", None) or ())
    assert set(getattr(model.config, "layer_types", None) or ()) == kinds
