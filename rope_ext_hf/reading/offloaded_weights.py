"""Weights that accelerate keeps in main memory or on disk, and brings to a device for each call of their module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


def is_offloaded(module: nn.Module) -> bool:
    """Return whether the weights of any part of a module are brought to their device for each call."""
    return any(_offloading_hooks(part) for part in module.modules())


def offloaded_bytes(module: nn.Module) -> int:
    """Return the bytes of the weights of a module that are brought to their device for each call."""
    return sum(weight.numel() * weight.itemsize for weight in module.parameters() if weight.is_meta)


def device_of_ids(model: Any) -> torch.device:
    """Return the device on which a model takes token ids: the one on which it computes their embeddings."""
    embeddings: nn.Module = model.get_input_embeddings()
    for part in embeddings.modules():
        for hook in _offloading_hooks(part):  # the weights themselves are on the meta device
            device: Any = hook.execution_device
            return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return next(embeddings.parameters()).device


@contextmanager
def loaded_once(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Bring the offloaded weights of modules to their device once inside the with block, at their first call.

    Without it they come at each call, and are freed after it. Other modules stay as they are.
    """
    with ExitStack() as stack:
        for module in modules:
            if _offloading_hooks(module):
                stack.enter_context(_LoadingOnce(module).in_place())
        yield


class _LoadingOnce:
    """A stand-in for the hook of a module, which loads the weights at the first call and keeps them.

    accelerate's forward of the module calls `module._hf_hook`, and takes all else from it as well.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hook: Any = module._hf_hook
        self._offloading = _offloading_hooks(module)
        self._called = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Stand in for the hook inside the with block, and free the weights at its end."""
        module: Any = self._module
        module._hf_hook = self
        try:
            yield
        finally:
            module._hf_hook = self._hook
            for hook in self._offloading:
                hook.offload = True
            if self._called:
                self._hook.post_forward(module, None)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Load the weights if this is the first call, and return the arguments on the device."""
        self._called = True
        arguments = self._hook.pre_forward(module, *args, **kwargs)
        for hook in self._offloading:
            hook.offload = False  # neither loads in the next calls nor frees after this one
        return arguments


def _offloading_hooks(module: nn.Module) -> list[Any]:
    """Return those hooks of accelerate on a module that bring its weights to a device for each call."""
    hook = module.__dict__.get("_hf_hook")
    hooks = getattr(hook, "hooks", (hook,))  # of a SequentialHook
    return [hook for hook in hooks if getattr(hook, "offload", False)]
