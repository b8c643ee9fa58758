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


def native_parameters(rope_type: str, rotary: Rotary, *, original: bool = False, **more: Any) -> dict[str, Any]:
    """`rope_parameters` as transformers takes them; with the original length where that type counts from it."""
    counted = {"original_max_position_embeddings": rotary.trained_length} if original else {}
    return {"rope_type": rope_type, "rope_theta": rotary.theta, **counted, **more}


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
    # The largest divisor leaves the fastest pairs 6e-39 radians per position.
    inv_freq = torch.where(inv_freq.abs() < 1e-38, 0.0, inv_freq)
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
some_factors = st.one_of(st.sampled_from(FACTORS), st.floats(1, 64))
some_rotaries = st.one_of(st.sampled_from(GEOMETRIES), st.builds(Rotary, some_dims, some_thetas, some_lengths))
native_rotaries = st.builds(
    Rotary,
    dim=st.sampled_from([32, 64, 80, 128, 256]),
    theta=st.sampled_from([1e4, 5e5, 1e6]),
    trained_length=st.sampled_from([256, 2048, 4096, 8192, 32768, 131072]),
)


@st.composite
def some_betas(draw: st.DrawFn) -> dict[str, Any]:
    """`beta_slow` and `beta_fast`: as published, far apart, or a step; also such that no pair lies between them."""
    published = st.sampled_from([(1.0, 32.0), (1.0, 4.0), (2.0, 20.0), (1.0, 1.0)])
    slow, fast = draw(
        st.one_of(
            published,
            st.tuples(st.floats(1e-6, 300), st.one_of(st.just(1.0), st.floats(1.5, 1e6))).map(
                lambda drawn: (drawn[0], drawn[0] * drawn[1])
            ),
        )
    )
    return {"beta_slow": slow, "beta_fast": fast}


@st.composite
def lengths_around(draw: st.DrawFn, context_length: int) -> list[int]:
    """Lengths in tokens: within the context length, at it and its multiples, one beyond, between, and some drawn."""
    fixed = [1, *(int(ratio * context_length) for ratio in (0.25, 1, 1.25, 1.5, 2, 3, 3.75, 4, 8, 9))]
    multiple = draw(st.integers(1, 64)) * context_length
    drawn = [context_length + 1, 2 * context_length + 1, multiple, multiple + 1]
    return [*fixed, *drawn, draw(st.integers(1, 64 * context_length))]
