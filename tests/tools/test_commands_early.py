"""Options of the tool box that are wrong whatever the model is are refused before torch is imported."""

from __future__ import annotations

import pytest

from tests.cli.test_dataclass_options_early import check_refusals

WRONG = {
    ("tasks", "reference", "--lengths", "256", "--suite", "rulr"): "Did you mean 'ruler'",
    ("extend", "reference", "--target-length", "512", "--engine", "vlm"): "Did you mean 'vllm'",
    ("extend", "reference", "--target-length", "512", "--data", "nosuch"): "no such text file, folder or pattern",
    (
        *("finetune", "reference", "--method", "yarn", "--data", "nosuch", "--steps", "1"),
        *("--out", "x"),
    ): "no such text file",
}


@pytest.mark.slow
def test_wrong_options_are_refused_before_heavy_imports() -> None:
    check_refusals(WRONG)
