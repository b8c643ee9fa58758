"""Find out under which names, and in which order of rows, transformers saves the weights of a layer.

Checkpoints as published often have other names than the class, or keep several weights in one tensor. transformers
renames, splits and joins them when it loads and saves. Tensors whose rows hold numbers are sent the same way here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor, nn

_LAYER = re.compile(r"(?:.*?\.)??\w+\.\d+\.(?P<inside>.+)")


def saved_rows(model: nn.Module, layer: str, attentions: Iterable[str]) -> dict[str, list[tuple[str, int]]]:
    """Return the tensors in the attention of a layer as transformers saves them, by their names inside the layer.

    Args:
        model: the model.
        layer: the path of the layer.
        attentions: the names that modules around rotated weights have inside layers of the model.

    Returns:
        For each row of each tensor, the name of the module that it is of, and its number there. It is empty where
        transformers saves everything under the names of the class.
    """
    numbered: dict[str, Tensor] = {}
    origins: list[tuple[str, int]] = []
    for name, tensor in model.get_submodule(layer).state_dict().items():
        if tensor.ndim and any(name.startswith(f"{attention}.") for attention in attentions):
            first, rows = len(origins), tensor.shape[0]
            numbers = torch.arange(first, first + rows, dtype=torch.float64)
            numbered[f"{layer}.{name}"] = numbers.reshape(-1, *[1] * (tensor.ndim - 1))
            origins += [(name.rpartition(".")[0] or name, row) for row in range(rows)]
    saved: dict[str, Tensor] = {}
    with suppress(Exception):  # of any kind: transformers does not document what this does to a part of the weights
        from transformers.core_model_loading import revert_weight_conversion

        saved = revert_weight_conversion(model, dict(numbered))
    if saved.keys() == numbered.keys():
        return {}
    named = {name: _LAYER.fullmatch(name) for name in saved}
    return {
        match["inside"]: [origins[int(number)] for number in saved[name].flatten().tolist()]
        for name, match in named.items()
        if match is not None
    }
