"""Models that carry a scaling in their config already."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import rope_ext_hf as rope
from tests.support.model_checks import CHANGED, LONG, PHI3_LISTS, difference, state
from tests.support.models import (
    TRAINED,
    build,
    logits,
    tokens,
)

YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
LLAMA3 = YARN | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CARRIERS: dict[str, tuple[str, dict[str, Any], int]] = {
    # family, rope settings, max_position_embeddings
    "Llama 3.1": ("llama", LLAMA3, 8 * TRAINED),
    "Qwen2.5": ("qwen2", YARN, TRAINED),
    "Qwen2.5, raised": ("qwen2", YARN, 4 * TRAINED),
    "Phi-3": ("phi3", {"rope_type": "longrope"} | PHI3_LISTS, 4 * TRAINED),
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}, TRAINED),
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0}, TRAINED),
}


@pytest.mark.parametrize("method", ["linear", "yarn", "ntk"])
@pytest.mark.parametrize("carrier", CARRIERS)
def test_over_original_a_patch_starts_from_the_original_settings(carrier: str, method: str) -> None:
    name, form, maximum = CARRIERS[carrier]
    model, ids = build(name, dict(form), max_position_embeddings=maximum), tokens(LONG)
    own = logits(copy.deepcopy(model), ids)
    logits(model, ids)  # transformers' dynamic keeps what it grew to
    before = state(model)
    output = logits(rope.patch(model, method, factor=4, over="original"), ids)
    assert torch.equal(output, logits(rope.patch(build(name), method, factor=4), ids))
    assert rope.describe(model).trained_length == TRAINED
    assert rope.describe(model).extended_length == LONG
    if method != form["rope_type"]:
        assert difference(output, own) >= CHANGED
    rope.unpatch(model)
    assert state(model) == before
    assert torch.equal(logits(model, ids), own)
