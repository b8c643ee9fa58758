"""Remapping methods whose rule follows the length of a row: unchanged up to the context length, remapped beyond."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError, MethodError
from tests.support.definition import assert_gradients_are_defined, attending_by, defined, patched_method
from tests.support.models import FAMILIES, TRAINED, build, build_config, from_config, logits, tokens
from tests.support.oracles import group_of_length, rotate_to

METHODS: dict[str, dict[str, Any]] = {
    "jet-long": {},
    "dynamic-self-extend": {},
    "self-extend": {"group": "length", "window": 20},
    "rerope": {"beyond_only": True},
    "leaky-rerope": {"beyond_only": True},
    "dca": {"beyond_only": True},
    "stairs": {"beyond_only": True},
}
LONG = 3 * TRAINED
ATOL = 5e-5
each_method = pytest.mark.parametrize("method", METHODS)
each_family = pytest.mark.parametrize("name", FAMILIES)
pytestmark = pytest.mark.filterwarnings("ignore:Every layer attends:UserWarning")  # Llama 4, whose layers are chunked


def patched(model: Any, method: str) -> Any:
    return rope.patched(model, method, **METHODS[method])


def one_layer(**more: Any) -> Any:
    """Return a model whose keys do not depend on what earlier tokens attended to, so that a row may grow."""
    return build("llama", num_hidden_layers=1, **more)


@pytest.mark.sampled(3)
@each_family
@each_method
def test_rows_up_to_the_context_length_are_as_loaded_to_the_bit(name: str, method: str) -> None:
    model = build(name)
    batch = tokens(TRAINED, batch=2)
    mask = torch.ones_like(batch)
    mask[1, :23] = 0
    cases: list[tuple[Tensor, dict[str, Any]]] = [
        (batch, {}),
        (batch[:, :-1], {"attention_mask": mask[:, :-1], "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)[:, :-1]}),
    ]
    expected = [logits(model, ids, **arguments) for ids, arguments in cases]
    with patched(model, method):
        for (ids, arguments), unpatched in zip(cases, expected, strict=True):
            assert torch.equal(logits(model, ids, **arguments), unpatched)
        assert not torch.equal(logits(model, tokens(LONG)), logits(build(name), tokens(LONG)))


@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama", "eager"), ("llama", "sdpa"), ("gemma3", "eager"), ("gemma3", "sdpa"), ("gpt_oss", "eager")],
)
def test_the_attention_that_the_model_was_loaded_with_is_run(name: str, attention: str) -> None:
    config = build_config(name)
    config._attn_implementation = attention
    model, ids = from_config(config), tokens(TRAINED, batch=2)
    assert model.config._attn_implementation == attention
    expected = logits(model, ids)
    with rope.patched(model, "jet-long"):
        assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_generation_within_the_context_length_is_as_loaded(name: str, cache: str) -> None:
    model, ids = build(name), tokens(40, batch=3)
    mask = torch.ones_like(ids)
    mask[1, :11] = 0
    settings: dict[str, Any] = {
        "max_new_tokens": TRAINED - 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None,
        "cache_implementation": cache, "disable_compile": True, "output_logits": True, "return_dict_in_generate": True,
    }  # fmt: skip
    expected = model.generate(ids, attention_mask=mask, **settings)
    with rope.patched(model, "jet-long"):
        actual = model.generate(ids, attention_mask=mask, **settings)
    assert torch.equal(actual.sequences, expected.sequences)
    for actual_step, expected_step in zip(actual.logits, expected.logits, strict=True):
        assert torch.equal(actual_step, expected_step)


@pytest.mark.sampled(7)
@pytest.mark.slow
@each_family
@each_method
def test_longer_rows_are_the_definition(name: str, method: str) -> None:
    model, ids = build(name), tokens(LONG)
    with patched(model, method):
        actual, fitted = logits(model, ids), patched_method(model)
    with defined(model, name, fitted):
        torch.testing.assert_close(actual, logits(model, ids), atol=ATOL, rtol=0)


@each_method
def test_each_row_of_a_batch_has_its_own_rule(method: str) -> None:
    model = build("llama")
    rows = [tokens(length, seed=length) for length in (LONG, 2 * TRAINED, TRAINED, 9)]
    as_loaded = [logits(model, row)[0] for row in rows]
    with patched(model, method):
        alone = [logits(model, row)[0] for row in rows]
        for left in (True, False):
            ids, mask = torch.zeros(4, LONG, dtype=torch.int64), torch.zeros(4, LONG, dtype=torch.int64)
            for i, row in enumerate(rows):
                where = slice(LONG - row.shape[1], LONG) if left else slice(0, row.shape[1])
                ids[i, where], mask[i, where] = row[0], 1
            together = logits(model, ids, attention_mask=mask)
            for out, real, expected in zip(together, mask.bool(), alone, strict=True):
                torch.testing.assert_close(out[real], expected, atol=ATOL, rtol=0)
    unchanged = [torch.equal(row, loaded) for row, loaded in zip(alone, as_loaded, strict=True)]
    assert unchanged == [False, False, True, True]


@each_method
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.sampled(3)
@pytest.mark.slow
def test_a_row_grows_past_the_context_length(method: str, cache: str) -> None:
    """Each step attends by the rule of the length so far, to keys that were stored under the rule of a shorter one."""
    model, first = one_layer(), torch.cat([tokens(50), tokens(50, seed=2)])
    mask = torch.ones_like(first)
    mask[1, :20] = 0
    settings: dict[str, Any] = {"max_new_tokens": 150, "min_new_tokens": 150, "do_sample": False, "pad_token_id": 0}
    settings |= {"eos_token_id": None, "cache_implementation": cache, "disable_compile": True}
    with patched(model, method):
        out = model.generate(first, attention_mask=mask, **settings)
        for row, padding in zip(out, (0, 20), strict=True):
            ids = row[None, padding:]
            for length in (51, 64, 65, 80, 100, 129, 150, 175):
                assert logits(model, ids[:, : length - padding])[0, -1].argmax() == ids[0, length - padding]


@each_method
def test_chunks_at_a_fixed_length_are_one_forward(method: str) -> None:
    model, ids = build("gemma2"), tokens(LONG, batch=2)
    with patched(model, method), rope.fixed_length(model, LONG):
        whole, cache, parts = logits(model, ids), DynamicCache(config=model.config), []
        with torch.no_grad():
            for piece in torch.split(ids, [50, 1, 1, 77, 3, 60], dim=1):
                parts.append(model(piece, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=ATOL, rtol=0)


def test_a_fixed_length_is_the_rule_of_every_row() -> None:
    model, short = build("llama"), tokens(40)
    with rope.patched(model, "dynamic-self-extend"):
        fitted = patched_method(model)
        with rope.fixed_length(model, LONG):
            actual = logits(model, short)
    group = group_of_length(fitted.to_dict(), LONG)
    with rope.patched(model, "self-extend", group=group, window=fitted.to_dict()["window"]):
        torch.testing.assert_close(actual, logits(model, short), atol=1e-5, rtol=0)
    assert not torch.equal(actual, logits(model, short))


@pytest.mark.slow
@each_method
def test_rows_that_are_copied_and_moved_between_steps(method: str) -> None:
    model, ids = one_layer(), tokens(60, batch=2)
    settings: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with patched(model, method):
        beams = model.generate(ids, num_beams=3, **settings)
        assert torch.equal(beams, torch.cat([model.generate(row[None], num_beams=3, **settings) for row in ids]))
        with torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            kept = copy.deepcopy(cache)
            cache.reorder_cache(torch.tensor([1, 0]))
            more = tokens(30, batch=2, seed=4)
            moved = model(more, past_key_values=cache).logits
            there = model(more.flip(0), past_key_values=kept).logits
        torch.testing.assert_close(moved.flip(0), there, atol=1e-5, rtol=0)
        torch.testing.assert_close(there, logits(model, torch.cat([ids, more.flip(0)], 1))[:, 60:], atol=ATOL, rtol=0)


def test_several_inputs_in_a_row() -> None:
    model = build("qwen2")
    positions = torch.cat([torch.arange(40), torch.arange(24)])[None]
    ids = tokens(64)
    expected = logits(model, ids, position_ids=positions)
    with rope.patched(model, "jet-long"):
        assert torch.equal(logits(model, ids, position_ids=positions), expected)
        longer = torch.cat([torch.arange(TRAINED + 9), torch.arange(24)])[None]
        with pytest.raises(LengthError, match="one input per row"):
            logits(model, tokens(longer.shape[1]), position_ids=longer)
        with rope.fixed_length(model, 2 * TRAINED):
            packed = logits(model, tokens(longer.shape[1]), position_ids=longer)
            alone = logits(model, tokens(longer.shape[1])[:, TRAINED + 9 :])
    torch.testing.assert_close(packed[:, TRAINED + 9 :], alone, atol=ATOL, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["jet-long", "dynamic-self-extend"])
@pytest.mark.parametrize("length", [TRAINED, LONG])
def test_gradients_are_those_of_the_definition(method: str, length: int) -> None:
    assert_gradients_are_defined(method, length)


@pytest.mark.slow
def test_compiled() -> None:
    model = rope.patch(build("llama"), "jet-long")
    inputs = [tokens(TRAINED, batch=2), tokens(LONG, batch=2)]
    expected = [logits(model, ids) for ids in inputs]
    compiled = torch.compile(model)
    for ids, eager in zip(inputs, expected, strict=True):
        torch.testing.assert_close(logits(compiled, ids), eager, atol=ATOL, rtol=0)


@contextmanager
def merged_as_released(model: Any, window: int, dtype: torch.dtype) -> Iterator[None]:
    """Run attention as in the authors' files for Qwen3: a window, plus all keys in groups, less the window in groups.

    The longest row of the batch decides. The third part is taken from the second by its log-sum-exp, where digits get
    lost; in float64 few enough for a comparison.
    """

    def part(query: Tensor, key: Tensor, value: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        scores = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(~visible, -torch.inf)
        return scores.softmax(-1).nan_to_num() @ value, scores.logsumexp(-1, keepdim=True)

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        tokens, dim = query.shape[2:]
        groups = query.shape[1] // key.shape[1]
        m = torch.arange(tokens)
        distance = m[:, None] - m
        size = -(-tokens // TRAINED)
        own, far = ([rotate_to(x, at.double(), dim, 10_000.0).to(dtype) for x in (query, key)] for at in (m, m // size))
        (q_own, k_own), (q_far, k_far) = own, far
        k_own, k_far, value = (x.to(dtype).repeat_interleave(groups, 1) for x in (k_own, k_far, value))
        near = (distance >= 0) & (distance <= window)
        a, lse_a = part(q_own, k_own, value, near)
        b, lse_b = part(q_far, k_far, value, distance >= 0)
        c, lse_c = part(q_far, k_far, value, near)
        top = torch.maximum(lse_a, lse_b)
        weights = [(lse - top).exp() for lse in (lse_a, lse_b, lse_c)]
        total = (weights[0] + weights[1] - weights[2]).clamp(min=0)
        out = (weights[0] * a + weights[1] * b - weights[2] * c) / total
        return out.transpose(1, 2).to(query.dtype).contiguous(), None

    with attending_by(model, attention):
        yield


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 5e-5), (torch.float32, 1e-3)], ids=str)
def test_jet_long_is_the_rule_of_its_authors(dtype: torch.dtype, atol: float) -> None:
    model, ids = build("qwen3"), tokens(LONG + 11)
    with merged_as_released(model, TRAINED // 16, dtype):
        released = logits(model, ids)
    with rope.patched(model, "jet-long"):
        torch.testing.assert_close(logits(model, ids), released, atol=atol, rtol=0)
    with rope.patched(model, "jet-long", window=TRAINED // 16 + 1):
        assert (logits(model, ids) - released).abs().max() > 0.01


@pytest.mark.parametrize(("window", "limit"), [(16, 64), (1, 64), (60, 64), (16, 17), (500, 2048)])
def test_the_group_is_the_smallest_that_keeps_distances_trained(window: int, limit: int) -> None:
    from rope_ext_hf.methods.grouped import JetLong, SelfExtend

    for length in (limit + 1, limit + 2, 2 * limit - 1, 2 * limit, 2 * limit + 1, 5 * limit + 3):
        extended = SelfExtend(group="length", window=window, max_distance=limit, temperature="none").at_length(length)
        assert extended is not None
        if length <= 400:
            assert extended.group == group_of_length(extended.to_dict() | {"group": "length"}, length)
        jet = JetLong(window=window, max_distance=limit, temperature="none").at_length(length)
        assert jet is not None
        assert jet.group == math.ceil(length / limit)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("self-extend", {"group": "long"}, 'group must be a whole number or "length"'),
        ("jet-long", {"group": 2.5}, 'group must be a whole number or "length"'),
        ("jet-long", {"group": 0}, "group must be at least 1"),
        ("rerope", {"beyond_only": True, "frequency": "ntk", "factor": 2}, "read by the model as loaded"),
        ("jet-long", {"frequency": "linear", "factor": 2}, "read by the model as loaded"),
        ("jet-long", {"window": 2 * TRAINED}, "window is"),
    ],
)
def test_what_cannot_be_is_refused(method: str, arguments: dict[str, Any], message: str) -> None:
    model = build("llama")
    with pytest.raises(MethodError, match=message):
        rope.patch(model, method, **arguments)


def test_what_is_said_of_a_model() -> None:
    model = rope.patch(build("llama"), "jet-long")
    description = rope.describe(model)
    assert any(note.startswith(f"Rows of up to {TRAINED} tokens are not remapped.") for note in description.notes)
    assert patched_method(model).to_dict() == {
        "method": "jet-long", "max_distance": TRAINED, "temperature": "none", "window": 4, "group": "length",
    }  # fmt: skip
    assert "beyond_only" not in rope.patch(model, "rerope").config.rope_ext_hf["method"]
