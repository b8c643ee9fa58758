"""The scripts of examples/ run as they stand."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.forks import run_commands, run_forked, run_script

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
RUNS = sorted((ROOT / "examples" / "runs").glob("*.yaml"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


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
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    """Cell by cell as a script, without a kernel; the value that ends a cell is shown as a notebook would."""
    script = tmp_path / f"{notebook.stem}.py"
    script.write_text(SHOW + "".join(cells_of(notebook)), encoding="utf-8")
    assert run_forked(run_script, script, folder=tmp_path, environment={"TMPDIR": str(tmp_path)})


SHOW = """
def show(value):
    shown = [getattr(value, name)() for name in ("_repr_html_", "_repr_png_") if hasattr(value, name)]
    assert any(shown) or not shown, value
"""


def cells_of(notebook: Path) -> Iterator[str]:
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]  # figures are not kept by hand
            tree = ast.parse("".join(cell["source"]))
            if isinstance(last := tree.body[-1], ast.Expr):
                last.value = ast.Call(ast.Name("show", ast.Load()), [last.value], [])
            yield ast.unparse(ast.fix_missing_locations(tree)) + "\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [pytest.param(path, marks=[pytest.mark.thorough] * (path.stem in ("search", "finetune"))) for path in RUNS],
    ids=lambda path: path.stem,
)
def test_run_file_runs(file: Path, tmp_path: Path) -> None:
    spans = ["--max-spans", "2"] * (file.stem in ("perplexity", "sweep"))
    assert run_forked(run_commands, [["run", str(file), *spans]], folder=tmp_path)
    assert list(tmp_path.rglob("run.yaml"))


def test_every_example_is_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert (len(EXAMPLES) >= 7, len(RUNS)) == (True, 5)
    for example in [*EXAMPLES, *NOTEBOOKS, *RUNS]:
        name = example.relative_to(ROOT / "examples")
        assert f"[{name}]({name})" in listed
