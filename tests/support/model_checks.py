"""Lengths, tolerances and comparisons that the tests of patched models share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models import (
    FAMILIES,
    TRAINED,
    dynamic_cases,
    rotary_of,
    static_cases,
)
from tests.support.tiers import spread

LONG = 4 * TRAINED
TOLERANCE = 1e-4  # of logits, float32, up to 256 positions
CHANGED = 100 * TOLERANCE  # what counts as another result

every_family = pytest.mark.parametrize("name", FAMILIES)
every_static = pytest.mark.parametrize(("name", "which"), spread(FAMILIES, static_cases))
every_dynamic = pytest.mark.parametrize("which", dynamic_cases("llama"))


def difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def cos_of(model: Any, positions: Tensor, layer_type: str | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The cosines a model's rotary module gives (batch, length, ...); of those that give complex numbers, all."""
    kwargs = {} if layer_type is None else {"layer_type": layer_type}
    out = rotary_of(model)(torch.zeros(1, dtype=dtype), positions, **kwargs)
    cos: Tensor = torch.view_as_real(out) if isinstance(out, Tensor) else out[0]
    return cos


def state(model: Any) -> dict[str, Any]:
    """All that must not change: who is where, configs by identity and by value, hooks, instance attributes."""
    return {
        "modules": {path: id(module) for path, module in model.named_modules()},
        "configs": {path: id(module.__dict__.get("config")) for path, module in model.named_modules()},
        "config": copy.deepcopy(model.config.to_dict()),
        "keys": list(model.state_dict()),
        "buffers": [path for path, _ in model.named_buffers()],
        "hooks": sum(
            len(m._forward_pre_hooks) + len(m._forward_hooks) + len(m._state_dict_pre_hooks) for m in model.modules()
        ),
        "own save": [path for path, m in model.named_modules() if "save_pretrained" in m.__dict__],
    }


class BoomError(Exception):
    pass


PHI3_LISTS = {"short_factor": [1.0 + i / 10 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}
