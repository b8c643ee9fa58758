"""What the stock side of a comparison is run with on a device, and the kernel that its attention runs."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile

KERNEL = "aten::_scaled_dot_product_"
"""How torch names the operators of its attention kernels."""


def usual_dtype(device: str) -> str:
    """The dtype that models are run in on a device."""
    return "bfloat16" if device.startswith("cuda") else "float32"


def heads_on(device: str, on_cpu: tuple[int, int]) -> tuple[int, int]:
    """Heads of queries and of keys: on CUDA 32 and 8, because fewer would measure launches there, not kernels."""
    return (32, 8) if device.startswith("cuda") else on_cpu


def attention_kernels(run: Callable[[], object]) -> str:
    """The kernels of scaled_dot_product_attention that a call runs, as torch names them: "flash_attention"."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    names = {event.key.removeprefix(KERNEL) for event in seen.key_averages() if event.key.startswith(KERNEL)}
    return ", ".join(sorted(names)) or "none of scaled_dot_product_attention"
