"""A folder that another process writes to is refused before a model is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import rope_ext_hf as rope
from rope_ext_hf.runs.folder.folder import exclusive
from rope_ext_hf.tools.training import finetune


def test_a_command_that_keeps_a_folder_is_refused_before_it_reads_a_model(tmp_path: Path) -> None:
    with exclusive(tmp_path, 0), pytest.raises(rope.FileError, match=rf"writing '.*' \(process {os.getpid()} on"):
        finetune("no model", tmp_path, data="stdlib", method="yarn", factor=4, steps=1)
    assert [path.name for path in tmp_path.iterdir()] == ["run.0.lock"]
