"""`ModelRope` of models, patched or not, of configs, and of folders that record a patch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.patches.model_rope import ModelRope
from tests.support.every_model import tiny
from tests.support.model_checks import state
from tests.support.models import TRAINED, build

FAMILIES = ("llama", "qwen2", "gemma2", "gemma3", "gpt_neox", "phi3")


def test_a_model_as_loaded() -> None:
    model = build("llama")
    before = state(model)
    read = ModelRope.of_model(model)
    assert read.rotary == Rotary(read.rotary.dim, 10_000.0, TRAINED)
    assert (read.layer_types, read.patches, read.is_patched) == ((None,), (), False)
    assert [slot.module for slot in read.slots] == [model.model.rotary_emb]
    assert read.pairing == "half"
    assert read.own_length_dependent is None
    assert state(model) == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_says_the_same_as_its_model(family: str) -> None:
    model = build(family)
    of_model, of_config = ModelRope.of_model(model), ModelRope.of_config(model.config.get_text_config())
    assert of_config.rotary == of_model.rotary
    assert of_config.layer_types == of_model.layer_types
    assert of_config.pairing == of_model.pairing
    assert of_config.extending("original").rotary == of_model.extending("original").rotary
    with pytest.raises(MethodError, match="needs the model itself"):
        of_config.extending("patched")


def test_a_patched_model_says_what_it_said_before() -> None:
    model = build("llama")
    before = ModelRope.of_model(model)
    rope.patch(model, "yarn", factor=4)
    read = ModelRope.of_model(model)
    assert read.rotary == before.rotary
    assert read.config is before.config
    assert read.is_patched
    assert [patch.method.name for patch in read.patches] == ["yarn"]
    over = read.extending("patched")
    assert over.rotary == before.rotary.scaled(read.patches[0].method, context_length=4 * TRAINED)
    assert over.below == read.patches


def test_a_folder_that_plain_transformers_has_loaded(tmp_path: Path) -> None:
    model = build("llama")
    before = ModelRope.of_model(model)
    rope.patch(model, "yarn", factor=4).save_pretrained(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    as_loaded = copy.deepcopy(loaded.config.to_dict())
    read = ModelRope.of_model(loaded)
    assert read.rotary == before.rotary
    assert [patch.method.name for patch in read.patches] == ["yarn"]
    assert not read.is_patched
    assert read.config.max_position_embeddings == TRAINED
    assert read.extending("patched").below == read.patches
    assert loaded.config.to_dict() == as_loaded


def test_layers_that_a_method_is_for() -> None:
    model = build("gemma3")
    full, sliding = ModelRope.of_model(model), ModelRope.of_model(model, "sliding_attention")
    assert (full.layer_types, sliding.layer_types) == (("full_attention",), ("sliding_attention",))
    assert full.rotary.theta != sliding.rotary.theta
    several = ModelRope.of_model(model, ["full_attention", "sliding_attention"])
    with pytest.raises(UnsupportedModelError, match="one method needs one rotary embedding"):
        several.rotary  # noqa: B018


def test_a_scaling_that_follows_the_length() -> None:
    assert (
        ModelRope.of_model(build("llama", {"rope_type": "dynamic", "factor": 4.0})).own_length_dependent
        == "dynamic-ntk"
    )


def test_weights_of_a_class_without_a_rotary_module() -> None:
    model = tiny("gptj")
    with pytest.raises(UnsupportedModelError):
        ModelRope.of_model(model)
    read = ModelRope.of_checkpoint(model.config, model)
    assert read.rotary.dim == model.config.rotary_dim
    assert read.slots == ()
