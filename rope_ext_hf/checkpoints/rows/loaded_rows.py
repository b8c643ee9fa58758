"""Reorder the rotated rows of a loaded model's parameters, in place, one tensor at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rope_ext_hf.checkpoints.rows.head_blocks import RowLayout, ScaleBlocks
from rope_ext_hf.checkpoints.rows.row_layouts import RotaryTensors, rotary_tensors
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.rotary.pairing_names import other_pairing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def reorder(model: nn.Module, tensors: RotaryTensors, to: str) -> None:
    """Reorder all rotated rows of a loaded model from the other pairing to the pairing `to`.

    Raises:
        CheckpointError: the rows of one parameter cannot be moved; then no parameter was changed.
    """
    with torch.no_grad():
        for parameter, layout in _rotated_parameters(model, tensors):
            parameter.copy_(_moved(parameter, layout, to))


def _moved(parameter: Any, layout: RowLayout | ScaleBlocks, to: str) -> Tensor:
    """Return the values of a parameter with its rotated rows in the pairing `to`."""
    if not hasattr(parameter.data, "full_tensor"):
        values: Tensor = layout.to_pairing(parameter.detach(), to)
        return values
    sharding = sys.modules["torch.distributed.tensor"]  # where the class of this parameter comes from
    whole = layout.to_pairing(parameter.detach().full_tensor(), to)
    moved: Tensor = sharding.distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return moved


def _rotated_parameters(model: nn.Module, tensors: RotaryTensors) -> list[tuple[Tensor, RowLayout | ScaleBlocks]]:
    """Return every parameter and buffer of a model that has rotated rows, with the layout of its rows."""
    rotated = []
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        layout = tensors.find(name, parameter.shape)
        if layout is None:
            continue
        if hasattr(parameter, "quant_state"):
            raise CheckpointError(f"{name!r} is packed by bitsandbytes; convert the checkpoint before it is quantised")
        is_dtensor = hasattr(parameter.data, "full_tensor")  # which is sharded, and takes copies as any tensor does
        if is_traceable_wrapper_subclass(parameter.data) and not is_dtensor:
            kind = type(parameter.data).__name__
            raise CheckpointError(f"{name!r} is packed ({kind}); convert the checkpoint before it is quantised")
        if parameter.is_meta:
            raise CheckpointError(f"{name!r} is offloaded to disk; convert the folder instead (convert_checkpoint)")
        rotated.append((parameter, layout))
    return rotated


@contextmanager
def reordered(model: PreTrainedModel, to: str) -> Iterator[None]:
    """Reorder the rotated rows of a model inside the with block, and put them back after it.

    Args:
        model: a model of a family whose row layouts are known.
        to: the pairing inside the block, "half" or "interleaved"; outside, the rows are in the other one.
    """
    rotary = ModelRope.of_checkpoint(model.config, model).rotary
    rotated = _rotated_parameters(model, rotary_tensors(model, rotary))
    moved: list[tuple[Tensor, RowLayout | ScaleBlocks]] = []
    try:
        with torch.no_grad():
            for tensor, layout in rotated:
                converted = _moved(tensor, layout, to)
                moved.append((tensor, layout))
                tensor.copy_(converted)
        yield
    finally:
        with torch.no_grad():
            for tensor, layout in moved:
                tensor.copy_(_moved(tensor, layout, other_pairing(to)))
