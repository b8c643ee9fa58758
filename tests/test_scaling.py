"""Every frequency-level method against the papers' formulas, against transformers' tables, and against its contract."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import MISSING, FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError, RopeExtError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.dynamic import DynamicNTK, DynamicYarn, LongRoPE
from rope_ext_hf.methods.registry import frequencies, list_methods, method_from_dict, register_method, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import NTK, Default, Factors, Linear, Theta, Yarn
from tests.method_examples import example_method, example_methods
from tests.oracles import (
    by_cycles,
    by_dimension,
    divided,
    dynamic_ntk_alpha,
    llama3,
    longrope_attention_factor,
    ntk,
    plain,
    rising_divisors,
    with_theta,
    yarn_attention_factor,
)

EXACT = 1e-12  # two float64 computations of one formula
NATIVE = 2e-5  # transformers computes in float32

DIMS = (32, 64, 80, 128, 256)
THETAS = (1e4, 5e5, 1e6)
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


# --- each method against its paper --------------------------------------------------------------------------------


@pytest.mark.parametrize("rotary", GEOMETRIES, ids=str)
class TestAgainstThePapers:
    def test_default(self, rotary: Rotary) -> None:
        result = frequencies("default", rotary)
        assert_same(result.inv_freq, plain(rotary))
        assert result.attention_factor == 1.0

    @pytest.mark.parametrize("factor", FACTORS)
    def test_linear(self, rotary: Rotary, factor: float) -> None:
        result = frequencies("linear", rotary, factor=factor)
        assert_same(result.inv_freq, [value / factor for value in plain(rotary)])
        assert result.attention_factor == 1.0

    def test_theta(self, rotary: Rotary) -> None:
        result = frequencies("theta", rotary, theta=3e7)
        assert_same(result.inv_freq, with_theta(rotary, 3e7))
        assert result.attention_factor == 1.0

    @pytest.mark.parametrize("factor", FACTORS)
    def test_ntk(self, rotary: Rotary, factor: float) -> None:
        result = frequencies("ntk", rotary, factor=factor)
        assert_same(result.inv_freq, ntk(rotary, factor))
        assert_same(result.inv_freq, with_theta(rotary, rotary.theta * factor ** (rotary.dim / (rotary.dim - 2))))
        assert result.attention_factor == 1.0

    @pytest.mark.parametrize("ratio", [0.25, 1.0, 1.5, 2.0, 3.75, 4.0, 9.0])
    @pytest.mark.parametrize(
        "params",
        [
            {"growth": "paper"},
            {"growth": "hf", "factor": 4},
            {"growth": "even"},
            {"growth": "even", "initial": 3},
            {"growth": "pow2"},
        ],
        ids=["paper", "hf", "even", "even-from-3", "pow2"],
    )
    def test_dynamic_ntk(self, rotary: Rotary, params: dict[str, Any], ratio: float) -> None:
        result = frequencies("dynamic-ntk", rotary, length=int(ratio * rotary.trained_length), **params)
        assert_same(result.inv_freq, ntk(rotary, dynamic_ntk_alpha(ratio=ratio, **params)))
        assert result.attention_factor == 1.0

    @pytest.mark.parametrize("factor", FACTORS)
    @pytest.mark.parametrize(("slow", "fast"), [(1.0, 32.0), (1.0, 4.0), (2.0, 20.0)])
    def test_by_parts(self, rotary: Rotary, factor: float, slow: float, fast: float) -> None:
        given_: dict[str, Any] = {"factor": factor, "beta_slow": slow, "beta_fast": fast}
        turns = frequencies("by-parts", rotary, ramp="turns", **given_)
        assert_same(turns.inv_freq, by_cycles(rotary, factor, slow, fast))
        whole = frequencies("by-parts", rotary, **given_)
        assert_same(whole.inv_freq, by_dimension(rotary, factor, slow, fast))
        fractional = frequencies("by-parts", rotary, truncate=False, **given_)
        assert_same(fractional.inv_freq, by_dimension(rotary, factor, slow, fast, truncate=False))
        assert turns.attention_factor == whole.attention_factor == fractional.attention_factor == 1.0

    @pytest.mark.parametrize("factor", FACTORS)
    def test_yarn(self, rotary: Rotary, factor: float) -> None:
        for params, expected in (
            ({}, by_dimension(rotary, factor)),
            ({"truncate": False}, by_dimension(rotary, factor, truncate=False)),
            ({"ramp": "turns"}, by_cycles(rotary, factor)),
        ):
            result = frequencies("yarn", rotary, factor=factor, **params)
            assert_same(result.inv_freq, expected)
            assert result.attention_factor == pytest.approx(yarn_attention_factor(factor), rel=EXACT)

    @pytest.mark.parametrize("ratio", [0.5, 1.0, 1.25, 3.0, 8.0])
    @pytest.mark.parametrize("ramp", ["dimension", "turns"])
    def test_dynamic_yarn(self, rotary: Rotary, ramp: str, ratio: float) -> None:
        result = frequencies("dynamic-yarn", rotary, length=int(ratio * rotary.trained_length), ramp=ramp)
        s = max(1.0, ratio)
        assert_same(result.inv_freq, by_cycles(rotary, s) if ramp == "turns" else by_dimension(rotary, s))
        assert result.attention_factor == pytest.approx(yarn_attention_factor(s), rel=EXACT)

    def test_longrope(self, rotary: Rotary) -> None:
        short, long = rising_divisors(rotary, 2), rising_divisors(rotary, 40)
        expected = longrope_attention_factor(rotary, 16)
        for length, divisors in (
            (None, short),
            (1, short),
            (rotary.trained_length, short),
            (rotary.trained_length + 1, long),
            (16 * rotary.trained_length, long),
        ):
            result = frequencies("longrope", rotary, length=length, short_factor=short, long_factor=long, factor=16)
            assert_same(result.inv_freq, divided(rotary, divisors))
            assert result.attention_factor == pytest.approx(expected, rel=EXACT)  # the same on both sides of L0
        unscaled = frequencies("longrope", rotary, short_factor=short, long_factor=long, factor=1)
        assert unscaled.attention_factor == 1.0
        explicit = frequencies(
            "longrope", rotary, short_factor=short, long_factor=long, factor=16, attention_factor=1.3
        )
        assert explicit.attention_factor == 1.3

    @pytest.mark.parametrize("factor", FACTORS)
    @pytest.mark.parametrize(("low", "high"), [(1.0, 4.0), (2.0, 7.5)])
    def test_llama3(self, rotary: Rotary, factor: float, low: float, high: float) -> None:
        result = frequencies("llama3", rotary, factor=factor, low_freq_factor=low, high_freq_factor=high)
        assert_same(result.inv_freq, llama3(rotary, factor, low, high))
        assert result.attention_factor == 1.0

    def test_factors(self, rotary: Rotary) -> None:
        result = frequencies("factors", rotary, factors=rising_divisors(rotary, 7), attention_factor=1.1)
        assert_same(result.inv_freq, divided(rotary, rising_divisors(rotary, 7)))
        assert result.attention_factor == 1.1
        assert frequencies("factors", rotary, factors=rising_divisors(rotary, 7)).attention_factor == 1.0


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


def test_a_ramp_narrower_than_one_dim_is_a_step() -> None:
    # Both ends of the ramp fall on dim 0: 2 pi 32 turns fit into neither of these lengths.
    rotary = Rotary(dim=64, theta=1e4, trained_length=6)
    assert_same(frequencies("yarn", rotary, factor=4).inv_freq, by_dimension(rotary, 4))


# --- figures worked out by hand -----------------------------------------------------------------------------------


def test_ntk_by_hand() -> None:
    assert_same(frequencies("ntk", LLAMA2, factor=8).inv_freq, with_theta(LLAMA2, 82684.6), rtol=1e-6)


def test_yarn_by_hand() -> None:
    inv_freq = frequencies("yarn", LLAMA2, factor=16).inv_freq
    assert float(inv_freq[0]) == 1.0
    assert float(inv_freq[63]) == pytest.approx(7.2e-6, rel=5e-3)


def test_linear_by_hand() -> None:
    ratio = frequencies("default", LLAMA2).inv_freq / frequencies("linear", LLAMA2, factor=4).inv_freq
    assert ratio.tolist() == [4.0] * 64


def test_attention_factors_by_hand() -> None:
    assert frequencies("yarn", LLAMA2, factor=32).attention_factor == pytest.approx(1.3466, abs=5e-5)
    ones = [1.0] * 64
    longrope = frequencies("longrope", LLAMA2, short_factor=ones, long_factor=ones, factor=32)
    assert longrope.attention_factor == pytest.approx(1.1902, abs=5e-5)
    m = frequencies("yarn", LLAMA2, factor=40).attention_factor
    assert m**2 == pytest.approx(1.8739, abs=5e-5)  # DeepSeek's softmax scale


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


def test_the_two_ramps_differ_by_up_to_three() -> None:
    dimension = frequencies("by-parts", LLAMA2, factor=16).inv_freq
    turns = frequencies("by-parts", LLAMA2, factor=16, ramp="turns").inv_freq
    ratio = torch.maximum(dimension / turns, turns / dimension)
    assert float(ratio.max()) == pytest.approx(3.04, abs=5e-3)


def test_high_frequencies_are_kept_and_low_ones_interpolated() -> None:
    """An inverted ramp passes many tests; this is the table itself."""
    for method in ("by-parts", "yarn"):
        for ramp in ("dimension", "turns"):
            ratio = plain(LLAMA2)[0], plain(LLAMA2)[63]
            inv_freq = frequencies(method, LLAMA2, factor=16, ramp=ramp).inv_freq
            assert float(inv_freq[0]) == ratio[0]
            assert float(inv_freq[63]) == pytest.approx(ratio[1] / 16, rel=EXACT)


@pytest.mark.parametrize(
    ("method", "params", "length", "golden"),
    [
        # dims 0, 20, 32, 40 and 63 of d=128, b=1e4, L0=4096
        ("default", {}, None, [1, 0.056234132519, 0.01, 0.00316227766017, 0.000115478198469]),
        ("ntk", {"factor": 8}, None, [1, 0.0290606126678, 0.00347766404811, 0.000844519208631, 1.44347748086e-05]),
        ("yarn", {"factor": 16}, None, [1, 0.056234132519, 0.00567307692308, 0.000881788962932, 7.21738740431e-06]),
        (
            "by-parts",
            {"factor": 16, "ramp": "turns"},
            None,
            [1, 0.056234132519, 0.00229404832733, 0.000299155724997, 7.21738740431e-06],
        ),
        ("llama3", {"factor": 8}, None, [1, 0.056234132519, 0.01, 0.00137432477678, 1.44347748086e-05]),
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


# --- transformers' own tables -------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("dim", DIMS)
class TestAgainstTransformers:
    def grid(self, dim: int, theta: float) -> list[tuple[Rotary, float, dict[str, Any]]]:
        return [
            (Rotary(dim, theta, trained_length), factor, {"rope_theta": theta, "factor": factor})
            for trained_length in TRAINED_LENGTHS
            for factor in FACTORS
        ]

    def test_default(self, dim: int, theta: float) -> None:
        rotary = Rotary(dim, theta, 4096)
        assert_native(rotary, frequencies("default", rotary), {"rope_type": "default", "rope_theta": theta})

    def test_linear(self, dim: int, theta: float) -> None:
        for rotary, factor, native in self.grid(dim, theta):
            assert_native(rotary, frequencies("linear", rotary, factor=factor), native | {"rope_type": "linear"})

    def test_dynamic(self, dim: int, theta: float) -> None:
        for rotary, factor, native in self.grid(dim, theta):
            trained = rotary.trained_length
            for length in (trained // 2, trained, trained + 1, int(trained * factor), 3 * trained):
                ours = frequencies("dynamic-ntk", rotary, growth="hf", factor=factor, length=length)
                assert_native(rotary, ours, native | {"rope_type": "dynamic"}, length)
                alias = frequencies("dynamic", rotary, factor=factor, length=length)
                assert torch.equal(alias.inv_freq, ours.inv_freq)

    def test_yarn(self, dim: int, theta: float) -> None:
        for rotary, factor, native in self.grid(dim, theta):
            native |= {"rope_type": "yarn", "original_max_position_embeddings": rotary.trained_length}
            for params in (
                {},
                {"truncate": False},
                {"mscale": 0.707, "mscale_all_dim": 1.0},
                {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 20.0, "beta_slow": 2.0},
                {"attention_factor": 1.25},
            ):
                assert_native(rotary, frequencies("yarn", rotary, factor=factor, **params), native | params)

    def test_longrope(self, dim: int, theta: float) -> None:
        for rotary, factor, native in self.grid(dim, theta):
            trained = rotary.trained_length
            lists: dict[str, Any] = {
                "short_factor": rising_divisors(rotary, 1.5),
                "long_factor": rising_divisors(rotary, 1.1 * factor),
            }
            native |= {"rope_type": "longrope", "original_max_position_embeddings": trained} | lists
            for length in (None, trained, trained + 1, 4 * trained):
                ours = frequencies("longrope", rotary, factor=factor, length=length, **lists)
                assert_native(rotary, ours, native, length)
            ours = frequencies("longrope", rotary, attention_factor=1.4, **lists)
            assert_native(rotary, ours, native | {"attention_factor": 1.4})

    def test_llama3(self, dim: int, theta: float) -> None:
        for rotary, factor, native in self.grid(dim, theta):
            native |= {"rope_type": "llama3", "original_max_position_embeddings": rotary.trained_length}
            for low, high in ((1.0, 4.0), (1.5, 16.0)):
                params: dict[str, Any] = {"low_freq_factor": low, "high_freq_factor": high}
                assert_native(rotary, frequencies("llama3", rotary, factor=factor, **params), native | params)

    def test_llama3_is_by_parts_with_a_ramp_in_turns(self, dim: int, theta: float) -> None:
        for rotary, factor, _ in self.grid(dim, theta):
            llama3 = frequencies("llama3", rotary, factor=factor, low_freq_factor=1.5, high_freq_factor=6)
            by_parts = frequencies("by-parts", rotary, factor=factor, ramp="turns", beta_slow=1.5, beta_fast=6)
            assert torch.equal(llama3.inv_freq, by_parts.inv_freq)
            assert llama3.attention_factor == by_parts.attention_factor


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
    saved = method.native(rotary)
    assert saved is not None
    assert_native(rotary, method.frequencies(rotary), saved | {"partial_rotary_factor": proportion})


@pytest.mark.parametrize("method", [NTK(factor=4), Theta(theta=1e6)], ids=lambda method: method.name)
def test_proportional_with_another_base(method: RopeMethod) -> None:
    rotary = Rotary(128, 1e4, 4096, rotated_pairs=16)
    saved = method.native(rotary)
    assert saved is not None
    assert_native(rotary, method.frequencies(rotary), saved | {"partial_rotary_factor": 0.25})


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


# --- the contract, over the registry ------------------------------------------------------------------------------

GEOMETRY = Rotary(dim=64, theta=1e4, trained_length=512)


over_methods = pytest.mark.parametrize(
    "method",
    [method for _, method in example_methods(GEOMETRY)],
    ids=[json.dumps(m.to_dict())[:60] for _, m in example_methods(GEOMETRY)],
)


def test_the_registry_holds_the_documented_names() -> None:
    assert {"default", "linear", "ntk", "dynamic-ntk", "by-parts", "yarn", "dynamic-yarn", "longrope", "llama3"} <= set(
        list_methods()
    )
    assert {"theta", "factors"} <= set(list_methods())
    assert all(cls.name == name for name, cls in list_methods().items())


def test_the_registry_hands_out_a_copy() -> None:
    list_methods().clear()
    assert "yarn" in list_methods()


@pytest.mark.parametrize("name", ["yarn", "dynamic"])
def test_a_second_holder_of_a_name_is_refused(name: str) -> None:
    before = list_methods()
    with pytest.raises(TypeError, match=name):
        register_method(name)(type("Impostor", (Linear,), {}))
    assert list_methods() == before


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


with_factor = [
    name
    for name, cls in list_methods().items()
    if any(f.name == "factor" and f.default is MISSING for f in fields(cls))
]


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


def test_longrope_native_serves_both_lists() -> None:
    method = LongRoPE(
        short_factor=tuple(rising_divisors(GEOMETRY, 2)), long_factor=tuple(rising_divisors(GEOMETRY, 30)), factor=8
    )
    parameters = method.native(GEOMETRY)
    assert parameters is not None
    for length in (512, 513):
        assert_native(GEOMETRY, method.frequencies(GEOMETRY, length), parameters, length)


@pytest.mark.parametrize(
    ("method", "extended"),
    [(Default(), 512), (Linear(factor=4), 2048), (NTK(factor=1.5), 768), (Theta(theta=1e6), None), (DynamicNTK(), None),
     (DynamicNTK(growth="hf", factor=4), 2048), (Yarn(factor=8), 4096)],
)  # fmt: skip
def test_extended_length(method: RopeMethod, extended: int | None) -> None:
    assert method.extended_length(GEOMETRY) == extended


def test_rope_frequencies_is_the_public_function() -> None:
    assert_same(rope.frequencies("linear", rope.Rotary(64, 1e4, 512), factor=2).inv_freq,
                [value / 2 for value in plain(GEOMETRY)])  # fmt: skip


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "params", "said"),
    [
        ("yarm", {"factor": 2}, ["'yarm'", "Did you mean 'yarn'?", "dynamic-ntk"]),
        ("dynamik", {"factor": 2}, ["'dynamik'", "Did you mean 'dynamic'?"]),
        ("llama-3", {"factor": 2}, ["'llama-3'", "Did you mean 'llama3'?"]),
        ("zzz", {}, ["'zzz'", "Known methods", "longrope"]),
        ("", {}, ["''", "Known methods"]),
        ("linear", {"factor": 0.5}, ["linear", "factor", "at least 1", "0.5"]),
        ("ntk", {"factor": 0}, ["ntk", "factor", "at least 1", "0"]),
        ("ntk", {"factor": -4}, ["factor", "-4"]),
        ("yarn", {"factor": math.nan}, ["yarn", "factor", "nan"]),
        ("yarn", {"factor": math.inf}, ["yarn", "factor", "inf"]),
        ("yarn", {"factor": 4, "beta_fast": math.inf}, ["beta_fast", "inf"]),
        ("yarn", {"factor": 4, "attention_factor": math.nan}, ["attention_factor", "nan"]),
        ("yarn", {"factor": 4, "attention_factor": 0.0}, ["attention_factor", "above 0", "0"]),
        ("yarn", {"factor": 4, "mscale": math.nan}, ["mscale", "nan"]),
        ("yarn", {"factor": 4, "target_length": 16384}, ["factor=4", "target_length=16384", "one"]),
        ("dynamic-ntk", {"factor": 4, "target_length": 16384, "growth": "hf"}, ["factor=4", "target_length=16384"]),
        ("yarn", {"target_length": 4095}, ["4095", "4096"]),
        ("theta", {"theta": 1e6, "target_length": 100}, ["100", "4096"]),
        ("default", {"factor": 4}, ["default", "factor", "target_length"]),
        ("theta", {"theta": 1e6, "factor": 4}, ["theta", "factor"]),
        ("yarn", {}, ["yarn", "factor", "target_length"]),
        ("theta", {}, ["theta", "needs"]),
        ("theta", {"theta": 1.0}, ["theta", "above 1", "got 1"]),
        ("theta", {"theta": math.nan}, ["theta", "nan"]),
        ("yarn", {"factor": 4, "beta_fats": 16}, ["yarn", "'beta_fats'", "Did you mean 'beta_fast'?", "truncate"]),
        ("linear", {"factor": 4, "theta": 1e6}, ["linear", "'theta'", "factor"]),
        ("yarn", {"factor": 4, "beta_fast": 1, "beta_slow": 32}, ["beta_fast=1", "beta_slow=32"]),
        ("yarn", {"factor": 4, "beta_fast": 8, "beta_slow": 8}, ["beta_fast=8", "beta_slow=8"]),
        ("by-parts", {"factor": 4, "beta_slow": 0}, ["by-parts", "beta_slow=0"]),
        ("dynamic-yarn", {"beta_slow": -1}, ["dynamic-yarn", "beta_slow=-1"]),
        ("by-parts", {"factor": 4, "ramp": "sideways"}, ["'sideways'", "dimension", "turns"]),
        ("llama3", {"factor": 8, "low_freq_factor": 4}, ["high_freq_factor=4", "low_freq_factor=4"]),
        ("llama3", {"factor": 8, "low_freq_factor": 0}, ["low_freq_factor=0"]),
        ("dynamic-ntk", {"growth": "linear"}, ["'linear'", "paper", "hf", "even", "pow2"]),
        ("dynamic-ntk", {"growth": "hf"}, ["hf", "needs factor"]),
        ("dynamic", {}, ["hf", "factor"]),
        ("dynamic-ntk", {"factor": 4}, ["factor", "hf", "'paper'"]),
        ("dynamic-ntk", {"factor": 4, "growth": "even"}, ["factor", "hf", "'even'"]),
        ("dynamic-ntk", {"factor": 4, "growth": "pow2"}, ["factor", "hf", "'pow2'"]),
        ("dynamic-ntk", {"sticky": True}, ["sticky", "even", "'paper'"]),
        ("dynamic-ntk", {"initial": 2, "growth": "pow2"}, ["initial", "even", "'pow2'"]),
        ("dynamic-ntk", {"initial": 0.5, "growth": "even"}, ["initial", "0.5"]),
        ("dynamic-ntk", {"initial": math.nan, "growth": "even"}, ["initial", "nan"]),
        ("factors", {"factors": [1.0] * 63}, ["factors", "64", "63"]),
        ("factors", {"factors": [1.0] * 63 + [0.0]}, ["factors", "above 0", "0"]),
        ("factors", {"factors": [1.0] * 63 + [math.nan]}, ["factors", "nan"]),
        ("longrope", {"short_factor": [1.0] * 64, "long_factor": [1.0] * 32, "factor": 4}, ["long_factor", "64", "32"]),
        ("longrope", {"short_factor": [1.0] * 65, "long_factor": [1.0] * 64, "factor": 4}, ["short_factor", "65"]),
        ("longrope", {"short_factor": [-1.0] * 64, "long_factor": [1.0] * 64, "factor": 4}, ["short_factor", "-1"]),
        ("longrope", {"short_factor": [1.0] * 64, "long_factor": [1.0] * 64}, ["longrope", "factor"]),
        ("longrope", {"factor": 4}, ["short_factor", "long_factor"]),
        ("linear", {"factor": "four"}, ["linear", "four"]),
        ("linear", {"factor": "four", "target_length": 8192}, ["four", "8192"]),
        ("linear", {"target_length": "4k"}, ["4k"]),
        ("yarn", {"factor": 4, "beta_fast": "many"}, ["yarn", "many"]),
        ("factors", {"factors": 2.0}, ["factors", "2.0"]),
    ],
)  # fmt: skip
def test_refused(method: str, params: dict[str, Any], said: list[str]) -> None:
    with pytest.raises(MethodError) as caught:
        frequencies(method, LLAMA2, **params)
    for words in said:
        assert words in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RopeExtError)


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


@pytest.mark.parametrize(
    "params",
    [{"factor": 4}, {"beta_fast": 16}, {"target_length": 8192}, {"factor": 2, "beta_slow": 2}, {"nonsense": 1}],
)
def test_parameters_beside_a_method_object_are_a_type_error(params: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(params))) as caught:
        frequencies(Yarn(factor=2), LLAMA2, **params)
    assert "Yarn" in str(caught.value)


def test_something_that_is_no_method_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="int"):
        frequencies(4, LLAMA2)  # type: ignore[arg-type]


def test_an_object_with_lists_of_another_geometry_is_refused() -> None:
    with pytest.raises(MethodError, match=r"64.*32"):
        frequencies(Factors(factors=(1.0,) * 32), LLAMA2)


def test_longrope_has_no_attention_factor_for_a_trained_length_of_one_token() -> None:
    """sqrt(1 + ln s / ln L0) divides by ln 1."""
    with pytest.raises(MethodError, match="longrope"):
        frequencies("longrope", Rotary(4, 1e4, 1), short_factor=[1, 1], long_factor=[2, 2], factor=4)


def test_a_saved_form_without_a_method_is_refused() -> None:
    with pytest.raises(MethodError, match="method"):
        method_from_dict({"factor": 4})


def test_target_length_needs_a_geometry() -> None:
    with pytest.raises(MethodError, match="target_length"):
        resolve_method("yarn", None, target_length=8192)


@pytest.mark.parametrize(
    ("method", "params"),
    [("default", {}), ("theta", {"theta": 1e6}), ("dynamic-ntk", {}), ("dynamic-ntk", {"growth": "even"}),
     ("dynamic-yarn", {}), ("factors", {"factors": [2.0] * 64})],
)  # fmt: skip
def test_target_length_is_accepted_where_there_is_no_factor(method: str, params: dict[str, Any]) -> None:
    stated, unstated = (resolve_method(method, LLAMA2, target_length=t, **params) for t in (65536, None))
    assert stated == unstated


# --- laws ---------------------------------------------------------------------------------------------------------

law = settings(max_examples=60, deadline=None, database=None, derandomize=True)
some_dims = st.integers(2, 128).map(lambda pairs: 2 * pairs)
some_thetas = st.floats(100, 1e7)
some_lengths = st.integers(16, 1 << 17)


@law
@given(dim=some_dims, theta=some_thetas, alpha=st.floats(1, 1024))
def test_ntk_keeps_the_highest_and_divides_the_lowest_by_alpha(dim: int, theta: float, alpha: float) -> None:
    rotary = Rotary(dim, theta, 4096)
    inv_freq = frequencies("ntk", rotary, factor=alpha).inv_freq
    assert float(inv_freq[0]) == 1.0
    assert alpha_of(rotary, inv_freq) == pytest.approx(alpha, rel=1e-11)


@law
@given(trained=some_lengths, extra=st.integers(0, 1 << 20), data=st.data())
def test_target_length_is_factor_times_trained_length(trained: int, extra: int, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(with_factor))
    rotary = Rotary(64, 1e4, trained)
    by_length = resolve_method(name, rotary, target_length=trained + extra)
    by_factor = resolve_method(name, rotary, factor=(trained + extra) / trained)
    assert by_length == by_factor
    assert by_length.extended_length(rotary) == trained + extra
    assert_same(by_length.frequencies(rotary).inv_freq, by_factor.frequencies(rotary).inv_freq)


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


@law
@given(
    dim=some_dims,
    theta=some_thetas,
    trained=some_lengths,
    factor=st.floats(1, 64),
    ramp=st.sampled_from(["turns", "dimension"]),
)
def test_by_parts_stays_between_plain_and_linear(
    dim: int, theta: float, trained: int, factor: float, ramp: str
) -> None:
    rotary = Rotary(dim, theta, trained)
    inv_freq = frequencies("by-parts", rotary, factor=factor, ramp=ramp).inv_freq.tolist()
    for value, unscaled in zip(inv_freq, plain(rotary), strict=True):
        assert unscaled / factor * (1 - EXACT) <= value <= unscaled * (1 + EXACT)


@law
@given(trained=some_lengths, shorter=st.integers(1, 1 << 20), longer=st.integers(1, 1 << 20), data=st.data())
def test_a_longer_input_never_turns_faster(trained: int, shorter: int, longer: int, data: st.DataObject) -> None:
    rotary = Rotary(64, 1e4, trained)
    dependent = [method for _, method in example_methods(rotary) if method.length_dependent]
    method = data.draw(st.sampled_from(dependent))
    shorter, longer = sorted((shorter, longer))
    slow, fast = (method.frequencies(rotary, length).inv_freq for length in (longer, shorter))
    assert (slow <= fast * (1 + EXACT)).all()
