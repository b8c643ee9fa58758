"""The contract of every method, over the registry: a new method is tested by being registered."""

from __future__ import annotations

import json
import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.dynamic import DynamicNTK, DynamicYarn
from rope_ext_hf.methods.registry import frequencies, list_methods, method_from_dict, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import NTK, Default, Factors, Linear, Theta, Yarn
from tests.method_checks import EXACT, GEOMETRY, LLAMA2, assert_native, assert_same, with_factor
from tests.method_examples import example_method, example_methods
from tests.oracles import (
    plain,
)

over_methods = pytest.mark.parametrize(
    "method",
    [method for _, method in example_methods(GEOMETRY)],
    ids=[json.dumps(m.to_dict())[:60] for _, m in example_methods(GEOMETRY)],
)


@over_methods
class TestContract:
    def test_shape_and_dtype(self, method: RopeMethod) -> None:
        for length in (None, 1, 512, 513, 5000):
            inv_freq, attention_factor = method.frequencies(GEOMETRY, length)
            assert inv_freq.shape == (32,)
            assert inv_freq.dtype == torch.float64
            assert type(attention_factor) is float

    def test_positive_and_non_increasing(self, method: RopeMethod) -> None:
        for length in (1, 512, 513, 5000):
            inv_freq, attention_factor = method.frequencies(GEOMETRY, length)
            assert torch.isfinite(inv_freq).all()
            assert (inv_freq > 0).all()
            assert (inv_freq.diff() <= 0).all()
            assert math.isfinite(attention_factor)
            assert attention_factor > 0

    def test_never_faster_than_the_model_itself(self, method: RopeMethod) -> None:
        """Extension slows pairs down; a turn beyond the trained ones is what it avoids."""
        inv_freq = method.frequencies(GEOMETRY, 5000).inv_freq
        assert (inv_freq <= torch.tensor(plain(GEOMETRY), dtype=torch.float64) * (1 + EXACT)).all()

    def test_json_round_trip(self, method: RopeMethod) -> None:
        again = method_from_dict(json.loads(json.dumps(method.to_dict())))
        assert again == method
        assert type(again) is type(method)
        assert again.to_dict() == method.to_dict()

    def test_pickle_round_trip(self, method: RopeMethod) -> None:
        assert pickle.loads(pickle.dumps(method)) == method

    def test_hashable(self, method: RopeMethod) -> None:
        assert len({method, pickle.loads(pickle.dumps(method))}) == 1

    def test_frozen(self, method: RopeMethod) -> None:
        with pytest.raises((FrozenInstanceError, TypeError)):
            method.factor = 2.0  # type: ignore[attr-defined]

    def test_native_form_of_a_static_method(self, method: RopeMethod) -> None:
        if isinstance(method, RemappingMethod):  # no frequencies say what it does
            assert method.native(GEOMETRY) is None
            return
        if method.length_dependent:
            parameters = method.native(GEOMETRY)
            assert parameters is None or parameters["rope_type"] == "longrope"
            return
        for rotary in (GEOMETRY, Rotary(dim=64, theta=5e5, trained_length=8192)):
            parameters = method.native(rotary)
            assert parameters is not None
            for length in (None, 4 * rotary.trained_length):
                assert_native(rotary, method.frequencies(rotary), parameters, length)

    def test_longrope_writes_any_static_frequencies(self, method: RopeMethod) -> None:
        if not method.length_dependent:
            assert_native(GEOMETRY, method.frequencies(GEOMETRY), method.longrope_parameters(GEOMETRY), 9999)

    def test_static_means_the_length_does_not_matter(self, method: RopeMethod) -> None:
        short, long = (method.frequencies(GEOMETRY, length) for length in (10, 50_000))
        same = torch.equal(short.inv_freq, long.inv_freq) and short.attention_factor == long.attention_factor
        assert same is not method.length_dependent

    def test_no_length_is_the_trained_length(self, method: RopeMethod) -> None:
        without, trained = method.frequencies(GEOMETRY), method.frequencies(GEOMETRY, 512)
        assert torch.equal(without.inv_freq, trained.inv_freq)
        assert without.attention_factor == trained.attention_factor

    def test_each_length_of_many(self, method: RopeMethod) -> None:
        """at_lengths over a tensor is `frequencies` of each entry."""
        lengths = [1, 256, 511, 512, 513, 1024, 1025, 2048, 2049, 4096, 4097, 100_000, 1 << 24]
        inv_freq, attention_factor = method.at_lengths(GEOMETRY, torch.tensor(lengths, dtype=torch.float64))
        inv_freq = inv_freq.expand(len(lengths), -1)
        warmth = torch.as_tensor(attention_factor, dtype=torch.float64).expand(len(lengths), 1)
        for row, length in enumerate(lengths):
            alone = method.frequencies(GEOMETRY, length)
            assert_same(inv_freq[row], alone.inv_freq)
            assert float(warmth[row, 0]) == pytest.approx(alone.attention_factor, rel=EXACT)

    def test_a_batch_of_lengths_may_have_any_shape(self, method: RopeMethod) -> None:
        lengths = torch.tensor([[100.0, 600.0, 1000.0], [2000.0, 512.0, 513.0]], dtype=torch.float64)
        flat, _ = method.at_lengths(GEOMETRY, lengths.flatten())
        square, _ = method.at_lengths(GEOMETRY, lengths)
        assert_same(square.expand(2, 3, 32).reshape(6, 32), flat.expand(6, 32))

    def test_the_ambient_default_device_does_not_matter(self, method: RopeMethod) -> None:
        expected = method.frequencies(GEOMETRY, 1000)
        with torch.device("meta"):
            inv_freq, attention_factor = method.frequencies(GEOMETRY, 1000)
        assert torch.equal(inv_freq, expected.inv_freq)
        assert attention_factor == expected.attention_factor

    def test_a_length_below_one_is_refused(self, method: RopeMethod) -> None:
        with pytest.raises(MethodError, match="got 0"):
            method.frequencies(GEOMETRY, 0)

    def test_an_object_is_as_good_as_a_name(self, method: RopeMethod) -> None:
        values = method.to_dict()
        by_name = frequencies(values.pop("method"), GEOMETRY, length=700, **values)
        by_object = frequencies(method, GEOMETRY, length=700)
        assert torch.equal(by_name.inv_freq, by_object.inv_freq)
        assert by_name.attention_factor == by_object.attention_factor


# --- figures that hold for several methods ------------------------------------------------------------------------


@pytest.mark.parametrize("name", with_factor)
def test_factor_one_is_the_identity(name: str) -> None:
    inv_freq, attention_factor = example_method(list_methods()[name], GEOMETRY, factor=1.0).frequencies(GEOMETRY)
    assert_same(inv_freq, plain(GEOMETRY))
    assert attention_factor == 1.0


@pytest.mark.parametrize(
    "method",
    [
        DynamicNTK(),
        DynamicNTK(growth="even"),
        DynamicNTK(growth="pow2"),
        DynamicNTK(growth="hf", factor=8),
        DynamicYarn(),
        DynamicYarn(ramp="turns"),
    ],
)
def test_within_the_trained_length_nothing_is_scaled(method: RopeMethod) -> None:
    for length in (1, 300, 512):
        inv_freq, attention_factor = method.frequencies(GEOMETRY, length)
        assert_same(inv_freq, plain(GEOMETRY))
        assert attention_factor == 1.0
    assert not torch.equal(method.frequencies(GEOMETRY, 513).inv_freq, method.frequencies(GEOMETRY, 512).inv_freq)


@pytest.mark.parametrize(
    ("method", "extended"),
    [(Default(), 512), (Linear(factor=4), 2048), (NTK(factor=1.5), 768), (Theta(theta=1e6), None), (DynamicNTK(), None),
     (DynamicNTK(growth="hf", factor=4), 2048), (Yarn(factor=8), 4096)],
)  # fmt: skip
def test_extended_length(method: RopeMethod, extended: int | None) -> None:
    assert method.extended_length(GEOMETRY) == extended


def test_no_native_form_where_transformers_would_read_it_otherwise() -> None:
    proportional = Rotary(64, 1e4, 4096, rotated_pairs=8)
    for name, method in example_methods(proportional):
        if name not in ("default", "linear", "ntk", "theta"):
            assert method.native(proportional) is None, name
    for growth in ("paper", "even", "pow2"):
        assert resolve_method("dynamic-ntk", LLAMA2, growth=growth).native(LLAMA2) is None
        assert resolve_method("dynamic-ntk", LLAMA2, growth=growth).approximate_rope_parameters(LLAMA2) is None
    dynamic = resolve_method("dynamic", LLAMA2, factor=4)
    assert dynamic.native(LLAMA2) is None  # transformers' own keeps a memory of earlier calls
    approximation = dynamic.approximate_rope_parameters(LLAMA2)
    assert approximation is not None
    for length in (4096, 9000):
        assert_native(LLAMA2, dynamic.frequencies(LLAMA2, length), approximation, length)


# --- geometries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"dim": 63}, "63"),
        ({"dim": 0}, "0"),
        ({"dim": -2}, "-2"),
        ({"theta": 1.0}, "1.0"),
        ({"theta": math.nan}, "nan"),
        ({"theta": math.inf}, "inf"),
        ({"trained_length": 0}, "0"),
        ({"trained_length": math.nan}, "nan"),
        ({"rotated_pairs": 33}, "33"),
        ({"rotated_pairs": -1}, "-1"),
    ],
)
def test_impossible_geometry_is_refused(values: dict[str, Any], said: str) -> None:
    geometry: dict[str, Any] = {"dim": 64, "theta": 1e4, "trained_length": 512}
    with pytest.raises(MethodError, match=said):
        Rotary(**geometry | values)


@pytest.mark.parametrize("name", ["ntk", "dynamic-ntk"])
def test_ntk_needs_four_dims(name: str) -> None:
    params = {"factor": 2} if name == "ntk" else {}
    with pytest.raises(MethodError, match="got 2"):
        frequencies(name, Rotary(2, 1e4, 512), **params)
    with pytest.raises(MethodError, match="got 2"):
        frequencies(example_method(list_methods()[name], GEOMETRY), Rotary(2, 1e4, 512))


def test_an_object_with_lists_of_another_geometry_is_refused() -> None:
    with pytest.raises(MethodError, match=r"64.*32"):
        frequencies(Factors(factors=(1.0,) * 32), LLAMA2)
