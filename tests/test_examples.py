"""The scripts of examples/ run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forks import run_forked, run_script

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path, tmp_path: Path) -> None:
    assert run_forked(run_script, example, folder=tmp_path, environment={"TMPDIR": str(tmp_path)})


def test_every_example_is_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert len(EXAMPLES) >= 7
    for example in EXAMPLES:
        assert f"[{example.name}]({example.name})" in listed
