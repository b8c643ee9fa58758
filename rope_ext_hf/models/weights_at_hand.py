"""Find out whether the weights of a model are here, so that a few tokens can be run through it."""

from __future__ import annotations

import sys

from torch import nn


def on_meta_device(model: nn.Module) -> bool:
    """Return whether a model lacks its weights, and has no hook of accelerate that brings them when they are needed.

    One parameter on the meta device is enough: some classes make a few of their parameters on the CPU whatever the
    device is (DiffLlama).
    """
    return _lacks_weights(model) and not _has_hooks(model)


def is_offloaded(model: nn.Module) -> bool:
    """Return whether hooks of accelerate bring weights of a model when they are needed."""
    return _lacks_weights(model) and _has_hooks(model)


def _lacks_weights(model: nn.Module) -> bool:
    return any(parameter.device.type == "meta" for parameter in model.parameters())


def _has_hooks(model: nn.Module) -> bool:
    return any(hasattr(module, "_hf_hook") for module in model.modules())


def is_partitioned(model: nn.Module) -> bool:
    """Return whether DeepSpeed ZeRO-3 has partitioned the weights of a model, so that parameters here are empty."""
    return any(not parameter.numel() and hasattr(parameter, "ds_shape") for parameter in model.parameters())


def missing_weights(model: nn.Module) -> str | None:
    """Return why a few tokens should not be run through a model's own weights; None: they are here, whole."""
    if is_offloaded(model):
        return "weights of the model are offloaded, and would all be read for it"
    if on_meta_device(model):
        return "the model was read without its weights; patching it with them checks it"
    sharding = sys.modules.get("torch.distributed.tensor")  # without it there are no sharded weights
    if is_partitioned(model) or (
        sharding is not None and any(isinstance(parameter, sharding.DTensor) for parameter in model.parameters())
    ):
        return "the weights of the model are sharded over devices"
    return None
