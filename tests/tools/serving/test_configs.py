"""Serving configs: what `serving_config` and its command give, and what they refuse."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf import reference
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import (
    MethodError,
    RopeExtError,
    ServingError,
)
from rope_ext_hf.methods.registry import list_methods
from rope_ext_hf.tools import serving
from rope_ext_hf.tools.engines.base import find_engine
from rope_ext_hf.tools.serving.auditing import audit_config
from rope_ext_hf.tools.serving.configs import make_target, open_model
from tests.support.commands import run
from tests.support.every_model import tiny
from tests.support.models import TRAINED, build
from tests.tools.support.serving_models import served_model

pytestmark = pytest.mark.filterwarnings("ignore")
BASE = {"model_type": "llama", "head_dim": 128, "max_position_embeddings": 32768, "rope_theta": 1e6}


def test_length_dependent_and_remapping_methods_are_refused_by_name() -> None:
    for name in ("dynamic-yarn", "self-extend"):
        with pytest.raises(ServingError, match=name):
            make_target(served_model("Mistral"), name, target_length=65536)
    with pytest.raises(MethodError, match="without a method"):
        make_target(served_model("Mistral"), factor=2.0)


def test_a_patch_for_chosen_layers_is_refused(tmp_path: Path) -> None:
    for name, arguments in (("llama", {"layers": [1]}), ("gemma3", {"layers": "sliding_attention"})):
        rope.patch(model := build(name), "nope", **arguments).save_pretrained(tmp_path / name)
        for source in (model, tmp_path / name):
            with pytest.raises(ServingError, match="the patch of this model is for chosen layers"):
                serving.serving_config(source, "vllm", plugin=True)
        assert "serve-config" not in str(serving.audit(tmp_path / name))
        config = json.loads((tmp_path / name / "config.json").read_text())
        damaged = str(audit_config(config | {"rope_ext_hf": "nope"}))
        assert "record of this config is damaged" in damaged
    # Named, the layers that a patch is for without a choice are no other ones.
    model, same = (rope.patch(build("gemma3"), "yarn", factor=4, **a) for a in ({"layers": "full_attention"}, {}))
    config, expected = (serving.serving_config(each, "vllm", plugin=True) for each in (model, same))
    assert str(config) == str(expected)


@pytest.mark.parametrize(("engine", "plugin"), [("vllm", False), ("vllm", True), ("sglang", True), ("gguf", False)])
@pytest.mark.parametrize("name", ["stairs", "rerope", "dca", "dynamic-self-extend", "alibi"])
def test_no_engine_serves_a_remapping_method(name: str, engine: str, plugin: bool) -> None:
    with pytest.raises(ServingError, match=f"{name}.*no serving engine does that"):
        serving.serving_config("reference", engine, name, plugin=plugin, target_length=1024)


def test_a_live_patched_model_and_a_folder(tmp_path: Path) -> None:
    from rope_ext_hf.hub import load_empty

    model = load_empty("reference")
    plain = serving.serving_config("reference", "vllm")
    assert "--hf-overrides" not in plain.command
    rope.patch(model, "yarn", factor=4, attention_factor=1.3)
    live = serving.serving_config(model, "sglang")
    named = serving.serving_config("reference", "sglang", "yarn", factor=4, attention_factor=1.3)
    assert live.overrides == named.overrides
    assert live.length == 4 * plain.length


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_a_folder_without_a_tokenizer_is_named(engine: str, tmp_path: Path) -> None:
    model = rope.patch(rope.from_pretrained("reference"), "yarn", factor=4)
    model.save_pretrained(tmp_path)
    (note,) = (note for note in serving.serving_config(tmp_path, engine).notes if "no tokenizer" in note)
    assert str(tmp_path) in note
    AutoTokenizer.from_pretrained(reference.path()).save_pretrained(tmp_path)
    assert not any("no tokenizer" in note for note in serving.serving_config(tmp_path, engine).notes)


def test_the_label_of_a_method_with_a_list_of_its_own_name() -> None:
    assert list_methods()["factors"](factors=(1.0, 2.0)).label() == "factors"  # type: ignore[call-arg]


def test_what_a_draft_gets_is_said_where_a_model_has_one() -> None:
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        model = build("llama")
        setattr(model.config, key, 1)
        for engine, part in (("vllm", "--hf-overrides does not reach a draft"), ("sglang", "go to the draft as well")):
            notes = serving.serving_config(model, engine, "yarn", factor=4).notes
            assert [part in note for note in notes if note.startswith("This model has draft layers.")] == [True]
            assert not any("draft" in note for note in serving.serving_config(model, engine).notes)
        assert not any("draft" in note for note in serving.serving_config(model, "mlx", "yarn", factor=4).notes)
    assert not any("draft" in note for note in serving.serving_config(build("llama"), "vllm", "yarn", factor=4).notes)


def test_pairs_that_do_not_rotate_are_no_division_by_zero(tmp_path: Path) -> None:
    tiny("gemma4_text").save_pretrained(tmp_path)
    with pytest.raises(ServingError, match=r"cannot serve yarn x4 on this 'gemma4_text' model"):
        serving.serving_config(tmp_path, "vllm", "yarn", factor=4)


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
    config = serving.serving_config(tmp_path / "patched", engine)
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
        again = serving.serving_config(tmp_path / "patched", engine)
    except RopeExtError:
        return
    assert again.overrides is not None


def served_model_of(folder: Path) -> Any:

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
    config = serving.serving_config("reference", "vllm", method, **params)
    assert config.encoding == encoding
    assert config.overrides is not None
    assert (config.overrides["rope_parameters"]["rope_type"] == "longrope") == ("longrope" in (encoding, method))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("method", ["yarn", "by-parts", "ntk"])
def test_a_folder_that_is_patched_as_told_is_served_as_told(
    method: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two shorter commands: what the first writes, the second serves, with the same numbers."""
    monkeypatch.chdir(tmp_path)
    config = serving.serving_config("reference", engine, method, factor=4)
    patch, serve = config.by_folder
    assert run(*shlex.split(patch)[1:])[0] == 0
    by_folder = serving.serving_config(f"reference-{config.length}", engine)
    assert shlex.join(by_folder.command) == serve
    assert by_folder.overrides is None
    assert by_folder.computed is not None
    assert config.computed is not None
    assert by_folder.computed.inv_freq == pytest.approx(config.computed.inv_freq, rel=1e-6)
    assert by_folder.computed.attention_factor == pytest.approx(config.computed.attention_factor, rel=1e-6)
    assert f"{patch}\n{serve}" in str(config)


def test_a_method_that_reads_the_length_of_each_row_is_refused() -> None:
    for plugin in (False, True):
        with pytest.raises(ServingError, match="no serving engine does that"):
            serving.serving_config(build("llama"), "vllm", "jet-long", target_length=4 * TRAINED, plugin=plugin)
