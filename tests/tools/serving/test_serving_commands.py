"""`extend`, `serve-config`, `audit`, `check-server` and `gguf`: what they print and write is YaRN."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rope_ext_hf import Rotary
from rope_ext_hf.reference import path
from rope_ext_hf.tools.engines.base import list_engines
from tests.support.commands import run, run_json
from tests.support.oracles import by_dimension, llama3, plain, yarn_attention_factor
from tests.tools.support.gguf_models import write_llama
from tests.tools.support.model_servers import serving

BUNDLED = Rotary(dim=64, theta=10_000.0, trained_length=256)
YARN = ("--method", "yarn", "--factor", "4")


def stock(**rope_parameters: Any) -> Any:
    """The bundled model as transformers builds it from rope settings."""
    settings = {"rope_type": "default", "rope_theta": 10000.0} | rope_parameters
    return AutoModelForCausalLM.from_pretrained(path(), rope_parameters=settings, dtype=torch.float32).eval()


def assert_yarn(rotary_emb: Any, factor: float) -> None:
    assert rotary_emb.inv_freq.tolist() == pytest.approx(by_dimension(BUNDLED, factor), rel=2e-5)
    assert rotary_emb.attention_scaling == pytest.approx(yarn_attention_factor(factor))


@pytest.mark.parametrize("engine", list_engines())
def test_every_engine_is_told_to_compute_yarn(engine: str) -> None:
    if engine == "tensorrt-llm":  # by its source
        code, _, err = run("serve-config", "reference", *YARN, "--engine", engine)
        assert (code, "floor(p / 2)" in err) == (2, True)
        return
    said = run_json("serve-config", "reference", *YARN, "--engine", engine)
    assert (said["engine"], said["method"], said["length"]) == (engine, "yarn x4", 1024)
    assert said["computed"]["inv_freq"] == pytest.approx(by_dimension(BUNDLED, 4), rel=1e-5)
    code, out, _ = run("serve-config", "reference", *YARN, "--engine", engine)
    assert code == 0
    assert "yarn x4 at 1,024 tokens" in out


def test_the_overrides_that_vllm_is_given_are_a_model_of_transformers() -> None:
    said = run_json("serve-config", "reference", *YARN, "--engine", "vllm")
    overrides = json.loads(said["command"][said["command"].index("--hf-overrides") + 1])
    assert overrides["max_position_embeddings"] == 1024
    settings = {key: value for key, value in overrides["rope_parameters"].items() if key != "attn_factor"}  # vLLM's own
    assert_yarn(stock(**settings).model.rotary_emb, 4)


def test_extend_writes_a_folder_that_engines_agree_on(tmp_path: Path) -> None:
    asked = ("extend", "reference", "--target-length", "512", "--no-measure", "--out", tmp_path / "new")
    code, _, err = run(*asked)
    assert (code, "give --yes" in err) == (2, True)
    assert not (tmp_path / "new").exists()
    said = run_json(*asked, "--yes", "--engine", "sglang")
    assert (said["plan"]["method"], said["serving"]["length"], said["verdict"]) == ("yarn", 512, None)
    assert_yarn(AutoModelForCausalLM.from_pretrained(tmp_path / "new").model.rotary_emb, 2)
    assert run("audit", tmp_path / "new")[0] == 0
    code, out, err = run(*asked, "--yes")  # the folder is there, and is not written again
    assert code == 0, err
    assert "rope-ext patch" not in out


def test_the_command_that_a_dry_run_prints_for_a_method_writes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    advice = run_json("extend", "reference", "--target-length", "1k", "--dry-run")["advice"]
    assert (advice["factor"], advice["context_length"]) == (4.0, 256)
    lines = [line for lines in advice["commands"].values() for line in lines if line.startswith("rope-ext patch")]
    code, _, err = run(*shlex.split(lines[0])[1:])
    assert code == 0, err
    (folder,) = tmp_path.iterdir()
    assert_yarn(AutoModelForCausalLM.from_pretrained(folder).model.rotary_emb, 4)


def test_audit_says_by_its_exit_code_whether_engines_agree(tmp_path: Path) -> None:
    said = run_json("audit", "reference")
    config = json.loads((Path(path()) / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 20_000.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    disagreed = run_json("audit", tmp_path / "config.json", code=1)  # mlx-lm reads the former spelling alone
    assert [each["engine"] for each in disagreed["engines"] if each["differs"] and each["was_run"]] == ["mlx"]
    assert run("patch", "reference", *YARN, "--out", tmp_path / "new")[0] == 0
    agreed = run_json("audit", tmp_path / "new")
    assert {each["engine"] for each in said["engines"]} == {each["engine"] for each in agreed["engines"]}
    for report, expected in ((said, plain(BUNDLED)), (agreed, by_dimension(BUNDLED, 4))):
        (of_transformers,) = (each for each in report["engines"] if each["engine"] == "transformers")
        assert of_transformers["computed"]["inv_freq"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_server_is_right_or_its_mistake_is_named(tmp_path: Path) -> None:
    assert run("patch", "reference", *YARN, "--out", tmp_path / "new")[0] == 0
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    for model, code in ((stock(**yarn), 0), (stock(), 1)):
        with serving("vLLM 0.33.0", model) as url:
            said = run_json("check-server", url, tmp_path / "new", "--lengths", "300", code=code)
        assert said["agrees"] is (code == 0)
        assert said["server"] == "vLLM 0.33.0"
    code, out, _ = run("check-server", "http://127.0.0.1:9", tmp_path / "new", "--lengths", "64")
    assert (code, out) == (2, "")


def test_a_gguf_file_gets_the_keys_or_divisors_of_a_method_and_keeps_its_weights(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    weights = np.arange(64, dtype=np.float32).reshape(4, 16)
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "llama")
    for set_number, number in (
        (writer.add_context_length, 256), (writer.add_embedding_length, 256), (writer.add_head_count, 4),
        (writer.add_rope_dimension_count, 64), (writer.add_rope_freq_base, 1e4),
    ):  # fmt: skip
        set_number(number)
    writer.add_tensor("blk.0.weight", weights)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    for method in ("yarn", "llama3"):
        out = tmp_path / f"{method}.gguf"
        command = ("gguf", tmp_path / "in.gguf", out, "--model", "reference", "--method", method, "--factor", "4")
        code, said, err = run(*command)
        assert code == 0, err
        assert f"written to {out}" in said
        assert run(*command)[0] == 2  # it exists
        reader = gguf.GGUFReader(out)
        tensors = {tensor.name: tensor.data for tensor in reader.tensors}
        np.testing.assert_array_equal(tensors["blk.0.weight"], weights)
        if method == "yarn":
            keys = ("type", "factor", "original_context_length")
            assert [reader.get_field(f"llama.rope.scaling.{key}").contents() for key in keys] == ["yarn", 4.0, 256]
        else:
            divisors = np.array(plain(BUNDLED)) / np.array(llama3(BUNDLED, 4))
            np.testing.assert_allclose(tensors["rope_freqs.weight"], divisors, rtol=1e-5)


@pytest.mark.slow
def test_extend_says_what_it_takes_before_it_asks(tmp_path: Path) -> None:
    asked = ("extend", "reference", "--target-length", "512", "--device", "cpu", "--out", tmp_path / "new")
    code, _, err = run(*asked)
    assert code == 2
    time, question = err.index("reads    13k tokens, unpatched and patched: about "), err.index("nobody can be asked")
    assert time < question
    assert not (tmp_path / "new").exists()


def test_commands_take_a_gguf_file_or_say_what_to_type(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "small.gguf"
    write_llama(file)
    method = ("--method", "yarn", "--factor", 2)
    working: list[tuple[Any, ...]] = [
        ("describe", file, *method),
        ("detect", file),
        ("serve-config", file, *method, "--engine", "gguf"),
        ("gguf", file, tmp_path / "out.gguf", *method),
        ("audit", tmp_path / "out.gguf"),
        ("ppl", file, "--lengths", "32,64", "--max-spans", 2, "--data", "stdlib", "--out", tmp_path / "runs", *method),
        ("convert", file, tmp_path / "folder", "--to", "half", "--dequantize", "bfloat16"),
    ]
    for arguments in working:
        code, _, error = run(*arguments)
        assert code == 0, error
    (stored,) = (tmp_path / "runs").iterdir()
    assert run("run", stored)[0] == 0
    refused: list[tuple[Any, ...]] = [
        ("patch", file, *method, "--out", tmp_path / "new"),
        ("serve-config", file, *method, "--engine", "vllm"),
        ("extend", file, "--target-length", 256, "--out", tmp_path / "new"),
        ("finetune", file, *method, "--data", "stdlib", "--steps", 1, "--out", tmp_path / "new"),
        ("card", file),
    ]
    for arguments in refused:
        code, _, error = run(*arguments)
        assert code == 2
        assert "`rope-ext gguf" in error, error
        assert f"`rope-ext convert {file} FOLDER --to hf --dequantize bfloat16`" in error
