"""Fused attention kernels that return the log-sum-exp of the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

_MIN_CUDNN_QUERIES = 128
"""Queries from which cuDNN's attention is used. It makes a plan for each shape, and every decoding step has another."""


class _Fused(NamedTuple):
    """The fused kernels of one kind of device.

    Attributes:
        run: (query, key, value, scale, causal) -> output and log-sum-exp.
        supports: (query, widest head_dim) -> whether they take these tensors.
        head_dim_multiple: head_dim is padded to a multiple of this.
    """

    run: Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
    supports: Callable[[Tensor, int], bool]
    head_dim_multiple: int


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    # Before torch 2.9 it was wrong where heads share keys, hence the minimum version.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(query, key, value, 0.0, causal, scale=scale)
    return out, lse


def _on_cuda(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Flash attention or cuDNN's, which take grouped heads; else the memory-efficient kernel, which does not."""
    rows, heads, tokens, dim = query.shape
    chosen = _torch_choice(query, key, value, causal)
    if chosen == SDPBackend.CUDNN_ATTENTION.value and tokens >= _MIN_CUDNN_QUERIES:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = cudnn(query, key, value, None, True, 0.0, causal, False, scale=scale)
        return out, lse.reshape(rows, heads, tokens)  # the kernel returns (rows, heads, tokens, 1)
    if chosen in (SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = flash(query, key, value, 0.0, causal, False, scale=scale)
        return out, lse
    groups = heads // key.shape[1]
    if groups > 1 and causal:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    elif groups > 1:  # without a mask, queries of heads that share keys are just more queries
        query = query.reshape(rows, key.shape[1], groups * tokens, dim)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = efficient(query, key, value, None, True, 0.0, causal, scale=scale)
    lse = lse[..., : query.shape[-2]]  # the kernel pads it to a multiple of 32
    return out.reshape(rows, heads, tokens, -1), lse.reshape(rows, heads, tokens)


def _torch_choice(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> int:
    """The kernel that scaled_dot_product_attention would run, a value of `SDPBackend`; MATH: none.

    torch answers for the device, its build and what the user has allowed by `torch.nn.attention.sdpa_kernel`.
    """
    return torch._fused_sdp_choice(query, key, value, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1])


def _cuda_supports(query: Tensor, width: int) -> bool:
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    padded = -(-width // 8) * 8
    # One head: any kernel can be made to serve grouped heads.
    example = query.new_empty(1, 1, _MIN_CUDNN_QUERIES, padded)
    return _torch_choice(example, example, example) != SDPBackend.MATH.value


KERNELS = {"cpu": _Fused(_on_cpu, lambda query, width: True, 1), "cuda": _Fused(_on_cuda, _cuda_supports, 8)}


def has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether a fused kernel takes these tensors."""
    fused = KERNELS.get(query.device.type)
    return fused is not None and fused.supports(query, max(query.shape[-1], value.shape[-1]))


def run_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: str) -> tuple[Tensor, Tensor]:
    """Run a fused kernel.

    Args:
        query: (rows, heads, queries, head_dim).
        key, value: (rows, kv_heads, keys, ...).
        mask: "full", "causal" or "anticausal", as in `TileRectangle`.

    Returns:
        (rows, heads, queries, head_dim of value), and the log-sum-exp of the scores, (rows, heads, queries) float32.
    """
    if mask == "anticausal":  # causal, read backwards
        out, lse = run_kernel(query.flip(-2), key.flip(-2), value.flip(-2), scale, "causal")
        return out.flip(-2), lse.flip(-1)
    fused, width = KERNELS[query.device.type], value.shape[-1]
    wide = -(-max(width, query.shape[-1]) // fused.head_dim_multiple) * fused.head_dim_multiple
    query, key, value = (_pad_head_dim(x, wide) for x in (query, key, value))
    out, lse = fused.run(query, key, value, scale, mask == "causal")
    return out[..., :width], lse.float()


def _pad_head_dim(x: Tensor, wide: int) -> Tensor:
    """`x` with `wide` dims per head, which lie next to each other in memory, as kernels require."""
    if x.shape[-1] < wide:
        return nn.functional.pad(x, (0, wide - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
