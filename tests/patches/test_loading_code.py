"""Folders that plain transformers loads by code of their own, for methods that no config can state."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from rope_ext_hf.errors import CheckpointError
from tests.support.models import TRAINED, build, logits, tokens


@pytest.fixture(autouse=True)
def own_cache_of_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers copies the code of a folder into a cache, and imports it from there."""
    for module in ("transformers.dynamic_module_utils", "transformers.utils.hub"):
        if hasattr(sys.modules[module], "HF_MODULES_CACHE"):
            monkeypatch.setattr(sys.modules[module], "HF_MODULES_CACHE", str(tmp_path / "code"))


def published(tmp_path: Path, name: str, method: str, **given: Any) -> Path:
    build(name).save_pretrained(tmp_path / "plain")
    words = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    out = tmp_path / "published"
    arguments = ["patch", str(tmp_path / "plain"), "--method", method, *words, "--out", str(out), "--as-code"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.parametrize(
    ("name", "method", "given"),
    [("llama", "jet-long", {}), ("qwen3", "self-extend", {"group": 4, "window": 20}), ("gemma3", "dca", {})],
)
def test_plain_transformers_loads_it(tmp_path: Path, name: str, method: str, given: dict[str, Any]) -> None:
    out, ids = published(tmp_path, name, method, **given), tokens(3 * TRAINED)
    expected = logits(rope.patch(build(name), method, **given), ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32)
    assert type(model) is type(build(name))
    assert torch.equal(logits(model, ids), expected)
    assert torch.equal(logits(rope.from_pretrained(out, dtype=torch.float32), ids), expected)
    bare = transformers.AutoModel.from_pretrained(out, trust_remote_code=True, dtype=torch.float32)
    assert torch.equal(bare(ids).last_hidden_state, model.base_model(ids).last_hidden_state)
    with pytest.raises(KeyError, match=f"rope_ext_hf/{method}"):
        transformers.AutoModelForCausalLM.from_pretrained(out)


def test_settings_given_to_the_auto_class_are_kept(tmp_path: Path) -> None:
    out = published(tmp_path, "llama", "rerope")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=True, use_cache=False, dtype=torch.bfloat16, attn_implementation="eager"
    )
    assert model.config.use_cache is False
    assert model.dtype == torch.bfloat16
    assert rope.unpatch(model).config._attn_implementation == "eager"


def test_a_loaded_model_is_saved_without_the_code(tmp_path: Path) -> None:
    out = published(tmp_path, "llama", "jet-long")
    model = transformers.AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    model.save_pretrained(tmp_path / "again")
    assert "auto_map" not in json.loads((tmp_path / "again" / "config.json").read_text())
    rope.write_loading_code(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert torch.equal(logits(again, tokens(100)), logits(model, tokens(100)))


@pytest.mark.slow
def test_without_this_package_the_way_out_is_named(tmp_path: Path) -> None:
    out = published(tmp_path, "llama", "jet-long")
    program = (
        "import sys; sys.modules['rope_ext_hf'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        f"AutoModelForCausalLM.from_pretrained({str(out)!r}, trust_remote_code=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "jet-long, which needs the package rope_ext_hf; install it first" in done.stderr


def test_what_needs_no_code_is_refused(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(CheckpointError, match="has no patch"):
        rope.write_loading_code(tmp_path / "plain")
    arguments = ["patch", str(tmp_path / "plain"), "--method", "yarn", "--factor", "4", "--as-code"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "it needs no code" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
