"""Attributes of the module in a patched slot: the numbers of the patch, or an error."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from tests.support.models import FAMILIES, build, rotary_of, tokens

NATIVE = {  # method: (its parameters, the settings with which transformers' own module computes the same)
    "linear": ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "yarn": ({"factor": 4.0}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}
BY_LENGTH = ["dynamic-ntk", "dynamic-yarn"]
REMAPPING = {"rerope": {}, "self-extend": {"factor": 4}, "dca": {}, "stairs": {}, "jet-long": {}}


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "qwen3", "deepseek_v3"])
@pytest.mark.parametrize("method", NATIVE)
def test_numbers_are_those_of_transformers_own_module(method: str, family: str) -> None:
    parameters, form = NATIVE[method]
    if form["rope_type"] not in FAMILIES[family].forms:
        pytest.skip(f"transformers' {family} has no rope type {form['rope_type']!r}")
    patched = rotary_of(rope.patch(build(family), method, **parameters))
    own = rotary_of(build(family, form, max_position_embeddings=256))
    for name in ("inv_freq", "original_inv_freq"):
        value: Tensor = getattr(patched, name)
        assert value.dtype == torch.float32
        assert torch.allclose(value, getattr(own, name), rtol=1e-6, atol=0)
    assert patched.attention_scaling == pytest.approx(own.attention_scaling)
    assert patched.rope_type == own.rope_type == patched.config.rope_parameters["rope_type"]
    assert patched.max_seq_len_cached == patched.config.max_position_embeddings


def test_cos_and_sin_follow_from_what_is_shown() -> None:
    positions = torch.arange(200)[None]
    for method, factor in (("ntk", 4.0), ("by-parts", 4.0), ("yarn", 4.0)):
        rotary = rotary_of(rope.patch(build("llama"), method, factor=factor))
        angle = positions[..., None] * rotary.inv_freq.double()
        cos, sin = rotary(torch.zeros(1, 1, 1), positions)
        both = rotary.attention_scaling * torch.cat([angle, angle], -1).cos(), angle.sin().repeat(1, 1, 2)
        assert torch.allclose(cos.double(), both[0], atol=1e-4)
        assert torch.allclose(sin.double(), rotary.attention_scaling * both[1], atol=1e-4)


@pytest.mark.parametrize("method", ["linear", "yarn", "ntk"])
def test_each_type_of_layers_has_its_own_numbers(method: str) -> None:
    loaded = build("gemma3")
    own = rotary_of(loaded)
    local, everywhere = own.sliding_attention_inv_freq.clone(), own.full_attention_inv_freq.clone()
    patched = rotary_of(rope.patch(loaded, method, factor=4.0))
    assert torch.allclose(patched.sliding_attention_inv_freq, local, rtol=1e-6)
    assert not torch.allclose(patched.full_attention_inv_freq, everywhere, rtol=1e-2)
    if method == "linear":
        assert torch.allclose(patched.full_attention_inv_freq, everywhere / 4, rtol=1e-6)
    assert patched.sliding_attention_attention_scaling == 1.0
    assert patched.rope_type["sliding_attention"] == "default"
    assert patched.rope_type == {
        name: settings["rope_type"]
        for name, settings in loaded.config.rope_parameters.items()
        if name in patched.rope_type
    }


@pytest.mark.parametrize("method", [*BY_LENGTH, *REMAPPING])
@pytest.mark.parametrize("name", ["inv_freq", "original_inv_freq", "attention_scaling"])
def test_no_number_is_shown_where_none_is_right(method: str, name: str) -> None:
    rotary = rotary_of(rope.patch(build("llama"), method, **REMAPPING.get(method, {})))
    assert not hasattr(rotary, name)
    with pytest.raises(AttributeError, match=f"no one value of '{name}'.*{method}"):
        getattr(rotary, name)


@pytest.mark.parametrize("method", BY_LENGTH)
def test_a_length_that_is_held_has_numbers(method: str) -> None:
    model = rope.patch(build("llama"), method)
    with rope.fixed_length(model, 200):
        expected = rotary_of(model).table("all").method.frequencies(rotary_of(model).table("all").rotary, 200)
        assert torch.allclose(rotary_of(model).inv_freq, expected.inv_freq.float())
        assert rotary_of(model).attention_scaling == expected.attention_factor
    assert not hasattr(rotary_of(model), "inv_freq")


@pytest.mark.parametrize("name", ["inv_freq", "original_inv_freq", "attention_scaling"])
@pytest.mark.parametrize("method", ["yarn", "dynamic-ntk", "rerope"])
def test_what_would_have_no_effect_cannot_be_set(method: str, name: str) -> None:
    model = rope.patch(build("llama"), method, **({"factor": 4.0} if method == "yarn" else {}))
    with pytest.raises(AttributeError, match="cannot be set in a patched model"):
        setattr(rotary_of(model), name, torch.ones(8))


def test_what_the_module_never_had_it_has_not() -> None:
    rotary = rotary_of(rope.patch(build("llama"), "yarn", factor=4.0))
    for name in ("full_attention_inv_freq", "short_inv_freq", "anything"):
        assert not hasattr(rotary, name)


def test_the_config_of_the_slot_is_that_of_the_patched_model() -> None:
    model = build("llama")
    before = rotary_of(model).config
    for method in ("yarn", "ntk", "yarn"):  # each in place of the previous one
        rope.patch(model, method, factor=4.0)
        assert rotary_of(model).config is model.config
    assert rotary_of(rope.unpatch(model)).config is before is model.config


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_show_the_same(copied: Any) -> None:
    model = rope.patch(build("llama"), "yarn", factor=4.0)
    other = copied(model)
    assert torch.equal(rotary_of(other).inv_freq, rotary_of(model).inv_freq)
    assert rotary_of(other).config is other.config


def test_casts_leave_the_numbers_exact() -> None:
    model = rope.patch(build("llama"), "yarn", factor=4.0)
    exact = rotary_of(model).inv_freq
    assert torch.equal(rotary_of(model.to(torch.bfloat16)).inv_freq, exact)


@pytest.mark.parametrize("method", ["yarn", "linear"])
def test_keys_are_rotated_again_by_what_is_shown(method: str) -> None:
    """Code that prunes a cache moves keys to other places by `inv_freq` (kvpress #84): 10 tokens moved by 30."""
    model = rope.patch(build("llama"), method, factor=4.0)
    rotary, ids = rotary_of(model), tokens(10)
    with torch.no_grad():
        caches = [
            model(ids, position_ids=torch.arange(start, start + 10)[None], use_cache=True).past_key_values
            for start in (0, 30)
        ]
    keys, moved = (cache.layers[0].keys for cache in caches)
    angle = 30 * torch.cat([rotary.inv_freq, rotary.inv_freq])
    turned = torch.cat([-keys[..., 8:], keys[..., :8]], -1)
    assert torch.allclose(keys * angle.cos() + turned * angle.sin(), moved, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "arguments", "shown"),
    [
        ("yarn", {"factor": 4}, "yarn, factor=4"),
        ("yarn", {"factor": 4, "beta_fast": 16}, "yarn, beta_fast=16, factor=4"),
        ("dynamic-ntk", {}, "dynamic-ntk"),
        ("yarn", {"factor": 4, "layers": [0, 1]}, "yarn, factor=4, layers=(0, 1)"),
        ("factors", {"factors": [1.0] * 8}, "factors, factors=[8 values]"),
    ],
)
def test_a_printed_model_names_its_patch(method: str, arguments: dict[str, Any], shown: str) -> None:
    model = build("llama")
    before = str(model)
    assert f"(rotary_emb): PatchedRotaryEmbedding({shown})\n" in str(rope.patch(model, method, **arguments))
    assert str(rope.unpatch(model)) == before
