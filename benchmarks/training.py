"""The steps of the short trainings that benchmarks make."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


def warmup_and_cosine(
    optimizer: torch.optim.Optimizer, steps: int, warmup: float
) -> torch.optim.lr_scheduler.LRScheduler:
    """A learning rate that rises over so many steps at the most, and follows a cosine down to zero."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)))
    )


def in_bits(loss: float) -> str:
    """A loss of bytes in nats, as text."""
    return f"{loss / math.log(2):.3f} bits per byte"


def take_steps(
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    steps: int,
    loss_of_step: Callable[[], Tensor],
    *,
    every: int,
    words: Callable[[float], str] = lambda loss: f"loss {loss:.3f}",
) -> None:
    """Train the optimizer's parameters, their gradient clipped to a norm of 1; print the loss now and then.

    Args:
        loss_of_step: draws a batch and returns its loss.
        every: steps between two lines.
        words: what a line says of a loss.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for step in range(1, steps + 1):
        loss = loss_of_step()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % every == 0:
            print(f"step {step}: {words(loss.item())}", flush=True)
