"""Convert a loaded model between RoPE layouts, in memory.

    convert(model, to="half", source_pairing="interleaved")    # its config says half, its weights are interleaved

The pairing of the weights is recorded as `rope_pairing` in the config, and saved with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rope_ext_hf.checkpoints.row_layouts import RotaryTensors, RowLayout, ScaleBlocks
from rope_ext_hf.errors import CheckpointError, MethodError
from rope_ext_hf.patches.config import PAIRING_KEY
from rope_ext_hf.patches.family_settings import class_pairing, set_pairing_switch
from rope_ext_hf.patches.geometry import checkpoint_geometry
from rope_ext_hf.patches.patching import patched_method
from rope_ext_hf.rotary.pairing import PAIRINGS, other_pairing

M = TypeVar("M", bound=nn.Module)


def convert(model: M, to: str, *, source_pairing: str | None = None) -> M:
    """Reorder the rows of every weight, bias, norm and adapter that rotates, in place, one tensor at a time.

    Args:
        model: a transformers model, also under PEFT.
        to: "half" or "interleaved".
        source_pairing: pairing of the weights now; default: the config's `rope_pairing`, else what the class runs.

    Returns:
        The same model. A warning is given if its class does not run the new pairing: then it is for saving only.

    Raises:
        CheckpointError: weights that are in that pairing already, or for which no reordering of rows is exact.
        MethodError: an unknown pairing, or a patched model.
        UnsupportedModelError: a family that the table does not list.
    """
    config: Any = model.config
    for name, value, allowed in (("to", to, PAIRINGS), ("source_pairing", source_pairing, (None, *PAIRINGS))):
        if value not in allowed:
            raise MethodError(f"{name} must be one of {', '.join(PAIRINGS)}, got {value!r}")
    if patched_method(model) is not None:
        raise MethodError("this model is patched: unpatch it, convert it, and patch it again")
    now = source_pairing or getattr(config, PAIRING_KEY, None) or class_pairing(config)
    if now is None:
        raise CheckpointError(
            f"the family table has no pairing for {config.model_type!r}; state the pairing of the weights "
            "(source_pairing=...)"
        )
    if now == to:
        raise CheckpointError(
            f"the weights are {to} already; if they are not, state their pairing (source_pairing=...)"
        )
    with torch.no_grad():
        for parameter, layout in _rotated_parameters(model, RotaryTensors(config, checkpoint_geometry(model).dim)):
            parameter.copy_(layout.to_pairing(parameter.data, to))
    set_pairing_switch(config, to)
    setattr(config, PAIRING_KEY, to)
    runs = class_pairing(config)
    if runs is not None and runs != to:
        warnings.warn(
            f"these weights are {to} now, and {type(model).__name__} runs {runs}: save them for code that runs {to}, "
            f"or convert them back (to={runs!r}) to use this model",
            stacklevel=2,
        )
    return model


def _rotated_parameters(model: nn.Module, tensors: RotaryTensors) -> list[tuple[Tensor, RowLayout | ScaleBlocks]]:
    """Every parameter and buffer of a model with rotated rows, and its layout."""
    rotated = []
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        layout = tensors.find(name, parameter.shape)
        if layout is None:
            continue
        if hasattr(parameter, "quant_state"):
            raise CheckpointError(f"{name!r} is packed by bitsandbytes; convert the checkpoint before it is quantised")
        if is_traceable_wrapper_subclass(parameter.data) and not hasattr(parameter.data, "full_tensor"):  # of a DTensor
            kind = type(parameter.data).__name__
            raise CheckpointError(f"{name!r} is packed ({kind}); convert the checkpoint before it is quantised")
        if parameter.is_meta:
            raise CheckpointError(f"{name!r} is offloaded to disk; convert the folder instead (convert_checkpoint)")
        rotated.append((parameter, layout))
    return rotated


@contextmanager
def reordered(model: nn.Module, tensors: RotaryTensors, to: str) -> Iterator[None]:
    """Inside, rotated rows stand as if they had been converted from the other pairing to this one; then as before."""
    rotated = _rotated_parameters(model, tensors)
    moved: list[tuple[Tensor, RowLayout | ScaleBlocks]] = []
    try:
        with torch.no_grad():
            for tensor, layout in rotated:
                converted = layout.to_pairing(tensor.detach(), to)
                moved.append((tensor, layout))
                tensor.copy_(converted)
        yield
    finally:
        with torch.no_grad():
            for tensor, layout in moved:
                tensor.copy_(layout.to_pairing(tensor.detach(), other_pairing(to)))
