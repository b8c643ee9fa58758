"""The attention backend for vLLM without vLLM: pages in any order, compared with the definition of the methods.

`make test-vllm` runs it in a real vLLM.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.plugins.paged_attention import PagedAttention, requests_of, store
from rope_ext_hf.plugins.vllm import BACKEND
from tests.support.models import build
from tests.support.oracles import naive_attention, rotate_to, stored_position

THETA, SIZE = 1e4, 16  # of blocks, in tokens


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class that vLLM finds by its path, over base classes without code."""
    base = ModuleType("vllm.v1.attention.backend")
    vars(base).update({name: type(name, (), {}) for name in ("AttentionBackend", "AttentionImpl")})

    class Builder:
        def __init__(self, spec: Any, *more: Any) -> None:
            self.kv_cache_spec = spec

    vars(base)["AttentionMetadataBuilder"] = Builder
    config, layouts = ModuleType("vllm.config"), ModuleType("vllm.v1.kv_cache_interface")
    vars(config)["get_current_vllm_config"] = lambda: SimpleNamespace(
        speculative_config=None,
        parallel_config=SimpleNamespace(world_size=1),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(rope_parameters=None)),
    )
    vars(layouts)["KVCacheLayout"] = SimpleNamespace(LBHNC="blocks, heads, tokens")
    for module in (base, config, layouts):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, BACKEND.rpartition(".")[0], raising=False)
    from rope_ext_hf.plugins.vllm_attention import RemappingBackend

    assert f"{RemappingBackend.__module__}.{RemappingBackend.__name__}" == BACKEND
    yield RemappingBackend
    sys.modules.pop(RemappingBackend.__module__)


def settings(method: str, length: int = 64, **params: Any) -> dict[str, Any]:
    """Rope settings as serve-config writes them, of a Llama of this context length with heads of 16 dims."""
    model = build("llama", max_position_embeddings=length)
    overrides = rope.serving_config(model, "vllm", method, plugin=True, target_length=512, **params).overrides
    assert overrides is not None
    parameters: dict[str, Any] = overrides["rope_parameters"]
    return parameters


@dataclass
class Pages:
    """A cache that the requests of a step share, their blocks shuffled, and what the definition gives for each."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    blocks: int = 96
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    def __post_init__(self) -> None:
        self.cache = torch.full((self.blocks, self.kv_heads, SIZE, 2 * self.dim), torch.nan)  # nobody may read the rest
        self.free = (1 + torch.randperm(self.blocks - 1, generator=self.generator)).tolist()

    def normal(self, *sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=self.generator)

    def step(self, method: Any, sizes: list[tuple[int, int]], pairing: Any = "half") -> tuple[Any, Tensor, Tensor]:
        """What vLLM gives the backend for requests of (tokens, new ones of these), the queries, and the answers.

        The keys before the new ones are in the cache already; the new ones come with the step.
        """
        starts, slots, table = [0], [], torch.zeros(len(sizes), self.blocks, dtype=torch.int32)
        queries, keys, values, answers = [], [], [], []
        for row, (length, new) in enumerate(sizes):
            q, k, v = (self.normal(n, length, self.dim) for n in (self.heads, self.kv_heads, self.kv_heads))
            q = q[:, length - new :]
            count = -(-length // SIZE)
            own = torch.tensor([self.free.pop() for _ in range(count)], dtype=torch.int32)
            table[row, :count] = own
            places = torch.arange(length)
            slot = own[places // SIZE].long() * SIZE + places % SIZE
            n = torch.tensor([stored_position(method, each) for each in range(length)], dtype=torch.float64)
            turned = rotate_to(k, n, self.dim, THETA, pairing).float().transpose(0, 1)
            store(self.cache, turned[: length - new], v.transpose(0, 1)[: length - new], slot[: length - new])
            queries.append(rotate_to(q, n[length - new :], self.dim, THETA, pairing).float().transpose(0, 1))
            keys.append(turned[length - new :])
            values.append(v.transpose(0, 1)[length - new :])
            slots.append(slot[length - new :])
            starts.append(starts[-1] + new)
            if pairing == "interleaved":  # the definition is of the other pairing: the same dims in another order
                q, k = (torch.cat((x[..., 0::2], x[..., 1::2]), -1) for x in (q, k))
            answers.append(naive_attention(method, q, k, v, self.dim, THETA).transpose(0, 1))
        step = SimpleNamespace(
            num_actual_tokens=starts[-1],
            query_start_loc_cpu=torch.tensor(starts),
            seq_lens=torch.tensor([length for length, _ in sizes]),
            block_table_tensor=table,
            slot_mapping=torch.cat(slots),
            keys=torch.cat(keys),
            values=torch.cat(values),
        )
        return step, torch.cat(queries), torch.cat(answers)


MIXED = [(300, 300), (201, 1), (40, 3), (64, 64), (250, 90), (17, 1)]
"""Prompts, decoding steps, and prompts that go on after a cached part or an earlier chunk; up to five zones."""


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("stairs", {}),
        ("stairs", {"window": 24, "start": 8, "chunk": 20, "temperature": "log-n"}),
        ("stairs", {"temperature": "none"}),
        ("rerope", {}),
        ("leaky-rerope", {"window": 20}),
        ("self-extend", {"window": 20}),
        ("dca", {"chunk": 40, "window": 20}),
    ],
)
def test_a_step_agrees_with_the_definition(name: str, params: dict[str, Any], pairing: str) -> None:
    given = settings(name, **params)
    given["remapping"] = given["remapping"].replace('"half"', f'"{pairing}"')
    attention, pages = PagedAttention(given), Pages()
    step, query, expected = pages.step(attention.method, MIXED, pairing)
    store(pages.cache, step.keys, step.values, step.slot_mapping)
    requests = list(
        requests_of(step.query_start_loc_cpu.tolist(), step.seq_lens.tolist(), step.block_table_tensor, SIZE)
    )
    out = torch.full_like(query, torch.nan)
    attention.run(query, pages.cache, requests, 16**-0.5, out)
    assert (out - expected).abs().max() < 3e-6


def test_the_backend_runs_a_step_of_vllm(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings("stairs", window=24, start=8, chunk=20)
    config = sys.modules["vllm.config"].get_current_vllm_config()
    config.model_config.hf_text_config.rope_parameters = given
    monkeypatch.setattr(sys.modules["vllm.config"], "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(sys.modules[backend.__module__], "get_current_vllm_config", lambda: config)
    impl = backend.get_impl_cls()(4, 16, 0.25, 2)
    builder = backend.get_builder_cls()(SimpleNamespace(block_size=SIZE), ["layer"], config, torch.device("cpu"))
    pages = Pages()
    step, query, expected = pages.step(impl.attention.method, [(200, 200), (90, 1)])
    padding = 7  # tokens that a captured graph adds: their output is nobody's
    query, keys, values = (
        torch.cat((x, torch.full((padding, *x.shape[1:]), torch.nan))) for x in (query, step.keys, step.values)
    )
    step.slot_mapping = torch.cat((step.slot_mapping, torch.full((padding,), -1)))
    step.query_start_loc_cpu, step.seq_lens = torch.tensor([0, 200, 201, 201]), torch.tensor([200, 90, 0])
    out = torch.zeros_like(query)
    metadata = builder.build(0, step)
    assert impl.forward(None, query, keys, values, pages.cache, metadata, out) is out
    assert (out[:201] - expected).abs().max() < 3e-6
    assert not out[201:].any()
    assert not impl.forward(None, query, keys, values, pages.cache, None, torch.ones_like(out)).any()
    with pytest.raises(NotImplementedError, match="does not quantise its output"):
        impl.forward(None, query, keys, values, pages.cache, metadata, out, torch.ones(()))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"alibi_slopes": [0.5]}, "ALiBi"),
        ({"sliding_window": 64}, "a sliding window"),
        ({"kv_cache_dtype": "fp8"}, "a cache in fp8"),
        ({"logits_soft_cap": 50.0}, "a softcap of scores"),
        ({"attn_type": "encoder_only"}, "attention of the type encoder_only"),
        ({"kv_sharing_target_layer_name": "layer.1"}, "layers that share keys"),
        ({"sinks": torch.zeros(4)}, "sinks"),
    ],
)
def test_what_it_does_not_run_is_an_error(backend: Any, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"CUSTOM of rope-ext-hf, an experiment, does not run with {said}"):
        backend.get_impl_cls()(4, 16, 0.25, 2, **asked)


def test_settings_without_such_a_method_are_an_error(backend: Any) -> None:
    with pytest.raises(ValueError, match="settings of this config have none; leave the option away"):
        backend.get_impl_cls()(4, 16, 0.25, 2)
