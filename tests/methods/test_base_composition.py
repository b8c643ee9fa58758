"""Methods over a scaling that a model was trained with, against definitions in plain Python that share no code."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import Rotary, TrainedScaling
from rope_ext_hf.methods.registry import frequencies, resolve_method, rotary_from_dict
from rope_ext_hf.rotary.embedding import RotaryEmbedding
from tests.support.method_checks import (
    assert_same,
    law,
    lengths_around,
    some_betas,
    some_factors,
    some_lengths,
    some_rotaries,
)
from tests.support.oracles import dynamic_ntk_alpha

Table = tuple[list[float], float, int]  # inverse frequencies, attention factor, context length


def thetas(d: int, b: float) -> list[float]:
    return [b ** (-2 * i / d) for i in range(d // 2)]


def cycles_ramp(w: list[float], c: int, slow: float, fast: float) -> list[float]:
    out = []
    for each in w:
        r = c * each / (2 * math.pi)
        if fast == slow:
            out.append(1.0 if r < fast else 0.0)
        else:
            out.append(min(1.0, max(0.0, (fast - r) / (fast - slow))))
    return out


def index_of(w: list[float], c: int, n: float, d: int, b: float) -> float:
    """Where ln(c w_i / 2 pi n), piecewise linear in i, first is 0; outside with the slope of a plain model."""
    y = [math.log(c * each / (2 * math.pi * n)) for each in w]
    slope = 2 * math.log(b) / d
    if y[0] <= 0:
        return y[0] / slope
    for i in range(1, len(y)):
        if y[i] <= 0:
            return i - 1 + y[i - 1] / (y[i - 1] - y[i])
    return len(y) - 1 + y[-1] / slope


def dimension_ramp(w: list[float], c: int, slow: float, fast: float, d: int, b: float, truncate: bool) -> list[float]:
    low, high = index_of(w, c, fast, d, b), index_of(w, c, slow, d, b)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    if low == high:
        high += 0.001
    return [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(len(w))]


def apply(name: str, params: dict[str, Any], table: Table, d: int, b: float, length: int) -> tuple[list[float], float]:
    """One method over a table, for an input of `length` tokens."""
    w, a, c = table
    s = params.get("factor", 1.0)
    if name == "default":
        return w, a
    if name == "linear":
        return [each / s for each in w], a
    if name == "factors":
        return [each / f for each, f in zip(w, params["factors"], strict=True)], a * params.get("attention_factor", 1.0)
    if name == "longrope":
        lists = params["long_factor"] if length > c else params["short_factor"]
        return [each / f for each, f in zip(w, lists, strict=True)], a * params["attention_factor"]
    if name in ("ntk", "dynamic-ntk"):
        if name == "dynamic-ntk":
            s = dynamic_ntk_alpha(params.get("growth", "paper"), length / c, s, params.get("initial", 1.0))
        return [each * s ** (-2 * i / (d - 2)) for i, each in enumerate(w)], a
    if name == "mrrope":
        cycles = [c * each / (2 * math.pi) for each in w]
        lo = max(i for i, r in enumerate(cycles) if r > params.get("beta_fast", 32))
        hi = min(i for i, r in enumerate(cycles) if r < params.get("beta_slow", 1))
        t = [min(max(i - lo, 0), hi - lo) / (hi - lo) for i in range(len(w))]
        if params.get("radix") != "uniform":
            t = [x * (x * (hi - lo) + 1) / (hi - lo + 1) for x in t]
        return [each / s**x for each, x in zip(w, t, strict=True)], a * (0.1 * math.log(s) + 1)
    if name == "dynamic-yarn":
        s = max(1.0, length / c)
    if name == "llama3":
        ramp = cycles_ramp(w, c, params.get("low_freq_factor", 1.0), params.get("high_freq_factor", 4.0))
    elif params.get("ramp", "dimension") == "cycles":
        ramp = cycles_ramp(w, c, params.get("beta_slow", 1.0), params.get("beta_fast", 32.0))
    else:
        betas = params.get("beta_slow", 1.0), params.get("beta_fast", 32.0)
        ramp = dimension_ramp(w, c, *betas, d, b, params.get("truncate", True))
    mixed = [each * (1 - r) + each / s * r for each, r in zip(w, ramp, strict=True)]
    if name in ("yarn", "dynamic-yarn"):
        a *= params.get("attention_factor") or 0.1 * math.log(s) + 1
    return mixed, a


Parameters = st.SearchStrategy[dict[str, Any]]


def given_(needed: dict[str, Any] | None = None, /, **optional: Any) -> Parameters:
    """Parameters of a method: those that it needs, and any of the others."""
    return st.fixed_dictionaries(needed or {}, optional=optional)


def ramped(parameters: Parameters) -> Parameters:
    """With the parameters that say which pairs are interpolated."""
    ramp = given_(ramp=st.sampled_from(["dimension", "cycles"]), truncate=st.booleans())
    betas = st.one_of(given_(), some_betas())
    return st.builds(lambda *parts: {k: v for part in parts for k, v in part.items()}, parameters, ramp, betas)


FACTOR = {"factor": some_factors}
YARN = ramped(given_(FACTOR, attention_factor=st.floats(0.5, 2)))
LLAMA3 = given_(FACTOR, low_freq_factor=st.floats(0.5, 3), high_freq_factor=st.floats(3.5, 16))
ON_TOP: dict[str, Parameters] = {
    "default": given_(),
    "linear": given_(FACTOR),
    "ntk": given_(FACTOR),
    "by-parts": ramped(given_(FACTOR)),
    "yarn": YARN,
    "llama3": LLAMA3,
    "dynamic-ntk": st.one_of(
        given_(growth=st.sampled_from(["paper", "pow2"])),
        given_({"growth": st.just("hf"), "factor": some_factors}),
        given_({"growth": st.just("even")}, initial=st.integers(1, 9)),
    ),
    "dynamic-yarn": ramped(given_()),
}
UNDERNEATH = st.one_of(
    st.sampled_from(
        [
            ("llama3", {"factor": 8.0}, 131072),
            ("llama3", {"factor": 32.0}, 131072),
            ("linear", {"factor": 8.0}, 65536),
            ("yarn", {"factor": 32.0, "truncate": False}, 131072),
            ("yarn", {"factor": 40.0, "attention_factor": 1.0, "beta_fast": 1.0, "beta_slow": 1.0}, 163840),
            ("ntk", {"factor": 1000.0}, 32768),
        ]
    ),
    *(
        st.tuples(st.just(name), parameters, some_lengths)
        for name, parameters in {
            "linear": given_(FACTOR),
            "ntk": given_(FACTOR),
            "yarn": YARN,
            "llama3": LLAMA3,
        }.items()
    ),
)
"""A method, its parameters, and the context length in tokens that the model has under it: as published, or drawn."""


@pytest.mark.parametrize("name", ON_TOP)
@law
@given(under=UNDERNEATH, plain=some_rotaries.filter(lambda rotary: rotary.dim > 2), data=st.data())
def test_composition_equals_its_definition(
    name: str, under: tuple[str, dict[str, Any], int], plain: Rotary, data: st.DataObject
) -> None:
    below, params, context_length = under
    d, b, original = plain.dim, plain.theta, plain.trained_length
    top = data.draw(ON_TOP[name])
    table: Table = (*apply(below, params, (thetas(d, b), 1.0, original), d, b, original), context_length)
    rotary = plain.scaled(resolve_method(below, None, **params), context_length=context_length)
    drawn = data.draw(st.integers(1, 64 * context_length))
    for length in (1, original, context_length, context_length + 1, 3 * context_length, drawn):
        expected, factor = apply(name, top, table, d, b, length)
        got = frequencies(name, rotary, length=length, **top)
        assert_same(got.inv_freq, expected, rtol=1e-9)
        assert got.attention_factor == pytest.approx(factor, rel=1e-9)


@pytest.mark.parametrize("radix", ["progressive", "uniform"])
@pytest.mark.parametrize("params", [{"factor": 2.0}, {"factor": 8.0, "beta_fast": 20.0, "beta_slow": 2.0}], ids=str)
@pytest.mark.parametrize(
    ("below", "settings", "plain", "context_length"),
    [
        ("llama3", {"factor": 8.0}, Rotary(128, 5e5, 8192), 131072),
        ("yarn", {"factor": 32.0, "truncate": False}, Rotary(64, 150000.0, 4096), 131072),
        ("linear", {"factor": 8.0}, Rotary(128, 1e4, 4096), 32768),
    ],
    ids=["Llama 3.1", "gpt-oss", "linear"],
)
def test_the_band_of_mrrope_is_counted_in_the_frequencies_of_the_model_as_loaded(
    below: str, settings: dict[str, Any], plain: Rotary, context_length: int, params: dict[str, Any], radix: str
) -> None:
    d, b, original = plain.dim, plain.theta, plain.trained_length
    table: Table = (*apply(below, settings, (thetas(d, b), 1.0, original), d, b, original), context_length)
    rotary = plain.scaled(resolve_method(below, None, **settings), context_length=context_length)
    expected, factor = apply("mrrope", params | {"radix": radix}, table, d, b, 1)
    got = frequencies("mrrope", rotary, radix=radix, **params)
    assert_same(got.inv_freq, expected)
    assert got.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("beta_slow", [0.001, 1.0, 20.0, 300.0])
@pytest.mark.parametrize("beta_fast", [400.0, 2000.0, 1e6])
def test_a_ramp_beyond_the_last_and_the_first_pair(beta_fast: float, beta_slow: float) -> None:
    """The slowest pair of this model rotates 22 cycles over its context length, the fastest 6,519."""
    linear: dict[str, Any] = {"factor": 2.0}
    params: dict[str, Any] = {"factor": 4.0, "beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": False}
    plain: Table = thetas(16, 1000.0), 1.0, 4096
    table: Table = (*apply("linear", linear, plain, 16, 1000.0, 4096), 8192 * 10)
    rotary = Rotary(16, 1000.0, 4096).scaled(resolve_method("linear", None, **linear), context_length=8192 * 10)
    expected, _ = apply("yarn", params, table, 16, 1000.0, 1)
    got = frequencies("yarn", rotary, **params).inv_freq
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=0)


def test_the_attention_factor_of_yarn_over_gpt_oss() -> None:
    """FORMULAS: 1.3466 (0.1 ln 2 + 1) = 1.4399, where YaRN x64 from the original length would have 1.4159."""
    rotary = Rotary(64, 150000.0, 4096).scaled(
        resolve_method("yarn", None, factor=32.0, truncate=False), context_length=131072
    )
    assert frequencies("yarn", rotary, factor=2).attention_factor == pytest.approx(1.4399, abs=5e-5)
    assert frequencies("yarn", rotary.plain, factor=64).attention_factor == pytest.approx(1.4159, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_TOP)
@law
@given(plain=some_rotaries.filter(lambda rotary: rotary.dim > 2), data=st.data())
def test_over_nothing_it_is_the_plain_method(name: str, plain: Rotary, data: st.DataObject) -> None:
    """A scaling that changes nothing, underneath, leaves the closed forms' numbers but for rounding."""
    same = plain.scaled(resolve_method("default", None), context_length=plain.trained_length)
    top = data.draw(ON_TOP[name])
    for length in data.draw(lengths_around(plain.trained_length)):
        alone, composed = (frequencies(name, each, length=length, **top) for each in (plain, same))
        assert_same(composed.inv_freq, alone.inv_freq, rtol=1e-9)
        assert composed.attention_factor == pytest.approx(alone.attention_factor, rel=1e-12)


def test_two_lists_over_another_scaling_switch_at_its_context_length() -> None:
    lists = {"short_factor": [1.0 + i for i in range(16)], "long_factor": [2.0 + i for i in range(16)]}
    rotary = Rotary(32, 1e4, 256).scaled(resolve_method("linear", None, factor=4.0), context_length=1024)
    table: Table = [each / 4 for each in thetas(32, 1e4)], 1.0, 1024
    params: dict[str, Any] = lists | {"attention_factor": 1.5}
    for length in (1, 1024, 1025):
        expected, factor = apply("longrope", params, table, 32, 1e4, length)
        got = frequencies("longrope", rotary, length=length, **params)
        assert torch.allclose(got.inv_freq, torch.tensor(expected, dtype=torch.float64), rtol=1e-12)
        assert got.attention_factor == factor
    form = resolve_method("longrope", rotary, **params).rope_parameters(rotary)
    assert form is not None
    assert form["original_max_position_embeddings"] == 1024
    assert form["short_factor"] == pytest.approx([4 * each for each in lists["short_factor"]])


def test_a_rotary_embedding_with_its_scalings_is_hashable_and_goes_through_json() -> None:
    rotary = Rotary(64, 1e4, 4096).scaled(resolve_method("yarn", None, factor=8.0), context_length=32768)
    stacked = rotary.scaled(resolve_method("ntk", None, factor=2.0), context_length=65536)
    for each in (rotary.plain, rotary, stacked):
        assert rotary_from_dict(each.to_dict()) == each
        assert hash(rotary_from_dict(each.to_dict())) == hash(each)
    assert stacked.context_length == 65536
    assert stacked.plain == Rotary(64, 1e4, 4096)
    for broken in ({}, {"dim": 64}, rotary.to_dict() | {"own": {}}, rotary.to_dict() | {"own": {"method": {}}}):
        with pytest.raises(MethodError):
            rotary_from_dict(broken)


def test_a_scaling_of_another_rotary_embedding_is_refused() -> None:
    yarn = resolve_method("yarn", None, factor=8.0)
    with pytest.raises(MethodError, match="another rotary embedding"):
        Rotary(64, 1e4, 4096, own=TrainedScaling(yarn, Rotary(32, 1e4, 4096), 32768))
    with pytest.raises(MethodError, match="context_length must be at least 1 token, got 0"):
        Rotary(64, 1e4, 4096).scaled(yarn, context_length=0)
    with pytest.raises(MethodError, match="no method can be applied over dynamic-ntk"):
        Rotary(64, 1e4, 4096).scaled(resolve_method("dynamic-ntk", None), context_length=8192)


def test_the_module_applies_the_composition() -> None:
    rotary = Rotary(64, 5e5, 8192).scaled(resolve_method("llama3", None, factor=8.0), context_length=131072)
    cases: list[tuple[str, dict[str, Any]]] = [("yarn", {"factor": 2.0}), ("dynamic-yarn", {})]
    for method, params in cases:
        module, positions = RotaryEmbedding(method, rotary, **params), torch.tensor([[0, 1, 200_000]])
        inv_freq, factor = frequencies(method, rotary, length=200_001, **params)
        cos, _ = module(torch.zeros(1), positions)
        expected = (positions.double()[..., None] * inv_freq).cos() * factor
        assert torch.allclose(cos[..., :32].double(), expected, atol=2e-6)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_over_two_lists_short_inputs_run_as_loaded(length: int) -> None:
    """Over a longrope whose lists change at 64 tokens: linear divides what the long list gives, and nothing else."""
    short, long = [1.0, 1.5, 2.0, 2.5], [2.0, 4.0, 8.0, 16.0]
    own = resolve_method("longrope", None, short_factor=short, long_factor=long, attention_factor=1.25)
    rotary = Rotary(8, 1e4, 64).scaled(own, context_length=256)
    actual, attention_factor = resolve_method("linear", None, factor=4.0).frequencies(rotary, length)
    divisors = [4 * each for each in long] if length > 64 else short
    wanted = [each / divisor for each, divisor in zip(thetas(8, 1e4), divisors, strict=True)]
    assert actual.tolist() == pytest.approx(wanted, rel=1e-12)
    assert attention_factor == pytest.approx(1.25)
