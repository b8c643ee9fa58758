"""Audits: what each engine computes from one file, and what is wrong with the file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import rope_ext_hf as rope
from rope_ext_hf.errors import (
    CheckpointError,
    FileError,
    ServingError,
    UnknownMethodError,
    UnsupportedModelError,
)
from rope_ext_hf.tools import serving
from rope_ext_hf.tools.engines.base import find_engine
from rope_ext_hf.tools.engines.keys import Computed
from rope_ext_hf.tools.serving.auditing import audit_config
from rope_ext_hf.tools.serving.configs import Model, make_target
from tests.support.models import build
from tests.support.wrapped_text import unwrapped
from tests.tools.support.serving_models import SERVED, published_config, served_model

pytestmark = pytest.mark.filterwarnings("ignore")
every_family = pytest.mark.parametrize("family", SERVED)
BASE = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 1e6}


def rows(config: dict[str, Any]) -> dict[str, Any]:
    return {report.engine: report for report in audit_config(config).engines}


def test_audit_finds_what_engines_ignore() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    extended = BASE | {"max_position_embeddings": 131072, "rope_scaling": yarn | {"type": "yarn"}}
    assert [name for name, report in rows(extended).items() if report.differs] == ["tensorrt-llm"]
    assert "floor(p / 2)" in rows(extended)["tensorrt-llm"].differs
    assert audit_config(extended).agrees  # nobody ran that engine
    short = rows(BASE | {"rope_scaling": yarn})  # ExLlamaV3 divides max_position_embeddings by the original length
    assert [name for name, report in short.items() if report.differs] == ["exllamav3", "tensorrt-llm"]
    assert short["exllamav3"].computed.notes == (
        "yarn: it takes the factor 1, max_position_embeddings divided by the original length.",
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
    assert modern["mlx"].computed.notes == ("rope_parameters is not read; theta is 10,000, its default.",)
    assert "frequencies differ" in modern["mlx"].differs
    required = rows(nested | {"model_type": "olmo3", "rope_parameters": yarn | {"rope_theta": 1e6}})
    assert "needs rope_theta at the top level" in required["mlx"].differs


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
LLAMA_3_1 = {key: value for key, value in BASE.items() if key != "rope_theta"}
LLAMA_3_1 |= {"max_position_embeddings": 131072, "rope_parameters": LLAMA3}


def test_audit_names_programs_that_drop_a_scaling_in_silence() -> None:
    report = audit_config(LLAMA_3_1)
    others: dict[str, Any] = {other.engine: other for other in report.others}
    assert others["ctranslate2"].differs == "without its llama3 scaling"
    assert max(others["ctranslate2"].computed.inv_freq) == 1.0
    assert min(others["ctranslate2"].computed.inv_freq) == pytest.approx(500_000.0 ** (-126 / 128))
    lost = "without its llama3 scaling and with theta 10,000 in place of 500,000"
    assert others["optimum-onnx"].differs == lost
    assert others["lmdeploy-pytorch"].differs is None
    text = unwrapped(str(report))
    assert "CTranslate2 4.8.5, ibm-fms 1.13.1 and keras-hub 0.32.0 (without its llama3 scaling); " in text
    assert "rope-ext audit PATH --engine NAME" in text
    # Both spellings repair those that read the former one.
    both = LLAMA_3_1 | {"rope_theta": 500_000.0, "rope_scaling": LLAMA3}
    assert {other.engine for other in audit_config(both).others if other.differs} == {"ctranslate2", "ibm-fms"}


def test_audit_shows_one_program_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_3_1))
    shown = unwrapped(str(serving.audit(file, engine="ctranslate2")))
    assert "by `ntk` (theta alone) or `linear`" in shown
    assert "vllm" not in shown
    assert "Some programs" not in shown
    assert "vllm" in str(serving.audit(file, engine="vllm"))
    with pytest.raises(UnknownMethodError, match=r"unknown engine 'ctranslate'\. Did you mean 'ctranslate2'"):
        serving.audit(file, engine="ctranslate")


def test_programs_that_stop_lose_nothing_in_silence() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    report = audit_config(BASE | {"rope_scaling": yarn})
    others: dict[str, Any] = {other.engine: other for other in report.others}
    assert others["ctranslate2"].stops
    assert "CTranslate2" not in str(report)
    assert "frequencies differ" in others["paddleformers"].differs  # its factor is that of the lengths, which is 1


@pytest.mark.parametrize(
    ("method", "wavelength"), [("cope", r"[\d,.]+ tokens"), ("nope", "none"), ("yarn", r"[\d,.]+ tokens")]
)
def test_engines_read_pairs_that_do_not_rotate(method: str, wavelength: str, tmp_path: Path) -> None:
    params: dict[str, Any] = {"nope": {"recalibrated": 1}, "yarn": {"factor": 4}}.get(method, {})
    rope.patch(build("llama"), method, **params).save_pretrained(tmp_path)
    result = serving.audit(tmp_path)
    verdicts = {report.engine: report.verdict for report in result.engines}
    assert {verdicts[name] for name in ("vllm", "sglang", "mlx", "exllamav3")} == {"the same"}
    assert re.search(rf"longest wavelength {wavelength}, magnitude", unwrapped(result))


def test_layers_without_rope_are_named() -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    smollm = AutoConfig.for_model("smollm3", no_rope_layers=[1, 1, 1, 0], rope_parameters=yarn, pad_token_id=0, **sizes)
    note = "1 of the 4 full-attention layers do not rotate their queries and keys (no RoPE)"
    assert audit_config(smollm.to_dict()).notes == (f"{note}: the method does not reach them.",)
    assert f"note {note}" in unwrapped(audit_config(smollm.to_dict()))
    model = Model("smollm", smollm, composite=False, patches=[])
    assert make_target(model, "linear", factor=2).notes == (f"{note}: the method does not reach them.",)
    assert make_target(model).notes == ()
    cohere = AutoConfig.for_model("cohere2", sliding_window=16, **sizes)
    assert audit_config(cohere.to_dict()).notes == ()
    with pytest.raises(UnsupportedModelError, match="none of the 1 full-attention layers"):
        make_target(Model("cohere", cohere, composite=False, patches=[]), "yarn", factor=2)


def test_audit_finds_a_factor_that_is_applied_twice() -> None:
    extended = rows(published_config("deepseek-coder"))  # for 16,384 tokens, by its model card
    assert extended["vllm"].differs == (
        "it would serve 65,536 tokens, but the model is for 16,384: the factor is applied twice"
    )
    assert extended["mlx"].differs is None
    assert audit_config(published_config("vicuna-7b-16k")).agrees  # whose length times the factor is 16,384
    phi = published_config("Phi-3")
    assert rows(phi)["vllm"].differs.startswith("for short inputs its frequencies differ")


def test_audit_of_a_table_in_the_weights_is_refused() -> None:
    with pytest.raises(ServingError, match="the angles of 'roformer' are a table in its weights"):
        audit_config({"model_type": "roformer", "max_position_embeddings": 512})


@pytest.mark.parametrize("value", [" ", [1], 5])
def test_audit_of_settings_that_are_no_object(value: Any) -> None:
    config = BASE | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": value}
    assert any("rope_parameters must be an object, got" in problem for problem in audit_config(config).problems)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"factor": 8.0}, "factor 8.0 (4.0)"),
        ({"rope_theta": 5e5}, "rope_theta 500000.0 (1000000.0)"),
        ({"rope_type": "linear", "factor": 8.0}, "factor 8.0 (4.0), rope_type linear (yarn)"),
    ],
)
def test_audit_finds_an_edit_that_the_former_spelling_hides(edit: dict[str, Any], named: str) -> None:
    """transformers reads the same as before the edit, whatever `rope_parameters` says."""
    config = BASE | {"rope_scaling": YARN, "rope_parameters": YARN | {"rope_theta": 1e6} | edit}

    def read(config: dict[str, Any]) -> Any:
        copied = json.loads(json.dumps(config))
        return AutoConfig.for_model(copied.pop("model_type"), **copied).rope_parameters

    assert read(config) == YARN | {"rope_theta": 1e6}
    [problem] = audit_config(config).problems
    assert f"it differs in {named}. Change both" in problem
    cured = {key: value for key, value in config.items() if key not in ("rope_scaling", "rope_theta")}
    assert read(cured) == YARN | {"rope_theta": 1e6} | edit
    assert not audit_config(cured).problems


def test_a_scaling_beside_rope_parameters_takes_the_theta_of_the_class() -> None:
    config = {key: value for key, value in BASE.items() if key != "rope_theta"}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    loaded = AutoConfig.for_model(**config).rope_parameters
    assert loaded["rope_theta"] == 10_000.0  # as long as transformers does it
    report = audit_config(config)
    slowest = {each.engine: each.computed.inv_freq[-1] for each in report.engines if each.computed is not None}
    for name in ("transformers", "vllm", "sglang", "llama.cpp"):
        assert slowest[name] == pytest.approx(10_000.0 ** (-126 / 128) / 4, rel=1e-5)
    (problem,) = report.problems
    assert "rope_theta 1000000.0 (10000.0), rope_type default (linear)" in problem
    # Configs from before rope_theta state none at all.
    former = {key: value for key, value in config.items() if key != "rope_parameters"}
    assert [each.differs for each in audit_config(former).engines if each.engine == "llama.cpp"] == [None]
    assert not audit_config(former).problems


def test_the_two_spellings_of_one_setting_are_no_problem() -> None:
    renamed = {"type": "yarn"} | {key: value for key, value in YARN.items() if key != "rope_type"}
    assert not audit_config(BASE | {"rope_scaling": renamed, "rope_parameters": YARN | {"rope_theta": 1e6}}).problems


def test_audit_names_why_gpt_oss_differs_and_what_serves_it(tmp_path: Path) -> None:
    rope.patch(build("gpt_oss"), "by-parts", factor=4).save_pretrained(tmp_path)
    audit = serving.audit(tmp_path)
    vllm = next(report for report in audit.engines if report.engine == "vllm")
    assert vllm.differs is not None
    assert vllm.computed is not None
    assert vllm.computed.notes == ("gpt-oss: run as yarn, without attention_factor.",)
    assert any(note.endswith("rope-ext serve-config MODEL --engine vllm --plugin") for note in audit.notes)
    assert not any(note.endswith("--engine sglang --plugin") for note in audit.notes)
    assert serving.serving_config(tmp_path, "vllm", plugin=True).command[0] == "vllm"
    with pytest.raises(ServingError, match="instead of 1 \\(gpt-oss: run as yarn, without attention_factor\\)"):
        serving.serving_config(build("gpt_oss"), "vllm", "by-parts", factor=4)


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
    unknown = {key: value for key, value in BASE.items() if key != "rope_theta"} | {"model_type": "unknown"}
    assert "rope_theta" in audit_config(unknown).problems[0]  # no class of transformers has a default for it
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
    with pytest.raises(FileError, match="not a regular file"):
        serving.audit(tmp_path)
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="no such file"):
        serving.audit(tmp_path / "model.gguf")
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
