"""Mistral's own format beside a config.json: named by audit, and passed over by vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rope_ext_hf.tools import serving
from tests.support.commands import run
from tests.support.mistral_format import mistral, write_both_formats

pytestmark = pytest.mark.filterwarnings("ignore")
_PARAMS = {"factor": 4, "original_max_position_embeddings": 64, "beta": 32, "alpha": 1}
OPTIONS = "--config-format hf --load-format safetensors"


@pytest.fixture
def both(tmp_path: Path) -> Path:
    return write_both_formats(tmp_path / "both")


def test_audit_names_the_other_format(both: Path, tmp_path: Path) -> None:
    [note] = [note for note in serving.audit(both).notes if "params.json" in note]
    assert "the same frequencies" in note
    for edit in ({"rope_theta": 1e6}, {"yarn": _PARAMS}, {"head_dim": 16}):
        params = json.loads((both / "params.json").read_text())
        (both / "params.json").write_text(json.dumps(params | edit))
        audit = serving.audit(both)
        assert not audit.agrees
        assert any("params.json: vLLM runs the model from these" in problem for problem in audit.problems), edit
        assert any(OPTIONS in problem for problem in audit.problems)
        (both / "params.json").write_text(json.dumps(params))


def test_nothing_is_left_of_it_after_a_patch(both: Path, tmp_path: Path) -> None:
    assert run("patch", both, "--method", "ntk", "--factor", 4, "--out", tmp_path / "out")[0] == 0
    assert not any("params.json" in problem for problem in serving.audit(tmp_path / "out").problems)


@pytest.mark.parametrize("method", [None, "linear", "ntk", "yarn", "by-parts"])
def test_vllm_is_started_on_config_json(both: Path, tmp_path: Path, method: str | None) -> None:
    factor: dict[str, Any] = {} if method is None else {"factor": 4.0}
    served = serving.serving_config(both, "vllm", method, **factor)
    assert OPTIONS in " ".join(served.command)
    assert not any("--config-format" in command for command in served.by_folder)  # a patched folder has one format
    assert "--config-format" not in serving.serving_config(both, "sglang", method, **factor).command
    mistral().save_pretrained(tmp_path / "one")
    assert "--config-format" not in serving.serving_config(tmp_path / "one", "vllm", method, **factor).command
