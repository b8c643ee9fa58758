"""Positions, methods and float64 references for the tests of rotary modules."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rope_ext_hf import Rotary
from tests.support.oracles import (
    by_cycles,
    divided,
    dynamic_ntk_alpha,
    llama3,
    longrope_attention_factor,
    mrrope,
    ntk,
    plain,
    rising_divisors,
)

BOUND = 1e-6  # on cos and sin, before the cast to the model's dtype
REACH = 1 << 24  # below which it holds

SMALL = Rotary(dim=64, theta=1e4, trained_length=256)


# --- an independent float64 reference -----------------------------------------------------------------------------


def cos_sin(positions: Tensor, inv_freq: Sequence[float] | Tensor) -> tuple[Tensor, Tensor]:
    """float64 (..., length, dim // 2). p x f is within 2e-9 rad of the true angle at p = 2^24."""
    angle = positions.to(torch.float64)[..., None] * torch.as_tensor(inv_freq, dtype=torch.float64)
    return angle.cos(), angle.sin()


def positions_to_check() -> Tensor:
    rng = random.Random(0)
    edges = [
        0,
        1,
        2,
        255,
        256,
        4095,
        32768,
        131071,
        131072,
        1 << 20,
        (1 << 20) + 1,
        (1 << 23) - 1,
        REACH - 2,
        REACH - 1,
    ]
    return torch.tensor([edges + [rng.randrange(REACH) for _ in range(200)]])


def worst(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    return max(float((left.double() - right).abs().max()) for left, right in zip(actual, expected, strict=True))


# (method, parameters, what the paper says, attention factor); every one static
STATIC: list[tuple[str, dict[str, Any], Callable[[Rotary], list[float]], float]] = [
    ("default", {}, plain, 1.0),
    ("linear", {"factor": 8}, lambda r: [value / 8 for value in plain(r)], 1.0),
    ("theta", {"theta": 5e6}, lambda r: plain(Rotary(r.dim, 5e6, r.trained_length)), 1.0),
    ("ntk", {"factor": 8}, lambda r: ntk(r, 8), 1.0),
    ("llama3", {"factor": 8}, lambda r: llama3(r, 8), 1.0),
    ("yarn", {"factor": 8, "ramp": "cycles"}, lambda r: by_cycles(r, 8, 1, 32), 0.1 * math.log(8) + 1),
    ("mrrope", {"factor": 8}, lambda r: mrrope(r, 8) or [], 0.1 * math.log(8) + 1),
    ("by-parts", {"factor": 3, "ramp": "cycles"}, lambda r: by_cycles(r, 3, 1, 32), 1.0),
]
static = pytest.mark.parametrize(("method", "params", "formula", "warmth"), STATIC, ids=[entry[0] for entry in STATIC])

# (method, parameters, alpha or s of the ratio L / L0)
DEPENDENT: list[tuple[str, dict[str, Any]]] = [
    ("dynamic-ntk", {"growth": "paper"}),
    ("dynamic-ntk", {"growth": "hf", "factor": 4}),
    ("dynamic-ntk", {"growth": "even"}),
    ("dynamic-ntk", {"growth": "pow2"}),
    ("dynamic-yarn", {"ramp": "cycles"}),
    ("longrope", {"short_factor": rising_divisors(SMALL, 2), "long_factor": rising_divisors(SMALL, 9), "factor": 4}),
]
dependent = pytest.mark.parametrize(
    ("method", "params"), DEPENDENT, ids=[f"{name}-{params.get('growth', '')}" for name, params in DEPENDENT]
)


def at_length(method: str, params: dict[str, Any], length: int) -> tuple[list[float], float]:
    """Inverse frequencies and attention factor of a length-dependent method on SMALL."""
    ratio = length / SMALL.trained_length
    grown = max(1.0, ratio)
    if method == "dynamic-yarn":
        return by_cycles(SMALL, grown, 1, 32), 0.1 * math.log(grown) + 1
    if method == "longrope":
        chosen = params["long_factor" if ratio > 1 else "short_factor"]
        return divided(SMALL, chosen), longrope_attention_factor(SMALL, params["factor"])
    growth = {"growth": params["growth"], "ratio": ratio, "factor": params.get("factor", 1)}
    return ntk(SMALL, dynamic_ntk_alpha(**growth)), 1.0


def half(columns: Tensor) -> Tensor:
    return torch.cat((columns, columns), dim=-1)


def llama_rotary(rotary: Rotary) -> nn.Module:
    from transformers.models.llama.configuration_llama import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    module = LlamaRotaryEmbedding(config_for(LlamaConfig, rotary))
    assert isinstance(module, nn.Module)
    return module


def config_for(kind: Any, rotary: Rotary, **more: Any) -> Any:
    return kind(
        hidden_size=2 * rotary.dim,
        num_attention_heads=2,
        head_dim=rotary.dim,
        max_position_embeddings=rotary.trained_length,
        rope_parameters={"rope_type": "default", "rope_theta": rotary.theta},
        **more,
    )


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


AT = torch.tensor([[0, 1, 2, 3, 17, 255], [5, 4, 3, 2, 1, 0]])


def emptied(module: Any) -> Any:
    """`to_empty` that fills what it leaves uninitialised: NaN, or the largest integer, rather than lucky leftovers."""
    torch.use_deterministic_algorithms(True)
    try:
        return module.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(False)
