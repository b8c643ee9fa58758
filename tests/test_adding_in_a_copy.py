"""The changes of checks/additions.py, made together in one copy of the tree, as docs/internals.md says.

One source file each, `make figures`, and nothing else: what each change is for then works in the copy, and the tests
that run over everything registered pass there. A test that fails here names a second place that somebody who makes the
change would have to find.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checks.additions import CHANGES

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parent.parent
LOOKED_UP = (
    # how the class of a family pairs dims
    "models/test_families.py::test_every_pairing_of_the_table_is_one_that_is_tested",
    # a published config that a recipe is for
    "tools/serving/test_configs_recipes.py::test_the_arguments_give_what_transformers_computes_from_the_entry[Nobody's]",
    # which engines do not read the new spelling of a config
    "tools/serving/test_serving_commands.py::test_audit_says_by_its_exit_code_whether_engines_agree",
    # where a public name stands on the API page
    "test_docs.py::test_public_names_stand_on_the_api_page",
)
"""Tests that compare an addition with what its author has to look up, and that therefore fail in the copy."""
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "dist", "site", "__pycache__", ".*_cache")


def run(copy: Path, *arguments: str) -> str:
    """A Python command in the copy, with the copy's package."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def contents(copy: Path) -> dict[str, bytes]:
    return {
        path.relative_to(copy).as_posix(): path.read_bytes()
        for path in copy.rglob("*")
        if path.is_file() and not path.is_symlink() and not {"__pycache__", ".pytest_cache"} & {*path.parts}
    }


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree with all changes, and with the pages that `make figures` writes."""
    made: Path = tmp_path_factory.mktemp("changed") / "copy"
    shutil.copytree(ROOT, made, symlinks=True, ignore=LEFT_OUT)
    before = contents(made)
    for change in CHANGES:
        path = made / change.file
        path.write_text(change.written(path.read_text("utf-8") if path.exists() else ""), encoding="utf-8")
    run(made, "-m", "docs.make_figures")
    after = contents(made)
    pages = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    pages -= {change.file for change in CHANGES}
    assert all(page == "README.md" or re.fullmatch(r"docs/[a-z0-9-]+\.(md|svg)", page) for page in pages), sorted(pages)
    return made


@pytest.fixture(scope="module")
def results(copy: Path) -> dict[str, str]:
    """What the checks say in the copy, by title."""
    assert run(copy, "-c", "import rope_ext_hf; print(rope_ext_hf.__file__)").startswith(str(copy))
    checked: dict[str, str] = json.loads(run(copy, "-m", "checks.additions").splitlines()[-1])
    return checked


@pytest.mark.parametrize("title", [change.title for change in CHANGES])
def test_one_file_is_enough(title: str, results: dict[str, str]) -> None:
    assert results[title] == "", results[title]


def test_what_runs_over_everything_registered_passes(copy: Path) -> None:
    contracts = ["tests/reading/test_protocols.py", "tests/tools/serving", "tests/models/test_families.py"]
    contracts += ["tests/test_architecture.py", "tests/test_docs.py"]
    pytest_run = ["-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-m", "not slow"]
    pytest_run += [f"--deselect=tests/{test}" for test in LOOKED_UP]
    ran = run(copy, *pytest_run, *contracts) + run(copy, *pytest_run, "-k", "slow-half or far-thirds", "tests/methods")
    for addition in ('"slow-half"', "[0-150-far-thirds]", "[hrm_text]", "[tail]"):
        assert addition in ran, f"no test of everything registered ran over {addition}"
