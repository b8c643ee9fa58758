"""Slots: what is said of models that have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError

SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "gptj": ({"n_layer": 1, "n_head": 2, "n_embd": 64, "rotary_dim": 16}, "attention layers compute angles themselves"),
    "codegen": (
        {"n_layer": 1, "n_head": 4, "n_embd": 64, "rotary_dim": 8},
        "attention layers compute angles themselves",
    ),
    "gpt2": ({"n_layer": 1, "n_head": 2, "n_embd": 64}, "positions are learned, absolute or ALiBi"),
    "bloom": ({"n_layer": 1, "n_head": 2, "hidden_size": 64}, "positions are learned, absolute or ALiBi"),
}


@pytest.mark.parametrize("model_type", SIZES)
def test_a_refusal_names_why_nothing_can_be_replaced(model_type: str) -> None:
    sizes, reason = SIZES[model_type]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))
    with pytest.raises(UnsupportedModelError, match=reason):
        rope.patch(model, "yarn", factor=2)
