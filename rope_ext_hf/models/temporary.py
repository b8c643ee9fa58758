"""Temporary changes of models and other objects, which end with a `with` block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["evaluating", "set_to", "trying"]

_LIBRARIES_WITH_HOOKS = {"torch", "transformers", "accelerate", "deepspeed", "rope_ext_hf"}
"""Libraries whose forward hooks are a part of a model's computation: they gather or derive its weights, for example."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module of a model into eval mode inside a `with` block, and back into its own mode at the end.

    `model.eval()` would call the `train` method of every module, which a `PatchedRotaryEmbedding` takes for a sign of
    training.
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
def trying(model: nn.Module) -> Iterator[None]:
    """Let this package run tokens through a model inside a `with` block: in eval mode, and without its user's hooks.

    A forward hook of the user's counts, records or changes the forwards that the user runs, and a trial is not one of
    them. Hooks of libraries that the model computes with stay.
    """
    put_aside = []
    with evaluating(model):
        for module in model.modules():
            for name in _HOOKS:
                hooks = module.__dict__[name]
                kept = OrderedDict(
                    (key, hook) for key, hook in hooks.items() if _library(hook) in _LIBRARIES_WITH_HOOKS
                )
                if len(kept) < len(hooks):
                    put_aside.append((module, name, hooks))
                    module.__dict__[name] = kept
        try:
            yield
        finally:
            for module, name, hooks in put_aside:
                module.__dict__[name] = hooks


def _library(hook: Any) -> str:
    """Return the name of the library that a hook comes from."""
    while isinstance(hook, partial):
        hook = hook.func
    return str(hook.__module__).partition(".")[0]


@contextmanager
def set_to(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of a module or an object inside the with block, and give them back their old values after it."""
    before = {name: getattr(owner, name) for name in values}
    try:
        vars(owner).update(values)
        yield
    finally:
        vars(owner).update(before)
