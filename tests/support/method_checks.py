"""Geometries, tolerances and comparisons that the tests of methods share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

import rope_ext_hf as rope
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.registry import list_methods
from tests.support.oracles import plain

EXACT = 1e-12  # two float64 computations of one formula
NATIVE = 2e-5  # transformers computes in float32
DIMS = (32, 64, 80, 128, 256)
THETAS = (1e4, pytest.param(5e5, marks=pytest.mark.slow), pytest.param(1e6, marks=pytest.mark.slow))
TRAINED_LENGTHS = (256, 2048, 4096, 8192, 32768, 131072)
FACTORS = (1.0, 1.5, 2.0, 4.0, 8.0, 32.0)

LLAMA2 = Rotary(dim=128, theta=1e4, trained_length=4096)
GEOMETRIES = (
    LLAMA2,
    Rotary(dim=64, theta=5e5, trained_length=8192),
    Rotary(dim=80, theta=1e6, trained_length=256),
    Rotary(dim=32, theta=1e4, trained_length=2048),
    Rotary(dim=64, theta=1e4, trained_length=131072),  # even the lowest frequency makes more than one turn
)


def assert_same(
    actual: torch.Tensor | Sequence[float], expected: torch.Tensor | Sequence[float], rtol: float = EXACT
) -> None:
    """Equal relative to each entry: a lowest frequency of 1e-6 counts as much as a highest of 1."""
    left, right = (torch.as_tensor(side, dtype=torch.float64) for side in (actual, expected))
    torch.testing.assert_close(left, right, rtol=rtol, atol=0)


def alpha_of(rotary: Rotary, inv_freq: torch.Tensor) -> float:
    """NTK divides the lowest frequency by exactly alpha."""
    return plain(rotary)[-1] / float(inv_freq[-1])


def native_grid(dim: int, theta: float) -> list[tuple[Rotary, float, dict[str, Any]]]:
    """Every trained length with every factor, and the settings that transformers takes for both."""
    return [
        (Rotary(dim, theta, trained_length), factor, {"rope_theta": theta, "factor": factor})
        for trained_length in TRAINED_LENGTHS
        for factor in FACTORS
    ]


def native_table(rotary: Rotary, parameters: dict[str, Any], length: int | None = None) -> tuple[torch.Tensor, float]:
    """What transformers computes from `rope_parameters`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = json.loads(json.dumps(parameters))  # what a saved config goes through
    config = LlamaConfig(
        hidden_size=2 * rotary.dim,
        num_attention_heads=2,
        head_dim=rotary.dim,
        max_position_embeddings=rotary.trained_length,
        rope_parameters=parameters,
    )
    if parameters["rope_type"] == "default":  # not in the table: each model's module has its own
        module = LlamaRotaryEmbedding(config)
        return module.inv_freq, module.attention_scaling
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, None, seq_len=length)
    return inv_freq, attention_factor


def assert_native(
    rotary: Rotary, ours: rope.Frequencies, parameters: dict[str, Any], length: int | None = None
) -> None:
    inv_freq, attention_factor = native_table(rotary, parameters, length)
    assert_same(ours.inv_freq, inv_freq, rtol=NATIVE)
    assert ours.attention_factor == pytest.approx(attention_factor, rel=NATIVE)


GEOMETRY = Rotary(dim=64, theta=1e4, trained_length=512)

with_factor = [
    name
    for name, cls in list_methods().items()
    if any(f.name == "factor" and f.default is MISSING for f in fields(cls))
]


law = settings(max_examples=60, deadline=None, database=None, derandomize=True)
some_dims = st.integers(2, 128).map(lambda pairs: 2 * pairs)
some_thetas = st.floats(100, 1e7)
some_lengths = st.integers(16, 1 << 17)
