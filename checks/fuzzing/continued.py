"""Folders that a command continues or reuses, each file damaged in turn: the right result again, or one line.

    python -m checks.fuzzing.continued                       # every command, every file, every damage
    python -m checks.fuzzing.continued --command finetune --seed 3 --kills 20

Each command runs twice, whole and killed halfway. Then each file of both folders is cut, emptied, removed and has a bit
turned over, and the command runs again. Kills end the command at random moments, and it runs again. The exit status is
1 where a result differs from the undamaged one, or an answer is neither a result nor an error of one line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from checks.fuzzing.running import Answer, _run, problems, run
from rope_ext_hf.cli.console import quiet_transformers
from tests.support.forks import kill_when, run_command
from tests.support.inputs import write_inputs

__all__ = ["COMMANDS", "damage_all"]


@dataclass(frozen=True)
class Command:
    """A command that continues a folder.

    Attributes:
        arguments: all but --out.
        halfway: a file of its folder that is there, with so many bytes or more, once it is to be killed; none: it is
            never stopped halfway.
    """

    arguments: tuple[str, ...]
    halfway: tuple[str, int] | None


_TEXT = ("--data", "texts/*.txt", "--device", "cpu", "--max-spans", "3")
COMMANDS = {
    "finetune": Command(
        (
            *("finetune", "model", *_TEXT, "--method", "yarn", "--factor", "4", "--steps", "45", "--accumulate", "1"),
            *("--guard", "0", "--eval-data", "held-out/*.txt"),
        ),
        ("checkpoints of trained/checkpoint-40/clock.json", 1),
    ),
    "extend": Command(("extend", "model", "--target-length", "512", "--no-measure", "--yes"), None),
    "tasks": Command(
        (
            *("tasks", "model", "--suite", "json-kv", "--lengths", "768,1024", "--score", "rank", "--samples", "4"),
            *("--method", "yarn", "--device", "cpu"),
        ),
        None,
    ),
}
_PAGES = (".html", ".md", ".png", ".svg", ".csv", ".lock")
_NOT_COMPARED = ("seconds", "cpu_seconds", "folder", "checksum", "tokens_per_second", "provenance", "conclusion")


def _flip(draw: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


DAMAGE: dict[str, Callable[[random.Random, bytes], bytes | None]] = {
    "a bit turned over": _flip,
    "cut": lambda draw, data: data[: draw.randrange(len(data))] if data else data,
    "emptied": lambda draw, data: b"",
    "removed": lambda draw, data: None,
}


def make_folder(command: Command, root: Path, out: str, *, halfway: bool) -> Answer | None:
    """Run a command to its end, or until a part of its folder is there, and kill it."""
    if not halfway:
        return run([*command.arguments, "--out", out], root)
    assert command.halfway is not None
    file, size = root / out / command.halfway[0], command.halfway[1]
    kill_when(
        lambda: file.is_file() and file.stat().st_size >= size,
        run_command,
        [*command.arguments, "--out", out],
        folder=root,
    )
    return None


def start(command: Command, root: Path, out: str) -> int:
    """Start a command; the number of its process."""
    child = os.fork()
    if not child:
        try:
            _run([*command.arguments, "--out", out], root, *(os.memfd_create(name) for name in ("out", "err", "crash")))
        finally:
            os._exit(70)
    return child


def result_of(folder: Path) -> dict[str, Any]:
    """Return the results of a command: the numbers of its report or runs, and the files of its model."""
    report = folder / "report.json"
    numbers = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    if runs := [*folder.glob("*/results.json"), *folder.glob("need.json")]:
        found = {str(path.relative_to(folder)): json.loads(path.read_text(encoding="utf-8")) for path in runs}
        return {"numbers": _without_times(found), "files": {}}
    model = folder / "model" if report.is_file() else folder
    files = {
        str(path.relative_to(model)): path.read_bytes()
        for path in sorted(model.rglob("*"))
        if path.is_file() and path.suffix != ".md"
    }
    if (asked := files.get("run.yaml")) is not None:  # which also has the folder's own name
        files["run.yaml"] = b"".join(line for line in asked.splitlines(keepends=True) if not line.startswith(b"out:"))
    return {"numbers": _without_times(numbers), "files": files}


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_times(each) for key, each in value.items() if key not in _NOT_COMPARED}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


def try_damage(command: Command, root: Path, out: str, expected: dict[str, Any]) -> tuple[str, list[str]]:
    """Run a command on a folder that was damaged: "right result" or "error", and what is wrong with the answer."""
    arguments = [*command.arguments, "--out", out]
    answer = run(arguments, root)
    wrong = [each for each in problems(arguments, answer) if not each.startswith("stray line")]
    if answer.code != 0:
        return "error", wrong
    found = result_of(root / out)
    wrong += [f"another result: {key}" for key in expected if found[key] != expected[key]]
    return "right result", wrong


def cases(folder: Path) -> Iterator[tuple[str, str]]:
    """Every file of a folder with every damage; not the pages and pictures, which no command reads."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in _PAGES:
            yield from ((str(path.relative_to(folder)), damage) for damage in DAMAGE)


def damage_all(name: str, root: Path, seed: int, share: float, log: Callable[[str], None]) -> Counter[str]:
    """Damage every file of the folders of one command in turn, or a share of the files."""
    command, counts, draw = COMMANDS[name], Counter[str](), random.Random(seed)
    first = make_folder(command, root, "whole", halfway=False)
    if first is None or first.code != 0:
        raise RuntimeError(f"{name} does not run: {first}")
    expected = result_of(root / "whole")
    states = ["whole"]
    if command.halfway is not None:
        make_folder(command, root, "halfway", halfway=True)
        states.append("halfway")
    for state in states:
        for file, damage in cases(root / state):
            if draw.random() > share:
                continue
            shutil.rmtree(root / "damaged", ignore_errors=True)
            shutil.copytree(root / state, root / "damaged", symlinks=True)
            path = root / "damaged" / file
            data = DAMAGE[damage](random.Random(f"{seed} {state} {file} {damage}"), path.read_bytes())
            if data is None:
                path.unlink()
            else:
                path.write_bytes(data)
            kind, wrong = try_damage(command, root, "damaged", expected)
            counts[f"{name}, {state}: {kind}"] += 1
            if wrong:
                counts[f"{name}, {state}: WRONG"] += 1
                log(f"{name}, {state}: {file} {damage}: {'; '.join(wrong)}")
    return counts


def kill_often(name: str, root: Path, seed: int, kills: int, log: Callable[[str], None]) -> Counter[str]:
    """Kill a command at random moments of one run after another, each of which is then continued."""
    command, counts, draw = COMMANDS[name], Counter[str](), random.Random(seed)
    began = time.monotonic()
    shutil.rmtree(root / "whole", ignore_errors=True)
    make_folder(command, root, "whole", halfway=False)
    took, expected = time.monotonic() - began, result_of(root / "whole")
    for number in range(kills):
        shutil.rmtree(root / "killed", ignore_errors=True)
        for _ in range(draw.randint(1, 2)):
            child = start(command, root, "killed")
            time.sleep(draw.uniform(0, took))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        kind, wrong = try_damage(command, root, "killed", expected)
        counts[f"{name}, killed: {kind}"] += 1
        if wrong or kind == "error":
            counts[f"{name}, killed: WRONG"] += 1
            log(f"{name}, kill {number}: {kind} {'; '.join(wrong)}")
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command", choices=COMMANDS, action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kills", type=int, default=0, help="kill each command so often instead of damaging its folder"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of the cases, drawn by the seed")
    options = parser.parse_args()
    total = Counter[str]()
    for name in options.command or COMMANDS:
        import_module("rope_ext_hf.tools.training")  # forks have it then
        for library in ("accelerate", "matplotlib.figure", "peft"):
            with suppress(ImportError):
                import_module(library)
        root = Path(tempfile.mkdtemp(prefix="continued-"))
        quiet_transformers()
        write_inputs(root)
        sys.stdout.flush()

        def log(line: str) -> None:
            print(line, flush=True)

        total += (
            kill_often(name, root, options.seed, options.kills, log)
            if options.kills
            else damage_all(name, root, options.seed, options.share, log)
        )
        shutil.rmtree(root, ignore_errors=True)
    for kind, count in sorted(total.items()):
        print(f"{kind}: {count}")
    return int(any("WRONG" in kind for kind in total))


if __name__ == "__main__":
    sys.exit(main())
