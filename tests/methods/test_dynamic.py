"""Every length-dependent frequency method against its paper, figures worked out by hand, and transformers' tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.dynamic import LongRoPE
from rope_ext_hf.methods.registry import frequencies
from tests.support.method_checks import (
    EXACT,
    GEOMETRY,
    LLAMA2,
    alpha_of,
    assert_native,
    assert_same,
    law,
    lengths_around,
    native_parameters,
    native_rotaries,
    some_factors,
    some_lengths,
    some_rotaries,
)
from tests.support.method_examples import example_methods
from tests.support.oracles import (
    by_cycles,
    by_dimension,
    divided,
    dynamic_ntk_alpha,
    longrope_attention_factor,
    ntk,
    rising_divisors,
    yarn_attention_factor,
)

# --- each method against its paper --------------------------------------------------------------------------------


class TestAgainstThePapers:
    @pytest.mark.parametrize("growth", ["paper", "hf", "even", "pow2"])
    @law
    @given(rotary=some_rotaries, factor=some_factors, initial=st.integers(1, 9), data=st.data())
    def test_dynamic_ntk(self, growth: str, rotary: Rotary, factor: float, initial: int, data: st.DataObject) -> None:
        assume(rotary.dim > 2)
        of_growth: dict[str, dict[str, Any]] = {"hf": {"factor": factor}, "even": {"initial": initial}}
        params = of_growth.get(growth, {})
        for length in data.draw(lengths_around(rotary.trained_length)):
            result = frequencies("dynamic-ntk", rotary, length=length, growth=growth, **params)
            alpha = dynamic_ntk_alpha(growth, length / rotary.trained_length, **params)
            assert_same(result.inv_freq, ntk(rotary, alpha))
            assert result.attention_factor == 1.0

    @law
    @given(rotary=some_rotaries, ramp=st.sampled_from(["dimension", "cycles"]), data=st.data())
    def test_dynamic_yarn(self, rotary: Rotary, ramp: str, data: st.DataObject) -> None:
        for length in data.draw(lengths_around(rotary.trained_length)):
            result = frequencies("dynamic-yarn", rotary, length=length, ramp=ramp)
            s = max(1.0, length / rotary.trained_length)
            assert_same(result.inv_freq, by_cycles(rotary, s) if ramp == "cycles" else by_dimension(rotary, s))
            assert result.attention_factor == pytest.approx(yarn_attention_factor(s), rel=EXACT)

    @law
    @given(rotary=some_rotaries, factor=some_factors, top=st.floats(1, 64), data=st.data())
    def test_longrope(self, rotary: Rotary, factor: float, top: float, data: st.DataObject) -> None:
        assume(rotary.dim > 2)
        lists: dict[str, Any] = {
            "short_factor": rising_divisors(rotary, 2),
            "long_factor": rising_divisors(rotary, top),
        }
        expected = longrope_attention_factor(rotary, factor)
        for length in (None, *data.draw(lengths_around(rotary.trained_length))):
            divisors = lists["long_factor" if length and length > rotary.trained_length else "short_factor"]
            result = frequencies("longrope", rotary, length=length, factor=factor, **lists)
            assert_same(result.inv_freq, divided(rotary, divisors))
            assert result.attention_factor == pytest.approx(expected, rel=EXACT)  # the same on both sides of L0
        assert frequencies("longrope", rotary, factor=1, **lists).attention_factor == 1.0
        explicit = frequencies("longrope", rotary, factor=factor, attention_factor=1.3, **lists)
        assert explicit.attention_factor == 1.3


# --- figures worked out by hand -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "length", "alpha"),
    [
        ({"growth": "even"}, 4096, 1),
        ({"growth": "even"}, 4097, 2),
        ({"growth": "even"}, 8192, 2),
        ({"growth": "even"}, 8193, 4),
        ({"growth": "even"}, 16384, 4),
        ({"growth": "even"}, 16385, 6),
        ({"growth": "even", "initial": 4}, 1, 4),
        ({"growth": "even", "initial": 4}, 16384, 4),
        ({"growth": "even", "initial": 4}, 16385, 6),
        ({"growth": "pow2"}, 4096, 1),
        ({"growth": "pow2"}, 4097, 3),
        ({"growth": "pow2"}, 8192, 3),
        ({"growth": "pow2"}, 8193, 7),
        ({"growth": "pow2"}, 16384, 7),
        ({"growth": "pow2"}, 32768, 15),
        ({"growth": "pow2"}, 32769, 31),
        ({"growth": "hf", "factor": 4}, 4096, 1),
        ({"growth": "hf", "factor": 4}, 16384, 13),
        ({"growth": "hf", "factor": 8}, 32768, 57),
        ({"growth": "hf", "factor": 1}, 12288, 3),
        ({"growth": "paper"}, 2048, 1),
        ({"growth": "paper"}, 12288, 3),
    ],
)
def test_dynamic_alpha_by_hand(params: dict[str, Any], length: int, alpha: float) -> None:
    result = frequencies("dynamic-ntk", LLAMA2, length=length, **params)
    assert alpha_of(LLAMA2, result.inv_freq) == pytest.approx(alpha, rel=1e-9)


def test_pow2_is_exact_at_every_power_of_two() -> None:
    for trained_length in (3, 100, 256, 4096, 10007):
        rotary = Rotary(dim=64, theta=1e4, trained_length=trained_length)
        for n in range(11):
            for length, power in ((trained_length << n, n), ((trained_length << n) + 1, n + 1)):
                inv_freq = frequencies("dynamic-ntk", rotary, growth="pow2", length=length).inv_freq
                alpha = 1 if power == 0 else 2 ** (power + 1) - 1
                assert alpha_of(rotary, inv_freq) == pytest.approx(alpha, rel=1e-9), (trained_length, length)


# --- transformers' own tables -------------------------------------------------------------------------------------


class TestAgainstTransformers:
    @law
    @given(rotary=native_rotaries, factor=some_factors, data=st.data())
    def test_dynamic(self, rotary: Rotary, factor: float, data: st.DataObject) -> None:
        trained = rotary.trained_length
        for length in (trained // 2, trained, trained + 1, data.draw(st.integers(1, 64 * trained))):
            ours = frequencies("dynamic-ntk", rotary, growth="hf", factor=factor, length=length)
            assert_native(rotary, ours, native_parameters("dynamic", rotary, factor=factor), length)
            alias = frequencies("dynamic", rotary, factor=factor, length=length)
            assert torch.equal(alias.inv_freq, ours.inv_freq)

    @law
    @given(rotary=native_rotaries, factor=some_factors, data=st.data())
    def test_longrope(self, rotary: Rotary, factor: float, data: st.DataObject) -> None:
        lists: dict[str, Any] = {
            "short_factor": rising_divisors(rotary, 1.5),
            "long_factor": rising_divisors(rotary, 1.1 * factor),
        }
        native = native_parameters("longrope", rotary, original=True, factor=factor, **lists)
        trained = rotary.trained_length
        for length in (None, trained, trained + 1, data.draw(st.integers(1, 64 * trained))):
            ours = frequencies("longrope", rotary, factor=factor, length=length, **lists)
            assert_native(rotary, ours, native, length)
        ours = frequencies("longrope", rotary, attention_factor=1.4, **lists)
        assert_native(rotary, ours, native | {"attention_factor": 1.4})


def test_longrope_native_serves_both_lists() -> None:
    method = LongRoPE(
        short_factor=tuple(rising_divisors(GEOMETRY, 2)), long_factor=tuple(rising_divisors(GEOMETRY, 30)), factor=8
    )
    parameters = method.rope_parameters(GEOMETRY)
    assert parameters is not None
    for length in (512, 513):
        assert_native(GEOMETRY, method.frequencies(GEOMETRY, length), parameters, length)


def test_longrope_has_no_attention_factor_for_a_trained_length_of_one_token() -> None:
    """sqrt(1 + ln s / ln L0) divides by ln 1."""
    with pytest.raises(MethodError, match="longrope"):
        frequencies("longrope", Rotary(4, 1e4, 1), short_factor=[1, 1], long_factor=[2, 2], factor=4)


# --- laws ---------------------------------------------------------------------------------------------------------


@law
@given(trained=some_lengths, ratio=st.floats(0.01, 64), initial=st.integers(1, 9))
def test_even_growth_takes_the_smallest_even_k_that_covers(trained: int, ratio: float, initial: int) -> None:
    rotary = Rotary(64, 1e4, trained)
    length = max(1, round(trained * ratio))
    inv_freq = frequencies("dynamic-ntk", rotary, growth="even", initial=initial, length=length).inv_freq
    alpha = alpha_of(rotary, inv_freq)
    k = round(alpha)
    assert alpha == pytest.approx(k, rel=1e-9)
    assert k * trained >= length
    if length <= initial * trained:
        assert k == initial
    else:
        assert k % 2 == 0
        assert (k - 2) * trained < length


@pytest.mark.slow
@law
@given(trained=some_lengths, shorter=st.integers(1, 1 << 20), longer=st.integers(1, 1 << 20), data=st.data())
def test_a_longer_input_never_turns_faster(trained: int, shorter: int, longer: int, data: st.DataObject) -> None:
    rotary = Rotary(64, 1e4, trained)
    dependent = [method for _, method in example_methods(rotary) if method.length_dependent]
    method = data.draw(st.sampled_from(dependent))
    shorter, longer = sorted((shorter, longer))
    slow, fast = (method.frequencies(rotary, length).inv_freq for length in (longer, shorter))
    assert (slow <= fast * (1 + EXACT)).all()
