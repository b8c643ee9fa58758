"""The Triton kernel that merges partial softmaxes, against the softmax over all keys: on a CUDA device, or in Triton's
interpreter."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from rope_ext_hf.attention.tile_batches import Spans, strided_spans
from rope_ext_hf.attention.triton_merging import merge_fused

SHAPES = [  # rows, spans, heads, queries, dim, parts of the same queries
    (1, 1, 4, 1, 128, 31),
    (2, 3, 2, 70, 24, 1),
    (1, 1, 3, 100, 64, 2),
    (3, 1, 2, 33, 16, 1),
]


def compare(device: str) -> None:
    """Compare the kernel with the softmax over all keys.

    `out` and `lse` are views of longer tensors, whose other elements must stay; parts lie in memory as flash attention
    returns them.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows, spans, heads, queries, dim, parts in SHAPES:
            generator = torch.Generator().manual_seed(queries)
            whole = torch.randn(rows, heads, spans * (queries + 3), dim, generator=generator).to(device, dtype)
            whole_lse = 9 * torch.randn(rows, heads, spans * (queries + 3), generator=generator).to(device)
            out, lse = (strided_spans(x, Spans(0, queries, queries + 3, spans)) for x in (whole, whole_lse[..., None]))
            out, lse = (out, lse[..., 0]) if spans > 1 else (out[:, None], lse[:, None, ..., 0])
            out[:, :, :, :2], lse[:, :, :, :2] = 0, -math.inf  # no keys so far
            many = rows * spans * parts
            more = torch.randn(many, queries, heads, dim, generator=generator).to(device, dtype).transpose(1, 2)
            more_lse = 9 * torch.randn(many, heads, queries, generator=generator).to(device)
            before, before_lse, rest = out.double(), lse.double(), whole.clone()
            merge_fused(out, lse, more, more_lse)
            values, scores = (
                torch.cat([x[:, :, None], y.double().reshape(rows, spans, parts, *y.shape[1:])], 2)
                for x, y in ((before, more), (before_lse, more_lse))
            )
            expected = (scores.softmax(2)[..., None] * values).sum(2)
            error = (out.double() - expected).abs() / expected.abs().clamp(min=1)
            assert error.max() <= (2e-6 if dtype == torch.float32 else torch.finfo(dtype).eps)
            torch.testing.assert_close(lse.double(), scores.logsumexp(2), rtol=2e-6, atol=2e-6)
            between = torch.ones(whole.shape[2], dtype=torch.bool).view(spans, -1)
            between[:, :queries] = False
            assert torch.equal(whole[:, :, between.flatten()], rest[:, :, between.flatten()])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the next test runs the kernel itself")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_the_kernel_in_the_interpreter() -> None:
    code = "from tests.attention.test_triton_merging import compare; compare('cpu')"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_merges_as_torch_does_on_a_gpu() -> None:
    compare("cuda")
