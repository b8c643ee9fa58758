"""A program of torch.export, from which several ways of export begin."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Logits(nn.Module):
    """The logits of a model for token ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        out: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return out


def ids(row: list[int]) -> Tensor:
    return torch.tensor([row])


def shapes(one_shape: bool) -> Any:
    """Return the argument `dynamic_shapes`: the number of tokens is that of the example, or left open."""
    return None if one_shape else ({1: torch.export.Dim("tokens", min=2, max=1024)},)


def program(model: nn.Module, example: list[int], one_shape: bool) -> torch.export.ExportedProgram:
    return torch.export.export(Logits(model), (ids(example),), dynamic_shapes=shapes(one_shape))


def last(logits: Any) -> Any:
    """Return the logits of the last token, (vocabulary,) float64."""
    return torch.as_tensor(logits)[0, -1].double().numpy()
