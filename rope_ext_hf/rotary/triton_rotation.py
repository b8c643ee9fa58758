"""`KeyRotation.apply` as one Triton kernel, which reads and writes each element once, where torch makes several passes.

Triton comes with torch for CUDA and is optional: without it, or where it cannot compile, torch's operators do the same.
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


_ELEMENTS_PER_PROGRAM = 4096  # elements of `x` that one program of the kernel reads at a time, a power of two


def can_fuse(x: Tensor) -> bool:
    """Return whether the Triton kernel can rotate this tensor.

    The tensor must be on CUDA and need no gradients, and must not be part of a graph that torch compiles.
    """
    if x.device.type != "cuda" or triton is None or torch.compiler.is_compiling():
        return False
    if not x.numel() or x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    return not (x.requires_grad and torch.is_grad_enabled()) and _compiles(x.device)


@functools.cache
def _compiles(device: torch.device) -> bool:
    """Return whether Triton can build the kernel for a device; it needs a C compiler and a supported device."""
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
    """Return rotated keys or queries in new memory; dims that are not rotated are copied.

    Args:
        x: (rows, heads, tokens, head_dim), of any strides.
        cos, sin: float32 (rows or 1, 1, tokens or 1, dim // 2).
        start: the first of the `dim` rotated dims.
        half: True: rotated dims i and i + dim // 2 form a pair; False: rotated dims 2i and 2i + 1 do.
        in_place: the number of tokens at the end that are rotated in `x` itself, and returned unrotated.
    """
    rows, heads, tokens, width = x.shape
    out = torch.empty_like(x)
    pairs = cos.shape[-1]
    others = width - 2 * pairs
    # One size of block for any number of tokens: another size would be another kernel to compile.
    pairs_block, others_block = power_of_two(pairs), power_of_two(others)
    tokens_block = max(1, _ELEMENTS_PER_PROGRAM // max(2 * pairs_block, others_block))
    with launching_on(x.device):
        _rotate[(rows * -(-tokens // tokens_block) * heads,)](
            x, out, cos, sin, *x.stride(), *out.stride(), *_strides(cos), *_strides(sin),
            heads, tokens, tokens - in_place, start, 2 * pairs, others, half, in_place > 0,
            tokens_block, pairs_block, others_block,
        )  # fmt: skip
    return out


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which Triton launches kernels on this device.

    On the CPU, where Triton's interpreter runs, the context does nothing.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def power_of_two(count: int) -> int:
    """Return the smallest power of two that is at least `count`; Triton's own function takes forty times as long."""
    return 1 << max(0, count - 1).bit_length()


def _strides(table: Tensor) -> tuple[int, int, int]:
    """Return the strides of cos or sin over rows, tokens and pairs; 0 where one row or token stands for all."""
    row, _, token, pair = table.stride()
    if table.shape[0] == 1:
        row = 0
    if table.shape[2] == 1:
        token = 0
    return row, token, pair


if triton is not None:

    @triton.jit(do_not_specialize=["tokens", "first_in_place"])  # type: ignore[untyped-decorator, unused-ignore]
    def _rotate(  # type: ignore[no-untyped-def]
        x, out, cos, sin,
        x_row, x_head, x_token, x_dim, out_row, out_head, out_token, out_dim,
        cos_row, cos_token, cos_pair, sin_row, sin_token, sin_pair,
        heads, tokens, first_in_place,
        START: tl.constexpr, DIM: tl.constexpr, OTHERS: tl.constexpr, HALF: tl.constexpr, IN_PLACE: tl.constexpr,
        TOKENS: tl.constexpr, PAIRS: tl.constexpr, OTHERS_BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Rotate a block of tokens of one head. Offsets are int64: keys may have more than 2^31 elements.

        The head varies fastest from program to program, so that programs that run at the same time read the same cos
        and sin, which come from memory once.
        """
        program = tl.program_id(0)
        head = (program % heads).to(tl.int64)
        blocks = tl.cdiv(tokens, TOKENS)
        row = (program // heads // blocks).to(tl.int64)
        token = ((program // heads % blocks) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
        pair = tl.arange(0, PAIRS)[None]
        present, stays = token < tokens, token >= first_in_place
        inside = present & (pair < DIM // 2)
        read = x + row * x_row + head * x_head + token * x_token
        write = out + row * out_row + head * out_head + token * out_token
        c = tl.load(cos + row * cos_row + token * cos_token + pair * cos_pair, mask=inside)
        s = tl.load(sin + row * sin_row + token * sin_token + pair * sin_pair, mask=inside)
        if HALF:
            first, second = START + pair, START + DIM // 2 + pair
            a, b = tl.load(read + first * x_dim, mask=inside), tl.load(read + second * x_dim, mask=inside)
            _store(read + first * x_dim, write + first * out_dim, a, a * c - b * s, inside, stays, IN_PLACE)
            _store(read + second * x_dim, write + second * out_dim, b, b * c + a * s, inside, stays, IN_PLACE)
        else:  # both members of a pair at once: each by itself would be accesses of a few bytes
            dim = START + tl.arange(0, 2 * PAIRS)[None]
            within = present & (dim < START + DIM)
            both = tl.load(read + dim * x_dim, mask=within)
            a, b = tl.split(tl.reshape(both, (TOKENS, PAIRS, 2)))
            rotated = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (TOKENS, 2 * PAIRS))
            _store(read + dim * x_dim, write + dim * out_dim, both, rotated, within, stays, IN_PLACE)
        if OTHERS > 0:
            other = tl.arange(0, OTHERS_BLOCK)[None]
            copied = present & (other < OTHERS)
            dim = tl.where(other < START, other, other + DIM)
            tl.store(write + dim * out_dim, tl.load(read + dim * x_dim, mask=copied), mask=copied)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _store(x, out, before, rotated, inside, stays, IN_PLACE: tl.constexpr):  # type: ignore[no-untyped-def]
        """Write rotated elements to `out`.

        For tokens that are rotated in place, the rotated elements go to `x` instead, and the elements as they were to
        `out`.
        """
        rotated = rotated.to(before.dtype)
        if IN_PLACE:
            tl.store(x, rotated, mask=inside & stays)
            rotated = tl.where(stays, before, rotated)
        tl.store(out, rotated, mask=inside)
