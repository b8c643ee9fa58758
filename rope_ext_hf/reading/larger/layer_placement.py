"""Places for the weights of a model that is larger than its device, as a device map of transformers.

What is outside of the layers is on the device, and layers as far as they fit. Other layers wait in main memory, and the
rest on disk; each comes to the device while texts go through the one before it (`layer_reader`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from rope_ext_hf.patches.forward.forward_hooks import decoder_of
from rope_ext_hf.patches.slots.slot_finding import find_slots

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LayerWeights(NamedTuple):
    """The number of weights of a model, by what has to be on the device at the same time.

    Attributes:
        outside: the weights outside of the layers.
        layers: the weights of each layer.
    """

    outside: int
    layers: tuple[int, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> LayerWeights:
        """Return the numbers of a model, which may be on the meta device."""
        layers = tuple(_count(layer) for layer in _layers(model))
        return cls(_count(model) - sum(layers), layers)

    def least(self, *, ahead: bool = True) -> int:
        """Return the most weights that are on the device at the same time, if no layer stays there.

        `ahead`: whether each layer comes while the one before it computes, so that those of two are there.
        """
        return self.outside + sum(sorted(self.layers)[-2 if ahead else -1 :])


def layer_map(model: PreTrainedModel, room: int, main: int, width: int, device: torch.device) -> dict[str, Any]:
    """Return a device map with which the weights of a model fit a device: the place of every part by its path.

    Args:
        model: the model, which may be on the meta device.
        room: the free bytes on the device for weights.
        main: the free bytes of main memory for weights, if the device is not the CPU.
        width: the bytes of one weight.
        device: the device.
    """
    weights = LayerWeights.of(model)
    here: Any = "cpu" if device.type == "cpu" else device.index or 0 if device.type == "cuda" else str(device)
    free = {here: room - weights.least() * width}
    if here != "cpu":
        free["cpu"] = main
    layers, places = _layers(model), {}

    def place(path: str, module: nn.Module) -> None:
        """Put a part of the model, and what is inside of it, in its place."""
        children = list(module.named_children())
        is_list = module is layers
        if not is_list and (not children or not any(part is layers for part in module.modules())):
            places[path] = here
            return
        for name, child in children:
            inside = f"{path}.{name}" if path else name
            if is_list:
                size = _count(child) * width
                places[inside] = next((where for where, left in free.items() if left >= size), "disk")
                if places[inside] in free:
                    free[places[inside]] -= size
            else:
                place(inside, child)
        for name, _ in module.named_parameters(recurse=False):
            places[f"{path}.{name}" if path else name] = here

    place("", model)
    return places


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """Return the layers of a model: of the lists of modules in its decoder, the one with most weights."""
    decoder = decoder_of(model, find_slots(model)[0].parent)
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=_count, default=nn.ModuleList())


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
