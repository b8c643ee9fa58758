"""`describe` and `patch` on the bundled model, against formulas and stock transformers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from rope_ext_hf import Rotary
from tests.support.commands import run, run_json
from tests.support.oracles import by_dimension, divided, yarn_attention_factor

BUNDLED = Rotary(dim=64, theta=10_000.0, trained_length=256)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("patched") / "yarn"
    assert run("patch", "reference", "--method", "yarn", "--factor", "4", "--out", folder)[0] == 0
    return folder


def test_a_patched_folder_is_described_as_its_formula_has_it(patched: Path) -> None:
    said = run_json("describe", patched)
    assert (said["method"], said["patched"], said["extended_length"]) == ("yarn", True, 1024)
    assert [2 * math.pi / each for each in said["wavelengths"]] == pytest.approx(by_dimension(BUNDLED, 4), rel=1e-6)
    assert said["attention_factor"] == pytest.approx(yarn_attention_factor(4))
    as_if = run_json("describe", "reference", "--method", "yarn", "--factor", "4")
    assert {key: as_if[key] for key in ("method", "params", "wavelengths")} == {
        key: said[key] for key in ("method", "params", "wavelengths")
    }


def test_a_recorded_patch_that_is_replaced_is_named(patched: Path, tmp_path: Path) -> None:
    arguments = "patch", patched, "--method", "linear", "--factor", "2"
    notes = run_json(*arguments, "--out", tmp_path / "replaced")["notes"]
    replaced = "records yarn for 1,024 tokens, and this patch replaces it: 1,024 tokens become 512. --over patched"
    assert any(replaced in note for note in notes)
    notes = run_json(*arguments, "--over", "patched", "--out", tmp_path / "kept")["notes"]
    assert not any("replaces it" in note for note in notes)


def test_a_patch_as_described_is_what_transformers_loads(patched: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(patched).model.rotary_emb
    assert module.inv_freq.tolist() == pytest.approx(by_dimension(BUNDLED, 4), rel=2e-5)
    assert module.attention_scaling == pytest.approx(yarn_attention_factor(4))


def test_an_edit_that_the_former_spelling_hides_is_described(patched: Path, tmp_path: Path) -> None:
    config = json.loads((patched / "config.json").read_text("utf-8"))
    del config["rope_ext_hf"]  # which refuses the edit
    config["rope_parameters"]["factor"] = 16.0
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    said = run_json("describe", tmp_path)
    assert said["params"]["factor"] == 4
    assert any("it differs in factor 16.0 (4.0). Change both" in note for note in said["notes"])
    assert not any("differs" in note for note in run_json("describe", patched)["notes"])


@pytest.mark.slow
def test_lists_of_divisors_on_the_command_line_reach_the_folder(tmp_path: Path) -> None:
    divisors = [1 + i / 8 for i in range(32)]
    typed = ",".join(map(str, divisors))
    code, _, err = run("patch", "reference", "--method", "factors", "--factors", typed, "--out", tmp_path / "new")
    assert code == 0, err
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "new").model.rotary_emb.inv_freq.tolist()
    assert found == pytest.approx(divided(BUNDLED, divisors), rel=2e-5)
