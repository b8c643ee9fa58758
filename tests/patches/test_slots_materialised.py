"""Models that are patched on the meta device and get their weights later; averages of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError
from tests.support.models import build, logits, rotary_of, tokens


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_neox", "glm"])
@pytest.mark.parametrize(
    ("method", "params"), [("yarn", {"factor": 4}), ("dynamic-ntk", {}), ("linear", {"factor": 2})]
)
def test_unpatch_after_to_empty(name: str, method: str, params: dict[str, Any]) -> None:
    given, ids = build(name), tokens(150)
    expected = logits(given, ids)
    with torch.device("meta"):
        model = type(given)(given.config)
    rope.patch(model, method, **params)
    model = model.to_empty(device="cpu").eval()
    for buffer in (
        buffer for path, buffer in model.named_buffers() if "replaced" not in path and "frequency" not in path
    ):
        if buffer.is_floating_point() and buffer.numel() == 1:  # Gemma's scale of embeddings: not of RoPE
            buffer.fill_(float(dict(given.named_buffers())["model.embed_tokens.embed_scale"]))
    model.load_state_dict(given.state_dict())
    assert torch.equal(logits(model, ids), logits(rope.patch(given, method, **params), ids))
    assert torch.equal(logits(rope.unpatch(model), ids), expected)


@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
@pytest.mark.parametrize("method", ["rerope", "dca", "jet-long"])
def test_a_remapping_method_is_patched_again_once_weights_are_there(name: str, method: str) -> None:
    given, ids = build(name), tokens(150)
    with torch.device("meta"):
        model = type(given)(given.config)
    rope.patch(model, method)
    model = model.to_empty(device="cpu").eval()
    model.load_state_dict(given.state_dict())
    with pytest.raises(UnsupportedModelError, match="had no weights yet, when its model was patched; patch it again"):
        model(ids)
    rope.patch(model, method)
    assert torch.equal(logits(model, ids), logits(rope.patch(given, method), ids))
    assert torch.equal(logits(rope.unpatch(model), ids), logits(build(name), ids))


AVERAGES: dict[str, dict[str, Any]] = {
    "SWA": {},
    "EMA": {"multi_avg_fn": get_ema_multi_avg_fn(0.999)},  # type: ignore[no-untyped-call]
    "EMA, one tensor at a time": {"avg_fn": get_ema_avg_fn(0.9)},  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize(
    ("method", "params"), [("yarn", {"factor": 4}), ("dynamic-ntk", {}), ("rerope", {}), ("learnable", {})]
)
def test_an_average_of_models_with_their_buffers_rotates_as_they_do(
    average: str, method: str, params: dict[str, Any]
) -> None:
    model = rope.patch(build("llama"), method, **params)
    averaged = AveragedModel(model, use_buffers=True, **AVERAGES[average])
    for _ in range(5):
        averaged.update_parameters(model)
    far = torch.tensor([[1_000_000, 1_000_001]])
    with rope.fixed_length(model, 2_000_000), rope.fixed_length(averaged.module, 2_000_000):
        expected = rotary_of(model).tables["all"](torch.zeros(1), far)
        actual = rotary_of(averaged.module).tables["all"](torch.zeros(1), far)
    for one, other in zip(actual, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_the_tables_are_no_buffers_and_follow_their_module() -> None:
    model = rope.patch(build("llama"), "yarn", factor=4)
    table = rotary_of(model).table("all")
    assert not list(table.buffers())
    assert model.to("meta").model.rotary_emb.table("all").frequency.device.type == "meta"
    assert not table.to_empty(device="cpu").frequency.is_meta
    table.to("meta")
    table(torch.zeros(1), torch.arange(3)[None])  # as where hooks of accelerate run a module elsewhere
    assert not table.frequency.is_meta
