"""Temporary changes of models and other objects, which end with a `with` block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["evaluating", "set_to"]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module of a model into eval mode inside a `with` block, and back into its own mode at the end.

    `model.eval()` would call the `train` method of every module, which a patched slot takes for a sign of training.
    """
    modes = {name: module.training for name, module in model.named_modules()}
    for module in model.modules():
        if module.training:
            module.training = False
    try:
        yield
    finally:
        for name, module in model.named_modules():  # by name: a patch may have put another module in the place
            before = modes.get(name, module.training)
            if module.training != before:
                module.training = before


@contextmanager
def set_to(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module or an object inside the with block, and give them back their old values after it."""
    before = {name: getattr(owner, name) for name in values}
    try:
        vars(owner).update(values)
        yield
    finally:
        vars(owner).update(before)
