"""The memory that a run takes, checked before the weights of its model are read, and loading a model for a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rope_ext_hf.hub import find_device, load_model, loaded_dtype, loads_by_layer
from rope_ext_hf.reading.cost.memory import MemoryEstimate, check_memory, fitting_memory, weight_places

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rope_ext_hf.runs.measurement import RunPlan


def run_memory(
    name: str | Path,
    empty: PreTrainedModel,
    plan: RunPlan[Any],
    dtype: torch.dtype,
    device: torch.device,
    *,
    spread: bool = False,
    check: bool = True,
) -> MemoryEstimate:
    """Return the estimated memory for a run.

    Args:
        name: a folder, a GGUF file, a Hub id, or "reference" for the bundled model.
        empty: this model, without its weights.
        plan: the plan of the run.
        dtype: the dtype of the weights, once they are loaded.
        device: the device that reads.
        spread: whether the weights are spread over all devices instead.
        check: whether to raise an error if less is free; else the result says what everything on the device needs.

    Raises:
        CheckpointError: too little memory is free.
        MethodError: the plan asks for keys and values in main memory, and the device is a CPU.
    """
    measurement = plan.measurement
    return (check_memory if check else fitting_memory)(
        empty,
        max(measurement.passes, default=1),
        dtype,
        device,
        spread=spread,
        offload_cache=plan.offload_cache,
        by_layer=measurement.by_layer,
        fetch=plan.scorer is None and measurement.by_layer and loads_by_layer(name, empty),
        further_weights=measurement.weight_bytes,
    )


def load_for_run(
    name: str | Path,
    empty: PreTrainedModel,
    plan: RunPlan[Any],
    *,
    dtype: str | torch.dtype = "auto",
    device: str = "auto",
) -> PreTrainedModel:
    """Return a model with its weights, after a check that the run fits into memory.

    Layers that the device has no room for wait in main memory or on disk, if the run is read layer by layer.

    Args:
        name, empty, plan: as in `run_memory`.
        dtype, device: as in `rope_ext_hf.hub.load_model`.

    Raises:
        CheckpointError: too little memory is free, or the model cannot be loaded.
        MethodError: as in `run_memory` and `load_model`.
    """
    weights, reader = loaded_dtype(empty, dtype) if isinstance(dtype, str) else dtype, find_device(device)
    needed = run_memory(name, empty, plan, weights, reader)
    places = weight_places(empty, needed, weights, reader)
    return load_model(name, dtype=dtype, device=device, device_map=places)
