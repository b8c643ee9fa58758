"""Random command lines over damaged inputs: every answer is a result or one line, soon, in little memory.

    python checks/fuzz.py                                  # 1,000 cases
    python checks/fuzz.py --cases 10000 --seed 3 --log fuzz.log
    python checks/fuzz.py --seed 3 --only 4711             # one case again, its answer printed and its files kept

Each case runs in a fork of this process, which has imported the libraries. The exit status is 1 where any answer was
wrong. What is checked: `problems` in checks/fuzzing/running.py, and `run_case` here.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

if __name__ == "__main__":  # `python checks/fuzz.py` has checks/ in its path, not what checks/ is in
    sys.path.insert(0, str(Path(__file__).parent.parent))

from checks.fuzzing.cases import COMMANDS, Case, make_case
from checks.fuzzing.inputs import Inputs, make_inputs
from checks.fuzzing.running import Answer, Snapshot, problems, run
from rope_ext_hf.cli.app import app

HEAVY = (
    "datasets",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "pyarrow.parquet",
    "rich.table",
    "accelerate",
    "peft",
)


@dataclass
class Outcome:
    """A case, what came of it, and what was wrong with that."""

    case: Case
    answer: Answer
    wrong: list[str]


@dataclass
class Tally:
    """Counts over a campaign, and the seconds that cases took."""

    cases: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    computing: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    wrong: int = 0
    slowest: tuple[float, int] = (0.0, -1)
    largest: tuple[int, int] = (0, -1)

    def add(self, outcome: Outcome, command: str) -> None:
        answer, number = outcome.answer, outcome.case.number
        self.cases[command] += 1
        self.codes[f"exit code {answer.code}" if answer.code is not None else "no exit code"] += 1
        self.computing[command] += answer.computing
        self.wrong += bool(outcome.wrong)
        self.slowest = max(self.slowest, (answer.computing, number))
        self.largest = max(self.largest, (answer.peak, number))

    def __str__(self) -> str:
        cases = ", ".join(
            f"{command} {count} of {self.computing[command] / count:.2f} s"
            for command, count in sorted(self.cases.items())
        )
        codes = ", ".join(f"{code}: {count}" for code, count in sorted(self.codes.items()))
        return (
            f"{self.cases.total()} cases ({cases})\n{codes}\nslowest: {self.slowest[0]:.1f} s of computing (case "
            f"{self.slowest[1]}); most memory: {self.largest[0] / 1e9:.2f} GB (case {self.largest[1]})\n"
            f"{self.wrong} wrong answers"
        )


def import_libraries() -> None:
    """Import what commands import, so that forks have it."""
    for name in HEAVY:
        try:
            __import__(name)
        except ImportError:
            continue


def run_case(inputs: Inputs, seed: int, number: int, folder: Path, command: str | None = None) -> Outcome:
    """Make a case in a new folder, run it and judge it."""
    case = make_case(inputs, seed, number, folder, command)
    kept = Snapshot(*case.kept, *inputs.models.values())
    answer = run(case.arguments, case.work)
    wrong = problems(case.arguments, answer)
    wrong += [f"changed outside of the output: {name}" for name in kept.changes()[:1]]
    if case.new is not None and answer.code in (0, 2) and os.path.lexists(case.new) != (answer.code == 0):
        wrong.append("new folder: there after an error, or not there without one")
    elif case.new is not None and answer.code == 0 and case.arguments[0] == "patch":
        again = run(["describe", str(case.new)], case.work)
        if again.code != 0:
            wrong.append(f"patched folder: cannot be described: {again.err}{again.crash}")
    return Outcome(case, answer, wrong)


def campaign(
    inputs: Inputs, seed: int, numbers: range, root: Path, command: str | None = None, until: float = float("inf")
) -> Iterator[tuple[str, Outcome]]:
    """Run cases until the numbers or the time end; yields the command's name and the outcome."""
    names = {registered.name for registered in app.registered_commands}
    for number in numbers:
        if time.monotonic() > until:
            return
        folder = root / f"case {number}"
        outcome = run_case(inputs, seed, number, folder, command)
        first = next(iter(outcome.case.arguments), "")
        yield (first if first in names else "none"), outcome
        shutil.rmtree(folder, ignore_errors=True)


def describe(outcome: Outcome) -> str:
    """A case and its answer, for a person."""
    case, answer = outcome.case, outcome.answer
    wrong = "\n".join(f"  WRONG {text}" for text in outcome.wrong)
    text = f"case {case.number}: rope-ext {shlex.join(case.arguments)[:1500]}\n  {case.what}\n{wrong}"
    last = "\n".join(answer.crash.strip().splitlines()[-8:]) or answer.err.strip()[-800:]
    return f"{text}\n  {answer.code}, {answer.computing:.1f} s, {answer.peak / 1e9:.2f} GB\n{last}".encode(
        errors="backslashreplace"
    ).decode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--command", choices=COMMANDS, help="cases of one kind alone")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one case, printed in full, its files kept")
    parser.add_argument("--log", type=Path, help="also write everything here")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    import_libraries()
    root = Path(tempfile.mkdtemp(prefix="fuzz-"))
    inputs = make_inputs(root / "inputs")
    sys.stdout.flush()
    if options.only is not None:
        outcome = run_case(inputs, options.seed, options.only, root / "case", options.command)
        print(describe(outcome), outcome.answer.out, outcome.answer.err, outcome.answer.crash, root / "case", sep="\n")
        return int(bool(outcome.wrong))
    with open(options.log or os.devnull, "a", encoding="utf-8") as log:  # noqa: PTH123
        tally = report(
            campaign(
                inputs, options.seed, range(options.start, options.start + options.cases), root, options.command, until
            ),
            log,
        )
    shutil.rmtree(root, ignore_errors=True)
    return int(tally.wrong > 0)


def report(outcomes: Iterator[tuple[str, Outcome]], log: TextIO) -> Tally:
    """Print wrong answers as they come, and the counts at the end."""
    tally = Tally()

    def say(text: str) -> None:
        for stream in (sys.stdout, log):
            print(text, file=stream, flush=True)

    for command, outcome in outcomes:
        tally.add(outcome, command)
        if outcome.wrong:
            say(describe(outcome))
        if tally.cases.total() % 500 == 0:
            say(f"after {tally.cases.total()} cases: {tally.wrong} wrong")
    say(str(tally))
    return tally


if __name__ == "__main__":
    sys.exit(main())
