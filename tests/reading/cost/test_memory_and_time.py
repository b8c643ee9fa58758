from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import rope_ext_hf as rope
from rope_ext_hf.eval import passkey, perplexity
from rope_ext_hf.reading.cost import memory as reading_memory
from rope_ext_hf.reading.cost.memory import MemoryEstimate, budgets, check_memory, estimate_memory, weight_places
from rope_ext_hf.reading.cost.operations import EFFICIENCY, estimate_flops, measure_flops
from rope_ext_hf.reading.scorer import TokenScorer
from rope_ext_hf.reading.spans import sliding_window_warning
from rope_ext_hf.reading.text.documents import Tokens
from tests.support.every_model import tiny
from tests.support.models import build

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GB = 10**9


def on_meta(name: str, **options: Any) -> Any:
    with torch.device("meta"):
        return build(name, **options)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The free bytes of two GPUs and a CPU, by the kind of device; a test may change them."""
    free = {"cpu": 100 * GB, "cuda": 100 * GB}
    monkeypatch.setattr(reading_memory, "available", lambda device: free[device.type])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return free


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_neox", "deepseek_v3"])
def test_keys_and_values_are_what_a_cache_holds(name: str) -> None:
    model = build(name)
    with torch.no_grad():
        cache = model(torch.arange(3, 35)[None], use_cache=True).past_key_values
    held = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    estimate = estimate_memory(model, 32)
    assert estimate.cache == held
    assert estimate.weights == sum(p.numel() * 4 for p in model.parameters())
    assert estimate_memory(model, 32, torch.bfloat16).cache == held // 2
    offloaded = estimate_memory(model, 32, offload_cache=True)
    assert offloaded.cache == held // len(cache.layers)
    assert held <= offloaded.offloaded <= 2 * held


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "deepseek_v3"])
def test_losses_take_the_keys_and_values_of_one_layer(name: str) -> None:
    """They grow by one layer's rate, whatever the number of layers, and by the hidden states of the text."""
    model, deeper = build(name), on_meta(name, num_hidden_layers=12)
    whole, by_layer = estimate_memory(model, 4096), estimate_memory(model, 4096, by_layer=True)
    assert by_layer.cache == whole.cache // model.config.num_hidden_layers
    assert by_layer.waiting >= 4096 * model.config.hidden_size * 4
    assert by_layer.offloaded == 0
    deep = estimate_memory(deeper, 4096, by_layer=True)
    assert (deep.cache, deep.waiting) == (by_layer.cache, by_layer.waiting)
    twice = estimate_memory(deeper, 8192, by_layer=True)
    assert (twice.cache, twice.waiting) == (2 * deep.cache, 2 * deep.waiting)


def test_layers_with_heads_of_several_sizes() -> None:
    """Gemma 4 has another head dim in layers with a window, and its config refuses to name one for all layers."""
    model = tiny("gemma4_text")
    estimate = estimate_memory(model, 4096, by_layer=True)
    widest = max(layer.head_dim for layer in model.config.per_layer_config)
    assert estimate.waiting == 4096 * 4 * (model.config.hidden_size + 2 * widest)


def test_layers_that_share_keys_are_not_read_one_by_one() -> None:
    model = on_meta("llama")
    model.config.num_kv_shared_layers = 1
    assert estimate_memory(model, 4096, by_layer=True) == estimate_memory(model, 4096)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_losses_of_a_model_that_is_larger_than_its_device(memory: dict[str, int], device: torch.device) -> None:
    model = on_meta("llama", num_hidden_layers=20, hidden_size=4096, intermediate_size=16384, vocab_size=1000)
    size = model.num_parameters() * 4
    memory["cpu"], memory["cuda"] = size // 2, size // 2
    with pytest.raises(rope.CheckpointError):
        check_memory(model, 256, torch.float32, device, by_layer=True)
    with pytest.raises(rope.CheckpointError):
        check_memory(model, 256, torch.float32, device, fetch=True)  # answers to prompts need all weights at each token
    needed = check_memory(model, 256, torch.float32, device, by_layer=True, fetch=True)
    assert needed.weights + needed.fetched == size
    assert needed.total < size // 2
    assert "of weights in main memory or on disk, read layer by layer: the next one while one computes" in str(needed)
    layer, outside = (sum(p.numel() * 4 for p in part.parameters()) for part in (model.model.layers[0], model.lm_head))
    assert 2 * layer + 2 * outside <= needed.weights < 2 * layer + 2.01 * outside  # and the embeddings
    places = weight_places(model, needed, torch.float32, device)
    assert places is not None
    layers = [places[f"model.layers.{index}"] for index in range(20)]
    here = "cpu" if device == CPU else 0
    assert 4 < layers.count(here) < 9
    assert layers[0] == here
    assert layers[-1] == "disk"


@pytest.mark.parametrize("device", [CPU, GPU])
def test_room_for_one_layer_is_enough(memory: dict[str, int], device: torch.device) -> None:
    model = on_meta("llama", num_hidden_layers=20, hidden_size=4096, intermediate_size=16384, vocab_size=1000)
    layer = sum(p.numel() * 4 for p in model.model.layers[0].parameters())
    memory["cpu"] = memory["cuda"] = model.num_parameters() * 2
    how: dict[str, Any] = {"by_layer": True, "fetch": True}
    two = check_memory(model, 256, torch.float32, device, **how)
    assert two.ahead
    memory[device.type] = two.total - layer // 2
    one = check_memory(model, 256, torch.float32, device, **how)
    assert not one.ahead
    assert two.weights - one.weights == one.fetched - two.fetched == layer
    assert "read layer by layer" in str(one)
    assert "the next one while one computes" not in str(one)
    places = weight_places(model, one, torch.float32, device)
    assert places is not None
    assert ("cpu" if device == CPU else 0) not in {places[f"model.layers.{index}"] for index in range(20)}
    memory[device.type] = two.total - 2 * layer
    with pytest.raises(rope.CheckpointError):
        check_memory(model, 256, torch.float32, device, **how)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "glm", "gpt_neox"])
def test_operations_are_those_counted_by_torch(name: str) -> None:
    model = build(name, attn_implementation="eager")
    length = 96
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(torch.arange(length)[None] % 90, use_cache=False)
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    every_pair = 4 * config.num_hidden_layers * config.num_attention_heads * head_dim * length**2
    # eager attention computes all pairs of query and key, a fused kernel half of them
    assert estimate_flops(model, [length], length) == pytest.approx(
        counter.get_total_flops() - every_pair / 2, rel=0.02
    )


def test_of_the_experts_only_those_chosen_count() -> None:
    one, all_of_them = (estimate_flops(build("mixtral", num_experts_per_tok=n), [64], 64) for n in (1, 4))
    model = build("mixtral", num_experts_per_tok=1)
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert model.config.num_local_experts == 4
    assert all_of_them - one == pytest.approx(2 * 64 * experts * 3 / 4)


def test_speed_is_measured() -> None:
    assert 1e7 < measure_flops(CPU, torch.float32, seconds=0.01) < 1e16


@pytest.mark.slow
@pytest.mark.parametrize("speed", [1e8, 1e11])
def test_a_slow_device_is_not_measured_for_long(speed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only matrix products advance the clock of this test: float16 on a CPU may run at 1e8 operations per second."""
    now = 0.0

    class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal now
            if function is torch.ops.aten.mm.default:
                now += 2 * len(args[0]) ** 3 / speed
            return function(*args, **(kwargs or {}))

    monkeypatch.setattr("rope_ext_hf.reading.cost.operations.time.perf_counter", lambda: now)
    with Products():  # type: ignore[no-untyped-call]
        assert measure_flops(CPU, torch.float32) == pytest.approx(EFFICIENCY * speed)
    assert now < 1.0


def test_what_does_not_fit_is_refused_with_what_would(memory: dict[str, int]) -> None:
    model = on_meta("llama", num_hidden_layers=8)
    per_token = estimate_memory(model, 1, torch.float32).cache
    longest = 200 * GB // per_token
    with pytest.raises(rope.CheckpointError, match=rf"spans of {longest:,} tokens need 20\d\.\d GB") as refused:
        check_memory(model, longest, torch.float32, GPU)
    message = str(refused.value)
    assert "cuda:0 has 100.0 GB free" in message
    assert "--device-map auto" in message  # two GPUs and the main memory have 300 GB together
    assert "--offload-cache" not in message  # the main memory has only 100 GB
    assert "--dtype bfloat16" in message
    assert "shorter lengths: up to" in message
    memory["cpu"] = 1000 * GB
    with pytest.raises(rope.CheckpointError, match="--offload-cache"):
        check_memory(model, longest, torch.float32, GPU)
    assert check_memory(model, longest, torch.float32, GPU, offload_cache=True).offloaded >= 200 * GB
    assert check_memory(model, longest, torch.float32, GPU, spread=True).total > 200 * GB


def test_the_shorter_length_that_is_offered_fits(memory: dict[str, int]) -> None:
    model = on_meta("llama")
    memory["cpu"] = 2 * GB
    with pytest.raises(rope.CheckpointError) as refused:
        check_memory(model, 1 << 30, torch.bfloat16, CPU)
    message = str(refused.value)
    assert "bfloat16" not in message.split("Instead")[1]
    assert "device-map" not in message
    fitting = int(message.split("up to ")[1].split(" tokens")[0].replace(",", ""))
    check_memory(model, fitting, torch.bfloat16, CPU)
    with pytest.raises(rope.CheckpointError):
        check_memory(model, fitting + 512, torch.bfloat16, CPU)


def test_weights_that_do_not_fit_at_all(memory: dict[str, int]) -> None:
    memory["cpu"] = 1000
    with pytest.raises(rope.CheckpointError, match="a machine with more memory"):
        check_memory(on_meta("llama"), 256, torch.bfloat16, CPU)


def test_memory_that_the_allocator_holds_unused_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a second measurement in the same process would be given small chunks."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50 * GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20 * GB)
    assert reading_memory.available(GPU) == 40 * GB


def test_offloading_from_a_cpu_is_refused() -> None:
    with pytest.raises(rope.MethodError, match="leave out --offload-cache"):
        check_memory(on_meta("llama"), 256, torch.float32, CPU, offload_cache=True)


def test_chunks_are_sized_by_the_free_memory(memory: dict[str, int]) -> None:
    large = build("llama", vocab_size=5000)
    plenty = TokenScorer(large)
    assert sum(budgets(CPU)) <= 400_000_000  # larger chunks are no faster on a CPU
    assert sum(budgets(GPU)) > sum(budgets(CPU))
    memory["cpu"] = 10_000_000
    scarce = TokenScorer(large)
    assert scarce.head_bytes < plenty.head_bytes
    assert scarce.chunk < plenty.chunk
    assert (TokenScorer(large, chunk=48).chunk, TokenScorer(large, head_bytes=4000).head_bytes) == (48, 4000)


def test_layers_that_see_less_than_a_window() -> None:
    assert sliding_window_warning(build("llama"), 1 << 20) is None
    mistral = build("mistral", sliding_window=24)
    assert sliding_window_warning(mistral, 24) is None
    message = "2 of 2 layers attend to the last 24 tokens only; spans of 64 tokens are longer"
    assert sliding_window_warning(mistral, 64) == message
    gemma = build("gemma2", sliding_window=24)
    assert (sliding_window_warning(gemma, 64) or "").startswith("1 of 2 layers")
    assert sliding_window_warning(build("qwen2", sliding_window=24), 64) is None  # switched off in its config


@contextmanager
def warned(match: str) -> Iterator[None]:
    with pytest.warns(UserWarning, match=match) as seen:
        yield
    assert [w.filename for w in seen if match in str(w.message)] == [__file__]  # the warning points to the user's call


@pytest.mark.slow
def test_measurements_warn_of_narrow_layers() -> None:
    from transformers import AutoTokenizer

    from rope_ext_hf.reference import path

    document = Tokens("a", torch.arange(3, 67), tuple(range(64)))
    with warned("2 of 2 layers attend to the last 24 tokens only"):
        perplexity(build("mistral", sliding_window=24), [document], lengths=[64], bos=False)
    model = build("mistral", sliding_window=24, vocab_size=400)
    with warned("2 of 2 layers"):
        passkey(model, lengths=[128], trials=1, task="key-value", tokenizer=AutoTokenizer.from_pretrained(path()))


def test_needs_in_words() -> None:
    needs = str(MemoryEstimate(1 * GB, 2 * GB, 500_000_000))
    assert needs == "3.5 GB: 1.0 GB weights, 2.0 GB keys and values, 500.0 MB activations"
    assert str(MemoryEstimate(1 * GB, 0, 0, 8 * GB)).endswith("and 8.0 GB of main memory")
