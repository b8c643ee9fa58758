"""Models without a slot: each refusal says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.reference import path
from tests.support.models import build

SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "gptj": ({"n_layer": 1, "n_head": 2, "n_embd": 64, "rotary_dim": 16}, "attention layers compute angles themselves"),
    "codegen": (
        {"n_layer": 1, "n_head": 4, "n_embd": 64, "rotary_dim": 8},
        "attention layers compute angles themselves",
    ),
    "gpt2": ({"n_layer": 1, "n_head": 2, "n_embd": 64}, "it knows positions in another way, or not at all"),
    "bloom": ({"n_layer": 1, "n_head": 2, "hidden_size": 64}, "it knows positions in another way, or not at all"),
}


NO_MODELS = {
    "a class": (LlamaForCausalLM, "LlamaForCausalLM is a class: load a model with it"),
    "a config": (LlamaConfig(), "LlamaConfig is the config of a model: load the model"),
    "None": (None, "expected a loaded transformers model, got NoneType"),
    "weights": ({}, "expected a loaded transformers model, got dict"),
    "a module": (torch.nn.Linear(2, 2), "Linear is not a transformers model: it has no config"),
}


@pytest.mark.parametrize("case", NO_MODELS)
def test_what_is_no_model_is_named(case: str) -> None:
    thing, message = NO_MODELS[case]
    calls: list[Any] = [lambda model: rope.patch(model, "yarn", factor=4.0), rope.describe]
    if case != "a module":  # nothing in it is patched, so that there is nothing to take off
        calls += [rope.unpatch, rope.reset]
    for call in calls:
        with pytest.raises(UnsupportedModelError, match=message):
            call(thing)


def test_a_pipeline_names_its_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(path())
    pipe = transformers.pipeline("text-generation", model=build("llama"), tokenizer=tokenizer)
    with pytest.raises(UnsupportedModelError, match=r"TextGenerationPipeline holds a model: give its \.model"):
        rope.patch(pipe, "yarn", factor=4.0)
    rope.patch(pipe.model, "yarn", factor=4.0)


@pytest.mark.parametrize("model_type", ["t5", "mamba"])
def test_models_without_rotary_positions_are_told_nothing_untrue(model_type: str) -> None:
    sizes: dict[str, Any] = {"num_layers": 1, "num_hidden_layers": 1, "d_model": 16, "hidden_size": 16}
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(model_type, **sizes))
    with pytest.raises(UnsupportedModelError, match="knows positions in another way, or not at all"):
        rope.patch(model, "yarn", factor=2)


@pytest.mark.parametrize("model_type", SIZES)
def test_a_refusal_names_why_nothing_can_be_replaced(model_type: str) -> None:
    sizes, reason = SIZES[model_type]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    with pytest.raises(UnsupportedModelError, match=reason):
        rope.patch(model, "yarn", factor=2)
