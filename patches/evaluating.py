"""Eval mode for as long as a model is looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, every module of a model is in eval mode; at the end each is back in its own mode."""
    modes = {name: module.training for name, module in model.named_modules()}
    for module in model.modules():
        if module.training:
            module.training = False
    try:
        yield
    finally:
        for name, module in model.named_modules():  # by name: a patch may have put another module in the place
            if module.training != (before := modes.get(name, module.training)):
                module.training = before
