"""Models that carry a scaling in their config already."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import rope_ext_hf as rope
from tests.support.model_checks import CHANGED, LONG, PHI3_LISTS, difference, state
from tests.support.models import (
    TRAINED,
    build,
    logits,
    rotary_of,
    tokens,
)

CARRIERS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    # name, rope settings, max_position_embeddings, method
    "Llama 3.1": (
        "llama",
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": TRAINED,
        },
        8 * TRAINED,
        "llama3",
    ),
    "Qwen2.5": (
        "qwen2",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
        TRAINED,
        "yarn",
    ),
    "Qwen2.5, raised": (
        "qwen2",
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
        4 * TRAINED,
        "yarn",
    ),
    "Phi-3": ("phi3", {"rope_type": "longrope"} | PHI3_LISTS, 4 * TRAINED, "longrope"),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}, TRAINED, "linear"),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0}, TRAINED, "dynamic-ntk"),
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_scaling_in_the_config_is_understood(carrier: str) -> None:
    name, form, maximum, method = CARRIERS[carrier]
    model = build(name, form, max_position_embeddings=maximum)
    seen = rope.describe(model)
    assert not seen.patched
    assert seen.method == method
    assert seen.trained_length == TRAINED
    if method != "dynamic-ntk":
        assert seen.extended_length == (8 if carrier == "Llama 3.1" else 4) * TRAINED
    factor = form.get("factor")
    if factor is not None:
        assert seen.params["factor"] == factor
    rotary = rotary_of(model)
    assert torch.allclose(
        torch.tensor(seen.wavelengths, dtype=torch.float64), 2 * math.pi / rotary.inv_freq.double(), rtol=2e-5
    )
    assert seen.attention_factor == pytest.approx(rotary.attention_scaling, rel=1e-6)


@pytest.mark.parametrize("method", ["linear", "yarn", "ntk"])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_over_original_a_patch_starts_from_the_original_settings(carrier: str, method: str) -> None:
    name, form, maximum, _ = CARRIERS[carrier]
    model, ids = build(name, form, max_position_embeddings=maximum), tokens(LONG)
    own = logits(copy.deepcopy(model), ids)
    logits(model, ids)  # transformers' dynamic keeps what it grew to
    before = state(model)
    got = logits(rope.patch(model, method, factor=4, over="original"), ids)
    assert torch.equal(got, logits(rope.patch(build(name), method, factor=4), ids))
    assert rope.describe(model).trained_length == TRAINED
    assert rope.describe(model).extended_length == LONG
    if method != form["rope_type"]:
        assert difference(got, own) >= CHANGED
    rope.unpatch(model)
    assert state(model) == before
    assert torch.equal(logits(model, ids), own)
