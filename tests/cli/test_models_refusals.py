"""`rope-ext patch` and `describe`, which read no weights, answer as `patch` does on the loaded model."""

from __future__ import annotations

from pathlib import Path

import pytest

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError
from tests.support.commands import run
from tests.support.every_model import tiny

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("model_type", "refused"), [("doge", True), ("qwen3", False)])
def test_the_command_refuses_what_the_loaded_model_refuses(model_type: str, refused: bool, tmp_path: Path) -> None:
    model = tiny(model_type)
    model.save_pretrained(tmp_path / "given")
    length = 4 * model.config.max_position_embeddings
    chosen = ("--method", "rerope", "--target-length", str(length))
    code, _, err = run("patch", tmp_path / "given", *chosen, "--out", tmp_path / "new")
    assert run("describe", tmp_path / "given", *chosen)[0] == code == (2 if refused else 0)
    assert (tmp_path / "new").exists() != refused
    if refused:
        with pytest.raises(UnsupportedModelError) as error:
            rope.patch(model, "rerope", target_length=length)
        assert " ".join(str(error.value).split()) in " ".join(err.split())
    else:
        assert rope.describe(rope.from_pretrained(tmp_path / "new")).method == "rerope"
