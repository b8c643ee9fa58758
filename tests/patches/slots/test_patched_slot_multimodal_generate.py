"""Multimodal RoPE in `generate`: chats of two turns through one cache, images, and positions between tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError
from tests.support.every_model import Entry, build, entries
from tests.support.models import tokens
from tests.support.tiers import needs_family
from tests.support.two_turns import Chat, logits_of_whole_rows, opening, two_turns

FAMILIES = [
    "glm4v",
    "paddleocr_vl",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_omni_moe_thinker",
    "qwen3_vl",
]
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
FORMS: dict[str, dict[str, Any]] = {
    "linear": {},
    "yarn": {"original_max_position_embeddings": 64},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64},
}
"""The settings of methods that transformers has, under their names there, beside the factor."""
AXES = "differ from axis to axis"


def entry(model_type: str) -> Entry:
    needs_family(model_type)
    return next(each for each in entries() if each.model_type == model_type and each.kind != "causal")


def native(model_type: str, rope_type: str) -> Any:
    """Return the unpatched model with a scaling of transformers, by a factor of 4."""
    own = build(entry(model_type)).config.get_text_config().rope_parameters
    form = {**own, "rope_type": rope_type, "factor": 4.0, **FORMS[rope_type]}
    return build(entry(model_type), text_config={"rope_parameters": form})


def chat(model: Any, model_type: str, *, image: bool, length: int = 30) -> Chat:
    """Return a chat of two rows, the second one with padding on the left."""
    first = opening(entry(model_type), length, image=image)
    assert first is not None
    return two_turns(model, first, 9)


def assert_same(actual: Chat, expected: Chat) -> None:
    assert torch.equal(actual.ids, expected.ids)
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_chat_of_two_turns_equals_that_of_transformers(model_type: str, image: bool) -> None:
    """In the second turn most classes give their rotary module positions of one axis, and Qwen3-Omni float32 ones."""
    as_loaded = chat(build(entry(model_type)), model_type, image=image)
    model = rope.patch(build(entry(model_type)), "yarn", factor=4)
    actual = chat(model, model_type, image=image)
    assert_same(actual, chat(native(model_type, "yarn"), model_type, image=image))
    assert (actual.logits - as_loaded.logits).abs().max() > 1e-3
    torch.testing.assert_close(actual.logits, logits_of_whole_rows(model, actual), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("image", [False, True], ids=["text", "image"])
@pytest.mark.parametrize("method", FORMS)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_scaling_of_transformers_gives_its_chat(model_type: str, method: str, image: bool) -> None:
    params = LLAMA3 if method == "llama3" else {}
    model = rope.patch(build(entry(model_type)), method, factor=4, **params)
    assert_same(chat(model, model_type, image=image), chat(native(model_type, method), model_type, image=image))


@pytest.mark.parametrize(
    "method", ["dynamic-ntk", "dynamic-yarn", "rerope", "self-extend", "dca", "jet-long", "stairs"]
)
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_5", "qwen3_omni_moe_thinker"])
def test_a_chat_within_the_reach_of_a_method_is_that_of_the_unpatched_model(model_type: str, method: str) -> None:
    params = {"rerope": {"window": 64}, "self-extend": {"window": 56, "group": 4}}.get(method, {})
    expected = chat(build(entry(model_type)), model_type, image=False)
    model = rope.patch(build(entry(model_type)), method, **params)
    if method in ("dca", "stairs"):  # these change positions within the context length, too
        actual = chat(model, model_type, image=False)
        torch.testing.assert_close(actual.logits, logits_of_whole_rows(model, actual), atol=1e-4, rtol=1e-4)
    else:
        assert_same(chat(model, model_type, image=False), expected)


@pytest.mark.parametrize("method", ["dynamic-ntk", "rerope"])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_omni_moe_thinker"])
def test_a_chat_beyond_the_context_length_equals_forwards_without_a_cache(model_type: str, method: str) -> None:
    model = rope.patch(build(entry(model_type)), method, **({"window": 16} if method == "rerope" else {}))
    with rope.fixed_length(model, 150):
        actual = chat(model, model_type, image=False, length=90)
        torch.testing.assert_close(actual.logits, logits_of_whole_rows(model, actual), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["dynamic-yarn", "dca"])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_omni_moe_thinker"])
def test_an_image_in_a_chat_is_refused_by_methods_of_one_position_per_token(model_type: str, method: str) -> None:
    model = rope.patch(build(entry(model_type)), method)
    with pytest.raises(LengthError, match=AXES):
        chat(model, model_type, image=True)
    if method == "dynamic-yarn":
        with rope.fixed_length(model, 64):
            expected = chat(build(entry(model_type)), model_type, image=True)
            assert_same(chat(model, model_type, image=True), expected)


def logits(model: Any, **inputs: Any) -> Tensor:
    with torch.no_grad():
        actual: Tensor = model(**inputs).logits
    return actual


def test_a_video_of_qwen3_omni_lies_between_tokens_and_is_read_as_natively() -> None:
    """Its frames are at multiples of 7.5 positions, and the text behind them begins between two whole numbers."""
    ids = tokens(40).clone() % 80 + 3
    ids[:, 3:13] = torch.tensor([92, *[91] * 8, 93])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values_videos": torch.randn(32, 384, generator=torch.Generator().manual_seed(0)),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
        "video_second_per_grid": torch.tensor([0.3]),
    }
    model = build(entry("qwen3_omni_moe_thinker"))
    positions, _ = model.get_rope_index(
        ids,
        video_grid_thw=inputs["video_grid_thw"],
        attention_mask=inputs["attention_mask"],
        second_per_grids=inputs["video_second_per_grid"],
    )
    assert (positions.frac() == 0.5).any()
    as_loaded = logits(model, **inputs)
    actual = logits(rope.patch(model, "yarn", factor=4), **inputs)
    torch.testing.assert_close(actual, logits(native("qwen3_omni_moe_thinker", "yarn"), **inputs), atol=1e-4, rtol=0)
    assert (actual - as_loaded).abs().max() > 1e-3
    with rope.fixed_length(rope.patch(model, "dynamic-yarn"), 64):
        torch.testing.assert_close(logits(model, **inputs), as_loaded, atol=1e-4, rtol=0)
    for method in ("dynamic-yarn", "dca"):
        with pytest.raises(LengthError, match="are not whole numbers"):
            rope.patch(model, method)(**inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["llama", "qwen2_5_vl"])
def test_positions_of_a_floating_point_dtype_are_read_as_in_transformers(model_type: str, dtype: torch.dtype) -> None:
    model = build(next(each for each in entries() if each.model_type == model_type))
    ids, whole = tokens(40) % 80, torch.arange(40)[None].to(dtype)
    expected = [logits(model, input_ids=ids, position_ids=positions) for positions in (whole, 0.5 * whole)]
    rope.patch(model, "linear", factor=1)
    for positions, wanted in zip((whole, 0.5 * whole), expected, strict=True):
        actual = logits(model, input_ids=ids, position_ids=positions)
        torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=0)
    assert torch.equal(
        logits(model, input_ids=ids, position_ids=whole), logits(model, input_ids=ids, position_ids=whole.long())
    )
    for method, params in (("dynamic-ntk", {}), ("rerope", {"window": 64})):
        rope.patch(model, method, **params)
        torch.testing.assert_close(logits(model, input_ids=ids, position_ids=whole), expected[0], atol=1e-4, rtol=0)
        with pytest.raises(LengthError, match=r"are not whole numbers.*fixed_length\(model"):
            model(ids, position_ids=0.5 * whole)
