"""Read the rotated weights of a loaded model, and measure the gains of norms by their classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rope_ext_hf.checkpoints.files.weight_files import TensorView, WeightFile
from rope_ext_hf.checkpoints.pairing.query_key_weights import Numbers, RotatedWeights, check_readable, numbers_in_files
from rope_ext_hf.checkpoints.rows.row_layouts import rotary_tensors
from rope_ext_hf.errors import CheckpointError
from rope_ext_hf.models.config_keys import PAIRING_KEY
from rope_ext_hf.models.family_settings import class_pairing
from rope_ext_hf.patches.model_rope import ModelRope


def weights_from_model(model: Any) -> RotatedWeights:
    """Return the rotated weights of a loaded model, which may be patched or under PEFT."""
    rotary = ModelRope.of_checkpoint(model.config, model).rotary
    rows = rotary_tensors(model, rotary)
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return RotatedWeights(
        path=model.name_or_path or type(model).__name__,
        tensors=rows,
        inv_freq=rotary.inv_freq().numpy(),
        trained_length=lambda: rotary.trained_length,
        gains=measured_gains(model),
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        read=partial(_read_numbers, tensors.__getitem__),
        stated=getattr(model.config, PAIRING_KEY, None) or rows.pairing,
        runs=class_pairing(model.config) or rows.pairing,
        load=lambda: model,
    )


def weights_in_files(model: Any, files: Iterable[WeightFile], path: str) -> RotatedWeights:
    """Return the rotated weights in files, of a model that may be on the meta device; `path` is its name in reports."""
    view = TensorView.from_files(files)
    shapes = {name: info.shape for name, info in view.tensors.items()}
    return replace(weights_from_model(model), path=path, shapes=shapes, read=numbers_in_files(view))


def _read_numbers(read: Callable[[str], Tensor], name: str, scale_name: str | None) -> Numbers:
    """Return the numbers of a tensor in memory, as `RotatedWeights.read` does; `read` returns the tensor."""
    tensor = read(name)
    if name != scale_name:
        if is_traceable_wrapper_subclass(tensor):
            kind = type(tensor).__name__
            raise CheckpointError(f"{name!r} is packed or sharded ({kind}); give the folder instead of the model")
        if tensor.is_meta:
            raise CheckpointError(f"{name!r} is offloaded to disk; give the folder instead of the model")
        dtype = str(tensor.dtype).removeprefix("torch.")
        check_readable(name, scale_name, floating=tensor.is_floating_point(), dtype=dtype)
    numbers: Numbers = tensor.float().cpu().numpy()
    return numbers


def measured_gains(model: nn.Module) -> Mapping[str, Callable[[Numbers], Numbers]]:
    """Return functions that measure the factor of each dim in a norm, by the last part of the norm's name.

    There is one for each kind of norm in the model. The norm is called on signs, whose root mean square is 1, with its
    other parameters zero: the factor may be the weight itself, or 1 + weight (as in Gemma).
    """
    named = ((name.rpartition(".")[2], module) for name, module in model.named_modules())
    norms = {name: module for name, module in named if "norm" in name and hasattr(module, "weight")}
    return {name: partial(_measured_gain, norm) for name, norm in norms.items()}


def _measured_gain(norm: nn.Module, weight: Numbers) -> Numbers:
    signs = 1.0 - 2.0 * (torch.arange(weight.size) % 2).view(weight.shape)
    parameters = {key: torch.zeros(p.shape) for key, p in norm.named_parameters()}
    called: Tensor = torch.func.functional_call(norm, parameters | {"weight": torch.tensor(weight)}, (signs,))
    gain: Numbers = (called * signs).detach().numpy()
    return gain
