"""`check_context_parallel`: methods that read whole rows are refused, and others pass."""

from __future__ import annotations

import pytest
import torch

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError
from rope_ext_hf.patches.trials.refusals import check_context_parallel
from tests.support.models import build

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("method", ["yarn", "linear", "ntk", "llama3"])
def test_static_methods_pass(method: str) -> None:
    check_context_parallel(rope.patch(build("llama"), method, factor=4))
    check_context_parallel(build("llama"))
    check_context_parallel(build("llama", YARN))


@pytest.mark.parametrize("method", ["dynamic-yarn", "dynamic-ntk"])
def test_length_dependent_methods_pass_at_a_fixed_length_alone(method: str) -> None:
    model = rope.patch(build("llama"), method)
    halves = torch.arange(256).reshape(1, 256).chunk(2, dim=-1)
    table = model.model.rotary_emb.table("all")

    with pytest.raises(MethodError, match=f"frequencies of {method} follow the longest position of each part"):
        check_context_parallel(model)
    angles = [table(torch.zeros(1), part)[1][0, 1] for part in (halves[0], torch.cat(halves, -1))]
    assert not torch.equal(*angles)  # the reason: position 1 is turned by another angle in a part and in the whole
    with rope.fixed_length(model, 256):
        check_context_parallel(model)
        assert torch.equal(*(table(torch.zeros(1), part)[1][0, 1] for part in (halves[0], torch.cat(halves, -1))))


@pytest.mark.parametrize("method", ["rerope", "self-extend", "dca"])
def test_remapping_methods_are_refused(method: str) -> None:
    model = rope.patch(build("llama"), method, target_length=256)
    with pytest.raises(MethodError, match=f"{method} needs all keys at their places"), rope.fixed_length(model, 256):
        check_context_parallel(model)


def test_a_models_own_dynamic_scaling_is_refused() -> None:
    with pytest.raises(MethodError, match="the model's own dynamic-ntk takes the length of the input"):
        check_context_parallel(build("llama", {"rope_type": "dynamic", "factor": 4.0}))
