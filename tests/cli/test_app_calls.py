"""How many functions of this package a command runs: what costs time and is hard to follow.

The limits are a twentieth above what a first call in a process takes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import run
from tests.support.own_calls import calls_of_this_package

LENGTH = ("--target-length", "1k")
COMMANDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "ppl": (4_300, ("--method", "yarn", "--factor", "2", "--lengths", "64", "--max-spans", "2")),
    "tasks": (5_000, ("--suite", "json-kv", "--lengths", "768", "--samples", "2", "--score", "rank")),
    "advise": (4_900, LENGTH),
    "extend": (11_750, (*LENGTH, "--max-spans", "2", "--yes", "--anyway")),
}
"""The most calls, and the options."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.thorough] * (name in ("tasks", "extend"))) for name in COMMANDS]
)
def test_a_command_takes_few_calls(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # extend keeps its runs there; one that is continued takes fewer calls
    most, options = COMMANDS[command]
    out = () if command == "advise" else ("--out", tmp_path / "out")
    codes = [run(command, "--help")[0]]  # what the command line imports is not counted
    count = calls_of_this_package(lambda: codes.append(run(command, "reference", *options, *out)[0]))
    assert codes == [0, 0]
    assert most / 3 < count < most
