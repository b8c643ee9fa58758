"""vLLM's HTTP server, run in an environment of its own by checks/live_servers.py.

    python checks/vllm_server.py

Every line that it reads is the JSON list of the arguments of one `vllm serve`; the server before it ends. vLLM is
imported once, which takes longer than to load a small model: each server, and each process that it starts, is a fork.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
from multiprocessing.context import ForkContext, ForkProcess

from vllm.utils import system_utils

FORK: ForkContext = multiprocessing.get_context("fork")
system_utils.get_mp_context = lambda: FORK  # its CPU platform asks for spawn, so that OMP_NUM_THREADS is read again

from vllm.entrypoints.launchers.api_server import entry  # noqa: E402


def serve(arguments: list[str]) -> None:
    os.setsid()  # the processes that it starts end with this group
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads standard output
    sys.argv = ["vllm", *arguments]
    entry.main()


def end(process: ForkProcess | None) -> None:
    if process is not None and process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def main() -> None:
    process = None
    for line in sys.stdin:
        end(process)
        process = None
        if arguments := json.loads(line):
            process = FORK.Process(target=serve, args=(arguments,))
            process.start()
    end(process)


if __name__ == "__main__":
    main()
