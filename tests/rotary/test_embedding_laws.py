"""The laws of RoPE (https://kexue.fm/archives/8265; Su et al. 2021, arXiv 2104.09864), over shapes, dtypes and methods.

The package rotates the vectors; a law, or plain Python, gives the numbers that they are compared with.
"""

from __future__ import annotations

import cmath
import itertools
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rope_ext_hf import Rotary, RotaryEmbedding, apply_rotary_pos_emb
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.rotary.pairing import rotate
from tests.support.method_examples import example_method

FREQUENCY_METHODS = sorted(name for name, cls in list_methods().items() if not issubclass(cls, RemappingMethod))
EPSILON = {torch.float64: 1e-6, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of a rotated vector of length 1, by dtype: cos and sin themselves are float32 before the cast."""


class Case(NamedTuple):
    """A rotary module, vectors to rotate, and positions at which a length-dependent method has equal frequencies."""

    module: RotaryEmbedding
    x: Tensor  # (batch, 1, heads, head_dim)
    positions: tuple[int, int, int]
    factor: float  # the attention factor, which multiplies every rotated vector

    def rotate(self, x: Tensor, position: int) -> Tensor:
        cos, sin = self.module(x, torch.full((x.shape[0], 1), position))
        return apply_rotary_pos_emb(x, cos, sin)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rotary = Rotary(2 * draw(st.integers(2, 40)), draw(st.sampled_from([100.0, 1e4, 5e5])), 4096)
    method = example_method(list_methods()[draw(st.sampled_from(FREQUENCY_METHODS))], rotary)
    shape = (draw(st.integers(1, 3)), 1, draw(st.integers(1, 3)), rotary.dim)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = (x / x.norm(dim=-1, keepdim=True)).to(draw(st.sampled_from(list(EPSILON))))
    positions = tuple(draw(st.integers(0, 1000)) for _ in range(3))
    module = RotaryEmbedding(method, rotary)
    assert len(positions) == 3
    return Case(module, x, positions, module.frequencies().attention_factor)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype, times: float = 1) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), atol=times * EPSILON[dtype], rtol=0)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_rotation_keeps_norms(case: Case) -> None:
    m, _, _ = case.positions
    rotated = case.rotate(case.x, m).double().norm(dim=-1)
    close(rotated, case.factor * case.x.double().norm(dim=-1), case.x.dtype, 2 * case.factor)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_scores_depend_on_relative_positions_alone(case: Case) -> None:
    """(R_m q) . (R_n k) = (R_(m+s) q) . (R_(n+s) k)"""
    m, n, s = case.positions
    q, k = case.x, case.x.flip(-1)

    def score(a: int, b: int) -> Tensor:
        return (case.rotate(q, a).double() * case.rotate(k, b).double()).sum(-1)

    close(score(m + s, n + s), score(m, n), case.x.dtype, 6 * case.factor**2)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_rotations_are_a_group(case: Case) -> None:
    """R_m R_n = R_(m+n), and R_0 = 1, each up to the attention factor that every rotation multiplies by."""
    m, n, _ = case.positions
    twice = case.rotate(case.rotate(case.x, n), m)
    close(twice, case.factor * case.rotate(case.x, m + n).double(), case.x.dtype, 4 * case.factor**2)
    close(case.rotate(case.x, 0), case.factor * case.x.double(), case.x.dtype, case.factor)


@settings(max_examples=60, deadline=None)
@given(case=cases(), pairing=st.sampled_from(["half", "interleaved"]))
def test_the_matrix_and_the_complex_form(case: Case, pairing: str) -> None:
    """Rotate each pair by its 2 x 2 matrix, and as a complex number times exp(1j m theta_i), in plain Python."""
    m, _, _ = case.positions
    inv_freq = case.module.frequencies().inv_freq
    x = case.x[0, 0, 0].double()
    actual = rotate(x, m * inv_freq, pairing).tolist()
    half = len(inv_freq)
    for i, frequency in enumerate(inv_freq.tolist()):
        one, other = (i, i + half) if pairing == "half" else (2 * i, 2 * i + 1)
        number = complex(x[one], x[other]) * cmath.exp(1j * m * frequency)
        assert (actual[one], actual[other]) == pytest.approx((number.real, number.imag), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_polar_and_both_pairings_are_one(case: Case) -> None:
    """Compare with torch.polar times the complex vector, and with half pairing of rows [0, 2, 4 ... 1, 3, 5 ...]."""
    m, _, _ = case.positions
    x, angles = case.x.double(), m * case.module.frequencies().inv_freq
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    polar = torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    torch.testing.assert_close(rotate(x, angles, "interleaved"), polar, atol=1e-12, rtol=0)
    order = [*range(0, x.shape[-1], 2), *range(1, x.shape[-1], 2)]
    torch.testing.assert_close(rotate(x[..., order], angles, "half"), polar[..., order], atol=1e-12, rtol=0)


# --- long-range decay -------------------------------------------------------------------------------------------------


def partial_sums(distance: int, inv_freq: list[float]) -> list[float]:
    """Return |S_1| .. |S_(d/2)| with S_j = sum over i < j of exp(1j distance theta_i)."""
    sizes, total = [], 0j
    for frequency in inv_freq:
        total += cmath.exp(1j * distance * frequency)
        sizes.append(abs(total))
    return sizes


@settings(max_examples=100, deadline=None)
@given(
    pairs=st.integers(2, 64),
    theta=st.sampled_from([50.0, 1e4, 1e6]),
    distance=st.integers(0, 5000),
    seed=st.integers(0, 999),
)
def test_no_score_exceeds_the_abel_bound(pairs: int, theta: float, distance: int, seed: int) -> None:
    """|(R_m q) . (R_n k)| <= max |h_(i+1) - h_i| x sum |S_j|, h_i = q_i conj(k_i) by pairs, h_(d/2) = 0."""
    rotary = Rotary(2 * pairs, theta, 4096)
    q, k = torch.randn(2, 2 * pairs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    offset = 77
    angles = torch.tensor([offset + distance, offset])[:, None] * rotary.inv_freq()
    score = float(rotate(q, angles[0], "half") @ rotate(k, angles[1], "half"))
    h = [complex(q[i], q[i + pairs]) * complex(k[i], -k[i + pairs]) for i in range(pairs)] + [0j]
    steps = max(abs(later - earlier) for earlier, later in itertools.pairwise(h))
    bound = steps * sum(partial_sums(distance, rotary.inv_freq().tolist()))
    assert abs(score) <= bound * (1 + 1e-9)
