"""Length-dependent methods compiled, and what a step costs in memory and waiting."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.errors import LengthError
from rope_ext_hf.rotary.key_rotation import KeyLayout, KeyRotation
from rope_ext_hf.rotary.rotating_cache import rotate_cached_keys_
from tests.support.dispatch import HostReads
from tests.support.length_examples import LONG, RULES, in_parts, patched, stock
from tests.support.models import TRAINED, build, logits, tokens

# --- compiled ------------------------------------------------------------------------------------------------------


def compiled(model: Any, kind: str, ids: Tensor, fullgraph: bool) -> tuple[int, Tensor]:
    """Return the number of graphs of a prefill of 62 tokens and single steps after it, and the logits."""
    from torch._dynamo.testing import CompileCounter

    torch.compiler.reset()
    counter = CompileCounter()
    run: Any = torch.compile(model, backend=counter, fullgraph=fullgraph)
    cache = transformers.DynamicCache(config=model.config)
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=96)
    with torch.no_grad():
        parts = torch.split(ids, [TRAINED - 2, *[1] * (ids.shape[1] - TRAINED + 2)], dim=1)
        actual = torch.cat([run(part, past_key_values=cache).logits for part in parts], 1)
    return counter.frame_count, actual


COMPILED = tokens(TRAINED + 3)


@functools.cache
def graphs_of_stock(kind: str, method: str) -> int:
    model = stock(num_hidden_layers=1) if method == "dynamic" else build("llama", num_hidden_layers=1)
    return compiled(model, kind, COMPILED, fullgraph=method != "dynamic")[0]


@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        pytest.param("even", "static", marks=pytest.mark.thorough),
        *(pytest.param(rule, "dynamic", marks=[pytest.mark.thorough] * (rule != "hf")) for rule in RULES),
    ],
)
def test_a_fixed_length_compiles_whole(rule: str, kind: str) -> None:
    """A prefill and steps onto a cache, and no cache, in no more graphs than the model has unpatched."""
    from torch._dynamo.testing import CompileCounter

    model = patched("llama", rule, num_hidden_layers=1)
    with rope.fixed_length(model, COMPILED.shape[1]):
        graphs, actual = compiled(model, kind, COMPILED, fullgraph=True)
        assert graphs <= graphs_of_stock(kind, "default")
        torch.testing.assert_close(actual, logits(model, COMPILED), atol=1e-4, rtol=0)
        torch.compiler.reset()
        counter = CompileCounter()
        whole: Any = torch.compile(model, backend=counter, fullgraph=True)
        torch.testing.assert_close(logits(whole, COMPILED), logits(model, COMPILED), atol=1e-5, rtol=0)
        assert counter.frame_count == 1


@pytest.mark.thorough
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("rule", "kind"), [("even", "dynamic"), ("hf", "static")])
def test_decoding_compiles_with_breaks(rule: str, kind: str) -> None:
    """Graphs end where the cache is read. transformers' own dynamic rule has as many, and is not one graph either."""
    model = patched("llama", rule, num_hidden_layers=1)
    graphs, actual = compiled(model, kind, COMPILED, fullgraph=False)
    assert graphs <= graphs_of_stock(kind, "dynamic")
    torch.testing.assert_close(actual, in_parts(model, COMPILED, [TRAINED - 2]), atol=1e-4, rtol=0)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a graph ends here; with rope_ext_hf"):
        compiled(model, kind, COMPILED, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="branching"):
        compiled(stock(num_hidden_layers=1), kind, COMPILED, fullgraph=True)
    torch.compiler.reset()
    whole: Any = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(whole, COMPILED), logits(model, COMPILED), atol=1e-5, rtol=0)


# --- what a step costs ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[pytest.mark.thorough] * (rule not in ("paper", "even"))) for rule in RULES]
)
def test_a_step_does_not_wait_for_the_device(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that change with every token never wait; rules in steps wait once where a row may have passed a step."""
    model, ids = patched("llama", rule), tokens(LONG)
    model.set_attn_implementation("eager")  # on a CPU, sdpa rotates keys in tiles, after a look at their positions
    reads, waited = HostReads(), []

    def counted(plain: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
        reads.count += 1
        return plain(tensor, *args)

    for name in ("tolist", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, functools.partialmethod(functools.partial(counted, getattr(Tensor, name))))
    in_parts(model, ids[:, :70], [60])  # the first time it looks how the cache keeps its keys
    with torch.no_grad(), reads:
        cache = model(ids[:, :40], use_cache=True).past_key_values
        for at in range(40, LONG):
            reads.count = 0
            model(ids[:, at : at + 1], past_key_values=cache)
            if reads.count:
                waited.append(at + 1)
    expected = {"even": [65, 129], "pow2": [65, 129], "longrope": [65]}
    assert waited == expected.get(rule, [])


@pytest.mark.parametrize(("rule", "first", "later"), [("even", 1, 1), ("paper", 1, 0)])
def test_positions_without_a_mask_are_looked_at_once(
    rule: str, first: int, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length may then be larger than the number of tokens, and a row may hold several inputs."""
    model, ids, reads = patched("llama", rule, num_hidden_layers=1), tokens(TRAINED + 9), HostReads()
    model.set_attn_implementation("eager")  # on a CPU, sdpa rotates keys in tiles, after a look at their positions

    def counted(plain: Callable[..., Any], tensor: Tensor, *args: Any) -> Any:
        reads.count += 1
        return plain(tensor, *args)

    in_parts(model, ids, [60])  # the first time it looks how the cache keeps its keys
    for name in ("tolist", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, functools.partialmethod(functools.partial(counted, getattr(Tensor, name))))
    waits = []
    with torch.no_grad(), reads:
        cache = model(ids[:, :60], position_ids=torch.arange(60)[None], use_cache=True).past_key_values
        for at in range(60, ids.shape[1]):
            reads.count = 0
            model(ids[:, at : at + 1], position_ids=torch.full((1, 1), at), past_key_values=cache)
            waits.append(reads.count)
    assert waits == [first, *[later] * (len(waits) - 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_turned_in_little_memory(dtype: torch.dtype) -> None:
    """Layers are rotated one at a time, and float32 copies are made of a stretch of the keys only."""
    from torch.profiler import ProfilerActivity, profile

    class Layer:
        is_initialized = True

        def __init__(self) -> None:
            self.keys = torch.ones(1, 4, 4096, 64, dtype=dtype)

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        layers = [(Layer(), KeyLayout("half", 0, 64)) for _ in range(12)]
        rotate_cached_keys_(layers, KeyRotation(torch.ones(1, 1, 4096, 32), torch.zeros(1, 1, 4096, 32)))
    held = sum(layer.keys.nbytes for layer, _ in layers)
    assert profiled.profiler is not None
    results: Any = profiled.profiler.kineto_results
    events = list(results.experimental_event_tree())
    for event in events:
        events.extend(event.children)
    sizes = sorted((e.start_time_ns, e.extra_fields.alloc_size) for e in events if e.name == "[memory]")
    live = list(itertools.accumulate(size for _, size in sizes))
    assert held < max(live) < 1.2 * held


def test_a_cache_keeps_to_the_length_that_was_held() -> None:
    model, ids = patched("llama", "paper"), tokens(90)
    with torch.no_grad():
        free = model(ids[:, :80], use_cache=True).past_key_values
        with rope.fixed_length(model, 200):
            held = model(ids[:, :80], use_cache=True).past_key_values
            model(ids[:, 80:81], past_key_values=held)
            with pytest.raises(LengthError, match=r"no fixed_length, and this model is .* with fixed_length=200"):
                model(ids[:, 80:81], past_key_values=free)
        with (
            rope.fixed_length(model, 300),
            pytest.raises(LengthError, match=r"with fixed_length=200, and this model is .* with fixed_length=300"),
        ):
            model(ids[:, 81:82], past_key_values=held)
        with pytest.raises(LengthError, match=r"with fixed_length=200, and this model is .* with no fixed_length"):
            model(ids[:, 81:82], past_key_values=held)
        model(ids[:, 80:81], past_key_values=free)
