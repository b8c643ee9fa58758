"""The most memory that something takes while it runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import profile, record_function


def most_bytes(prepare: Callable[[], Callable[[], object]], device: str = "cpu") -> int:
    """Return the peak memory in bytes during the call that `prepare` returns, including what `prepare` allocated."""
    if device.startswith("cuda"):
        before = torch.cuda.memory_allocated()
        run = prepare()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        run = prepare()
        with record_function("run"):
            run()
    events = list(seen.profiler.kineto_results.experimental_event_tree())
    for event in events:  # grows by what is inside, and is seen to its end
        events.extend(event.children)
    begin = next(event.start_time_ns for event in events if event.name == "run")
    sizes = [(e.start_time_ns, e.extra_fields.alloc_size) for e in events if e.name == "[memory]"]
    live = most = 0
    for time, size in sorted(sizes, key=lambda pair: pair[0]):
        live += size
        most = max(most, live) if time >= begin else most
    return most
