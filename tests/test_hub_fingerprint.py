"""`rope.fingerprint` of folders, configs and models, and `rope-ext diff`, which compares two."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

import rope_ext_hf as rope
from rope_ext_hf.cli.app import app
from tests.support.models import build, build_config


def test_a_model_its_config_and_its_folder_have_one_fingerprint(tmp_path: Path) -> None:
    model = build("qwen3")
    model.save_pretrained(tmp_path)
    expected = rope.fingerprint(model)
    for other in (build_config("qwen3"), tmp_path, str(tmp_path)):
        assert expected.differences(rope.fingerprint(other)) == []


def test_the_command_names_what_differs(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(plain := tmp_path / "plain")
    rope.patch(model, "yarn", factor=4).save_pretrained(extended := tmp_path / "extended")
    (in_trainer := tmp_path / "trainer.json").write_text(json.dumps(rope.fingerprint(model).to_dict()))

    alike = CliRunner().invoke(app, ["diff", str(extended), str(in_trainer)])
    assert (alike.exit_code, alike.stdout) == (0, f"Both rotate alike: {rope.fingerprint(model).digest}.\n")
    other = CliRunner().invoke(app, ["diff", str(extended), str(plain), "--json"])
    assert other.exit_code == 1
    assert json.loads(other.stdout)["differences"][0].startswith("The scaling is missing")
    (broken := tmp_path / "broken.json").write_text("{}")
    assert CliRunner().invoke(app, ["diff", str(broken), str(plain)]).exit_code == 2
