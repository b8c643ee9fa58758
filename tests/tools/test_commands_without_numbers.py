"""A model whose weights are NaN, and texts with nothing to read, through commands of the tool box."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_models_without_numbers import (
    CORPORA,
    TEXT,
    check_nothing_to_read,
    check_refused,
    write_model_with_nan,
)

MORE = (*TEXT, "--eval-data", "texts/*.txt", "--max-spans", "2")
COMMANDS: dict[str, tuple[str, ...]] = {
    "tasks": ("--suite", "json-kv", "--lengths", "768", "--score", "rank", "--samples", "2"),
    "tasks, written": ("--suite", "json-kv", "--lengths", "768", "--score", "generate", "--samples", "2"),
    "gain": ("--data", "rows.jsonl", "--lengths", "128", "--distances", "64"),
    "extend": (*TEXT, "--target-length", "128", "--max-spans", "2", "--anyway", "--yes"),
    "finetune": (*MORE, "--method", "linear", "--factor", "2", "--steps", "1", "--train-all", "--out", "trained"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in."""
    write_model_with_nan(tmp_path)
    filling = "Mice pay in kind. " * 9
    rows = [
        {"context": f"Say {i}. {filling}", "evidence": f"Say {i}. ", "question": " So?", "answer": f" {i}"}
        for i in range(3)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each == "extend")) for each in COMMANDS]
)
@pytest.mark.sampled(5)
def test_a_model_with_nan_has_no_result(name: str, folder: Path) -> None:
    check_refused((name.partition(",")[0], "nan", *COMMANDS[name]), folder)


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("name", ["extend", "finetune"])
def test_texts_without_anything_to_read_are_refused(name: str, corpus: str, folder: Path) -> None:
    check_nothing_to_read((name, "model", *COMMANDS[name]), corpus, folder)
