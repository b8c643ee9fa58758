"""Which family runs in which engine: the tables say of a family what the recorded runs say, and no more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rope_ext_hf.errors import ServingError
from rope_ext_hf.models.engine_keys import compare_engines
from rope_ext_hf.tools.engines.base import find_engine, list_engines
from rope_ext_hf.tools.engines.config_engine import ConfigEngine
from rope_ext_hf.tools.serving.auditing import audit_config
from rope_ext_hf.tools.serving.configs import Model, make_target
from tests.support.models import FAMILIES, build_config, known_config, small_config

RESULTS = Path(__file__).parents[3] / "docs" / "results"
VLLM = {"Phi-3": "phi3", "gpt-oss": "gpt_oss", "Mistral": "mistral", "Llama": "llama", "GLM": "glm"}
VLLM |= {"Gemma 3": "gemma3_text", "Qwen3": "qwen3", "Qwen3-VL": "qwen3_vl_text"}


def measured(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def target_of(family: str, method: str | None = "yarn", **params: Any) -> Any:
    params = params or ({"factor": 4.0} if method else {})
    return make_target(Model("MODEL", small_config(family), composite=False, patches=[]), method, **params)


def test_every_recorded_configuration_computes_the_same() -> None:
    result = measured("engine-families")
    for row in result["rows"]:
        assert "error" not in row, row
        way = result["own_ways"].get(row["engine"], {}).get(row["family"], {"within": result["agree"]})
        worst = max(row.get("difference", {"": 0.0}).values())
        assert max(row.get("imitated", row.get("difference", {"": 0.0})).values()) <= way["within"] <= 2e-3, row
        assert worst <= 1e-2, row
        assert row["method"] == "as published" or worst <= row.get("without", 0.0) / 100, row
    for engine in measured("engine-classes")["engines"]:
        assert all(row["frequencies"] < 2e-5 and row["magnitude"] < 1e-6 for row in engine["families"])


@pytest.mark.parametrize("engine", ["gguf", "mlx"])
def test_an_engine_goes_its_own_way_where_it_lies_further_apart(engine: str) -> None:
    """No family is held to less than the others without need: its way explains most of what lies between them."""
    result = measured("engine-families")
    for family in result["own_ways"][engine]:
        rows = [row for row in result["rows"] if row["family"] == family and row["engine"] == engine]
        apart, left = (
            max(max(row.get(kind, {"": 0.0}).values()) for row in rows) for kind in ("difference", "imitated")
        )
        assert apart > result["agree"]
        assert left < 2 / 3 * apart


@pytest.mark.parametrize("engine", ["gguf", "mlx"])
def test_what_was_not_run_has_a_reason(engine: str) -> None:
    rows = [row for row in measured("engine-families")["rows"] if row["engine"] == engine]
    table = find_engine(engine).table
    unrun = {family for families in table["unrun"].values() for family in families}
    assert {row["family"] for row in rows if "not run" in row} <= unrun <= set(table["families"]) - set(table["run"])
    assert all(reason in find_engine(engine).caveat(families[0])[0] for reason, families in table["unrun"].items())


@pytest.mark.parametrize("engine", ["vllm", "sglang", "exllamav3", "llama.cpp", "mlx"])
def test_a_family_that_was_run_is_one_of_an_engine(engine: str) -> None:
    table, models = find_engine(engine).table, set(measured("engine-models")["models"][engine])
    other_names = {"vllm": {"glm"}, "exllamav3": {"bailing_hybrid"}}  # the model of transformers; another class
    assert {*table["run"], *table["classes"]} - models == other_names.get(engine, set())


@pytest.mark.parametrize("engine", ["gguf", "mlx"])
def test_a_family_counts_as_run_where_a_method_was(engine: str) -> None:
    rows = measured("engine-families")["rows"]
    ran = {row["family"] for row in rows if row["engine"] == engine and "4" in row.get("difference", {})}
    assert set(find_engine(engine).table["run"]) == ran
    assert ran <= set(find_engine(engine).table["families"])


@pytest.mark.parametrize("name", ["vllm", "sglang", "exllamav3"])
def test_a_family_counts_as_computed_where_the_own_classes_did(name: str) -> None:
    result = next(each for each in measured("engine-classes")["engines"] if each["engine"] == name)
    computed = {row["family"] for row in result["families"] if not row.get("plugin")}
    assert set(find_engine(name).table["classes"]) == computed


def test_a_family_counts_as_run_in_vllm_where_it_was() -> None:
    result = measured("vllm")
    ran = {VLLM.get(row["family"]) for row in result["rows"] if row.get("largest_difference", 1) <= result["agree"]}
    assert set(find_engine("vllm").table["run"]) == ran - {None}


def test_every_engine_states_what_was_checked() -> None:
    for name, engine in list_engines().items():
        if not engine.reference:
            assert engine.table["when"] or not engine.table["families"], name
            refused = [family for families in engine.table["refused"].values() for family in families]
            assert not set(refused) & set(engine.table["families"])
            assert {*engine.table["run"], *engine.table["classes"]} <= {
                *refused,
                *engine.table["families"],
            } or issubclass(engine, ConfigEngine)


def test_what_was_read_alone_is_said_so() -> None:
    config = find_engine("tensorrt-llm").config_for(target_of("llama", "linear", factor=4.0))
    assert "The rules for 'llama' were read in the source of TensorRT-LLM 1.2.0rc2, not run." in config.notes
    assert not any("not run" in note for note in find_engine("gguf").config_for(target_of("llama")).notes)
    reports = {report.engine: report for report in audit_config(build_config("llama").to_dict()).engines}
    assert reports["sglang"].caveat == ()
    assert "not run" in str(audit_config(build_config("llama", rope_theta=1e4).to_dict() | {"rope_theta": 1e4}))


def test_no_engine_is_known_to_read_a_folder_right_by_its_source_alone() -> None:
    config = known_config("llama").to_dict() | {"rope_theta": 10_000.0, "rope_scaling": None}
    agreement = compare_engines(config)
    assert not any(label.startswith("TensorRT-LLM") for label in agreement.agreeing)
    assert agreement.by_source == ["TensorRT-LLM 1.2.0rc2"]


@pytest.mark.parametrize(
    ("family", "method", "params", "reason"),
    [
        ("llama", "yarn", {"factor": 4.0}, "floor(p / 2)"),
        ("llama", "factors", {"factors": [2.0] * 8, "attention_factor": 1.1}, "takes a whole number"),
        ("qwen2", "linear", {"factor": 4.0}, "stops at the rope type 'linear'"),
    ],
)
def test_tensorrt_llm_refuses_what_its_source_contradicts(
    family: str, method: str, params: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ServingError) as refused:
        find_engine("tensorrt-llm").config_for(target_of(family, method, **params))
    assert reason in str(refused.value)


def test_tensorrt_llm_is_refused_in_the_version_with_other_rules() -> None:
    with pytest.raises(ServingError, match=r"from 1\.2\.1 on: it reads other keys"):
        find_engine("tensorrt-llm").check_version("1.2.1")
    assert find_engine("tensorrt-llm").check_version("1.2.0")


def test_flags_of_llama_cpp_do_not_reach_the_sliding_layers_of_gpt_oss() -> None:
    assert "gpt_oss" in FAMILIES
    config = find_engine("llama.cpp").config_for(target_of("gpt_oss", "linear", factor=4.0))
    assert config.gguf_keys["gpt-oss.rope.scaling.factor"] == 4.0
    assert "--rope-scaling" not in config.command
    with pytest.raises(ServingError, match="takes one theta for all layers"):
        find_engine("gguf").config_for(target_of("olmo3", "ntk", factor=4.0))


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite"])
def test_graphs_that_scale_the_softmax_by_the_scaling_are_refused(family: str) -> None:
    """Run, they lie 1.4 to 3.7 standard deviations apart."""
    for method in ("linear", "yarn"):
        with pytest.raises(ServingError, match="into the softmax scale"):
            find_engine("llama.cpp").config_for(target_of(family, method, factor=4.0))
    assert find_engine("llama.cpp").config_for(target_of(family, "ntk", factor=4.0)).computed is not None


def test_hybrids_of_granite_rotate_by_a_rewritten_file_alone() -> None:
    """Their converter turns the rotation off, whatever the config says."""
    engine = find_engine("llama.cpp")
    for method in ("yarn", None):
        config = engine.config_for(target_of("granitemoehybrid", method))
        assert "OUT.gguf" in config.command
        assert not any("finetuned" in key for key in config.gguf_keys)
    with pytest.raises(ServingError, match="turns the rotation off"):
        engine.computes(known_config("granitemoehybrid").to_dict() | {"position_embedding_type": "rope"})
    unrotated = known_config("granitemoehybrid").to_dict() | {"position_embedding_type": "nope"}
    assert engine.computes(unrotated).attention_factor == 1.0


def test_audit_finds_the_theta_that_vllm_does_not_read() -> None:
    config = known_config("llama").to_dict() | {"model_type": "bailing_moe", "rope_theta": 600_000.0}
    beside = {key: value for key, value in config.items() if key != "rope_parameters"}
    inside = config | {"rope_parameters": {"rope_type": "default", "rope_theta": 600_000.0}}
    differs = [{each.engine: each for each in audit_config(each).engines}["vllm"].differs for each in (beside, inside)]
    assert differs[0] is not None
    assert "frequencies differ" in differs[0]
    assert differs[1] is None


@pytest.mark.parametrize("engine", ["llama.cpp", "mlx", "exllamav3"])
def test_qwen_3_5_is_served(engine: str) -> None:
    for family in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "qwen3_vl_text"):
        computed = find_engine(engine).config_for(target_of(family)).computed
        assert computed is not None
        assert computed.inv_freq[-1] == pytest.approx(target_of(family).inv_freq[-1], rel=1e-6)
