"""The Triton kernels of attention over all zones, as Triton compiles them without a GPU: see the tests of rotations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from rope_ext_hf.attention import triton_attention
from rope_ext_hf.attention.triton_attention import ZonedAttention, attend_fused
from rope_ext_hf.methods.tiles import ZoneEdges
from rope_ext_hf.rotary.key_rotation import KeyLayout, KeyRotation
from tests.support.triton_compiler import SHARED_KILOBYTES, TRITON_3_9, WithoutDevice, resources, spills_in_products

KERNELS = triton_attention._attend_zones, triton_attention._merge_parts
HEADS, KV_HEADS = 32, 8
SPILLED = {"reading": 720, "step": 24}
"""Bytes per thread, as measured: once per zone for reading, where queries are rotated."""
SPILLED_READING_64 = 64 if TRITON_3_9 else 0
"""The same for heads of 64 dims."""


def launch(
    tokens: int,
    count: int,
    dim: int,
    parts: int = 1,
    pairing: str = "half",
    rows: int = 1,
    turns: str = "near far",
    **more: Any,
) -> None:
    query = torch.zeros(rows, tokens, HEADS, dim, dtype=torch.bfloat16).transpose(1, 2)
    key, value = torch.zeros(2, rows, KV_HEADS, count, dim, dtype=torch.bfloat16)
    near = key[:, :, -min(count, 1000 + tokens) :]

    def table(size: int) -> KeyRotation:
        return KeyRotation(*torch.zeros(2, 1, 1, size, dim // 2))

    near_keys = table(near.shape[2]) if tokens < 16 and "near" in turns else None  # as `_Attention` has it
    padding, temperature = torch.zeros(rows, dtype=torch.int32), torch.zeros(1, 1, tokens, 1)
    to_near, to_far = (table(tokens) if zone in turns else None for zone in ("near", "far"))
    layout = KeyLayout(pairing, 0, dim)
    zoned = ZonedAttention(ZoneEdges(2, -1000), padding, count, to_near, to_far, near_keys, None, layout, temperature)
    attend_fused(zoned, query, near, key, value, 0.1, parts=parts, **more)


@pytest.mark.parametrize("target", SHARED_KILOBYTES)
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize(("work", "tokens", "parts"), [("reading", 1024, 1), ("step", 1, 16)])
def test_the_kernel_keeps_its_budget(work: str, tokens: int, parts: int, dim: int, target: str) -> None:
    with WithoutDevice(target, *KERNELS) as device:
        launch(tokens, 4096, dim, parts)
    assert device.launches == (2 if parts > 1 else 1)
    (variant,) = device.variants
    taken = resources(variant)
    assert taken.spilled <= (SPILLED_READING_64 if (work, dim) == ("reading", 64) else SPILLED[work]), taken
    assert not spills_in_products(variant), taken
    assert taken.shared <= SHARED_KILOBYTES[target] * 1024, taken
    assert max(taken.loads) == max(taken.stores) == 128, taken  # bits


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("tokens", [1, 1024])
def test_sinks_soft_caps_and_other_pairings_fit(tokens: int, target: str) -> None:
    with WithoutDevice(target, *KERNELS) as device:
        launch(tokens, 4096, 128, pairing="interleaved", sinks=torch.zeros(HEADS), softcap=30.0)
    (variant,) = device.variants
    assert not spills_in_products(variant), resources(variant)


@pytest.mark.parametrize("tokens", [1, 1024])
@pytest.mark.parametrize("turns", ["near", "far", ""])
def test_queries_and_keys_may_stay_where_they_are(turns: str, tokens: int) -> None:
    """Dual chunk attention and stairs turn queries for far zones alone, and layers without RoPE turn none."""
    with WithoutDevice("sm_90", *KERNELS) as device:
        launch(tokens, 4096, 64, turns=turns)
    (variant,) = device.variants
    assert not spills_in_products(variant), resources(variant)


@pytest.mark.parametrize("target", SHARED_KILOBYTES)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_the_kernel_that_merges_parts_keeps_its_budget(dim: int, target: str) -> None:
    with WithoutDevice(target, *KERNELS[::-1]) as device:
        launch(1, 20_000, dim, 64, sinks=torch.zeros(HEADS))
    (variant,) = device.variants
    taken = resources(variant)
    assert not taken.spilled, taken
    assert max(taken.loads) == 128, taken


def test_two_variants_serve_any_length() -> None:
    """One reads and one decodes, whatever the number of tokens, of keys and of rows."""
    with WithoutDevice("sm_90", *KERNELS) as device:
        for tokens in (100, 127, 1024, 2000):
            for count in (2000, 2001, 5003):
                launch(tokens, count, 64)
        for rows in (1, 2):
            for count in (2000, 2001, 2015, 5003):
                launch(1, count, 64, parts=7, rows=rows)
    assert device.launches == 4 * 3 + 2 * 4 * 2
    assert len(device.variants) == 2
