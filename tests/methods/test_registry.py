"""Methods by name: registering, resolving what a user writes, reading saved forms, and what is refused."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rope_ext_hf.errors import MethodError, RopeExtError
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.registry import (
    accepts_factor,
    frequencies,
    list_methods,
    method_from_dict,
    register_method,
    registered_name,
    resolve_method,
    split_parameters,
)
from rope_ext_hf.methods.static import Linear, Yarn
from tests.support.method_checks import LLAMA2, assert_same, law, some_lengths, with_factor
from tests.support.method_examples import example_method


def test_the_registry_holds_the_documented_names() -> None:
    assert {"default", "linear", "ntk", "dynamic-ntk", "by-parts", "yarn", "dynamic-yarn", "longrope", "llama3"} <= set(
        list_methods()
    )
    assert {"theta", "factors"} <= set(list_methods())
    assert all(cls.name == name for name, cls in list_methods().items())


@pytest.mark.parametrize("name", ["yarn", "dynamic"])
def test_a_second_holder_of_a_name_is_refused(name: str) -> None:
    before = list_methods()
    with pytest.raises(TypeError, match=name):
        register_method(name)(type("Impostor", (Linear,), {}))
    assert list_methods() == before


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NTK", "ntk"),
        ("NTK-aware", "ntk"),
        ("ntk_aware", "ntk"),
        ("YaRN", "yarn"),
        ("yarn ", "yarn"),
        ("PI", "linear"),
        ("Position Interpolation", "linear"),
        ("linear_interpolation", "linear"),
        ("NTK-by-parts", "by-parts"),
        ("Llama-3", "llama3"),
        ("Dynamic NTK", "dynamic-ntk"),
        ("dynamic_yarn", "dynamic-yarn"),
        ("ReRoPE", "rerope"),
        ("SelfExtend", "self-extend"),
        ("Dual Chunk Attention", "dca"),
        ("Jet_Long", "jet-long"),
    ],
)
def test_names_as_people_write_them(written: str, name: str) -> None:
    given: dict[str, Any] = {"factor": 4.0} if accepts_factor(name) else {}
    assert accepts_factor(written) == accepts_factor(name)
    assert resolve_method(written, LLAMA2, **given) == resolve_method(name, LLAMA2, **given)


def test_every_name_in_any_case_and_with_any_separators() -> None:
    for name, cls in list_methods().items():
        for alias in (name, *cls.aliases):
            spaced = alias.replace("-", " ")
            for written in (alias.upper(), spaced.title(), spaced.replace(" ", "_"), spaced.replace(" ", "")):
                assert registered_name(written) == alias


def test_dynamic_is_transformers_rule_and_dynamic_ntk_that_of_the_paper() -> None:
    own = resolve_method("dynamic-ntk", LLAMA2, growth="hf", factor=4.0)
    assert resolve_method("Dynamic", LLAMA2, factor=4.0) == own
    assert resolve_method("dynamic-ntk", LLAMA2) == resolve_method("dynamic-ntk", LLAMA2, growth="paper")


@pytest.mark.parametrize("name", ["YARN", "ntk_aware", "Position Interpolation"])
def test_a_name_that_differs_in_case_alone_is_taken(name: str) -> None:
    before = list_methods()
    with pytest.raises(TypeError, match=f"'{name}' is taken"):
        register_method(name)(type("Impostor", (Linear,), {}))
    with pytest.raises(TypeError, match=f"'{name}' is taken"):
        register_method("impostor", aliases=[name])(type("Impostor", (Linear,), {}))
    assert list_methods() == before


@pytest.mark.parametrize("factor", [1, 1.5, 8.0])
def test_methods_without_a_factor_take_it_as_the_extended_length_alone(factor: float) -> None:
    assert resolve_method("theta", LLAMA2, theta=1e6, factor=factor) == resolve_method("theta", LLAMA2, theta=1e6)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "params", "parts"),
    [
        ("yarm", {"factor": 2}, ["'yarm'", "Did you mean 'yarn'?", "dynamic-ntk"]),
        ("dynamik", {"factor": 2}, ["'dynamik'", "Did you mean 'dynamic'?"]),
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
        ("theta", {"theta": 1e6, "factor": 0.99}, ["theta", "factor", "at least 1"]),
        ("theta", {"theta": 1e6, "factor": 0}, ["theta", "factor", "at least 1"]),
        ("yarn", {}, ["yarn", "factor", "target_length"]),
        ("theta", {}, ["theta", "needs"]),
        ("theta", {"theta": 1.0}, ["theta", "above 1", "got 1"]),
        ("theta", {"theta": math.nan}, ["theta", "nan"]),
        ("yarn", {"factor": 4, "beta_fats": 16}, ["yarn", "'beta_fats'", "Did you mean 'beta_fast'?", "truncate"]),
        ("linear", {"factor": 4, "theta": 1e6}, ["linear", "'theta'", "factor"]),
        ("yarn", {"factor": 4, "beta_fast": 1, "beta_slow": 32}, ["beta_fast=1", "beta_slow=32"]),
        ("by-parts", {"factor": 4, "beta_slow": 0}, ["by-parts", "beta_slow=0"]),
        ("dynamic-yarn", {"beta_slow": -1}, ["dynamic-yarn", "beta_slow=-1"]),
        ("by-parts", {"factor": 4, "ramp": "sideways"}, ["'sideways'", "dimension", "cycles"]),
        ("llama3", {"factor": 8, "low_freq_factor": 5}, ["high_freq_factor=4", "low_freq_factor=5"]),
        ("llama3", {"factor": 8, "low_freq_factor": 0}, ["low_freq_factor=0"]),
        ("dynamic-ntk", {"growth": "linear"}, ["'linear'", "paper", "hf", "even", "pow2"]),
        ("dynamic-ntk", {"growth": "hf"}, ["hf", "needs factor"]),
        ("dynamic", {}, ["hf", "factor"]),
        ("dynamic-ntk", {"factor": 0.5, "growth": "even"}, ["factor", "at least 1", "0.5"]),
        ("dynamic-yarn", {"factor": "four"}, ["factor", "number", "four"]),
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
        ("linear", {"target_length": "4q"}, ["4q", "not a length"]),
        ("yarn", {"factor": 4, "beta_fast": "many"}, ["yarn", "many"]),
        ("factors", {"factors": 2.0}, ["factors", "2.0"]),
    ],
)  # fmt: skip
def test_refused(method: str, params: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(MethodError) as caught:
        frequencies(method, LLAMA2, **params)
    for words in parts:
        assert words in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RopeExtError)


@pytest.mark.parametrize(
    "params",
    [{"factor": 4}, {"beta_fast": 16}, {"target_length": 8192}, {"factor": 2, "beta_slow": 2}, {"nonsense": 1}],
)
def test_parameters_beside_a_method_object_are_a_type_error(params: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=next(iter(params))) as caught:
        frequencies(Yarn(factor=2), LLAMA2, **params)
    assert "Yarn" in str(caught.value)


@pytest.mark.parametrize("name", sorted(list_methods()))
@pytest.mark.parametrize(
    ("guess", "meant"),
    [("scale", "factor"), ("scaling_factor", "factor"), ("max_length", "target_length"), ("length", "target_length")],
)
def test_names_of_other_programs_lead_to_ours(name: str, guess: str, meant: str) -> None:
    with pytest.raises(MethodError, match=rf"no parameter {guess!r}\. Did you mean {meant!r}\?"):
        resolve_method(name, LLAMA2, **{guess: 4})
    with suppress(MethodError):  # or it is refused already
        assert split_parameters(name, {guess: 4}) == ({guess: 4}, {})


@pytest.mark.parametrize("key", ["rope_type", "type", "method"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("yarn", {"factor": 4, "beta_fast": 16, "attention_factor": None}),
        ("linear", {"factor": 2.0, "rope_theta": LLAMA2.theta}),
        ("llama3", {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}),
        ("longrope", {"factor": 2.0, "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}),
        ("dynamic", {"factor": 4.0}),
        ("default", {}),
        ("dca", {"chunk": 1024}),
    ],
)
def test_rope_settings_of_a_config_are_a_method(name: str, settings: dict[str, Any], key: str) -> None:
    stated = {key: name, "original_max_position_embeddings": LLAMA2.context_length} | settings
    values = {key: value for key, value in settings.items() if value is not None and key != "rope_theta"}
    assert resolve_method(stated, LLAMA2) == resolve_method(name, LLAMA2, **values)


@pytest.mark.parametrize(
    ("settings", "beside", "message"),
    [
        ({"factor": 4}, {}, "must name one method"),
        ({"rope_type": "yarn", "type": "linear", "factor": 4}, {}, "must name one method"),
        ({"rope_type": "yarn", "factor": 4, "mrope_section": [16, 24, 24]}, {}, "no parameter 'mrope_section'"),
        ({"rope_type": "yarn", "factor": 4, "rope_theta": 5e5}, {}, r"rope_theta=500000.0, and this model has 10000"),
        ({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 8192}, {}, "give context_length"),
        ({"rope_type": "yarn", "factor": 4}, {"factor": 2}, "factor is given in the settings and beside them"),
        ({"rope_type": "yarn", "beta_fast": 4}, {"beta_fast": 2, "factor": 2}, "beta_fast is given in the settings"),
        ({"rope_type": "yarm", "factor": 4}, {}, "yarn"),
    ],
)
def test_every_key_of_rope_settings_is_used_or_refused(
    settings: dict[str, Any], beside: dict[str, Any], message: str
) -> None:
    with pytest.raises(MethodError, match=message):
        resolve_method(settings, LLAMA2, **beside)


def test_something_that_is_no_method_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="int"):
        frequencies(4, LLAMA2)  # type: ignore[arg-type]


def test_a_saved_form_without_a_method_is_refused() -> None:
    with pytest.raises(MethodError, match="method"):
        method_from_dict({"factor": 4})


# --- target length ------------------------------------------------------------------------------------------------


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


@pytest.mark.slow
@law
@given(trained=some_lengths, extra=st.integers(0, 1 << 20), data=st.data())
def test_target_length_is_factor_times_trained_length(trained: int, extra: int, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(with_factor))
    rotary = Rotary(64, 1e4, trained)
    values = example_method(list_methods()[name], rotary).to_dict()
    given_ = {key: value for key, value in values.items() if key in ("beta_fast", "beta_slow")}
    by_length = resolve_method(name, rotary, target_length=trained + extra, **given_)
    by_factor = resolve_method(name, rotary, factor=(trained + extra) / trained, **given_)
    assert by_length == by_factor
    assert by_length.extended_length(rotary) == trained + extra
    assert_same(by_length.frequencies(rotary).inv_freq, by_factor.frequencies(rotary).inv_freq)
