"""Settings of the stock model in a comparison on a device, and the attention kernel that it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch.profiler import ProfilerActivity, profile, supported_activities

KERNEL = "aten::_scaled_dot_product_"
"""How torch names the operators of its attention kernels."""
WINDOWS = "aten::_flash_attention_forward"
"""The operator behind that of flash attention, which takes windows as well."""
ZONES = "_attend_zones"
"""The Triton kernel of the package that goes through all zones; a table shows it as "zones"."""

LAUNCHING = frozenset(
    (
        *("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"),
        *("hipLaunchKernel", "hipExtLaunchKernel", "hipModuleLaunchKernel", "hipExtModuleLaunchKernel"),
    )
)
"""Functions of CUDA and ROCm that launch a kernel, as the profiler names them."""


def usual_dtype(device: str) -> str:
    """The dtype that models are run in on a device; bfloat16 has kernels from NVIDIA's compute capability 8.0 on."""
    if not device.startswith("cuda"):
        return "float32"
    too_old = torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
    return "float16" if too_old else "bfloat16"


def heads_on(device: str, on_cpu: tuple[int, int], asked: int | None = None) -> tuple[int, int]:
    """Heads of queries and of keys: on CUDA 32 and 8, because fewer would measure launches there, not kernels.

    Args:
        asked: heads of queries, with a fourth of them for keys; tiny runs ask for few.
    """
    if asked:
        return asked, max(1, asked // 4)
    return (32, 8) if device.startswith("cuda") else on_cpu


def attention_kernels(run: Callable[[], object]) -> str:
    """The kernels of attention that a call runs: those of torch by its names for them, and the one for all zones."""
    return _kernels(_events(run, supported_activities()))  # type: ignore[no-untyped-call]


def attention_kernels_and_launches(run: Callable[[], object]) -> tuple[str, int | None]:
    """`attention_kernels`, and how many kernels of any kind are launched; None where the profiler sees none."""
    events = _events(run, supported_activities())  # type: ignore[no-untyped-call]
    return _kernels(events), sum(events[name] for name in LAUNCHING) or None


def _events(run: Callable[[], object], activities: Iterable[ProfilerActivity]) -> Counter[str]:
    """Count the profiler's events during a call by name; raw events, because a tree of 100,000 takes minutes."""
    with profile(activities=list(activities)) as seen:
        run()
    return Counter(event.name() for event in seen.profiler.kineto_results.events())


def _kernels(events: Counter[str]) -> str:
    names = {name.removeprefix(KERNEL) for name in events if name.startswith(KERNEL)}
    names |= {"flash_attention"} if events[WINDOWS] else set()
    names |= {"zones"} if events[ZONES] else set()
    return ", ".join(sorted(names)) or "none of scaled_dot_product_attention"
