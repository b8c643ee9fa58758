"""Models that are patched on the meta device and get their weights later."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import rope_ext_hf as rope
from tests.support.models import build, logits, tokens


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
