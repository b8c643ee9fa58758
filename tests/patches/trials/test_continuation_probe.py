"""The trial of a patch with a cache: a model that goes on from it passes; a patch that misses the cache is refused."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import rope_ext_hf as rope
from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.patches.forward import forward_call, length_forward
from rope_ext_hf.patches.slots.patched_slot import patch_state
from rope_ext_hf.patches.trials import continuation_probe
from tests.support import every_model
from tests.support.models import FAMILIES, build

KINDS = ["dynamic-ntk", "dynamic-yarn", "rerope", "dca", "dynamic-self-extend"]
"""Methods that work with the cache: length-dependent ones, remapping ones, and a remapping one by length."""


@pytest.fixture(autouse=True)
def nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation_probe, "_tried", set())


@pytest.fixture
def missed_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make patched forwards see no cache, as if a release had given it another name and type."""
    monkeypatch.setattr(forward_call, "cache_argument", lambda decoder, call: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(5)
def test_a_cache_that_is_found_passes(name: str, method: str, dtype: torch.dtype) -> None:
    model = rope.patch(build(name).to(dtype), method, target_length=512)
    assert len(continuation_probe._tried) == 1
    assert not any("not checked" in note for note in rope.describe(model).notes)


@pytest.mark.usefixtures("missed_cache")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", KINDS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sampled(5)
def test_a_cache_that_is_missed_is_refused(name: str, method: str, dtype: torch.dtype) -> None:
    model = build(name).to(dtype).eval()
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        before = model(ids).logits
        with pytest.raises(UnsupportedModelError, match=f"transformers {transformers.__version__}") as refusal:
            rope.patch(model, method, target_length=512)
        assert torch.equal(model(ids).logits, before)
    assert method in str(refusal.value)
    assert patch_state(model) is None
    assert not continuation_probe._tried


def test_a_refusal_leaves_an_earlier_patch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = rope.patch(build("llama").eval(), "yarn", factor=4)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        before = model(ids).logits
        monkeypatch.setattr(forward_call, "cache_argument", lambda decoder, call: None)
        with pytest.raises(UnsupportedModelError, match="does not compute the same with a cache"):
            rope.patch(model, "rerope")
        assert torch.equal(model(ids).logits, before)
    assert rope.describe(model).method == rope.describe(rope.patch(build("llama"), "yarn", factor=4)).method


def test_an_error_of_ours_in_the_trial_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it was in 5.24, where the cache under its new name was taken for the paged one of continuous batching."""
    monkeypatch.setattr(forward_call, "cache_argument", lambda decoder, call: None)
    monkeypatch.setattr(length_forward, "paged_cache", lambda call: call.get("cache") or call.get("past_key_values"))
    with pytest.raises(UnsupportedModelError, match="a paged cache holds parts of many inputs"):
        rope.patch(build("llama"), "dynamic-ntk")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["dynamic-ntk", "dynamic-yarn"])
@pytest.mark.parametrize("of_type", ["paligemma", "minimax"])
def test_what_the_unpatched_model_does_is_no_fault_of_the_patch(of_type: str, method: str, dtype: torch.dtype) -> None:
    """PaliGemma's attention is not causal, and MiniMax computes linear attention differently onto a cache."""
    model = rope.patch(every_model.tiny(of_type).to(dtype), method, target_length=512)
    noted = any("not checked" in note and "even when it is not patched" in note for note in rope.describe(model).notes)
    assert noted == (not continuation_probe._tried)


@pytest.mark.parametrize("method", KINDS)
def test_a_trial_is_made_once_for_a_class_and_kind(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, both_ways = [], continuation_probe._both_ways

    def counted(decoder: nn.Module, continued: int) -> Any:
        tried.append(type(decoder).__name__)
        return both_ways(decoder, continued)

    monkeypatch.setattr(continuation_probe, "_both_ways", counted)
    for name in ("llama", "llama", "qwen2"):
        rope.patch(build(name), method, target_length=512)
    assert tried == ["LlamaModel", "Qwen2Model"]


@pytest.mark.parametrize("method", ["yarn", "ntk", "linear", "llama3"])
def test_static_methods_are_not_tried(method: str) -> None:
    rope.patch(build("llama"), method, factor=4)
    assert not continuation_probe._tried


@pytest.mark.parametrize("method", ["dynamic-yarn", "dca"])
def test_on_the_meta_device_it_is_said_that_nothing_was_tried(method: str) -> None:
    with torch.device("meta"):
        model = build("llama")
    rope.patch(model, method, target_length=512)
    (note,) = (note for note in rope.describe(model).notes if "not checked" in note)
    assert "the model was read without its weights" in note


@pytest.mark.parametrize("method", [*KINDS, "yarn"])
def test_a_patch_runs_no_hook_of_its_user(method: str) -> None:
    """Trials are made while a model is patched, and neither hooks from before nor ones from after it see them."""
    model, ids = build("llama"), torch.arange(3, 90)[None]
    seen: list[str] = []

    class Counter:
        def __call__(self, module: nn.Module, *_: Any) -> None:
            seen.append(type(module).__name__)

    def count(name: str, module: nn.Module, *_: Any) -> None:
        seen.append(type(module).__name__)

    def watch() -> None:
        for module in model.modules():
            module.register_forward_hook(Counter())
            module.register_forward_pre_hook(partial(count, "before"))

    watch()
    model.model.layers[0].register_forward_pre_hook(lambda *_: seen.append("lambda"))
    rope.patch(model, method, **({"factor": 4} if method == "yarn" else {"target_length": 512}))
    assert not seen
    watch()
    with torch.no_grad():
        model(ids, use_cache=True)
    once = list(seen)
    assert once.count("LlamaModel") == 4
    seen.clear()
    with torch.no_grad():
        cache = model(ids[:, :60], use_cache=True).past_key_values
        model(ids[:, 60:], past_key_values=cache)
    assert sorted(seen) == sorted(once * 2)


@pytest.mark.parametrize("method", KINDS)
def test_hooks_that_make_weights_run_in_a_trial(method: str) -> None:
    """torch's own weight norm computes weights in a hook, from parameters that a hook of the user's may not see."""
    model = build("llama")
    for layer in model.model.layers:
        with warnings.catch_warnings(action="ignore"):
            torch.nn.utils.weight_norm(layer.self_attn.k_proj)
    weight = [layer.self_attn.k_proj.weight for layer in model.model.layers]
    rope.patch(model, method, target_length=512)
    assert all(layer.self_attn.k_proj.weight is not old for layer, old in zip(model.model.layers, weight, strict=True))


@pytest.mark.parametrize("before", [None, "linear", "dca"])
@pytest.mark.parametrize("method", KINDS)
def test_a_patch_that_is_interrupted_leaves_the_model_as_it_was(
    method: str, before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the trial forwards the interrupt comes in."""
    model, ids = build("llama"), torch.arange(3, 90)[None]
    if before is not None:
        rope.patch(model, before, target_length=512)
    with torch.no_grad():
        expected = model(ids).logits
    layer, config = model.model.layers[1].mlp, model.config.to_dict()
    forward, calls, interrupted = layer.forward, 0, 0

    def interrupt(*args: Any) -> Any:
        nonlocal calls, interrupted
        calls += 1
        if calls == interrupted + 1:
            interrupted += 1
            calls = -100  # not while the model is put back
            raise KeyboardInterrupt
        return forward(*args)

    for _ in range(20):
        monkeypatch.setattr(continuation_probe, "_tried", set())
        layer.forward, calls = interrupt, 0
        try:
            rope.patch(model, method, target_length=512)
            break
        except KeyboardInterrupt:
            del layer.forward
            assert model.config.to_dict() == config
            with torch.no_grad():
                assert torch.equal(model(ids).logits, expected)
    assert interrupted > 1


def test_the_modes_and_random_numbers_of_a_model_stay() -> None:
    model = build("llama").train()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    rope.patch(model, "dynamic-yarn", target_length=512)
    assert torch.equal(torch.rand(3), expected)
    assert all(module.training for module in model.model.layers.modules())
