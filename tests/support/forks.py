"""Code that runs in a process of its own, forked from one that has the libraries in memory: importing takes seconds.

`kill_when` is for what is continued after a kill: a run, a fine-tuning.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

__all__ = ["kill_when", "run_blocks", "run_command", "run_commands", "run_forked", "run_script"]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["transformers.models.llama.modeling_llama", "peft", "matplotlib.figure"])


def run_forked(
    function: Callable[..., None],
    *arguments: Any,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    status: int = 0,
    seconds: float = 900,
) -> str:
    """Call a function of a module in a new process whose working directory is `folder`; what it printed.

    Raises:
        AssertionError: it ended with another exit status, 1 after an exception, or took longer than `seconds`.
    """
    with tempfile.NamedTemporaryFile() as log:
        process = _start(function, arguments, folder, environment, log.name)
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
        said = Path(log.name).read_text(encoding="utf-8", errors="replace")
    assert process.exitcode == status, f"exit status {process.exitcode}\n{said[-3000:]}"
    return said


def kill_when(
    reached: Callable[[], bool], function: Callable[..., None], *arguments: Any, folder: Path, seconds: float = 900
) -> None:
    """Call a function of a module in a new process, in `folder`, and end it by SIGKILL as soon as `reached` holds.

    Raises:
        AssertionError: it ended by itself, or did not get so far within `seconds`.
    """
    with tempfile.NamedTemporaryFile() as log:
        process, end = _start(function, arguments, folder, {}, log.name), time.monotonic() + seconds
        while process.is_alive() and time.monotonic() < end and not (got := reached()):
            time.sleep(0.001)
        process.kill()
        process.join()
        said = Path(log.name).read_text(encoding="utf-8", errors="replace")
    assert process.exitcode == -signal.SIGKILL, f"it ended with exit status {process.exitcode}\n{said[-3000:]}"
    assert got, f"it did not get so far within {seconds:g} seconds\n{said[-3000:]}"


def _start(
    function: Callable[..., None],
    arguments: Sequence[Any],
    folder: Path,
    environment: Mapping[str, str] | None,
    log: str,
) -> ForkServerProcess:
    process = _CONTEXT.Process(target=_child, args=(function, arguments, folder, dict(environment or {}), log))
    process.start()
    return process


def _child(
    function: Callable[..., None], arguments: Sequence[Any], folder: Path, environment: dict[str, str], log: str
) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= environment
    tempfile.tempdir = None  # TMPDIR may be another
    os.chdir(folder)
    function(*arguments)


def run_script(path: Path, *arguments: str) -> None:
    """Run a file as `python FILE ARGUMENTS` would."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    runpy.run_path(str(path), run_name="__main__")


def run_blocks(blocks: Sequence[str]) -> None:
    """Run pieces of a page one after the other, each with the names of those before it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        exec(compile(block, block, "exec"), names)


def run_command(arguments: Sequence[str]) -> None:
    """Run a command line of rope-ext, which ends with SystemExit."""
    from rope_ext_hf.cli.app import main

    sys.argv = ["rope-ext", *arguments]
    main()


def run_commands(commands: Sequence[Sequence[str]]) -> None:
    """Run command lines of rope-ext one after the other, and stop at the first that fails."""
    for command in commands:
        try:
            run_command(command)
        except SystemExit as stop:
            if stop.code:
                raise RuntimeError(f"{command}: exit status {stop.code}") from None
