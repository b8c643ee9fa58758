"""A folder that some engine would read as another model is named in a warning when it is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rope_ext_hf as rope
from rope_ext_hf.checkpoints.folder_copies import save_patched_folder
from rope_ext_hf.hub import load_empty
from tests.support.models import build


def test_a_warning_names_the_folder_that_is_there_afterwards(tmp_path: Path) -> None:
    scaled: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    source, out = tmp_path / "scaled", tmp_path / "longer"
    build("llama", scaled | {"original_max_position_embeddings": 16}, max_position_embeddings=128).save_pretrained(
        source
    )
    model = rope.patch(load_empty(source), "yarn", factor=2)
    with pytest.warns(UserWarning, match=r"would load '.*/longer' without an error"):
        save_patched_folder(model, source, out)
