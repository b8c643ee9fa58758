"""A loaded model from one RoPE layout to the other, in memory.

    convert(model, to="half", source="interleaved")      # the folder said half and held interleaved weights

The pairing of the weights is recorded as `rope_pairing` in the config, and saved with it.
"""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

import torch
from torch import nn

from rope_ext_hf.checkpoints.row_layouts import rotating_rows
from rope_ext_hf.errors import CheckpointError, MethodError
from rope_ext_hf.patches.config import PAIRING_KEY
from rope_ext_hf.patches.family_settings import class_pairing, set_pairing_switch
from rope_ext_hf.patches.geometry import checkpoint_geometry
from rope_ext_hf.patches.patching import patched_method
from rope_ext_hf.rotary.pairing import PAIRINGS

__all__ = ["convert"]

M = TypeVar("M", bound=nn.Module)


def convert(model: M, to: str, *, source: str | None = None) -> M:
    """Reorder the rows of every weight, bias, norm and adapter that rotates, in place, one after the other.

    Args:
        model: a transformers model, also under PEFT.
        to: "half" or "interleaved".
        source: the pairing of the weights now; default: the config's `rope_pairing`, else what the class runs.

    Returns:
        The same model. If its class does not run that pairing, a warning says so: it is for saving only.

    Raises:
        CheckpointError: weights that are in that pairing already, or that no reordering of rows is exact for.
        MethodError: not a pairing, or a patched model.
        UnsupportedModelError: a family that the table says nothing of.
    """
    config: Any = model.config
    if to not in PAIRINGS or source not in (None, *PAIRINGS):
        raise MethodError(f"pairings are half and interleaved, got {to!r}" + (f" and {source!r}" if source else ""))
    if patched_method(model) is not None:
        raise MethodError("this model is patched: unpatch it, convert it, and patch it again")
    now = source or getattr(config, PAIRING_KEY, None) or class_pairing(config)
    if now is None:
        raise CheckpointError(
            f"which pairing {config.model_type!r} runs is not in the family table; say which one the weights are in "
            "(source=...)"
        )
    if now == to:
        raise CheckpointError(f"the weights are {to} already; if they are not, say what they are (source=...)")
    rows = rotating_rows(config, checkpoint_geometry(model).dim)
    moving = []
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        layout = rows.find(name, parameter.shape)
        if layout is None:
            continue
        if hasattr(parameter, "quant_state"):
            raise CheckpointError(f"{name!r} is packed by bitsandbytes; convert the checkpoint before it is quantised")
        if parameter.is_meta:
            raise CheckpointError(f"{name!r} is offloaded to disk; convert the folder instead (convert_checkpoint)")
        moving.append((parameter, layout))
    with torch.no_grad():
        for parameter, layout in moving:
            parameter.copy_(layout.repaired(parameter.data, to))
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
