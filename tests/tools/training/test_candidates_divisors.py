"""What a search tries: methods inside their ranges, lists for long inputs alone, curves of divisors."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.dynamic import LongRoPE
from rope_ext_hf.methods.registry import frequencies, list_methods, resolve_method
from rope_ext_hf.methods.static import NTK, Linear, Llama3, Yarn
from rope_ext_hf.tools.training.candidates import DivisorCurve, fixed_methods, is_static, two_lists

ROTARY = Rotary(dim=32, theta=10_000.0, trained_length=256)
EXTENDED = ROTARY.scaled(Yarn(factor=2.0), context_length=512)
PARTIAL = Rotary(dim=32, theta=10_000.0, trained_length=256, rotated_pairs=9)


def test_a_search_begins_with_static_methods_for_the_target_length() -> None:
    assert fixed_methods() == ["linear", "ntk", "by-parts", "yarn", "llama3", "mrrope"]
    for name in fixed_methods():
        method = resolve_method(name, ROTARY, target_length=2048)
        assert is_static(method)
        assert method.to_dict()["factor"] == 8
    short = Rotary(dim=32, theta=10_000.0, trained_length=128)  # no pair of more than 32 cycles
    assert fixed_methods(short) == ["linear", "ntk", "by-parts", "yarn", "llama3"]
    assert not is_static(resolve_method("self-extend", ROTARY, target_length=2048))


@pytest.mark.parametrize("rotary", [ROTARY, EXTENDED])
@pytest.mark.parametrize("method", [Linear(factor=8.0), Yarn(factor=8.0), NTK(factor=20.0)])
def test_two_lists_leave_short_inputs_as_loaded(method: RopeMethod, rotary: Rotary) -> None:
    both = two_lists(method, rotary, 8 * rotary.context_length)
    assert isinstance(both, LongRoPE)
    assert not is_static(both)
    assert both.extended_length(rotary) == 8 * rotary.context_length
    short, long = (both.frequencies(rotary, length) for length in (rotary.context_length, rotary.context_length + 1))
    torch.testing.assert_close(short.inv_freq, rotary.inv_freq(), rtol=1e-12, atol=0)
    expected = method.frequencies(rotary)
    torch.testing.assert_close(long.inv_freq, expected.inv_freq, rtol=1e-12, atol=0)
    assert long.attention_factor == pytest.approx(expected.attention_factor)


@pytest.mark.parametrize("rotary", [ROTARY, EXTENDED, PARTIAL])
def test_a_curve_with_a_point_for_each_pair_is_the_method(rotary: Rotary) -> None:
    method = Llama3(factor=8.0)
    pairs = int((rotary.inv_freq() > 0).sum())
    curve = DivisorCurve.of_method(method, rotary, pairs)
    ours, theirs = curve.method(rotary).frequencies(rotary), method.frequencies(rotary)
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq, rtol=1e-9, atol=0)
    assert ours.attention_factor == pytest.approx(theirs.attention_factor)
    assert curve.resampled(pairs) == curve


def test_a_curve_is_straight_between_its_points() -> None:
    made = DivisorCurve((0.0, 1.0, 3.0), 1.1).method(Rotary(dim=10, theta=10_000.0, trained_length=256))
    assert made.to_dict()["factors"] == pytest.approx([1, 2**0.5, 2, 4, 8])
    assert made.to_dict()["attention_factor"] == 1.1


def test_one_pair_has_no_curve() -> None:
    with pytest.raises(MethodError, match="at least 2 pairs rotate, and 1 does"):
        DivisorCurve.of_method(Linear(factor=2.0), Rotary(dim=2, theta=10_000.0, trained_length=256), 1)


@given(st.integers(0, 10**9), st.floats(0.01, 3.0), st.integers(2, 40))
def test_neighbours_ascend_within_their_bounds(seed: int, step: float, points: int) -> None:
    draws = random.Random(seed)
    curve = DivisorCurve.of_method(Yarn(factor=8.0), ROTARY, points)
    for _ in range(20):
        before, curve = curve, curve.changed(draws, step, 5.0)
        assert curve != before
        assert list(curve.levels) == sorted(curve.levels)
        assert curve.levels[0] >= 0
        assert curve.levels[-1] <= 5
        assert 0.8 <= curve.attention_factor <= 1.6
    assert curve.changed(random.Random(seed), step, 5.0) == curve.changed(random.Random(seed), step, 5.0)


def test_longrope_published_factors_are_a_neighbourhood_of_the_curve() -> None:
    """Every list that never falls can be reached: a point for each pair repeats it."""
    factors = (1.0, 1.0, 1.08, 1.1, 1.5, 2.0, 3.2, 4.6, 8.2, 13.0, 20.1, 30.0, 33.1, 40.0, 41.5, 64.0)
    method = resolve_method("factors", ROTARY, factors=factors)
    again = DivisorCurve.of_method(method, ROTARY, 16).method(ROTARY)
    torch.testing.assert_close(
        frequencies(again, ROTARY).inv_freq, frequencies(method, ROTARY).inv_freq, rtol=1e-12, atol=0
    )
    assert "factors" in list_methods()
