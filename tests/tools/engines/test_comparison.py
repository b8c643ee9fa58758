"""The table of the library says of every engine what the rules of the tool box compute, and what was measured."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import rope_ext_hf as rope
from rope_ext_hf.errors import RopeExtError, ServingError
from rope_ext_hf.models.engine_keys import TRIED_FAMILIES, EngineAgreement, compare_engines
from rope_ext_hf.patches.saved.saving import config_as_saved
from rope_ext_hf.tools.engines.base import reference_engine
from rope_ext_hf.tools.engines.comparison import engine_difference, expected_numbers
from rope_ext_hf.tools.engines.config_engine import other_engines
from tests.patches.test_model_rope_published_configs import PUBLISHED
from tests.patches.test_model_rope_published_configs import build as build_published
from tests.support.models import FAMILIES, TRAINED, build, static_cases

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings("ignore")

SCALINGS: dict[str, dict[str, Any] | None] = {
    "as trained": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
    "llama3": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
"""The scalings that models were trained under."""
UNCHANGED = {"yarn by 1", "linear by 1", "learnable, no factor"}
"""Patches that change nothing. Over a yarn of a Qwen3's own, TensorRT-LLM runs their lists as that very yarn."""


def by_rules(config: dict[str, Any]) -> EngineAgreement:
    """Return what the table should say of a saved config, computed by the rules of every engine."""
    agreement = EngineAgreement([], [], [])
    try:
        expected = expected_numbers(reference_engine(), config)
    except (ServingError, ArithmeticError):
        return agreement
    for engine in other_engines():
        with suppress(ServingError, ArithmeticError):
            if engine_difference(engine, expected, config) is not None:
                agreement.disagreeing.append(engine.label)
            elif engine.checked(config["model_type"]) == "read":
                agreement.by_source.append(engine.label)
            else:
                agreement.agreeing.append(engine.label)
    return agreement


def cases(pairs: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Methods with parameters of which an engine may ignore some, by a name for each."""
    one, growing = [1.0] * pairs, [1.0 + pair for pair in range(pairs)]
    return {
        "yarn by 1": ("yarn", {"factor": 1.0}),
        "yarn by 16": ("yarn", {"factor": 16.0}),
        "yarn for a length": ("yarn", {"target_length": 4 * TRAINED + 3}),
        "yarn for another length than its factor": ("yarn", {"factor": 4.0, "target_length": 200}),
        "yarn, attention factor 1": ("yarn", {"factor": 4.0, "attention_factor": 1.0}),
        "yarn, attention factor 0.9": ("yarn", {"factor": 4.0, "attention_factor": 0.9}),
        "yarn, not truncated": ("yarn", {"factor": 4.0, "truncate": False}),
        "yarn, mscale": ("yarn", {"factor": 4.0, "mscale": 1.4, "mscale_all_dim": 0.6}),
        "linear by 3.3": ("linear", {"factor": 3.3}),
        "linear by 1": ("linear", {"factor": 1.0}),
        "longrope, two lists": ("longrope", {"factor": 4, "short_factor": one, "long_factor": growing}),
        "longrope, one list": ("longrope", {"factor": 4, "short_factor": growing, "long_factor": growing}),
        "longrope, attention factor 1": (
            "longrope",
            {"factor": 4, "short_factor": growing, "long_factor": growing, "attention_factor": 1.0},
        ),
        "learnable, no factor": ("learnable", {}),
        "learnable": ("learnable", {"factor": 4.0}),
        "rerope": ("rerope", {}),
        "native": ("dynamic", {"factor": 4.0, "native": True}),
    }


def compare_all(
    model: Any, methods: dict[str, tuple[str, dict[str, Any]]], overs: tuple[str, ...] = ("own",)
) -> set[str]:
    """Compare the table with the rules for a model under every method; return the rope types that would be saved."""
    rope_types = set()
    own_yarn = (getattr(model.config, "rope_parameters", None) or {})["rope_type"] == "yarn"
    for over in overs:
        for name, (method, params) in methods.items():
            try:
                state = rope.plan_patch(model, method, **{"over": over, **params}).state
            except RopeExtError:
                continue
            config = config_as_saved(state.configs[0].patched.to_dict())
            if not (over == "own" and own_yarn and config["model_type"] == "qwen3" and name in UNCHANGED):
                assert compare_engines(config) == by_rules(config), (name, over, config["rope_parameters"])
            rope_types.add(config["rope_parameters"]["rope_type"])
    return rope_types


@pytest.mark.parametrize(
    "scaling", ["as trained", *(pytest.param(name, marks=pytest.mark.slow) for name in list(SCALINGS)[1:])]
)
@pytest.mark.parametrize("family", sorted(TRIED_FAMILIES))
def test_the_table_says_what_the_rules_compute(family: str, scaling: str) -> None:
    methods = cases(FAMILIES[family].rotated // 2)
    methods |= {name: (case.method, case.params) for name, case in static_cases(family).items()}
    overs = ("own", "original") if SCALINGS[scaling] else ("own",)
    rope_types = compare_all(build(family, SCALINGS[scaling]), methods, overs)
    assert rope_types >= {"default", "linear", "yarn", "llama3", "longrope", "dynamic"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, entry in PUBLISHED.items() if entry["config"]["model_type"] in TRIED_FAMILIES]
)
def test_the_table_holds_for_published_models(name: str) -> None:
    model = build_published(name)
    pairs = rope.fingerprint(model).layers.popitem()[1].inv_freq
    assert len(compare_all(model, cases(len(pairs))))


def test_the_dual_chunk_attention_of_vllm_is_not_known() -> None:
    """vLLM runs Qwen2.5-1M by another class, whose rules this package does not have."""
    model = build("qwen2", dual_chunk_attention_config={"chunk_size": 32, "local_size": 16})
    compare_all(model, cases(8))
    config = config_as_saved(rope.plan_patch(model, "yarn", factor=4.0).state.configs[0].patched.to_dict())
    assert "dual_chunk_attention_config" in config
    assert not any("vLLM" in label for labels in compare_engines(config) for label in labels)


# --- what was measured ------------------------------------------------------------------------------------------------


def test_what_is_said_was_measured() -> None:
    measured = json.loads((ROOT / "docs" / "results" / "other-engines.json").read_text(encoding="utf-8"))
    programs = {row["engine"] for row in measured["rows"]}
    assert {next(each.label for each in other_engines() if name.startswith(each.label)) for name in programs} == {
        "transformers 4.57",
        "mlx-lm 0.32.2",
    }
    assert {row["model"] for row in measured["rows"]} == {"reference", *TRIED_FAMILIES}
    for row in measured["rows"]:
        assert row["without"] > 100 * measured["agree"], row  # a program that passes over the method would show
        if row["method"] in ("linear", "ntk", "yarn", "by-parts", "llama3"):  # see test_forms_that_all_of_them_read
            assert row["difference"] <= measured["agree"], row


def test_mlx_lm_ran_what_serving_config_prints() -> None:
    result = json.loads((ROOT / "docs" / "results" / "other-engines.json").read_text(encoding="utf-8"))
    for row in result["served"]:
        assert row["by"] == "refused" or row["difference"] <= result["agree"], row
    served = {row["method"] for row in result["served"] if row["by"] != "refused"}
    assert served == {row["method"] for row in result["rows"]} - {"longrope, two lists"}
