"""The skill in the wheel: short, and its code runs in the order in which it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rope_ext_hf
from tests.support.forks import run_blocks, run_forked

SKILL = Path(rope_ext_hf.__file__).parent / ".agents" / "skills" / "rope-ext" / "SKILL.md"


def test_it_begins_as_agents_expect() -> None:
    head, _, body = SKILL.read_text(encoding="utf-8").removeprefix("---\n").partition("\n---\n")
    assert dict(line.split(": ", 1) for line in head.splitlines()).keys() == {"name", "description"}
    assert body.lstrip().startswith("# rope_ext_hf")


@pytest.mark.slow
def test_its_code_runs(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", SKILL.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 3
    run_forked(run_blocks, blocks, folder=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"longer", "longer-interleaved"}
