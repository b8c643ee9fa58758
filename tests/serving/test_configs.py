"""Serving configs: every method on every engine and family is served exactly, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf import reference
from rope_ext_hf.cli.app import app
from rope_ext_hf.engines.base import Computed, Engine, ServingConfig, Target, find_engine, list_engines, register_engine
from rope_ext_hf.engines.hf_transformers import MLA_FAMILIES, Transformers
from rope_ext_hf.engines.vllm import DEEPSEEK_FAMILIES
from rope_ext_hf.errors import (
    CheckpointError,
    FileError,
    MethodError,
    RopeExtError,
    ServingError,
    UnknownMethodError,
    UnsupportedModelError,
)
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.patches.families import families
from rope_ext_hf.patches.patching import patched_method
from rope_ext_hf.serving.audit import audit_config
from rope_ext_hf.serving.target import Model, make_target, open_model
from tests.support.every_model import tiny
from tests.support.models import build
from tests.support.serving_models import SERVED, published_config, served_model, targets
from tests.support.wrapped_text import unwrapped

pytestmark = pytest.mark.filterwarnings("ignore")
every_family = pytest.mark.parametrize("family", SERVED)


def serve(engine: str, target: Target) -> tuple[ServingConfig | None, str]:
    """The config, or the message of the refusal."""
    try:
        return find_engine(engine).config_for(target), ""
    except ServingError as error:
        return None, str(error)


@pytest.mark.slow
@every_family
@pytest.mark.parametrize("over", ["own", "original"])
def test_every_method_is_served_exactly_or_refused_by_name(family: str, over: str) -> None:
    served = 0
    for method, target in targets(family, over):
        for name in list_engines():
            if not isinstance(target, Target):
                assert method.name in str(target) or method.label() in str(target)
                continue
            config, refusal = serve(name, target)
            if config is None:
                assert name in refusal
                assert target.method in refusal
                continue
            served += 1
            expected = method.frequencies(
                served_model(family).described.rotary if over == "own" else served_model(family).described.plain,
                target.length,
            )
            assert config.computed is not None
            computed = torch.tensor(config.computed.inv_freq, dtype=torch.float64)
            torch.testing.assert_close(computed, expected.inv_freq, rtol=1e-6, atol=0)
            assert math.isclose(config.computed.attention_factor, expected.attention_factor, rel_tol=1e-6)
            json.dumps(config.to_dict())
    assert served >= 7, "at least the model as it is, and most methods by transformers"


@every_family
def test_the_rules_for_transformers_are_those_of_transformers(family: str) -> None:
    for _, target in targets(family, "original"):
        if not isinstance(target, Target) or target.composite or target.layer_type is not None:
            continue
        values = {k: v for k, v in target.patched.items() if k not in ("model_type", "transformers_version")}
        config: Any = AutoConfig.for_model(target.model_type, **values)
        kind = config.rope_parameters["rope_type"]
        if kind == "default":
            continue
        inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=target.length)
        computed = Transformers().computes(config.to_dict(), target.length)
        torch.testing.assert_close(torch.tensor(computed.inv_freq), inv_freq.float(), rtol=2e-5, atol=0)
        assert computed.attention_factor == pytest.approx(factor, rel=1e-6)


# What the sources of the engines say, by hand: family, method over the original length, engine -> how it is served.
@pytest.mark.parametrize(
    ("family", "over", "method", "engine", "encoding"),
    [
        ("Mistral", "own", "yarn", "vllm", "native"),
        ("Mistral", "own", "factors", "llama.cpp", "divisors in rope_freqs.weight"),
        ("Llama", "own", "linear", "llama.cpp", "native"),
        ("Llama", "own", "yarn", "vllm", "longrope"),
        ("Qwen3", "original", "llama3", "llama.cpp", None),
        ("Qwen3-VL", "own", "yarn", "sglang", "native"),
        ("Qwen3-VL", "own", "linear", "vllm", None),
        ("gpt-oss", "own", "yarn", "vllm", None),
        ("gpt-oss", "original", "yarn", "vllm", "native"),
        ("DeepSeek", "own", "default", "sglang", "native"),
        ("DeepSeek", "own", "default", "exllamav3", "native"),
        ("gpt-oss", "original", "yarn", "exllamav3", "native"),
        ("Llama", "own", "yarn", "exllamav3", "longrope with equal lists"),
        ("Qwen3", "original", "yarn", "tensorrt-llm", "native"),
        ("Qwen3", "original", "linear", "tensorrt-llm", None),
        ("Gemma 3", "original", "by-parts", "tensorrt-llm", "native"),
        ("DeepSeek", "own", "ntk", "vllm", None),
        ("Phi-3", "original", "yarn", "mlx", "longrope with equal lists"),
    ],
)
def test_how_a_method_is_served(family: str, over: str, method: str, engine: str, encoding: str | None) -> None:
    target = next(each for known, each in targets(family, over) if known.name == method)
    assert isinstance(target, Target)
    if encoding is None:
        with pytest.raises(ServingError, match=engine):
            find_engine(engine).config_for(target)
    else:
        assert find_engine(engine).config_for(target).encoding == encoding


def test_length_dependent_and_remapping_methods_are_refused_by_name() -> None:
    for name in ("dynamic-yarn", "self-extend"):
        with pytest.raises(ServingError, match=name):
            make_target(served_model("Mistral"), name, target_length=65536)
    with pytest.raises(MethodError, match="without a method"):
        make_target(served_model("Mistral"), factor=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stairs", "rerope"])
def test_remapping_is_served_as_an_experiment(name: str, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"target_length": 1024, "temperature": "log-n"}
    for engine, plugin in (("vllm", False), ("sglang", True)):
        with pytest.raises(ServingError, match=f"{name} .*no serving engine runs that .*vLLM runs it with the plug-in"):
            rope.serving_config("reference", engine, name, plugin=plugin, **asked)
    with pytest.raises(ServingError, match=r"alibi .*adds to scores by distance; no serving engine runs that"):
        rope.serving_config("reference", "vllm", "alibi", plugin=True, target_length=1024)
    config = rope.serving_config("reference", "vllm", name, plugin=True, **asked)
    assert config.command[-2:] == ("--attention-backend", "CUSTOM")
    assert any(note.startswith("An experiment") for note in config.notes)
    with pytest.raises(ServingError, match=f"{name} has no end: give the method with the length to serve"):
        rope.serving_config("reference", "vllm", name, plugin=True)
    assert config.overrides is not None
    settings = config.overrides["rope_parameters"]
    model = rope.patch(AutoModelForCausalLM.from_pretrained(reference.path()), name, **asked)
    bound = patched_method(model)
    assert bound is not None
    assert json.loads(settings["remapping"]) == {"method": bound.to_dict(), "pairing": "half"}
    model.save_pretrained(tmp_path)
    saved = rope.serving_config(tmp_path, "vllm", plugin=True)
    assert saved.overrides == config.overrides
    assert str(tmp_path) in saved.command
    static = rope.serving_config("reference", "vllm", "yarn", factor=4, plugin=True)
    assert static.overrides is not None
    assert "remapping" not in static.overrides["rope_parameters"]
    assert "CUSTOM" not in static.command


@pytest.mark.parametrize("name", ["gemma3", "llama4", "gpt_oss", "deepseek_v3", "mistral"])
def test_remapping_is_served_where_all_layers_are_alike(name: str) -> None:
    """Layers with windows or without RoPE, sinks, latent attention."""
    window: dict[str, Any] = {"sliding_window": 16} if name == "mistral" else {}
    said = "latent attention, sinks and M-RoPE|every layer attends to everything|every layer of this model has"
    with pytest.raises(RopeExtError, match=said):
        rope.serving_config(build(name, **window), "vllm", "stairs", plugin=True, target_length=256)


def test_a_magnitude_is_spelled_for_every_engine() -> None:
    target = make_target(served_model("Mistral"), "by-parts", factor=4.0)
    for name, read in (("vllm", "attention_factor"), ("sglang", "attn_factor"), ("mlx", "mscale")):
        config = find_engine(name).config_for(target)
        settings = config.config_keys.get("rope_parameters") or config.config_keys["rope_scaling"]
        without = {key: value for key, value in settings.items() if key not in (read, "mscale", "attn_factor")}
        keys = config.config_keys | ({"rope_scaling": without} if name == "mlx" else {"rope_parameters": without})
        if name != "vllm":
            changed = find_engine(name).computes({**target.config, "rope_parameters": None} | keys, target.length)
            assert changed.attention_factor == pytest.approx(0.1 * math.log(4) + 1)
        assert config.computed is not None
        assert config.computed.attention_factor == pytest.approx(1.0)


def test_a_composite_config_is_overridden_inside_text_config() -> None:
    config = find_engine("vllm").config_for(make_target(served_model("Qwen3-VL"), "yarn", factor=4.0))
    assert config.overrides is not None
    settings = config.overrides["text_config"]["rope_parameters"]
    assert settings["mrope_section"] == [24, 20, 20]
    assert settings["original_max_position_embeddings"] == 262144
    assert settings["rope_theta"] == 5_000_000
    assert json.loads(config.command[-1]) == config.overrides
    assert config.command[:5] == ("vllm", "serve", "Qwen3-VL", "--max-model-len", "1048576")


def test_the_ramp_of_an_older_multimodal_family_is_quadrupled_by_vllm() -> None:
    target = make_target(served_model("Qwen3-VL"), "yarn", factor=4.0)
    older = dataclasses.replace(target, config={**target.config, "model_type": "qwen2_5_vl_text"})
    config = find_engine("vllm").config_for(older)
    assert config.overrides is not None
    settings = config.overrides["text_config"]["rope_parameters"]
    assert settings["original_max_position_embeddings"] == 262144 // 4


def test_a_linear_factor_is_applied_to_the_length_once() -> None:
    config = find_engine("vllm").config_for(make_target(served_model("Mistral"), "linear", factor=4.0))
    assert config.overrides is not None
    assert "max_position_embeddings" not in config.overrides
    assert config.computed is not None
    assert config.computed.length == 4 * 32768


def test_a_live_patched_model_and_a_folder(tmp_path: Path) -> None:
    from rope_ext_hf.hub import load_empty

    model = load_empty("reference")
    plain = rope.serving_config("reference", "vllm")
    assert "--hf-overrides" not in plain.command
    rope.patch(model, "yarn", factor=4, attention_factor=1.3)
    live = rope.serving_config(model, "sglang")
    named = rope.serving_config("reference", "sglang", "yarn", factor=4, attention_factor=1.3)
    assert live.overrides == named.overrides
    assert live.length == 4 * plain.length


def test_llama_cpp_reads_the_betas_of_yarn_from_flags_alone() -> None:
    target = make_target(served_model("Mistral"), "yarn", factor=4.0, beta_fast=8.0)
    flags = find_engine("llama.cpp").config_for(target)
    assert flags.encoding == "native"
    assert flags.command[flags.command.index("--yarn-beta-fast") + 1] == "8.0"
    assert find_engine("gguf").config_for(target).encoding == "divisors in rope_freqs.weight"
    with pytest.raises(ServingError, match="reads no tensor of divisors"):
        find_engine("ollama").config_for(make_target(served_model("Qwen3"), "yarn", factor=4.0, beta_fast=8.0))


def test_versions() -> None:
    with pytest.raises(ServingError, match="--rope-scaling"):
        find_engine("vllm").check_version("0.10.2")
    assert not find_engine("vllm").check_version("0.33.0")
    assert find_engine("vllm").check_version("0.40.0")
    assert find_engine("llama.cpp").check_version("b12000")
    with pytest.raises(UnknownMethodError, match="Did you mean 'vllm'"):
        find_engine("vlm")


def test_an_engine_is_one_class() -> None:
    with pytest.raises(ValueError, match="already"):
        register_engine("vllm")(Transformers)
    for name, engine in list_engines().items():
        assert issubclass(engine, Engine), f"the class registered as {name!r} must derive from engines.base.Engine"
        assert getattr(engine, "version", ""), (
            f"engine {name!r}: state `version`, that of the source its rules are from"
        )


def test_the_label_of_a_method_with_a_list_of_its_own_name() -> None:
    assert list_methods()["factors"](factors=(1.0, 2.0)).label() == "factors"  # type: ignore[call-arg]


# --- what was measured -----------------------------------------------------------------------------------------------

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def measured(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


@pytest.mark.slow
def test_the_rules_are_those_of_the_versions_that_were_compared() -> None:
    for engine in measured("engine-classes")["engines"]:
        assert engine["version"] == find_engine(engine["engine"]).version
        assert {row["family"] for row in engine["rows"]} | set(engine["skipped"]) >= {"Llama", "Qwen3-VL", "DeepSeek"}
        assert engine.get("untouched", len(engine["rows"])) == len(engine["rows"])
        for row in engine["rows"] + engine.get("plugin", []):
            assert row["frequencies"] <= 2e-5, row
            assert max(row["magnitude"], row.get("softmax_scale", 0.0)) <= 1e-6, row
            assert row.get("positions", 0.0) <= 2e-5, row
    files = measured("llama-cpp")
    assert files["versions"]["llama.cpp"] == find_engine("llama.cpp").version
    methods: dict[str, set[str]] = {}
    for row in files["rows"]:
        if "difference" not in row:
            assert row["refused"], row
            continue
        assert max(row["difference"].values()) <= files["agree"], row
        if row["name"] not in ("default", "type none beside a factor"):
            assert row["without"] > 100 * files["agree"], row
        methods.setdefault(row["by"], set()).add(row["name"])
    assert {"linear", "ntk", "yarn", "by-parts", "llama3", "factors"} <= methods["file"]
    assert {"linear", "ntk", "yarn"} <= methods["flags"]
    assert "yarn with other betas" in methods["rules"]


# --- audit -----------------------------------------------------------------------------------------------------------

BASE = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 1e6}


def rows(config: dict[str, Any]) -> dict[str, Any]:
    return {report.engine: report for report in audit_config(config).engines}


def test_audit_finds_what_engines_ignore() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    extended = BASE | {"max_position_embeddings": 131072, "rope_scaling": yarn | {"type": "yarn"}}
    assert audit_config(extended).agrees
    short = rows(BASE | {"rope_scaling": yarn})  # ExLlamaV3 divides max_position_embeddings by the original length
    assert [name for name, report in short.items() if report.differs] == ["exllamav3"]
    assert short["exllamav3"].computed.notes == (
        "yarn: the factor is 1, max_position_embeddings over the original length.",
    )
    qwen = rows(extended | {"model_type": "qwen3", "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
    assert qwen["tensorrt-llm"].computed.notes == ("Qwen3: the rope type linear is run as yarn.",)
    assert "frequencies differ" in qwen["tensorrt-llm"].differs
    given = rows(BASE | {"rope_scaling": yarn | {"attention_factor": 1.0}})
    assert given["vllm"].differs is None
    assert "magnitude" in given["sglang"].differs
    assert "magnitude" in given["mlx"].differs
    assert "yarn: attention_factor is ignored." in given["mlx"].computed.notes
    nested = {key: value for key, value in BASE.items() if key != "rope_theta"}
    modern = rows(nested | {"rope_parameters": yarn | {"rope_theta": 1e6}})
    assert "does not run" in modern["mlx"].differs


def test_layers_without_rope_are_named() -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    smollm = AutoConfig.for_model("smollm3", no_rope_layers=[1, 1, 1, 0], rope_parameters=yarn, pad_token_id=0, **sizes)
    note = "1 of the 4 full-attention layers do not rotate their queries and keys (no RoPE)"
    assert audit_config(smollm.to_dict()).notes == (f"{note}: the method does not reach them.",)
    assert f"note {note}" in unwrapped(audit_config(smollm.to_dict()))
    model = Model("smollm", smollm, composite=False, specs=[])
    assert make_target(model, "linear", factor=2).notes == (f"{note}: the method does not reach them.",)
    assert make_target(model).notes == ()
    cohere = AutoConfig.for_model("cohere2", sliding_window=16, **sizes)
    assert audit_config(cohere.to_dict()).notes == ()
    with pytest.raises(UnsupportedModelError, match="none of the 1 full-attention layers"):
        make_target(Model("cohere", cohere, composite=False, specs=[]), "yarn", factor=2)


def test_what_a_draft_gets_is_said_where_a_model_has_one() -> None:
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        model = build("llama")
        setattr(model.config, key, 1)
        for engine, part in (("vllm", "--hf-overrides does not reach a draft"), ("sglang", "go to the draft as well")):
            notes = rope.serving_config(model, engine, "yarn", factor=4).notes
            assert [part in note for note in notes if note.startswith("This model has draft layers.")] == [True]
            assert not any("draft" in note for note in rope.serving_config(model, engine).notes)
        assert not any("draft" in note for note in rope.serving_config(model, "mlx", "yarn", factor=4).notes)
    assert not any("draft" in note for note in rope.serving_config(build("llama"), "vllm", "yarn", factor=4).notes)


def test_audit_finds_a_factor_that_is_applied_twice() -> None:
    linear = {"type": "linear", "rope_type": "linear", "factor": 4.0}
    coder = {"model_type": "llama", "head_dim": 128, "rope_theta": 100000, "rope_scaling": linear}
    extended = rows(coder | {"max_position_embeddings": 16384})  # deepseek-coder: 16,384 tokens, by its model card
    assert extended["vllm"].differs == (
        "it would serve 65,536 tokens, and the model is for 16,384: the factor is applied twice"
    )
    assert extended["mlx"].differs is None
    vicuna = coder | {"rope_theta": 10000.0, "max_position_embeddings": 4096}  # its length times the factor
    assert audit_config(vicuna).agrees
    phi = published_config("Phi-3")
    assert rows(phi)["vllm"].differs.startswith("for short inputs its frequencies differ")


def test_pairs_that_do_not_rotate_are_no_division_by_zero(tmp_path: Path) -> None:
    tiny("gemma4_text").save_pretrained(tmp_path)
    with pytest.raises(ServingError, match=r"cannot serve yarn x4 on this 'gemma4_text' model"):
        rope.serving_config(tmp_path, "vllm", "yarn", factor=4)


def test_audit_of_a_table_in_the_weights_is_refused() -> None:
    with pytest.raises(ServingError, match="the angles of 'roformer' are a table in its weights"):
        audit_config({"model_type": "roformer", "max_position_embeddings": 512})


@pytest.mark.parametrize("value", [" ", [1], 5])
def test_audit_of_settings_that_are_no_object(value: Any) -> None:
    config = BASE | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": value}
    assert any("rope_parameters must be an object, and is" in problem for problem in audit_config(config).problems)


def test_audit_finds_a_damaged_record_of_a_patch(tmp_path: Path) -> None:
    model = rope.patch(build("llama"), "yarn", factor=4)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert not any("record" in problem for problem in audit_config(config).problems)
    config["rope_ext_hf"]["target_length"] = "long"
    [problem] = audit_config(config).problems
    assert "record of this config is damaged" in problem
    assert "Error(" not in problem


def test_audit_finds_problems_of_the_file() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    composite = {"text_config": BASE, "rope_scaling": yarn}
    assert "beside text_config" in audit_config(composite).problems[0]
    assert "without original" in audit_config(BASE | {"rope_scaling": yarn}).problems[0]
    no_theta = {key: value for key, value in BASE.items() if key != "rope_theta"}
    assert "rope_theta" in audit_config(no_theta).problems[0]
    hostile: list[dict[str, Any]] = [
        {"rope_scaling": 3},
        {"rope_scaling": yarn | {"factor": "4"}},
        {"head_dim": 10**30},
        {"head_dim": []},
    ]
    for changed in hostile:
        assert not audit_config(BASE | changed).agrees
    assert not audit_config({"text_config": 3}).agrees


def test_pipes_and_numbers_beyond_all_bounds(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(FileError, match="no regular file"):
        rope.audit(tmp_path)
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="no such file"):
        rope.audit(tmp_path / "model.gguf")
    target = make_target(served_model("Mistral"), "yarn", factor=4.0)
    settings = {**target.patched["rope_parameters"], "original_max_position_embeddings": 1e308}
    broken = dataclasses.replace(target, patched={**target.patched, "rope_parameters": settings}, original=10**308)
    assert find_engine("vllm").config_for(broken).encoding == "longrope with equal lists"  # its own yarn overflows


@every_family
def test_audit_of_published_configs_runs(family: str) -> None:
    result = audit_config(published_config(family))
    assert result.engines[0].computed is not None, str(result)
    assert isinstance(result.engines[0].computed, Computed)
    json.dumps(result.to_dict())


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_commands(tmp_path: Path) -> None:
    run = CliRunner().invoke
    result = run(app, ["serve-config", "reference", "-m", "yarn", "--factor", "4", "--engine", "vllm"])
    assert result.exit_code == 0, result.output
    assert f"vllm serve {reference.path()}" in result.output
    assert "--hf-overrides" in result.output
    result = run(app, ["serve-config", "reference", "-m", "dca", "--factor", "4", "--engine", "vllm"])
    assert result.exit_code == 2
    (tmp_path / "config.json").write_text(json.dumps(BASE), encoding="utf-8")
    result = run(app, ["audit", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["agrees"]
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.0}
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"rope_scaling": scaled}), encoding="utf-8")
    result = run(app, ["audit", str(tmp_path / "config.json")])
    assert result.exit_code == 1
    assert "sglang" in result.output


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_folder_that_states_its_patch_needs_no_overrides(engine: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(reference.path())
    rope.patch(model, "yarn", factor=4).save_pretrained(tmp_path / "patched")
    config = rope.serving_config(tmp_path / "patched", engine)
    assert config.overrides is None
    assert str(tmp_path / "patched") in config.command
    assert config.length == 1024
    assert not any(part.startswith(("--hf-overrides", "--json-model")) for part in config.command)
    computed = find_engine(engine).computes(json.loads((tmp_path / "patched" / "config.json").read_text()), 1024)
    target = make_target(served_model_of(tmp_path / "patched"))
    np.testing.assert_allclose(computed.inv_freq, target.inv_freq, rtol=1e-5)
    path = tmp_path / "patched" / "config.json"  # edited by hand: the overrides are needed again
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"max_position_embeddings": 512}))
    try:
        again = rope.serving_config(tmp_path / "patched", engine)
    except RopeExtError:
        return
    assert again.overrides is not None


def served_model_of(folder: Path) -> Any:
    from rope_ext_hf.serving.target import open_model

    return open_model(folder)


@pytest.mark.parametrize(
    ("method", "params", "encoding"),
    [
        ("factors", {"factors": (2.0,) * 32}, "longrope"),
        ("yarn", {"factor": 4, "ramp": "cycles"}, "longrope"),
        ("longrope", {"factor": 4, "short_factor": (2.0,) * 32, "long_factor": (2.0,) * 32}, "native"),
        ("yarn", {"factor": 4}, "native"),
    ],
)
def test_lists_in_the_place_of_a_method_are_called_longrope(method: str, params: dict[str, Any], encoding: str) -> None:
    config = rope.serving_config("reference", "vllm", method, **params)
    assert config.encoding == encoding
    assert config.overrides is not None
    assert (config.overrides["rope_parameters"]["rope_type"] == "longrope") == ("longrope" in (encoding, method))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_length_profiles_are_an_instance_each(engine: str) -> None:
    params: dict[str, Any] = {"smaller": [1, 2], "frequency": "yarn", "beta_fast": 16.0}
    config = rope.serving_config("reference", engine, "profiles", factor=4, **params)
    *shorter, longest = *config.shorter, dataclasses.replace(config, shorter=())
    static = [rope.serving_config("reference", engine, "yarn", factor=factor, beta_fast=16.0) for factor in (2, 4)]
    assert [shorter[1], longest] == static
    published = rope.serving_config("reference", engine)
    assert (shorter[0].overrides, shorter[0].computed) == (published.overrides, published.computed)
    assert [each.length for each in (*shorter, longest)] == [256, 512, 1024]


def test_a_folder_with_profiles_prints_its_instances_and_the_way_to_them(tmp_path: Path) -> None:
    folder = str(tmp_path / "profiles")
    run = CliRunner().invoke
    written = run(app, ["patch", "reference", "--method", "profiles", "--factor", "2", "--out", folder])
    assert written.exit_code == 0, written.output
    printed = run(app, ["serve-config", folder, "--engine", "vllm"]).output
    assert [line for line in printed.splitlines() if line.startswith("vllm serve")] == [
        "vllm serve MODEL \\",  # the folder itself states the patch
        f"vllm serve {folder} \\",
    ]
    assert "a router" in printed
    assert "carries a patch that this is without" in printed
    audited = rope.audit(folder)
    assert any("profiles for 256, 512 tokens" in problem for problem in audited.problems)
    assert not audited.agrees
    refused = run(app, ["gguf", "in.gguf", "out.gguf", "--model", folder])
    assert refused.exit_code == 2
    assert "one for each profile" in refused.output


def test_the_families_with_a_softmax_scale_are_those_of_the_family_table() -> None:
    of_remote_code = {"kimi_k2"}
    assert MLA_FAMILIES - of_remote_code == {name for name, known in families().items() if known.softmax_mscale}
    assert DEEPSEEK_FAMILIES < MLA_FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type",
    # remote code, a config that states no length, and a part of another family
    sorted(MLA_FAMILIES - {"kimi_k2", "bailing_hybrid", "mistral_large4_text"}),
)
def test_latent_attention_is_served_with_its_softmax_scale_or_refused(model_type: str) -> None:
    plain = {"rope_type": "default", "rope_theta": 1e4}
    yarn = plain | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    models = [tiny(model_type, rope_parameters=each) for each in (plain, yarn | {"mscale": 1.0, "mscale_all_dim": 0.5})]
    before, after = (
        next(
            float(part.scaling)
            for part in model.modules()
            if hasattr(part, "scaling") and hasattr(part, "kv_lora_rank")
        )
        for model in models
    )
    target = make_target(open_model(models[1]))
    for engine, served in (("transformers", True), ("vllm", model_type in DEEPSEEK_FAMILIES)):
        config, refusal = serve(engine, target)
        assert (config is not None) is served, refusal
        if config is not None and config.computed is not None:
            assert config.computed.softmax_scale == pytest.approx(after / before, rel=1e-5)
    config, refusal = serve("vllm", make_target(open_model(models[0]), "llama3", factor=4))
    assert (config is None) is (model_type in DEEPSEEK_FAMILIES), refusal


@pytest.mark.parametrize("model_type", ["mimo_v2_flash", "minimax_m3_vl_text"])
def test_a_file_of_vllm_that_hands_on_theta_alone_serves_theta_alone(model_type: str) -> None:
    model = open_model(tiny(model_type.removesuffix("_text"), rope_parameters=None))
    assert serve("vllm", make_target(model))[0] is not None
    config, refusal = serve("vllm", make_target(model, "yarn", factor=4))
    assert config is None, refusal
    with pytest.raises(ServingError, match="hands on theta alone"):
        find_engine("vllm").with_plugin().config_for(make_target(model, "yarn", factor=4))


@pytest.mark.parametrize(("model_type", "runs_it"), [("llama", True), ("olmo2", False), ("starcoder2", False)])
def test_two_lists_are_not_those_of_the_classes_of_transformers_in_vllm(model_type: str, runs_it: bool) -> None:
    short, long = [1.0, 2.0, 3.0, 4.0], [2.0, 4.0, 6.0, 8.0]
    settings = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, "factor": 4.0}
    config = {"model_type": model_type, "max_position_embeddings": 256, "head_dim": 8}

    def computed(**lists: list[float]) -> Computed:
        return find_engine("vllm").computes(config | {"rope_parameters": settings | lists}, 256)

    same = computed(short_factor=long, long_factor=long)
    if runs_it:
        assert computed(short_factor=short, long_factor=long).inv_freq == same.inv_freq
    else:
        with pytest.raises(ServingError, match="takes the list of the longest input of a batch"):
            computed(short_factor=short, long_factor=long)
