"""The Triton kernel that merges partial softmaxes, as Triton compiles it without a GPU: see the tests of rotations."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from rope_ext_hf.attention import triton_merging
from rope_ext_hf.attention.triton_merging import merge_fused
from tests.support.triton_compiler import TARGETS, TRITON_3_9, WithoutDevice, resources

KERNEL = triton_merging._merge
_HALF = (72, 64) if TRITON_3_9 else (64, 40)
REGISTERS = {torch.bfloat16: _HALF, torch.float16: _HALF, torch.float32: (80, 56)}
"""Per thread, NVIDIA and AMD, as measured and rounded up to a multiple of 8."""


def merge(dtype: torch.dtype, dim: int, queries: int, parts: int) -> None:
    out, lse = torch.zeros(1, 1, 32, queries, dim, dtype=dtype), torch.zeros(1, 1, 32, queries)
    tokens_first = torch.zeros(parts, queries, 32, dim, dtype=dtype).transpose(1, 2)
    merge_fused(out, lse, tokens_first, torch.zeros(parts, 32, queries))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", REGISTERS, ids=str)
def test_the_kernel_keeps_its_budget(dtype: torch.dtype, dim: int, target: str) -> None:
    with WithoutDevice(target, KERNEL) as device:
        merge(dtype, dim, 1041, 3)
    assert device.launches == 1
    (variant,) = device.variants
    taken = resources(variant)
    assert taken.registers <= REGISTERS[dtype][target.startswith("gfx")], taken
    assert not taken.spilled, taken
    assert taken.shared <= 256, taken
    assert max(taken.loads) == max(taken.stores) == 128, taken  # bits: of the parts; of the log-sum-exp they are 32


def test_one_variant_serves_any_number_of_queries_and_parts() -> None:
    with WithoutDevice("sm_90", KERNEL) as device:
        for queries in (1, 2, 3, 16, 31, 100):
            for parts in (1, 2, 16, 31):
                merge(torch.bfloat16, 128, queries, parts)
    assert device.launches == 6 * 4
    assert len(device.variants) == 1
