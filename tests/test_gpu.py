"""What only a CUDA device can show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import rope_ext_hf as rope
from rope_ext_hf.eval import perplexity
from rope_ext_hf.reference import path
from tests.models import build

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
    model(ids, position_ids=positions, use_cache=False)
    with torch.no_grad(), no_synchronisation():
        model(ids, position_ids=positions, use_cache=False)


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
    plain = {r.length: r.bits_per_byte for r in perplexity(model, "stdlib", lengths=[256, 1024], max_windows=16)}
    with rope.patched(model, "yarn", factor=4):
        yarn = {r.length: r.bits_per_byte for r in perplexity(model, "stdlib", lengths=[256, 1024], max_windows=16)}
    assert plain[256] <= 1.4
    assert plain[1024] >= plain[256] + 1.0
    assert yarn[1024] <= plain[256] + 0.25


@pytest.mark.parametrize("method", ["rerope", "leaky-rerope", "self-extend", "dca"])
def test_attention_level_methods_give_what_they_give_on_the_cpu(method: str) -> None:
    ids = torch.randint(0, 97, (2, 300), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :100] = 0
    model = rope.patch(build("llama"), method)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask).logits[mask.bool()]
        for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.05)):
            moved = model.to("cuda", dtype)
            found = moved(ids.cuda(), attention_mask=mask.cuda()).logits.float().cpu()[mask.bool()]
            assert (found - wanted).norm() / wanted.norm() < tolerance
            cache = moved(ids[:, :200].cuda(), attention_mask=mask[:, :200].cuda(), use_cache=True).past_key_values
            step = moved(ids[:, 200:].cuda(), attention_mask=mask.cuda(), past_key_values=cache).logits.float().cpu()
            whole = moved(ids.cuda(), attention_mask=mask.cuda()).logits.float().cpu()[:, 200:]
            assert (step - whole).norm() / whole.norm() < tolerance
