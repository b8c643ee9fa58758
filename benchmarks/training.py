"""The steps of the short trainings that benchmarks make."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


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
