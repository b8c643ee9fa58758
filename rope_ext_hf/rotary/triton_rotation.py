"""`KeyRotation.apply` as one Triton kernel: it reads and writes each element once, where torch makes several passes.

Triton comes with torch for CUDA and is optional: without it, or where it cannot compile, torch does the same.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


_ELEMENTS_PER_PROGRAM = 2048
"""Pairs that one program of the kernel rotates, a power of two."""


def can_fuse(x: Tensor) -> bool:
    """Whether the kernel rotates this tensor: on CUDA, outside autograd and outside graphs that torch compiles."""
    if x.device.type != "cuda" or triton is None or torch.compiler.is_compiling():
        return False
    if not x.numel() or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    return not (x.requires_grad and torch.is_grad_enabled()) and _compiles(x.device)


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Whether Triton can build the kernel here, which takes a C compiler and a supported device."""
    x, angle = torch.zeros(1, 1, 1, 2, device=device), torch.zeros(1, 1, 1, 1, device=device)
    try:
        rotate_fused(x, angle, angle, start=0, half=True)
    except Exception as error:  # whatever a compiler may raise
        warnings.warn(
            f"Triton could not build the kernel that rotates keys, so torch's own, slower operators are used: {error}",
            stacklevel=2,
        )
        return False
    return True


def rotate_fused(x: Tensor, cos: Tensor, sin: Tensor, *, start: int, half: bool, in_place: int = 0) -> Tensor:
    """Rotated keys or queries in new memory; dims that are not rotated are copied.

    The last `in_place` tokens are rotated in `x` itself, and returned as they were.

    Args:
        x: (rows, heads, tokens, head_dim), of any strides.
        cos, sin: float32 (rows or 1, 1, tokens or 1, dim // 2).
        start: `dim` dims from here on are rotated.
        half: pairs are i and i + dim // 2 of them; False: 2i and 2i + 1.
    """
    rows, heads, tokens, width = x.shape
    out = torch.empty_like(x)
    cos, sin = (part.expand(rows, 1, tokens, -1) for part in (cos, sin))
    pairs = cos.shape[-1]
    others = width - 2 * pairs
    pairs_block = triton.next_power_of_2(pairs)
    tokens_block = max(1, min(triton.next_power_of_2(tokens), _ELEMENTS_PER_PROGRAM // pairs_block))
    blocks = triton.cdiv(tokens, tokens_block)
    with _current(x.device):
        _rotate[(blocks * rows * heads,)](
            x, out, cos, sin,
            *x.stride(), *out.stride(), cos.stride(0), *cos.stride()[2:], sin.stride(0), *sin.stride()[2:],
            heads, tokens, blocks, tokens - in_place,
            START=start, DIM=2 * pairs, OTHERS=others, HALF=half, IN_PLACE=in_place > 0,
            TOKENS=tokens_block, PAIRS=pairs_block, OTHERS_BLOCK=triton.next_power_of_2(max(1, others)),
        )  # fmt: skip
    return out


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one, on which Triton launches; Triton's interpreter works on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _rotate(  # type: ignore[no-untyped-def]
        x, out, cos, sin,
        x_row, x_head, x_token, x_dim, out_row, out_head, out_token, out_dim,
        cos_row, cos_token, cos_pair, sin_row, sin_token, sin_pair,
        heads, tokens, blocks, first_in_place,
        START: tl.constexpr, DIM: tl.constexpr, OTHERS: tl.constexpr, HALF: tl.constexpr, IN_PLACE: tl.constexpr,
        TOKENS: tl.constexpr, PAIRS: tl.constexpr, OTHERS_BLOCK: tl.constexpr,
    ):  # fmt: skip
        """One program: a block of tokens of one head. Offsets are int64: keys may have more than 2^31 elements."""
        program = tl.program_id(0)
        row = (program // blocks // heads).to(tl.int64)
        head = (program // blocks % heads).to(tl.int64)
        token = ((program % blocks) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
        pair = tl.arange(0, PAIRS)[None]
        inside = (token < tokens) & (pair < DIM // 2)
        if HALF:
            first = START + pair
            second = START + DIM // 2 + pair
        else:
            first = START + 2 * pair
            second = START + 2 * pair + 1
        read = x + row * x_row + head * x_head + token * x_token
        write = out + row * out_row + head * out_head + token * out_token
        a = tl.load(read + first * x_dim, mask=inside).to(tl.float32)
        b = tl.load(read + second * x_dim, mask=inside).to(tl.float32)
        c = tl.load(cos + row * cos_row + token * cos_token + pair * cos_pair, mask=inside)
        s = tl.load(sin + row * sin_row + token * sin_token + pair * sin_pair, mask=inside)
        rotated_a, rotated_b = a * c - b * s, b * c + a * s
        if IN_PLACE:
            stays = token >= first_in_place
            tl.store(read + first * x_dim, rotated_a.to(x.dtype.element_ty), mask=inside & stays)
            tl.store(read + second * x_dim, rotated_b.to(x.dtype.element_ty), mask=inside & stays)
            rotated_a, rotated_b = tl.where(stays, a, rotated_a), tl.where(stays, b, rotated_b)
        tl.store(write + first * out_dim, rotated_a.to(out.dtype.element_ty), mask=inside)
        tl.store(write + second * out_dim, rotated_b.to(out.dtype.element_ty), mask=inside)
        if OTHERS > 0:
            other = tl.arange(0, OTHERS_BLOCK)[None]
            present = (token < tokens) & (other < OTHERS)
            dim = tl.where(other < START, other, other + DIM)
            tl.store(write + dim * out_dim, tl.load(read + dim * x_dim, mask=present), mask=present)
