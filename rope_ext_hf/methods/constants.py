"""Constants of a method as tensors on a device, copied there once."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def device_constant(numbers: tuple[float, ...] | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """These numbers as a tensor (len(numbers),), which nobody may write to.

    Kept between calls, because the host waits for the device when it copies; made anew inside a trace, an export or a
    fake mode, whose tensors must not reach a later call.
    """
    if may_keep_tensors():
        return _kept(numbers, dtype, device)
    return torch.tensor(numbers, dtype=dtype, device=device)


@lru_cache(maxsize=256)
def _kept(numbers: tuple[float, ...] | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # an inference tensor would fail in a later forward that needs gradients
        return torch.tensor(numbers, dtype=dtype, device=device)


def may_keep_tensors() -> bool:
    """Whether a tensor made now may outlive the call: not under torch.compile, torch.export, tracing or a fake mode."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    return type(torch.empty(0, device="cpu")) is Tensor
