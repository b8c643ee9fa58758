"""Positions and padding of a forward, where modules around the decoder change the arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from tests.support.every_model import build, entries, inputs

PADDING, LENGTH, COMPARED = 13, 80, 20

METHODS: dict[str, dict[str, Any]] = {
    "self-extend": {"group": 4, "window": 16},
    "rerope": {"window": 32},
    "dca": {"chunk": 24, "window": 8},
    "dynamic-ntk": {},
}


def last_logits(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        actual: Tensor = model(input_ids=ids, attention_mask=mask)[0][:, -COMPARED:]
    return actual


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model_type", ["fuyu", "gemma4", "gemma4_unified"])
def test_padding_on_the_left_without_positions(model_type: str, method: str) -> None:
    """These models count positions themselves, padding included; the mask decides all the same."""
    entry = next(entry for entry in entries() if entry.model_type == model_type)
    model = build(entry).eval()
    ids = inputs(entry, LENGTH)["input_ids"]
    padded = torch.cat((ids[:, :1].expand(-1, PADDING), ids), dim=1)
    mask = torch.ones_like(padded)
    mask[:, :PADDING] = 0
    rope.patch(model, method, **METHODS[method])
    alone = last_logits(model, ids, torch.ones_like(ids))
    assert (last_logits(model, padded, mask) - alone).abs().max() < 1e-3 * alone.std()
    # positions that the caller gives are taken as they are
    shifted = torch.arange(LENGTH + PADDING)[None]
    with torch.no_grad():
        with_positions = model(input_ids=padded, attention_mask=mask, position_ids=shifted)[0][:, -COMPARED:]
    if method in ("self-extend", "dca"):
        assert (with_positions - alone).abs().max() > 1e-3 * alone.std()


@pytest.mark.slow
def test_a_decoder_that_returns_no_cache() -> None:
    """Granite 4 Vision's text model returns no cache; the probe of its keys gives it one."""
    entry = next(entry for entry in entries() if entry.model_type == "granite4_vision")
    model = rope.patch(build(entry).eval(), "dynamic-ntk")
    ids = inputs(entry, LENGTH)["input_ids"]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    cached, plain = (model.generate(ids, use_cache=use_cache, **options) for use_cache in (True, False))
    assert cached.shape == plain.shape == (1, LENGTH + 6)
    assert torch.equal(cached[:, : LENGTH + 1], plain[:, : LENGTH + 1])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dca", "rerope"])
@pytest.mark.sampled(2)
def test_a_model_of_several_language_models(method: str) -> None:
    """Qwen2.5-Omni names no input embeddings of its own; those of the part that reads text are used."""
    entry = next(entry for entry in entries() if entry.model_type == "qwen2_5_omni")
    model = build(entry).eval()
    rope.patch(model, method, **METHODS[method])
    ids = torch.arange(3, 3 + LENGTH)[None] % 60
    thinker = next(entry for entry in entries() if entry.model_type == "qwen2_5_omni_thinker")
    alone = build(thinker).eval()
    alone.load_state_dict(model.thinker.state_dict())
    rope.patch(alone, method, **METHODS[method])
    expected, actual = (last_logits(part.get_decoder(), ids, torch.ones_like(ids)) for part in (alone, model.thinker))
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
