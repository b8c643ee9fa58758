"""`rope.fingerprint` of folders, configs, models and files of a fingerprint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rope_ext_hf as rope
from tests.support.models import build, build_config


def test_a_model_its_config_and_its_folder_have_one_fingerprint(tmp_path: Path) -> None:
    model = build("qwen3")
    model.save_pretrained(tmp_path)
    expected = rope.fingerprint(model)
    for other in (build_config("qwen3"), tmp_path, str(tmp_path)):
        assert expected.differences(rope.fingerprint(other)) == []


def test_the_file_of_a_fingerprint_is_compared_with_folders(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(plain := tmp_path / "plain")
    rope.patch(model, "yarn", factor=4).save_pretrained(extended := tmp_path / "extended")
    (in_trainer := tmp_path / "trainer.json").write_text(json.dumps(rope.fingerprint(model).to_dict()))

    assert rope.fingerprint(extended).differences(rope.fingerprint(in_trainer)) == []
    first, *_ = rope.fingerprint(in_trainer).differences(rope.fingerprint(plain))
    assert first.startswith("The scaling is missing")
    (broken := tmp_path / "broken.json").write_text("{}")
    with pytest.raises(rope.CheckpointError, match="not the fingerprint"):
        rope.fingerprint(broken)
