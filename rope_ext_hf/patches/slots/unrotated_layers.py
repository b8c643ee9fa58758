"""Layers that lose their rotation while others, which get cos and sin from the same rotary module, keep it.

A decoder asks its rotary module once in a forward, and gives cos and sin to all layers. A hook on a layer, or on the
attention module inside it, puts cos 1 and sin 0 in the place of what it is given, times the attention factor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.patches.slots.slot_refusals import forward_arguments

_ARGUMENT = "position_embeddings"
"""The argument by which layers of transformers take cos and sin; a layer without it is refused."""


@dataclass(frozen=True)
class DroppedRotation:
    """A forward pre-hook of a layer, which gives it the angle 0 at every position.

    Attributes:
        layer: the index of the layer.
        attention_factor: the factor of cos and sin.
    """

    layer: int
    attention_factor: float

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments of one call of the layer, with other cos and sin.

        Raises:
            UnsupportedModelError: the layer was given no cos and sin.
        """
        if _ARGUMENT in kwargs:
            return args, kwargs | {_ARGUMENT: self._without_rotation(module, kwargs[_ARGUMENT])}
        place = forward_arguments(module).index(_ARGUMENT)
        angles = args[place] if len(args) > place else ()
        return (*args[:place], self._without_rotation(module, angles), *args[place + 1 :]), kwargs

    def _without_rotation(self, module: nn.Module, angles: Any) -> Any:
        """Return cos and sin, or complex numbers, of angles of 0; `angles` are those that the layer was given."""
        if angles is None:  # as loaded, this layer does not rotate
            return None
        if isinstance(angles, Tensor) and angles.is_complex():
            return torch.full_like(angles, self.attention_factor)
        if isinstance(angles, Sequence) and len(angles) == 2:
            cos, sin = angles
            return torch.full_like(cos, self.attention_factor), torch.zeros_like(sin)
        raise UnsupportedModelError(
            f"{type(module).__name__} was given no cos and sin as {_ARGUMENT}, so its rotation cannot be dropped "
            "without that of the other layers"
        )


def taking_angles(decoder: nn.Module, index: int, count: int, rotary_modules: Collection[nn.Module]) -> list[nn.Module]:
    """Return the modules of a layer that take cos and sin; of modules inside each other the outermost one.

    Args:
        decoder: the module around the layers.
        index: the index of the layer.
        count: the number of all layers.
        rotary_modules: the rotary modules of the model.

    Raises:
        UnsupportedModelError: there are none; or the layer has a rotary module of its own.
    """
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    layers = [modules[index] for modules in lists]
    taking = [module for layer in layers for module in _outermost_taking_angles(layer)]
    has_its_own = any(module in rotary_modules for layer in layers for module in layer.modules())
    if not taking or has_its_own:
        reason = "a rotary module of its own" if has_its_own else f"no {_ARGUMENT} (cos and sin) that could be replaced"
        raise UnsupportedModelError(
            f"layer {index} of {type(decoder).__name__} has {reason}, so its rotation cannot be dropped without that "
            "of the other layers"
        )
    return taking


def _outermost_taking_angles(module: nn.Module) -> Iterator[nn.Module]:
    if _ARGUMENT in forward_arguments(module):
        yield module
        return
    for child in module.children():
        yield from _outermost_taking_angles(child)


def unrotated_layers(model: nn.Module) -> tuple[int, ...]:
    """Return the indices of the layers of a model whose rotation is dropped in this way, ascending."""
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    return tuple(sorted({hook.layer for hook in hooks if isinstance(hook, DroppedRotation)}))
