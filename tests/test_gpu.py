"""What only a CUDA device can show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import rope_ext_hf as rope
from rope_ext_hf.attention.blockwise import attend
from rope_ext_hf.attention.rules import Rotation, RotationTable, TokenPositions
from rope_ext_hf.eval import perplexity
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.reference import path
from rope_ext_hf.rotary.key_rotation import KeyLayout
from tests.support.models import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Any wait of the host for the device inside is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_static_forward_never_waits_for_the_device() -> None:
    model = rope.patch(build("llama").cuda(), "yarn", factor=4)
    ids = torch.randint(0, 97, (2, 32), device="cuda")
    positions = torch.arange(32, device="cuda")[None]
    model(ids, position_ids=positions, past_key_values=DynamicCache())
    # Given neither a mask nor a cache, transformers itself waits, to see whether positions start anew in a row.
    with torch.no_grad(), no_synchronisation():
        model(ids, position_ids=positions, past_key_values=DynamicCache())


def test_patching_before_and_after_a_move_is_the_same() -> None:
    ids = torch.randint(0, 97, (1, 200), device="cuda")
    before = rope.patch(build("llama"), "yarn", factor=4).cuda()
    after = rope.patch(build("llama").cuda(), "yarn", factor=4)
    with torch.no_grad():
        torch.testing.assert_close(before(ids).logits, after(ids).logits)


def test_compiled_equals_eager() -> None:
    model = rope.patch(build("llama").cuda().eval(), "yarn", factor=4)
    ids = torch.randint(0, 97, (1, 128), device="cuda")
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)(ids, use_cache=False).logits  # type: ignore[no-untyped-call]
        torch.testing.assert_close(compiled, model(ids, use_cache=False).logits, atol=1e-3, rtol=1e-3)


def test_device_map_auto(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    build("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto")
    rope.patch(model, "yarn", factor=4)
    ids = torch.randint(0, 97, (1, 200), device="cuda")
    reference = rope.patch(build("llama").cuda(), "yarn", factor=4)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, atol=1e-4, rtol=1e-4)


def test_the_bundled_model_reads_on_in_bfloat16() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.bfloat16).cuda().eval()
    plain = {r.length: r.bits_per_token for r in perplexity(model, "stdlib", lengths=[256, 1024], max_spans=16)}
    with rope.patched(model, "yarn", factor=4):
        yarn = {r.length: r.bits_per_token for r in perplexity(model, "stdlib", lengths=[256, 1024], max_spans=16)}
    assert plain[256] <= 1.4
    assert plain[1024] >= plain[256] + 1.0
    assert yarn[1024] <= plain[256] + 0.25


METHODS = ["rerope", "leaky-rerope", "self-extend", "dca"]


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    assert (found.float().cpu() - wanted).norm() / wanted.norm() < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gemma2", "glm", "cohere"])
@pytest.mark.parametrize("method", METHODS)
def test_attention_level_methods_give_what_they_give_on_the_cpu(method: str, name: str, dtype: torch.dtype) -> None:
    ids = torch.randint(0, 97, (2, 300), generator=torch.Generator().manual_seed(0))
    padded = torch.ones_like(ids)
    padded[1, :100] = 0
    model: Any = rope.patch(build(name).eval(), method)
    tolerance = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.06}[dtype]
    with torch.no_grad():
        wanted = [model(ids, attention_mask=mask).logits[mask.bool()] for mask in (torch.ones_like(ids), padded)]
        model.to("cuda", dtype)
        ids = ids.cuda()
        for mask, expected in zip((torch.ones_like(ids), padded.cuda()), wanted, strict=True):
            whole = model(ids, attention_mask=mask).logits
            close(whole[mask.bool()], expected, tolerance)
            cache = model(ids[:, :200], attention_mask=mask[:, :200], use_cache=True).past_key_values
            chunk = model(ids[:, 200:299], attention_mask=mask[:, :299], past_key_values=cache).logits
            step = model(ids[:, 299:], attention_mask=mask, past_key_values=cache).logits
            close(torch.cat([chunk, step], dim=1), whole[:, 200:].float().cpu(), tolerance)


@pytest.mark.parametrize("method", METHODS)
def test_attention_level_methods_under_autocast_and_with_gradients(method: str) -> None:
    model: Any = rope.patch(build("llama"), method)
    ids = torch.randint(0, 97, (2, 150))
    with torch.no_grad():
        wanted = model(ids).logits
    model.cuda()
    with torch.autocast("cuda", torch.bfloat16):
        with torch.no_grad():
            close(model(ids.cuda()).logits, wanted, 0.06)
        model(ids.cuda(), labels=ids.cuda()).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (32, 32), (28, 4)])
@pytest.mark.parametrize("name", METHODS)
def test_memory_of_a_prefill_of_16k(name: str, heads: int, kv_heads: int) -> None:
    """What tests/attention/test_blockwise.py works out without a device."""
    rotary = rope.Rotary(dim=128, theta=10_000.0, trained_length=4096)
    method: Any = resolve_method(name, rotary)
    method = method.bind(rotary, 2**14)
    made = [torch.randn(1, n, 2**14, 128, dtype=torch.bfloat16, device="cuda") for n in (heads, kv_heads, kv_heads)]
    positions = torch.arange(2**14, device="cuda")[None]
    rotation = Rotation(RotationTable(rotary.inv_freq()), KeyLayout("half", 0, 128))

    def most(run: Callable[..., object]) -> int:
        torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode():
            run(*made)
        return torch.cuda.max_memory_allocated()

    def plain(query: Tensor, key: Tensor, value: Tensor) -> object:
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> object:
        return attend(method, rotation, TokenPositions(positions, positions, (0,), None), query, key, value, 128**-0.5)

    assert most(ours) <= 1.5 * most(plain)
