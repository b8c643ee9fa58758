"""Fingerprints: mistakes that trainers and servers make are named, and what rotates alike is never called different."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.patches.saved.fingerprint import Fingerprint, fingerprint_of
from tests.support.models import TRAINED, build

SCALED: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}


def with_rope(family: str = "llama", length: int = 4 * TRAINED, theta: float = 1e6, **rope_parameters: Any) -> Any:
    """A small model whose rotary embedding is stated by its config, as a trainer or an engine would build it."""
    return build(
        family,
        rope_parameters={"rope_type": "default", "rope_theta": theta} | rope_parameters,
        max_position_embeddings=length,
    )


def patched(family: str, method: str, **params: Any) -> Any:
    return rope.patch(build(family), method, **params)


def rotates(model: Any, change: Callable[[Any], None]) -> Any:
    """A model whose rotary module no longer does what its config states."""
    change(model.model.rotary_emb)
    return model


def reset(module: Any) -> None:
    module.inv_freq = with_rope().model.rotary_emb.inv_freq
    module.attention_scaling = 1.0


def scale_again(module: Any) -> None:
    module.inv_freq = module.inv_freq**2 / with_rope().model.rotary_emb.inv_freq


def square_magnitude(module: Any) -> None:
    module.attention_scaling **= 2


MISTAKES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "theta is lost": (
        with_rope,
        lambda: with_rope(theta=1e4),
        "theta is 10,000 instead of 1,000,000; it is the default",
    ),
    "theta is another": (with_rope, lambda: with_rope(theta=5e5), "theta is 500,000 instead of 1,000,000."),
    "the scaling is dropped": (lambda: with_rope(**SCALED), with_rope, "The scaling is missing"),
    "the module lost the scaling": (
        lambda: with_rope(**SCALED),
        lambda: rotates(with_rope(**SCALED), reset),
        "The scaling is missing",
    ),
    "a draft without the scaling": (lambda: patched("llama", "ntk", factor=4), lambda: build("llama"), "is missing"),
    "a scaling out of nowhere": (with_rope, lambda: with_rope(**SCALED), "a scaling where none is expected"),
    "linear twice": (
        lambda: patched("llama", "linear", factor=4),
        lambda: patched("llama", "linear", factor=16),
        "The scaling is applied twice",
    ),
    "yarn twice": (lambda: with_rope(**SCALED), lambda: rotates(with_rope(**SCALED), scale_again), "is applied twice"),
    "another linear factor": (
        lambda: patched("llama", "linear", factor=4),
        lambda: patched("llama", "linear", factor=8),
        "Every frequency is divided by 2 more than expected",
    ),
    "another factor of yarn": (
        lambda: with_rope(**SCALED),
        lambda: with_rope(**SCALED | {"factor": 8.0}),
        "The method or its numbers differ",
    ),
    "no attention factor": (
        lambda: with_rope(**SCALED),
        lambda: with_rope(**SCALED, attention_factor=1.0),
        r"multiplied by 1 instead of 1.13863: the attention factor \(mscale\) is missing",
    ),
    "the attention factor twice": (
        lambda: with_rope(**SCALED),
        lambda: rotates(with_rope(**SCALED), square_magnitude),
        "is applied twice",
    ),
    "another pairing": (lambda: build("llama"), lambda: build("glm"), "The pairing is interleaved instead of half"),
    "fewer rotated dims": (
        lambda: build("gpt_neox"),
        lambda: build(
            "gpt_neox",
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            rotary_pct=1.0,  # which counts in 5.0
        ),
        "the share of rotated dims differs",
    ),
    "one layer type is forgotten": (
        lambda: patched("gemma3", "linear", factor=4),
        lambda: build("gemma3"),
        "full_attention layers: The scaling is missing",
    ),
    "the long list for short inputs": (
        lambda: patched("llama", "dynamic-ntk", growth="even"),
        lambda: patched("llama", "ntk", factor=4),
        "Frequencies do not follow the length of the input",
    ),
    "no remapping": (lambda: patched("llama", "rerope"), lambda: build("llama"), "none instead of rerope"),
    "another window": (
        lambda: patched("llama", "rerope", window=32),
        lambda: patched("llama", "rerope", window=16),
        'rerope with other parameters: .*"window": 16.* instead of .*"window": 32',
    ),
    "another softmax scale": (
        lambda: build(
            "deepseek_v3", rope_parameters=SCALED | {"rope_theta": 1e4, "mscale_all_dim": 1.0, "mscale": 1.0}
        ),
        lambda: build("deepseek_v3", rope_parameters=SCALED | {"rope_theta": 1e4, "mscale": 1.0}),
        "the softmax scale differs",
    ),
    "another length": (with_rope, lambda: with_rope(length=TRAINED), "a length of 64 tokens instead of 256"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.sampled(3)
def test_a_mistake_is_named(name: str) -> None:
    expected, actual, sentence = MISTAKES[name]
    right, wrong = fingerprint_of(expected()), fingerprint_of(actual())
    differences = "\n".join(right.differences(wrong))
    assert re.search(sentence, differences), differences
    assert right.digest != wrong.digest
    assert wrong.differences(right)
    assert right.differences(right) == []


STATIC = [("linear", 4.0), ("ntk", 4.0), ("yarn", 4.0), ("by-parts", 8.0), ("llama3", 4.0)]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3", "gpt_oss", "glm", "deepseek_v3", "gpt_neox"])
def test_a_saved_folder_rotates_alike_however_it_is_loaded(family: str, tmp_path: Path) -> None:
    for method, factor in STATIC:
        expected = fingerprint_of(rope.patch(model := build(family), method, factor=factor))
        model.save_pretrained(folder := tmp_path / method)
        half = rope.from_pretrained(folder, dtype=torch.bfloat16)
        for actual in (
            rope.fingerprint(folder),
            fingerprint_of(rope.from_pretrained(folder)),
            fingerprint_of(AutoModelForCausalLM.from_pretrained(folder)),
            fingerprint_of(half.to(torch.float32)),
        ):
            assert expected.differences(actual) == []
            assert expected.digest == actual.digest


def test_a_cast_of_the_module_is_no_difference() -> None:
    expected = fingerprint_of(with_rope(**SCALED))
    for dtype in (torch.bfloat16, torch.float16):
        cast = with_rope(**SCALED).to(dtype)
        assert cast.model.rotary_emb.inv_freq.dtype == dtype
        assert expected.differences(fingerprint_of(cast)) == []
    almost = with_rope(**SCALED | {"factor": 4.02})
    assert expected.differences(fingerprint_of(almost))


def test_the_record_comes_back_from_json(tmp_path: Path) -> None:
    expected = fingerprint_of(patched("gemma3", "dynamic-yarn"))
    (path := tmp_path / "fingerprint.json").write_text(json.dumps(expected.to_dict()))
    assert rope.fingerprint(path) == expected
    with pytest.raises(CheckpointError, match="not the fingerprint"):
        Fingerprint.from_dict({"pairing": "half"})


@pytest.mark.parametrize(
    "change",
    [
        {"layers": {}},
        {"pairing": ["half"]},
        {"length": "64"},
        {"softmax_scale": [float("nan")]},
        {"layer": {"positions": 5}},
        {"layer": {"positions": {}}},
        {"layer": {"attention_factor": float("inf")}},
        {"layer": {"inv_freq": [float("nan")] * 8}},
    ],
    ids=str,
)
def test_a_damaged_record_is_refused(change: dict[str, Any]) -> None:
    saved = fingerprint_of(build("llama")).to_dict()
    saved["layers"]["all"] |= change.get("layer", {})
    with pytest.raises(CheckpointError, match="not the fingerprint"):
        Fingerprint.from_dict(saved | {key: value for key, value in change.items() if key != "layer"})
