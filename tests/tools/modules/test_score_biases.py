"""Score biases as methods: the length up to which inputs are unchanged, and models that are refused."""

from __future__ import annotations

from typing import Any

import pytest

import rope_ext_hf as rope
from tests.patches.slots.test_roformer import build
from tests.support.models import TRAINED


def test_inputs_up_to_the_context_length_stay() -> None:
    rotary = rope.Rotary(dim=128, theta=10000.0, trained_length=4096)
    method: Any = rope.list_methods()["alibi"]()
    assert method.bind(rotary, 65536).unchanged_length(rotary) == 4097


def test_a_model_with_a_table_of_angles_is_refused() -> None:
    with pytest.raises(rope.UnsupportedModelError, match="transformers' attention interface, so alibi"):
        rope.patch(build(), "alibi", target_length=4 * TRAINED)
