"""The scripts of examples/ run as they stand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from docs.notebooks import NOTEBOOKS, differences, run
from tests.support.forks import run_commands, run_forked, run_script

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUNS = sorted((ROOT / "examples" / "runs").glob("*.yaml"))


QUICK = ("patch_and_generate", "own_family", "rotary_in_own_model")
"""Those that `make test` runs."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [pytest.param(path, marks=[pytest.mark.thorough] * (path.stem not in QUICK)) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    assert run_forked(run_script, example, folder=tmp_path, environment={"TMPDIR": str(tmp_path)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "notebook",
    [
        pytest.param(path, marks=[pytest.mark.thorough] * path.stem.startswith(("finetune", "measure")))
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_a_notebook_shows_what_comes_out(notebook: Path, tmp_path: Path) -> None:
    """What is committed is what its cells show, run one after the other without a kernel."""
    run_forked(check_notebook, notebook, folder=tmp_path, environment={"TMPDIR": str(tmp_path), "COLUMNS": "100"})


def check_notebook(notebook: Path) -> None:
    committed = json.loads(notebook.read_text(encoding="utf-8"))
    made = run(committed)
    assert differences(committed, made) == []
    assert sum(len(cell.get("outputs", [])) for cell in made["cells"]) > 3


def test_another_output_of_a_notebook_is_noticed() -> None:
    cell = {
        "cell_type": "code",
        "source": ["1"],
        "outputs": [{"output_type": "stream", "text": ["loss 1.00 at 256\n"]}],
    }
    shown = {"cells": [cell]}
    for text, differs in (("loss 1.01 at 256\n", 0), ("loss 1.10 at 256\n", 1), ("gain 1.00 at 256\n", 1)):
        other = {"cells": [cell | {"outputs": [{"output_type": "stream", "text": [text]}]}]}
        assert len(differences(shown, other)) == differs, text
    assert len(differences(shown, {"cells": [cell | {"outputs": []}]})) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [pytest.param(path, marks=[pytest.mark.thorough] * (path.stem in ("finetune", "passkey"))) for path in RUNS],
    ids=lambda path: path.stem,
)
def test_run_file_runs(file: Path, tmp_path: Path) -> None:
    spans = ["--max-spans", "2"] * (file.stem in ("perplexity", "sweep"))
    assert run_forked(run_commands, [["run", str(file), *spans]], folder=tmp_path)
    assert list(tmp_path.rglob("run.yaml"))


def test_every_example_is_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert (len(EXAMPLES) >= 7, len(RUNS)) == (True, 4)
    for example in [*EXAMPLES, *NOTEBOOKS, *RUNS]:
        name = example.relative_to(ROOT / "examples")
        assert f"[{name}]({name})" in listed
