"""A model that is known by its config alone plans what `patch` does to the model itself."""

from __future__ import annotations

import pytest
import torch

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.patches.slots.patched_slot import active_patches
from rope_ext_hf.tools.serving.config_model import ConfigModel
from tests.support.every_model import tiny
from tests.support.models import build


def test_the_planned_patch_is_the_one_that_patch_applies() -> None:
    model = build("llama")
    planned = ConfigModel(model.config)
    patch = planned.planned_patch("yarn", factor=4)
    config = planned.patched_config(patch).to_dict()
    rope.patch(model, "yarn", factor=4)
    assert [patch] == list(active_patches(model))
    assert config["rope_parameters"] == model.config.to_dict()["rope_parameters"]
    assert config["max_position_embeddings"] == 4 * planned.rope.embedding.context_length


def test_a_patched_model_is_taken_without_its_patch() -> None:
    model = build("llama")
    before = ConfigModel(model.config).rope.embedding
    rope.patch(model, "yarn", factor=4)
    config, patches = ConfigModel.parts_of(model)
    assert [each.method.name for each in patches] == ["yarn"]
    assert ConfigModel(config, patches).rope.embedding == before


def test_methods_are_tried_on_a_small_model_of_the_class() -> None:
    planned = ConfigModel(build("llama").config)
    assert planned.can_be_tried
    assert planned.refusal("rerope", factor=4) is None
    assert planned.softmax_scale == 1.0


def test_what_the_whole_model_refuses_is_known_without_its_weights() -> None:
    """The text config of T5Gemma, that of its decoder, does not tell that its encoder has a rotary module, too."""
    model = tiny("t5gemma")
    with torch.device("meta"):
        empty = type(model)(model.config)
    planned = ConfigModel(model.config.get_text_config(), whole=lambda: empty)
    announced = planned.refusal("learnable")
    with pytest.raises(UnsupportedModelError) as refused:
        rope.patch(model, "learnable")
    assert str(announced) == str(refused.value)
    assert planned.refusal("yarn", factor=4.0) is None
    rope.patch(model, "yarn", factor=4)
