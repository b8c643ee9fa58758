"""Steps of one token under rules by length on a CPU: attention rotates the cached keys in tiles, without a copy."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import rope_ext_hf as rope
from tests.support.length_examples import one_layer
from tests.support.models import build, logits, tokens

METHODS = ("dynamic-yarn", "dynamic-ntk", "dynamic-self-extend", "jet-long")
PAST = 2100  # in three tiles
FAMILIES = ("llama", "qwen3", "gpt_neox", "cohere", "phi3", "gemma2", "mixtral", "deepseek_v3", "gpt_oss")


def steps(model: Any, ids: Tensor, past: int, **kwargs: Any) -> Tensor:
    """The logits of the tokens after the first `past` ones, (rows, tokens, vocabulary), read one by one."""
    cache, mask = DynamicCache(config=model.config), kwargs.get("attention_mask")
    out = []
    with torch.inference_mode():
        for start, stop in itertools.pairwise([0, *range(past, ids.shape[1] + 1)]):
            if mask is not None:
                kwargs = {"attention_mask": mask[:, :stop], "position_ids": _positions(mask[:, :stop])[:, start:]}
            out.append(model(ids[:, start:stop], past_key_values=cache, **kwargs).logits[:, -1])
    return torch.stack(out[1:], dim=1)


def _positions(mask: Tensor) -> Tensor:
    """The positions as `generate` makes them of a padding mask."""
    return (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("llama", "cohere"))) for name in FAMILIES]
)
def test_a_step_is_the_last_token_of_a_forward(family: str, method: str) -> None:
    """In a single layer the keys of earlier tokens are the same whatever the length at which these were read."""
    model = rope.patch(build(family, **one_layer(family)), method)
    ids = tokens(PAST + 3)
    actual = steps(model, ids, PAST)
    for index in range(3):
        expected = logits(model, ids[:, : PAST + index + 1])[:, -1]
        torch.testing.assert_close(actual[:, index], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_padded_rows_are_read_as_each_alone(method: str) -> None:
    model = rope.patch(build("llama", num_hidden_layers=1), method)
    ids, mask = tokens(1300, batch=3), torch.ones(3, 1300, dtype=torch.int64)
    padding = (0, 3, 700)  # the first two rows have one rule, and other positions
    for row, count in enumerate(padding):
        mask[row, :count] = 0
    actual = steps(model, ids, 1298, attention_mask=mask)
    for row, count in enumerate(padding):
        expected = logits(model, ids[row : row + 1, count:])[:, -1]
        torch.testing.assert_close(actual[row, -1:], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_beams_and_eager_attention_give_the_same(method: str) -> None:
    """Beams move the rows of the cache; eager attention multiplies by a rotated copy of the keys."""
    ids = tokens(1100, batch=2)
    options: dict[str, Any] = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "eos_token_id": None}
    answers = [
        rope.patch(build("llama", attn_implementation=name), method).generate(ids, pad_token_id=0, **options)
        for name in ("sdpa", "eager")
    ]
    assert answers[0].tolist() == answers[1].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_step_makes_no_copy_of_the_cache(method: str, dtype: torch.dtype) -> None:
    from torch.profiler import ProfilerActivity, profile

    model = rope.patch(build("llama", num_hidden_layers=1, num_key_value_heads=4).to(dtype), method)
    ids, cache = tokens(8193), DynamicCache(config=model.config)
    with torch.inference_mode():
        model(ids[:, :8192], past_key_values=cache, logits_to_keep=1)
        keys = cache.layers[0].keys
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            model(ids[:, 8192:], past_key_values=cache)
    assert profiled.profiler is not None
    results: Any = profiled.profiler.kineto_results
    # A processor with AMX packs the values for a product in bfloat16; nothing in it is a copy that we make.
    events = [event for event in results.experimental_event_tree() if event.name != "aten::bmm"]
    for event in events:
        events.extend(child for child in event.children if child.name != "aten::bmm")
    sizes = [event.extra_fields.alloc_size for event in events if event.name == "[memory]"]
    # The cache itself grows by a copy of its keys and one of its values, as without a patch.
    largest = sorted(size for size in sizes if size > 0)[-3:]
    assert [size >= keys.nbytes / 2 for size in largest] == [False, True, True], largest
