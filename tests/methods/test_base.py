"""The contract of every method, over the registry: a new method is tested by being registered."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal, cast

import pytest
import torch

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.dynamic import DynamicNTK, DynamicYarn, LongRoPE
from rope_ext_hf.methods.grouped import SelfExtend
from rope_ext_hf.methods.registry import frequencies, list_methods, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod, ReRoPE
from rope_ext_hf.methods.static import NTK, Default, Factors, Linear, Theta, Yarn
from rope_ext_hf.patches.model_rope import ModelRope
from tests.support.contracts import MethodContract
from tests.support.method_checks import GEOMETRY, LLAMA2, assert_native, assert_same, with_factor
from tests.support.method_examples import example_method, example_methods
from tests.support.models import TRAINED, build
from tests.support.oracles import (
    plain,
)

over_methods = pytest.mark.parametrize(
    "method",
    [method for _, method in example_methods(GEOMETRY)],
    ids=[json.dumps(m.to_dict())[:60] for _, m in example_methods(GEOMETRY)],
)


@over_methods
class TestContract(MethodContract):
    pass


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
        DynamicYarn(ramp="cycles"),
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


@pytest.mark.parametrize(
    ("method", "label"),
    [
        (Default(), "default"),
        (Linear(factor=8), "linear x8"),
        (NTK(factor=1.5), "ntk x1.5"),
        (Theta(theta=1e6), "theta 1e+06"),
        (Yarn(factor=8), "yarn x8"),
        (Yarn(factor=8, beta_fast=16), "yarn x8 beta_fast=16"),
        (Yarn(factor=8, ramp="cycles", attention_factor=1.2), "yarn cycles x8 attention_factor=1.2"),
        (DynamicNTK(), "dynamic-ntk paper"),
        (DynamicNTK(growth="hf", factor=2), "dynamic-ntk hf x2"),
        (DynamicNTK(growth="even", sticky=True), "dynamic-ntk even sticky"),
        (ReRoPE(window=48, frequency=Yarn(factor=2)), "rerope window=48 on yarn x2"),
        (SelfExtend(group=4, window=64), "self-extend window=64 group=4"),
    ],
)
def test_label(method: RopeMethod, label: str) -> None:
    assert method.label() == label


@pytest.mark.parametrize("cls", list_methods().values(), ids=list_methods())
def test_parameters_are_given_by_name_and_stay(cls: type[RopeMethod]) -> None:
    assert all(item.kw_only for item in dataclasses.fields(cls))
    method = example_method(cls, GEOMETRY)
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.factor = 3.0  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EveryType(Default):
    """A parameter of every type that the base class checks."""

    count: int = 1
    size: float | None = None
    flag: bool = False
    counts: tuple[int, ...] = ()
    rule: Literal["first", "second"] = "first"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("count", 1.5, "count must be a whole number, got 1.5"),
        ("count", True, "count must be a whole number, got True"),
        ("count", None, "count must be a whole number, got None"),
        ("size", "2", "size must be a number, got '2'"),
        ("size", math.inf, "size must be finite"),
        ("flag", 1, "flag must be True or False, got 1"),
        ("counts", [1, 2.5], "counts must be a list of whole numbers"),
        ("counts", 1, "counts must be a list of whole numbers"),
        ("rule", "secnd", "rule must be one of first, second; got 'secnd'. Did you mean 'second'"),
    ],
)
def test_parameters_are_checked_by_their_types(name: str, value: Any, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        EveryType(**{name: value})


def test_parameters_of_the_right_types_are_taken() -> None:
    method = EveryType(count=2, size=3, flag=True, counts=[4, 5], rule="second")  # type: ignore[arg-type]
    assert method.counts == (4, 5)  # so that the method is hashable
    assert EveryType(size=None).size is None


@over_methods
def test_up_to_constant_until_the_frequencies_are_the_same(method: RopeMethod) -> None:
    """Compare the frequencies at many lengths of up to eight times the trained length."""
    trained = GEOMETRY.trained_length
    tables = {n: method.frequencies(GEOMETRY, n) for n in range(1, 8 * trained, 61)}
    for length, table in tables.items():
        until = method.constant_until(GEOMETRY, length)
        assert until >= length
        same = method.frequencies(GEOMETRY, min(until, 10**6))
        assert torch.equal(same.inv_freq, table.inv_freq)
        assert same.attention_factor == table.attention_factor
        if until < 10**6:
            beyond = method.frequencies(GEOMETRY, until + 1)
            assert not torch.equal(beyond.inv_freq, table.inv_freq)


def test_no_native_form_where_transformers_would_read_it_otherwise() -> None:
    proportional = Rotary(64, 1e4, 4096, rotated_pairs=8)
    for name, method in example_methods(proportional):
        if name not in ("default", "linear", "ntk", "theta"):
            assert method.rope_parameters(proportional) is None, name
    for growth in ("paper", "even", "pow2"):
        assert resolve_method("dynamic-ntk", LLAMA2, growth=growth).rope_parameters(LLAMA2) is None
        assert resolve_method("dynamic-ntk", LLAMA2, growth=growth).approximate_rope_parameters(LLAMA2) is None
    dynamic = resolve_method("dynamic", LLAMA2, factor=4)
    assert dynamic.rope_parameters(LLAMA2) is None  # transformers' own keeps a memory of earlier calls
    approximation = dynamic.approximate_rope_parameters(LLAMA2)
    assert approximation is not None
    for length in (4096, 9000):
        assert_native(LLAMA2, dynamic.frequencies(LLAMA2, length), approximation, length)


# --- geometries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "message"),
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
def test_impossible_geometry_is_refused(values: dict[str, Any], message: str) -> None:
    geometry: dict[str, Any] = {"dim": 64, "theta": 1e4, "trained_length": 512}
    with pytest.raises(MethodError, match=message):
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


# --- inputs that stay as they are ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama() -> Any:
    return build("llama")


WITH_TEMPERATURE = [
    (name, temperature)
    for name, cls in list_methods().items()
    for temperature in (None, "none", "log-n")
    if temperature is None or issubclass(cls, RemappingMethod)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "temperature"), WITH_TEMPERATURE)
def test_the_output_stays_up_to_the_unchanged_length_and_no_further(
    llama: Any, name: str, temperature: str | None
) -> None:
    rotary = ModelRope.of_model(llama).rotary
    parameters = {} if temperature is None else {"temperature": temperature}
    example = example_method(list_methods()[name], rotary, **parameters)
    try:
        method = ModelRope.of_model(llama).bind(example, 16 * TRAINED)
    except MethodError:  # without a parameter that follows from the target, some do not reach so far
        method = ModelRope.of_model(llama).bind(example, TRAINED)
    longest = method.unchanged_length(rotary)
    ids = torch.randint(3, 60, (1, 2 * TRAINED), generator=torch.Generator().manual_seed(0))

    def change(length: int) -> float:
        with torch.no_grad():
            before = llama(ids[:, :length]).logits
            with rope.patched(llama, method):
                return float((llama(ids[:, :length]).logits - before).abs().max())

    stated = (
        f"{name} states that inputs up to {longest} tokens stay as they are (`unchanged_length`; `exact_length` of a "
    )
    stated += "a remapping method)"
    if longest:
        assert change(min(longest, 2 * TRAINED)) < 1e-4, f"{stated}, and these change: lower it"
    if longest < 2 * TRAINED:
        assert change(max(2, longest + 1)) > 1e-3, f"{stated}, and one token more changes nothing: raise it"


def test_windows_state_how_far_short_inputs_stay() -> None:
    rotary = Rotary(dim=128, theta=10000.0, trained_length=4096)
    kept = {
        name: cast("type[RemappingMethod]", list_methods()[name])().bind(rotary, 65536).unchanged_length(rotary)
        for name in ("rerope", "leaky-rerope", "self-extend", "dca")
    }
    # the last query of dca's 4,096 tokens gets the temperature
    assert kept["rerope"] == kept["leaky-rerope"] == 2049
    assert (kept["self-extend"], kept["dca"]) == (1025, 4095)
    assert ReRoPE(frequency=Yarn(factor=4.0)).bind(rotary, None).unchanged_length(rotary) == 0


def test_over_two_lists_inputs_up_to_the_original_length_stay() -> None:
    ones, twos = (1.0,) * 64, (2.0,) * 64
    phi = Rotary(dim=128, theta=10000.0, trained_length=4096).scaled(
        LongRoPE(short_factor=ones, long_factor=twos, factor=32.0), context_length=131072
    )
    assert Yarn(factor=2.0).unchanged_length(phi) == 4096
    assert DynamicYarn().unchanged_length(phi) == 131072
