"""Times of single calls on a device that works while the host goes on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def timed(run: Callable[[], object], device: str) -> float:
    """Return the seconds of one call, until the device has finished its work.

    Where a single thread of a CPU computes, these are its own seconds, which other programs do not lengthen.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    alone = not device.startswith("cuda") and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    started = clock()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return clock() - started


def seconds_of(run: Callable[[], object], device: str, *, runs: int = 10, calls: int = 10) -> float:
    """Return the median seconds of one call, over several runs of several calls each, after a warm-up.

    The host waits once per run, not once per call, so that the time between two calls is not part of a short one.
    """
    for _ in range(3):
        run()

    def many() -> None:
        for _ in range(calls):
            run()

    return statistics.median(timed(many, device) for _ in range(runs)) / calls
