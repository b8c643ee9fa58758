"""What a process of its own runs against the stand-in of the Hub: commands, and the functions of the package.

`HF_ENDPOINT` and `HF_HOME` are read at import, so a client is a process that starts with them in its environment.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

__all__ = ["Client", "Outcome", "client", "logits"]

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """How a command ended: exit code, what it printed, what libraries logged, and the seconds it took."""

    code: int
    out: str
    err: str
    log: str
    seconds: float


class Client:
    """A process with the environment of a Hub."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def call(self, function: Callable[..., T], *arguments: Any, limit: float = 600.0) -> T:
        """What a function of a module returns in the process, within so many seconds."""
        return self._pool.submit(function, *arguments).result(timeout=limit)

    def run(self, *arguments: str, limit: float = 600.0) -> Outcome:
        """Run a command of the command line."""
        return self.call(_command, arguments, limit=limit)


@contextmanager
def client(environment: Mapping[str, str]) -> Iterator[Client]:
    """A process that has these environment variables, and is ended after the block even if it hangs."""
    context = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        pool = ProcessPoolExecutor(1, mp_context=context)
        process = pool.submit(os.getpid).result()
    try:
        yield Client(pool)
    finally:
        os.kill(process, signal.SIGKILL)
        pool.shutdown()


def _command(arguments: tuple[str, ...]) -> Outcome:
    import datasets  # noqa: F401 - the libraries log to the standard error that they were imported with
    import transformers  # noqa: F401
    from typer.testing import CliRunner

    from rope_ext_hf.cli.app import app

    started = time.monotonic()
    with tempfile.TemporaryFile() as log:
        original = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            result = CliRunner().invoke(app, list(arguments))
        finally:
            os.dup2(original, 2)
            os.close(original)
        log.seek(0)
        logged = log.read().decode()
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Outcome(result.exit_code, result.stdout, result.stderr, logged, time.monotonic() - started)


def logits(name: str | Path, **options: Any) -> Any:
    """The logits of a few tokens, as lists, of a model by Hub id or folder."""
    import torch

    import rope_ext_hf as rope

    model = rope.from_pretrained(name, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model(torch.arange(3, 40)[None]).logits[0, -1].tolist()
