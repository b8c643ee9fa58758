"""The values of a trainable parameter in the config of a patched model, brought up to date when it is saved."""

from __future__ import annotations

import copy

from torch import nn

from rope_ext_hf.patches.config import PATCH_KEY
from rope_ext_hf.patches.slots import patched_slots

__all__ = ["record_trained_values", "trained_keys"]


def trained_keys(model: nn.Module) -> list[str]:
    """Keys in a model's state_dict of the parameters that its method trains."""
    rotary = [module for slot in patched_slots(model) for module in slot.tables.modules()]
    trained = {id(parameter) for module in rotary for parameter in module.parameters(recurse=False)}
    return [name for name, parameter in model.named_parameters() if id(parameter) in trained]


def record_trained_values(model: nn.Module) -> None:
    """Bring the record of the patch, and the rope settings beside it, up to date."""
    for slot in patched_slots(model):
        if not slot.state.spec.method.trainable:
            continue
        spec = slot.present_spec
        divisors = spec.method.longrope_parameters(spec.rotary)
        for config in (swap.patched for swap in slot.state.configs):
            record = vars(config).get(PATCH_KEY)
            if record is None:
                continue
            parameters = copy.deepcopy(config.rope_parameters)
            for layer_type in record["layer_types"]:
                settings = parameters if layer_type is None else parameters[layer_type]
                if settings.get("rope_type") == "longrope":
                    settings |= {key: divisors[key] for key in ("short_factor", "long_factor")}
            config.rope_parameters = parameters
            record |= spec.to_dict() | {"rope_parameters": copy.deepcopy(parameters)}
