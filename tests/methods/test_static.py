"""Every static frequency method against its paper, figures worked out by hand, and transformers' tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import frequencies
from rope_ext_hf.methods.static import NTK, Default, Linear, Theta
from tests.support.method_checks import (
    EXACT,
    LLAMA2,
    alpha_of,
    assert_native,
    assert_same,
    law,
    native_parameters,
    native_rotaries,
    some_betas,
    some_dims,
    some_factors,
    some_lengths,
    some_rotaries,
    some_thetas,
)
from tests.support.oracles import (
    by_cycles,
    by_dimension,
    divided,
    llama3,
    mrrope,
    ntk,
    plain,
    rising_divisors,
    with_theta,
    yarn_attention_factor,
)

# --- each method against its paper --------------------------------------------------------------------------------


class TestAgainstThePapers:
    @law
    @given(rotary=some_rotaries)
    def test_default(self, rotary: Rotary) -> None:
        result = frequencies("default", rotary)
        assert_same(result.inv_freq, plain(rotary))
        assert result.attention_factor == 1.0

    @law
    @given(rotary=some_rotaries, factor=some_factors)
    def test_linear(self, rotary: Rotary, factor: float) -> None:
        result = frequencies("linear", rotary, factor=factor)
        assert_same(result.inv_freq, [value / factor for value in plain(rotary)])
        assert result.attention_factor == 1.0

    @law
    @given(rotary=some_rotaries, theta=some_thetas)
    def test_theta(self, rotary: Rotary, theta: float) -> None:
        result = frequencies("theta", rotary, theta=theta)
        assert_same(result.inv_freq, with_theta(rotary, theta))
        assert result.attention_factor == 1.0

    @law
    @given(rotary=some_rotaries, factor=some_factors)
    def test_ntk(self, rotary: Rotary, factor: float) -> None:
        assume(rotary.dim > 2)
        result = frequencies("ntk", rotary, factor=factor)
        assert_same(result.inv_freq, ntk(rotary, factor))
        assert_same(result.inv_freq, with_theta(rotary, rotary.theta * factor ** (rotary.dim / (rotary.dim - 2))))
        assert result.attention_factor == 1.0

    @law
    @given(rotary=some_rotaries, factor=some_factors, betas=some_betas())
    def test_by_parts(self, rotary: Rotary, factor: float, betas: dict[str, Any]) -> None:
        given_, cycles_between = betas | {"factor": factor}, (betas["beta_slow"], betas["beta_fast"])
        cycles = frequencies("by-parts", rotary, ramp="cycles", **given_)
        assert_same(cycles.inv_freq, by_cycles(rotary, factor, *cycles_between))
        whole = frequencies("by-parts", rotary, **given_)
        assert_same(whole.inv_freq, by_dimension(rotary, factor, *cycles_between))
        fractional = frequencies("by-parts", rotary, truncate=False, **given_)
        assert_same(fractional.inv_freq, by_dimension(rotary, factor, *cycles_between, truncate=False))
        assert cycles.attention_factor == whole.attention_factor == fractional.attention_factor == 1.0

    @law
    @given(rotary=some_rotaries, factor=some_factors)
    def test_yarn(self, rotary: Rotary, factor: float) -> None:
        for params, expected in (
            ({}, by_dimension(rotary, factor)),
            ({"truncate": False}, by_dimension(rotary, factor, truncate=False)),
            ({"ramp": "cycles"}, by_cycles(rotary, factor)),
        ):
            result = frequencies("yarn", rotary, factor=factor, **params)
            assert_same(result.inv_freq, expected)
            assert result.attention_factor == pytest.approx(yarn_attention_factor(factor), rel=EXACT)

    @law
    @given(rotary=some_rotaries, factor=some_factors, low=st.floats(0.1, 8), times=st.floats(1.5, 64))
    def test_llama3(self, rotary: Rotary, factor: float, low: float, times: float) -> None:
        for slow, fast in ((1.0, 4.0), (low, low * times)):
            result = frequencies("llama3", rotary, factor=factor, low_freq_factor=slow, high_freq_factor=fast)
            assert_same(result.inv_freq, llama3(rotary, factor, slow, fast))
            assert result.attention_factor == 1.0

    @law
    @given(rotary=some_rotaries, factor=some_factors, betas=some_betas(), warmth=st.floats(0.5, 2))
    def test_mrrope(self, rotary: Rotary, factor: float, betas: dict[str, Any], warmth: float) -> None:
        fast, slow = betas["beta_fast"], betas["beta_slow"]
        for radix in ("progressive", "uniform"):
            given_ = betas | {"factor": factor, "radix": radix}
            if (expected := mrrope(rotary, factor, radix, fast, slow)) is None:
                with pytest.raises(MethodError, match=r"mrrope needs pairs that complete more than beta_fast"):
                    frequencies("mrrope", rotary, **given_)
                continue
            result = frequencies("mrrope", rotary, **given_)
            assert_same(result.inv_freq, expected)
            assert result.attention_factor == pytest.approx(yarn_attention_factor(factor), rel=EXACT)
            assert frequencies("mrrope", rotary, **given_, attention_factor=warmth).attention_factor == warmth

    @law
    @given(rotary=some_rotaries, top=st.floats(1, 64), warmth=st.floats(0.5, 2))
    def test_factors(self, rotary: Rotary, top: float, warmth: float) -> None:
        assume(rotary.dim > 2)
        divisors = rising_divisors(rotary, top)
        result = frequencies("factors", rotary, factors=divisors, attention_factor=warmth)
        assert_same(result.inv_freq, divided(rotary, divisors))
        assert result.attention_factor == warmth
        assert frequencies("factors", rotary, factors=divisors).attention_factor == 1.0


MRROPE_GEOMETRIES = (
    LLAMA2,
    Rotary(dim=128, theta=5e5, trained_length=8192),
    Rotary(dim=128, theta=1e6, trained_length=32768),
    Rotary(dim=64, theta=1e4, trained_length=256),
    Rotary(dim=96, theta=1e4, trained_length=2048),
    Rotary(dim=80, theta=1e7, trained_length=131072),
)


@pytest.mark.parametrize("rotary", MRROPE_GEOMETRIES, ids=str)
@pytest.mark.parametrize("radix", ["progressive", "uniform"])
@pytest.mark.parametrize("factor", [1.0, 2.0, 16.0])
def test_mrrope_equals_its_closed_form(rotary: Rotary, radix: str, factor: float) -> None:
    expected = mrrope(rotary, factor, radix)
    assert expected is not None
    result = frequencies("mrrope", rotary, factor=factor, radix=radix)
    assert_same(result.inv_freq, expected)
    kept, slowest = plain(rotary)[0], plain(rotary)[-1]
    assert result.inv_freq[0] == kept
    assert float(result.inv_freq[-1]) == pytest.approx(slowest / factor, rel=EXACT)


def test_the_band_of_mrrope_lies_among_the_pairs_that_rotate() -> None:
    """Gemma 4's proportional embedding: 12 of 32 pairs rotate here, as the first 12 of the whole one do."""
    whole = Rotary(dim=64, theta=1e4, trained_length=4096)
    part = Rotary(dim=64, theta=1e4, trained_length=4096, rotated_pairs=12)
    cycles = [4096 * value / 6.283185307179586 for value in plain(part)]
    betas: dict[str, Any] = {"beta_fast": (cycles[3] + cycles[4]) / 2, "beta_slow": (cycles[9] + cycles[10]) / 2}
    got = frequencies("mrrope", part, factor=4, **betas).inv_freq
    assert_same(got[:12], frequencies("mrrope", whole, factor=4, **betas).inv_freq[:12])
    assert not got[12:].any()
    with pytest.raises(MethodError, match=r"The 12 pairs of this model complete 651\.9 to 27\.\d+"):
        frequencies("mrrope", part, factor=4)  # none of fewer than one cycle: those that do not rotate do not count


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, yarn_attention_factor(40)),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, yarn_attention_factor(40, 0.707) / yarn_attention_factor(40)),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, yarn_attention_factor(40) / yarn_attention_factor(40, 0.5)),
        ({"mscale": 0.707}, yarn_attention_factor(40)),  # one alone says nothing
        ({"mscale_all_dim": 0.707}, yarn_attention_factor(40)),
        ({"mscale": 0.0, "mscale_all_dim": 0.0}, yarn_attention_factor(40)),
        ({"attention_factor": 1.7}, 1.7),
        ({"attention_factor": 1.7, "mscale": 0.707, "mscale_all_dim": 1.0}, 1.7),  # the explicit value wins
    ],
)
def test_yarn_attention_factor_variants(params: dict[str, Any], expected: float) -> None:
    result = frequencies("yarn", LLAMA2, factor=40, **params)
    assert result.attention_factor == pytest.approx(expected, rel=EXACT)
    assert_same(result.inv_freq, by_dimension(LLAMA2, 40))  # a matter of cos and sin alone


def test_a_ramp_ends_at_the_last_dim() -> None:
    # The dim with one cycle lies beyond the last: 131072 / (2 pi) is above theta^2.
    rotary = Rotary(dim=64, theta=100, trained_length=131072)
    for truncate in (True, False):
        result = frequencies("by-parts", rotary, factor=4, beta_fast=2000, truncate=truncate)
        assert_same(result.inv_freq, by_dimension(rotary, 4, fast=2000, truncate=truncate))


def test_a_ramp_narrower_than_one_dim_is_a_step() -> None:
    # Both ends of the ramp fall on dim 0: 2 pi 32 cycles fit into neither of these lengths.
    rotary = Rotary(dim=64, theta=1e4, trained_length=6)
    assert_same(frequencies("yarn", rotary, factor=4).inv_freq, by_dimension(rotary, 4))


# --- figures worked out by hand -----------------------------------------------------------------------------------


def test_ntk_by_hand() -> None:
    assert_same(frequencies("ntk", LLAMA2, factor=8).inv_freq, with_theta(LLAMA2, 82684.6), rtol=1e-6)


def test_the_two_ramps_differ_by_up_to_three() -> None:
    dimension = frequencies("by-parts", LLAMA2, factor=16).inv_freq
    cycles = frequencies("by-parts", LLAMA2, factor=16, ramp="cycles").inv_freq
    ratio = torch.maximum(dimension / cycles, cycles / dimension)
    assert float(ratio.max()) == pytest.approx(3.04, abs=5e-3)


def test_high_frequencies_are_kept_and_low_ones_interpolated() -> None:
    """An inverted ramp passes many tests; this is the table itself."""
    for method in ("by-parts", "yarn"):
        for ramp in ("dimension", "cycles"):
            ratio = plain(LLAMA2)[0], plain(LLAMA2)[63]
            inv_freq = frequencies(method, LLAMA2, factor=16, ramp=ramp).inv_freq
            assert float(inv_freq[0]) == ratio[0]
            assert float(inv_freq[63]) == pytest.approx(ratio[1] / 16, rel=EXACT)


@pytest.mark.parametrize(
    ("method", "params", "length", "golden"),
    [
        # pairs 0, 20, 32, 40 and 63 of d=128, b=1e4, L0=4096; conformance/ has the other methods
        (
            "by-parts",
            {"factor": 16, "ramp": "cycles"},
            None,
            [1, 0.056234132519, 0.00229404832733, 0.000299155724997, 7.21738740431e-06],
        ),
        (
            "dynamic-ntk",
            {"growth": "even"},
            16385,
            [1, 0.031839618618, 0.0040248395436, 0.00101376131374, 1.92463664115e-05],
        ),
        ("dynamic-yarn", {}, 6000, [1, 0.056234132519, 0.00853538461538, 0.00239035757492, 7.88331168215e-05]),
    ],
)
def test_golden(method: str, params: dict[str, Any], length: int | None, golden: list[float]) -> None:
    inv_freq = frequencies(method, LLAMA2, length=length, **params).inv_freq
    assert_same(inv_freq[[0, 20, 32, 40, 63]], golden, rtol=1e-9)


some_mscales = st.sampled_from([0.0, 0.5, 0.707, 1.0])


# --- transformers' own tables -------------------------------------------------------------------------------------


class TestAgainstTransformers:
    @law
    @given(rotary=native_rotaries)
    def test_default(self, rotary: Rotary) -> None:
        assert_native(rotary, frequencies("default", rotary), native_parameters("default", rotary))

    @law
    @given(rotary=native_rotaries, factor=some_factors)
    def test_linear(self, rotary: Rotary, factor: float) -> None:
        native = native_parameters("linear", rotary, factor=factor)
        assert_native(rotary, frequencies("linear", rotary, factor=factor), native)

    @law
    @given(
        rotary=native_rotaries, factor=some_factors, betas=some_betas(), mscales=st.tuples(some_mscales, some_mscales)
    )
    def test_yarn(self, rotary: Rotary, factor: float, betas: dict[str, Any], mscales: tuple[float, float]) -> None:
        native = native_parameters("yarn", rotary, original=True, factor=factor)
        for params in (
            {},
            {"truncate": False},
            {"mscale": 0.707, "mscale_all_dim": 1.0},
            {"mscale": mscales[0], "mscale_all_dim": mscales[1], **betas},
            {"attention_factor": 1.25},
        ):
            assert_native(rotary, frequencies("yarn", rotary, factor=factor, **params), native | params)

    @law
    @given(rotary=native_rotaries, factor=some_factors, low=st.floats(0.1, 8), times=st.floats(1.5, 64))
    def test_llama3(self, rotary: Rotary, factor: float, low: float, times: float) -> None:
        native = native_parameters("llama3", rotary, original=True, factor=factor)
        for slow, fast in ((1.0, 4.0), (1.5, 16.0), (low, low * times)):
            params: dict[str, Any] = {"low_freq_factor": slow, "high_freq_factor": fast}
            assert_native(rotary, frequencies("llama3", rotary, factor=factor, **params), native | params)

    @law
    @given(rotary=some_rotaries, factor=some_factors, low=st.floats(0.1, 8), times=st.floats(1.5, 64))
    def test_llama3_is_by_parts_with_a_ramp_in_cycles(
        self, rotary: Rotary, factor: float, low: float, times: float
    ) -> None:
        slow, fast = low, low * times
        llama3 = frequencies("llama3", rotary, factor=factor, low_freq_factor=slow, high_freq_factor=fast)
        by_parts = frequencies("by-parts", rotary, factor=factor, ramp="cycles", beta_slow=slow, beta_fast=fast)
        assert torch.equal(llama3.inv_freq, by_parts.inv_freq)
        assert llama3.attention_factor == by_parts.attention_factor


with_proportional = pytest.mark.skipif(
    "proportional" not in ROPE_INIT_FUNCTIONS, reason="this transformers has no such rope type"
)


@with_proportional
@pytest.mark.parametrize("proportion", [0.0, 0.25, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("factor", [1.0, 8.0])
@pytest.mark.parametrize(("dim", "theta"), [(64, 1e4), (256, 1e6), (512, 1e6)])
def test_proportional(dim: int, theta: float, factor: float, proportion: float) -> None:
    rotary = Rotary(dim, theta, 4096, rotated_pairs=int(proportion * dim / 2))
    ours = frequencies("linear", rotary, factor=factor)
    native: dict[str, Any] = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": proportion}
    assert_native(rotary, ours, native | {"factor": factor})
    assert int((ours.inv_freq > 0).sum()) == int(proportion * dim / 2)
    method = Linear(factor=factor) if factor > 1 else Default()
    saved = method.rope_parameters(rotary)
    assert saved is not None
    assert_native(rotary, method.frequencies(rotary), saved | {"partial_rotary_factor": proportion})


@with_proportional
@pytest.mark.parametrize("method", [NTK(factor=4), Theta(theta=1e6)], ids=lambda method: method.name)
def test_proportional_with_another_base(method: RopeMethod) -> None:
    rotary = Rotary(128, 1e4, 4096, rotated_pairs=16)
    saved = method.rope_parameters(rotary)
    assert saved is not None
    assert_native(rotary, method.frequencies(rotary), saved | {"partial_rotary_factor": 0.25})


# --- laws ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@law
@given(dim=some_dims, theta=some_thetas, alpha=st.floats(1, 1024))
def test_ntk_keeps_the_highest_and_divides_the_lowest_by_alpha(dim: int, theta: float, alpha: float) -> None:
    rotary = Rotary(dim, theta, 4096)
    inv_freq = frequencies("ntk", rotary, factor=alpha).inv_freq
    assert float(inv_freq[0]) == 1.0
    assert alpha_of(rotary, inv_freq) == pytest.approx(alpha, rel=1e-11)


@pytest.mark.slow
@law
@given(
    dim=some_dims,
    theta=some_thetas,
    trained=some_lengths,
    factor=st.floats(1, 64),
    ramp=st.sampled_from(["cycles", "dimension"]),
)
def test_by_parts_stays_between_plain_and_linear(
    dim: int, theta: float, trained: int, factor: float, ramp: str
) -> None:
    rotary = Rotary(dim, theta, trained)
    inv_freq = frequencies("by-parts", rotary, factor=factor, ramp=ramp).inv_freq.tolist()
    for value, unscaled in zip(inv_freq, plain(rotary), strict=True):
        assert unscaled / factor * (1 - EXACT) <= value <= unscaled * (1 + EXACT)
