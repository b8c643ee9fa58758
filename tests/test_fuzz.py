"""A short campaign of checks/fuzz.py, and that it notices what it looks for."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from checks.fuzz import campaign, describe, import_libraries
from checks.fuzzing import continued, running
from checks.fuzzing.cases import make_case
from checks.fuzzing.inputs import Inputs, make_inputs
from checks.fuzzing.running import Answer, Snapshot, problems, run
from tests.support.inputs import write_inputs

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"),
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),  # the child runs one thread
    pytest.mark.filterwarnings("default::UserWarning"),  # the command line prints them
]

CLEAN = Answer(code=0, out="{}", err="", crash="", stalled=False, computing=1.0, peak=10**9)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    import_libraries()
    return make_inputs(tmp_path_factory.mktemp("inputs"), families=("llama", "gemma3"))


@pytest.mark.slow
@pytest.mark.thorough
def test_damaged_inputs_and_odd_options(inputs: Inputs, tmp_path: Path) -> None:
    wrong = [describe(outcome) for _, outcome in campaign(inputs, 0, range(15), tmp_path) if outcome.wrong]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.slow
def test_a_damaged_folder_that_is_reused_gives_the_right_result_or_an_error(tmp_path: Path) -> None:
    wrong: list[str] = []
    write_inputs(tmp_path)
    counts = continued.damage_all("extend", tmp_path, 1, 0.3, wrong.append)
    assert not wrong, "\n".join(wrong)
    assert counts.total() >= 3


@pytest.mark.slow
@pytest.mark.thorough
def test_a_seed_and_a_number_are_one_case(inputs: Inputs, tmp_path: Path) -> None:
    def made(name: str, number: int) -> list[str]:
        folder = tmp_path / name
        arguments = make_case(inputs, 1, number, folder).arguments
        return [argument.replace(str(folder), "") for argument in arguments]

    first = [made(f"first {number}", number) for number in range(20)]
    assert first[::-1] == [made(f"again {number}", number) for number in reversed(range(20))]
    assert len({tuple(arguments) for arguments in first}) > 15


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("crash", {"code": None, "crash": "Traceback ...\nKeyError: 1"}),
        ("exit code 3", {"code": 3, "err": "rope-ext: no"}),
        ("exit code 1", {"code": 1, "err": "rope-ext: no"}),
        ("no error line", {"code": 2}),
        ("several error lines", {"code": 2, "err": "rope-ext: a\nrope-ext: b\n"}),
        ("exit code 0 with an error", {"err": "rope-ext: a\n"}),
        ("stray line", {"code": 2, "err": "thread panicked\nrope-ext: a\n"}),
        ("line of", {"code": 2, "err": f"rope-ext: {'a' * 2000}\n"}),
        ("prints a traceback", {"code": 2, "err": "rope-ext: Traceback\n"}),
        ("control character", {"code": 2, "err": "rope-ext: \x1b[31m\n"}),
        ("hang", {"computing": 21.0}),
        ("hang", {"stalled": True}),
        ("memory", {"peak": 3 * 10**9}),
        ("memory", {"code": 2, "err": "rope-ext: DefaultCPUAllocator: can't allocate memory\n"}),
        ("no JSON", {"out": '{"loss": NaN}'}),
    ],
)
def test_a_wrong_answer_is_noticed(kind: str, change: dict[str, object]) -> None:
    (wrong,) = problems(["describe", "--json"], dataclasses.replace(CLEAN, **change))  # type: ignore[arg-type]
    assert wrong.startswith(kind)
    assert not problems(["describe", "--json"], CLEAN)
    assert not problems(["describe"], dataclasses.replace(CLEAN, code=2, err="rope-ext: no\n"))


def _raise() -> None:
    raise KeyError("gone")


def _fill() -> None:
    assert len(bytearray(os.urandom(1)) * 1_200_000_000)


def _print() -> None:
    print("out")
    raise SystemExit(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "expected"),
    [
        (_raise, lambda a: a.code is None and "KeyError: 'gone'" in a.crash),
        (lambda: time.sleep(60), lambda a: a.stalled and "SIGKILL" in a.crash),
        # Linux counts resident pages per processor and adds them up late: on machines with many, the two numbers that
        # are subtracted here can both be off by some hundred megabytes.
        (_fill, lambda a: a.code == 0 and a.peak > 400_000_000),
        (_print, lambda a: (a.code, a.out, a.crash) == (2, "out\n", "")),
    ],
)
def test_a_process_is_watched(
    app: Callable[[], None], expected: Callable[[Answer], bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("typer.main.get_command", lambda _: app)
    monkeypatch.setattr(running, "_STALLED", 0.5)
    answer = run([], tmp_path)
    assert expected(answer), answer


def test_changes_of_files_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a")
    (tmp_path / "b").write_text("b")
    kept = Snapshot(tmp_path)
    assert not kept.changes()
    (tmp_path / "a").write_text("other")
    (tmp_path / "b").unlink()
    (tmp_path / "c").symlink_to("b")
    assert [Path(name).name for name in kept.changes()] == ["a", "b", "c"]
