"""One command line in a process of its own, and what must hold of its answer."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import stat
import sys
import traceback
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["MEMORY", "SECONDS", "Answer", "Snapshot", "problems", "run"]

SECONDS = 20
"""Of computing; no small input takes longer."""

MEMORY = 3 * 10**9 // 2
"""Bytes resident beyond those of the forking process, which after hundreds of tests may hold more than a command."""

_STALLED = 40.0  # seconds without computing: not a busy machine, but a wait for something, a FIFO say
_ADDRESSES = 12 * 2**30  # of address space, so that a wild allocation fails instead of stopping the machine
_MOST_CHARACTERS = 1200  # of a line of an error
_STDERR_LINE = re.compile(
    r"(rope-ext: |(warning|needs|reads|read|run|time|picture) {2,}"
    r"|Ignored unknown kwarg option ).*"  # printed by the compiled code of tokenizers
)
_NO_MEMORY = re.compile(r"can't allocate memory|MemoryError|not enough memory|std::bad_alloc|Unable to allocate")


@dataclass(frozen=True)
class Answer:
    """Output and exit status of a process.

    Attributes:
        code: its exit code; None where an exception escaped or a signal ended it.
        out, err: what it printed.
        crash: the traceback or the signal.
        stalled: whether it waited for something without end.
        computing: seconds of the processor.
        peak: bytes resident beyond those of the parent at the fork, which the child shares.
    """

    code: int | None
    out: str
    err: str
    crash: str
    stalled: bool
    computing: float
    peak: int


def run(arguments: Sequence[str], folder: Path) -> Answer:
    """Run the command line in a fork of this process, which has the libraries in memory, with `folder` as its own."""
    logs = [os.memfd_create(name) for name in ("out", "err", "crash")]
    memory = psutil.Process().memory_info()
    inherited = memory.rss - memory.shared  # a fork has no page of a file until it reads it
    child = os.fork()
    if not child:
        try:
            _run(arguments, folder, *logs)
        finally:
            os._exit(70)
    stalled, status, used = _wait(child)
    out, err, crash = (_take(log) for log in logs)
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) and not crash else None
    if os.WIFSIGNALED(status):
        crash += f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return Answer(code, out, err, crash, stalled, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 - inherited)


def _run(arguments: Sequence[str], folder: Path, out: int, err: int, crash: int) -> None:
    """The child: never returns to the code of the parent."""
    import torch

    from rope_ext_hf.cli.app import main

    os.setsid()
    _stay_offline()
    torch.set_num_threads(1)  # threads of the parent do not live in a fork
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESSES, _ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS + 1, SECONDS + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = ["rope-ext", *arguments]
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        os.write(crash, traceback.format_exc().encode("utf-8", errors="backslashreplace"))
        code = 70
    try:
        sys.stdout.flush()
    except Exception:
        os.write(crash, traceback.format_exc().encode("utf-8", errors="backslashreplace"))
    sys.stderr.flush()
    os._exit(code)


def _stay_offline() -> None:
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def _wait(child: int) -> tuple[bool, int, resource.struct_rusage]:
    """Wait for a process, and end it where it stalls; whether it did, its status and what it used."""
    descriptor, stalled, computed = os.pidfd_open(child), False, -1.0
    while not select.select([descriptor], [], [], _STALLED)[0]:
        before, computed = computed, sum(psutil.Process(child).cpu_times()[:2])
        if stalled := computed - before < 0.1:
            os.killpg(child, signal.SIGKILL)
            break
    os.close(descriptor)
    _, status, used = os.wait4(child, 0)
    return stalled, status, used


def _take(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, "rb") as file:
        return file.read().decode("utf-8", errors="backslashreplace")


class Snapshot:
    """Every file of some folders, by name, kind, size and time of change."""

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self.files = dict(self._list())

    def _list(self) -> list[tuple[str, tuple[int, ...]]]:
        listed: list[tuple[str, tuple[int, ...]]] = []
        for folder in self.folders:
            for root, names, files in os.walk(folder):
                for name in (*names, *files):
                    path = os.path.join(root, name)  # noqa: PTH118 - names that are not UTF-8
                    status = os.lstat(path)
                    plain = not stat.S_ISDIR(status.st_mode)
                    listed.append(
                        (path, (status.st_mode, status.st_mtime_ns if plain else 0, status.st_size if plain else 0))
                    )
        return listed

    def changes(self) -> list[str]:
        """Names of files that appeared, went or changed since."""
        now = dict(self._list())
        return sorted(name for name in {*now, *self.files} if now.get(name) != self.files.get(name))


def problems(arguments: Sequence[str], answer: Answer) -> list[str]:
    """Return the problems of an answer, each as its kind, a colon and the evidence; an empty list for a good answer."""
    wrong: list[str] = []
    errors = answer.err.splitlines()
    if answer.crash:
        wrong.append(f"crash: {answer.crash.strip().splitlines()[-1]}")
    elif answer.code not in (0, 1, 2):
        wrong.append(f"exit code {answer.code}:")
    elif answer.code == 1 and arguments[0] == "audit" and answer.out:  # engines disagree
        pass
    elif answer.code == 1 and "the loss is not finite" not in answer.err:
        wrong.append("exit code 1 for another reason than a loss:")
    elif answer.code and not [line for line in errors if line.startswith("rope-ext: ")]:
        wrong.append("no error line:")
    if len([line for line in errors if line.startswith("rope-ext: ")]) > 1:
        wrong.append("several error lines:")
    if answer.code == 0 and [line for line in errors if line.startswith("rope-ext: ")]:
        wrong.append(f"exit code 0 with an error: {errors[-1]}")
    told = arguments[:2] == ["extend", "--json"]  # what is done goes to standard error
    for line in errors:
        if not told and not _STDERR_LINE.fullmatch(line):
            wrong.append(f"stray line on stderr: {line}")
        elif len(line) > _MOST_CHARACTERS:
            wrong.append(f"line of {len(line)} characters: {line[:80]}")
    if "Traceback" in answer.err or "Traceback" in answer.out:
        wrong.append("prints a traceback:")
    control = {c for c in answer.out + answer.err if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs")}
    if control:
        wrong.append(f"control character: {sorted(control)[0]!r}")
    if answer.computing > SECONDS or answer.stalled:
        wrong.append(f"hang: {answer.computing:.0f} s of computing{', then waiting' * answer.stalled}")
    if answer.peak > MEMORY:
        wrong.append(f"memory: {answer.peak / 1e9:.1f} GB")
    if _NO_MEMORY.search(answer.err):
        wrong.append(f"memory: {errors[-1]}")
    if answer.code == 0 and arguments[1:2] == ["--json"]:
        try:
            json.loads(answer.out, parse_constant=_refuse)
        except ValueError as error:
            wrong.append(f"no JSON: {error}")
    return wrong


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
