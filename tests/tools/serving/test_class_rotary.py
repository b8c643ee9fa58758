"""The class of a model, run for a config: its frequencies are those of the method that the config states."""

from __future__ import annotations

import pytest
import torch

import rope_ext_hf as rope
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.tools.serving.class_rotary import ClassRotary
from tests.support.models import build


def test_the_class_computes_the_frequencies_of_its_config() -> None:
    model = build("llama")
    computed = ClassRotary(model.config)
    inv_freq, magnitude = computed.at(64)
    expected = rope.frequencies("default", ModelRope.of_model(model).rotary)
    assert torch.allclose(torch.tensor(inv_freq, dtype=torch.float64), expected.inv_freq, rtol=4e-6)
    assert magnitude == pytest.approx(expected.attention_factor)
    assert (computed.context_length, computed.softmax_scale, computed.note) == (
        ModelRope.of_model(model).rotary.context_length,
        1.0,
        None,
    )
