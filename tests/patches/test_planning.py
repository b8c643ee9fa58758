"""A plan changes nothing; applied, it is the patch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError
from tests.support.models import TRAINED, build, logits, tokens

METHODS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4},
    "dynamic-ntk": {},
    "rerope": {"target_length": 4 * TRAINED},
}


def everything(model: nn.Module) -> dict[str, Any]:
    """Whatever a patch may change: modules, hooks, attributes, configs, weights."""
    return {
        path: (
            id(module),
            sorted(vars(module)),
            len(module._forward_pre_hooks) + len(module._forward_hooks) + len(module._state_dict_pre_hooks),
            id(config := module.__dict__.get("config")),
            copy.deepcopy(config.to_dict()) if config is not None else None,
        )
        for path, module in model.named_modules()
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_planning_changes_nothing(family: str, method: str) -> None:
    model = build(family)
    before, expected = everything(model), logits(model, tokens(TRAINED))
    plan = rope.plan_patch(model, method, **METHODS[method])
    assert plan.slots
    assert everything(model) == before
    assert torch.equal(logits(model, tokens(TRAINED)), expected)


@pytest.mark.parametrize("method", METHODS)
def test_an_applied_plan_is_the_patch(method: str) -> None:
    planned, patched = build("llama"), build("llama")
    plan = rope.plan_patch(planned, method, **METHODS[method])
    described = rope.describe(plan)
    rope.apply_plan(plan)
    rope.patch(patched, method, **METHODS[method])
    assert described == rope.describe(planned) == rope.describe(patched)
    assert torch.equal(logits(planned, tokens(4 * TRAINED)), logits(patched, tokens(4 * TRAINED)))


def test_a_plan_that_fails_leaves_the_present_patch() -> None:
    model = rope.patch(build("llama"), "yarn", factor=4)
    before = everything(model)
    with pytest.raises(MethodError, match="at least 1"):
        rope.plan_patch(model, "yarn", factor=0.5)
    assert everything(model) == before
