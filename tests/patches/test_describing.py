"""`describe`: the method, the lengths and the notes of plain and patched models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.static import Yarn
from tests.support.every_model import tiny
from tests.support.model_checks import LONG, every_family, state
from tests.support.models import (
    THETA,
    TRAINED,
    build,
    dynamic_cases,
    logits,
    tokens,
)
from tests.support.wrapped_text import unwrapped

ROOT = Path(__file__).parent.parent.parent


# --- notes on sliding layers --------------------------------------------------------------------------------------


def test_every_layer_sliding_is_a_warning_where_it_is_asked_for() -> None:
    model = build("mistral", sliding_window=32)
    with pytest.warns(UserWarning, match="last 32 tokens"):
        rope.patch(model, "yarn", factor=4, layers="sliding_attention")
    (note,) = rope.describe(model).notes
    assert "32" in note
    assert note in unwrapped(rope.describe(model))


def test_a_window_that_is_not_reached_is_no_warning() -> None:
    model = build("mistral", sliding_window=LONG)
    rope.patch(model, "yarn", factor=4)  # warnings are errors here
    assert rope.describe(model).notes == ()


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2"])
def test_some_layers_sliding_is_a_note(name: str) -> None:
    settings: dict[str, Any] = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
    if name != "gemma2":
        settings["use_sliding_window"] = True
    model = rope.patch(build(name, **settings), "yarn", factor=4)
    (note,) = rope.describe(model).notes
    assert "1 of 2 layers" in note
    assert "32" in note
    assert "share" in note


# --- descriptions -------------------------------------------------------------------------------------------------


# --- what is said -------------------------------------------------------------------------------------------------


def test_describe_a_plain_model() -> None:
    seen = rope.describe(build("llama"))
    assert (seen.model_type, seen.method, seen.params, seen.pairing) == ("llama", "default", {}, "half")
    assert (seen.trained_length, seen.extended_length, seen.patched) == (TRAINED, TRAINED, False)
    assert (seen.attention_factor, seen.theta) == (1.0, THETA)
    assert seen.wavelengths == pytest.approx([2 * math.pi * THETA ** (2 * i / 16) for i in range(8)])
    assert "as loaded" in str(seen)


def test_describe_a_patched_model() -> None:
    seen = rope.describe(rope.patch(build("glm"), "yarn", factor=4, beta_fast=8))
    assert (seen.model_type, seen.method, seen.pairing) == ("glm", "yarn", "interleaved")
    assert (seen.trained_length, seen.extended_length, seen.patched) == (TRAINED, LONG, True)
    assert seen.params["factor"] == 4
    assert seen.params["beta_fast"] == 8
    assert seen.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
    assert seen.wavelengths[0] == pytest.approx(2 * math.pi)
    assert seen.wavelengths[-1] == pytest.approx(4 * 2 * math.pi * THETA ** (6 / 8))
    text = str(seen)
    for part in ("glm", "yarn", "factor=4", "interleaved", "64 tokens", "256 tokens", "1.1386", "'yarn'"):
        assert part in text, part


@every_family
@pytest.mark.parametrize("method", ["longrope", "hf"])
def test_descriptions_are_json(name: str, method: str) -> None:
    chosen, params = dynamic_cases(name)[method]
    seen = rope.describe(rope.patch(build(name), chosen, **params))
    read = json.loads(json.dumps(seen.to_dict(), allow_nan=False))
    assert read["method"] == seen.method
    assert tuple(read["wavelengths"]) == seen.wavelengths
    if method == "hf":
        assert "rope_ext_hf/dynamic-ntk" in seen.save_route
        assert "rope_ext_hf.from_pretrained" in seen.save_route


def test_a_description_with_pairs_that_do_not_turn_is_json() -> None:
    seen = rope.describe(build("llama", {"rope_type": "proportional", "partial_rotary_factor": 0.5}))
    assert seen.wavelengths[:4] == pytest.approx([2 * math.pi * THETA ** (2 * i / 16) for i in range(4)])
    assert seen.wavelengths[4:] == (math.inf,) * 4
    json.dumps(seen.to_dict(), allow_nan=False)


def test_describe_dynamic_extends_with_the_input_unless_told() -> None:
    model = build("llama")
    assert rope.describe(rope.patch(model, "dynamic-ntk")).extended_length is None
    assert "no fixed limit" in str(rope.describe(model))
    seen = rope.describe(rope.patch(model, "dynamic-ntk", target_length=8 * TRAINED))
    assert seen.extended_length == 8 * TRAINED


def test_describe_does_not_touch_the_model() -> None:
    model = rope.patch(build("gemma3"), "yarn", factor=4)
    before, out = state(model), logits(model, tokens(LONG))
    rope.describe(model)
    assert state(model) == before
    assert torch.equal(logits(model, tokens(LONG)), out)


def test_a_model_whose_full_attention_layers_do_not_rotate_needs_no_patch() -> None:
    """Cohere 2 rotates in its sliding-window layers alone."""
    model = tiny("cohere2")
    first, second = rope.describe(model).notes
    assert "None of the 1 full-attention layers rotates" in first
    assert "longer inputs need no patch" in first
    assert second == "1 of 2 layers attend to the last 32 tokens only; of all layers, they alone rotate."
    with pytest.raises(UnsupportedModelError, match="so longer inputs need no patch"):
        rope.patch(model, "yarn", factor=4)
    assert not any("no patch" in note for note in rope.describe(tiny("smollm3")).notes)


def test_that_a_patch_changes_short_inputs_is_stated() -> None:
    model = build("llama")  # for 64 tokens
    text, *_ = rope.describe(rope.patch(model, "yarn", factor=3)).short_inputs  # the tool box may add one
    assert text.startswith("Inputs within the context length change as well, and mostly get worse: `rope-ext ppl` ")
    assert text in unwrapped(rope.describe(model))
    assert rope.describe(rope.patch(model, "rerope")).short_inputs == (
        "Inputs of up to 33 tokens give the output of the unpatched model up to rounding.",
    )
    assert rope.describe(rope.unpatch(model)).short_inputs == ()


def test_a_ramp_over_fast_pairs_is_stated() -> None:
    """Heads of 8 trained at 512 tokens: the second of four pairs completes 8 cycles and is slowed by half."""
    rotary = Rotary(dim=8, theta=10000.0, trained_length=512)
    (text,) = Yarn(factor=4.0).cautions(rotary)
    assert "1 of 4 pairs" in text
    assert Yarn(factor=4.0, beta_fast=8.0).cautions(rotary) == ()
    assert Yarn(factor=4.0).cautions(Rotary(dim=128, theta=10000.0, trained_length=4096)) == ()


@pytest.mark.parametrize("model_type", ["emu3", "mllama"])
def test_the_pairing_of_a_model_whose_text_config_loads_no_class_is_described(model_type: str) -> None:
    """The family table does not state it, and the class that is probed is that of the model."""
    assert rope.describe(tiny(model_type)).pairing == "half"
