"""The Triton kernel that rotates keys against torch's operators: on a CUDA device, or in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from rope_ext_hf.rotary import triton_rotation
from rope_ext_hf.rotary.key_rotation import KeyLayout, KeyRotation
from rope_ext_hf.rotary.triton_rotation import can_fuse, rotate_fused

LAYOUTS = [
    KeyLayout("half", 0, 16),
    KeyLayout("interleaved", 0, 16),
    KeyLayout("half", 8, 8),
    KeyLayout("interleaved", 0, 12),
    KeyLayout("half", 0, 10, negative_angle=True),
]
SHAPES = [(2, 3, 70, 16), (1, 2, 1, 24), (3, 1, 5, 16)]


def compare(device: str) -> None:
    """Every layout, dtype and shape; keys that are views, as a cache and a projection give them.

    Triton's interpreter multiplies numbers of bfloat16 wrongly (3.7.1 and 3.9.0), and reads, converts and writes them
    rightly: bfloat16 can be compared there because the kernel multiplies in float32 alone.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows, heads, tokens, width in SHAPES:
            for layout in LAYOUTS:
                generator = torch.Generator().manual_seed(tokens)
                x = torch.randn(rows, tokens, heads, width, generator=generator).to(device, dtype).transpose(1, 2)
                of_rows = 1 if rows == 3 else rows
                cos, sin = torch.randn(2, of_rows, 1, tokens, layout.dim // 2, generator=generator).to(device)
                expected = KeyRotation(cos.cpu().double(), sin.cpu().double()).apply(x.cpu().double(), layout)
                sign = -1 if layout.negative_angle else 1
                rotate = partial(rotate_fused, x, cos, sign * sin, start=layout.start, half=layout.pairing == "half")
                actual = rotate()
                assert (actual.shape, actual.dtype) == (x.shape, dtype)
                check(actual, expected)
                before, kept = x.clone(), max(0, tokens - 3)
                actual = rotate(in_place=tokens - kept)
                check(actual[..., :kept, :], expected[..., :kept, :])
                check(x[..., kept:, :], expected[..., kept:, :])
                assert torch.equal(actual[..., kept:, :], before[..., kept:, :])
                assert torch.equal(x[..., :kept, :], before[..., :kept, :])


def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
    if expected.numel():
        error = (actual.cpu().double() - expected).abs() / expected.abs().clamp(min=1)
        assert error.max() <= {torch.float32: 1e-6}.get(actual.dtype, torch.finfo(actual.dtype).eps)


class FirstPrograms:
    """The kernel, launched as asked but for a grid of `count` programs."""

    def __init__(self, kernel: Any, count: int) -> None:
        self.kernel, self.count = kernel, count

    def __getitem__(self, _: tuple[int]) -> Any:
        return self.kernel[(self.count,)]


def check_order() -> None:
    """The programs that read the same cos and sin, those of all heads, run one after the other."""
    x, (cos, sin) = torch.ones(2, 3, 600, 16), torch.ones(2, 2, 1, 600, 8)

    def written_by(programs: int) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_rotation, "_rotate", FirstPrograms(triton_rotation._rotate, programs))
            patch.setattr(torch, "empty_like", torch.zeros_like)
            return rotate_fused(x, cos, sin, start=0, half=True)[..., -1] != 0

    block = int(written_by(1)[0, 0].sum())
    expected = torch.zeros(2, 3, 600, dtype=torch.bool)
    expected[0, :, :block] = True
    assert 0 < block < 600
    assert torch.equal(written_by(3), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the next test runs the kernel itself")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("check", ["compare('cpu')", "check_order()"])
def test_the_kernel_in_the_interpreter(check: str) -> None:
    code = f"from tests.rotary.test_triton_rotation import *; {check}"
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_rotates_as_torch_does_on_a_gpu() -> None:
    assert can_fuse(torch.zeros(1, 1, 1, 16, device="cuda"))
    compare("cuda")


def test_a_cpu_has_no_use_for_it() -> None:
    assert not can_fuse(torch.zeros(1, 1, 1, 16))
