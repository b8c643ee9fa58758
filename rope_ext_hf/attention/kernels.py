"""Fused attention kernels that return the log-sum-exp of the scores, and their backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from rope_ext_hf.methods.tiles import Mask

_MIN_CUDNN_QUERIES = 128
"""Queries from which cuDNN's attention is used. It makes a plan for each shape, and every decoding step has another."""
_Three = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, or their gradients; or the gradient of the output, the output and the log-sum-exp."""


class _Fused(NamedTuple):
    """The functions that run fused attention kernels on one kind of device, and what these kernels can do."""

    run: Callable[[Tensor, Tensor, Tensor, float, Mask], tuple[Tensor, Tensor]]
    """(query, key, value, scale, mask) -> output and log-sum-exp."""
    backward: Callable[[_Three, _Three, float, bool], _Three]
    """(whole, rows, scale, causal) -> gradients of the rows, see `run_backward`."""
    kernel: Callable[[Tensor, int], int] | None
    """(query, widest head_dim) -> the kernel that takes them, a value of `SDPBackend`; MATH: no kernel does.

    None: flash attention takes all.
    """
    head_dim_multiple: int  # head_dim is padded to a multiple of this
    windows: bool  # whether its flash attention takes masks that are numbers


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Mask) -> tuple[Tensor, Tensor]:
    # Before torch 2.9 this kernel was wrong where heads share keys, hence the minimum version of torch.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(query, key, value, 0.0, mask == "causal", scale=scale)
    return out, lse


def _on_cuda(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Mask) -> tuple[Tensor, Tensor]:
    """Return the attention by a fused kernel on CUDA, and the log-sum-exp of its scores.

    Flash attention and cuDNN's attention let query heads share key heads; the memory-efficient kernel, used where they
    cannot run, does not.
    """
    rows, heads, tokens, dim = query.shape
    if isinstance(mask, int):  # the operator of flash attention used below takes no windows
        flash, sizes = torch.ops.aten._flash_attention_forward, (tokens, key.shape[-2])
        window = {"window_size_left": mask - 1, "window_size_right": 0}
        tokens_first = (x.transpose(1, 2) for x in (query, key, value))
        out, lse, *_ = flash(*tokens_first, None, None, *sizes, 0.0, False, False, scale=scale, **window)
        return out.transpose(1, 2), lse
    causal = mask == "causal"
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


def _cpu_backward(whole: _Three, rows: _Three, scale: float, causal: bool) -> _Three:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    grad, out, lse = whole
    dq, dk, dv = flash(grad, *rows, out, lse, 0.0, causal, scale=scale)
    return dq, dk, dv


def _cuda_backward(whole: _Three, rows: _Three, scale: float, causal: bool) -> _Three:
    """Return the gradients on CUDA, by the backward of flash attention or of the memory-efficient kernel.

    The backward of flash attention also serves after cuDNN's forward. The arguments are as in `run_backward`.
    """
    (grad, out, lse), (query, key, value) = whole, rows
    with torch.enable_grad():  # so that torch chooses for the backward, which takes fewer head_dims on some devices
        chosen = _torch_choice(query.detach().requires_grad_(), key, value, causal)
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of the dropout, which is 0
    if chosen in (SDPBackend.FLASH_ATTENTION.value, SDPBackend.CUDNN_ATTENTION.value):
        flash, sizes = torch.ops.aten._scaled_dot_product_flash_attention_backward, (query.shape[-2], key.shape[-2])
        dq, dk, dv = flash(grad, *rows, out, lse.contiguous(), None, None, *sizes, 0.0, causal, seed, seed, scale=scale)
        return dq, dk, dv
    heads, kv_heads = query.shape[1], key.shape[1]
    if causal:
        key, value = (x.repeat_interleave(heads // kv_heads, dim=1) for x in (key, value))
    else:  # as in the forward
        grad, out, lse, query = (x.reshape(len(x), kv_heads, -1, *x.shape[3:]) for x in (grad, out, lse, query))
    lse = nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)  # as the forward returns it
    efficient, gradients = torch.ops.aten._scaled_dot_product_efficient_attention_backward, (True, True, True, False)
    dq, dk, dv, _ = efficient(grad, query, key, value, None, out, lse, seed, seed, 0.0, gradients, causal, scale=scale)
    dk, dv = (x.reshape(len(x), kv_heads, -1, *x.shape[2:]).sum(2) for x in (dk, dv))
    return dq.reshape(len(dq), heads, -1, dq.shape[-1]), dk, dv


def _torch_choice(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> int:
    """Return the kernel that scaled_dot_product_attention would run, as a value of `SDPBackend`.

    MATH stands for no fused kernel. torch chooses by the device, its own build and the kernels that
    `torch.nn.attention.sdpa_kernel` allows.
    """
    return torch._fused_sdp_choice(query, key, value, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1])


def _cuda_kernel(query: Tensor, width: int) -> int:
    """Return the kernel that torch would run for heads of `width` dims, as a value of `SDPBackend`.

    MATH stands for no fused kernel.
    """
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return SDPBackend.MATH.value
    padded = -(-width // 8) * 8
    # One head: any kernel can be made to serve grouped heads.
    example = query.new_empty(1, 1, _MIN_CUDNN_QUERIES, padded)
    return _torch_choice(example, example, example)


KERNELS = {
    "cpu": _Fused(_on_cpu, _cpu_backward, None, 1, False),
    "cuda": _Fused(_on_cuda, _cuda_backward, _cuda_kernel, 8, torch.version.hip is None),
}


def usable_kernel(query: Tensor, value: Tensor) -> tuple[bool, bool]:
    """Return whether a fused kernel can run on such queries and values, and whether it takes sizes of windows.

    A kernel that takes the size of a window in tokens needs no mask for a tile with a sliding window. Where torch
    prefers cuDNN's attention the second value is False, because torch does not pass sizes of windows on to cuDNN.
    """
    if (fused := KERNELS.get(query.device.type)) is None:
        return False, False
    if fused.kernel is None:
        return True, fused.windows
    kernel = fused.kernel(query, max(query.shape[-1], value.shape[-1]))
    return kernel != SDPBackend.MATH.value, fused.windows and kernel == SDPBackend.FLASH_ATTENTION.value


def run_kernel(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Mask, joint: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the attention by a fused kernel, and the log-sum-exp of its scores.

    Args:
        query: (rows or 1, heads, queries, head_dim).
        key, value: (rows, kv_heads, keys, ...).
        scale: the factor of scores.
        mask: the keys that queries see.
        joint: whether all rows have the same queries; if anticausal, they are merged into one softmax.

    Returns:
        The output (rows, heads, queries, head_dim of value), and the log-sum-exp (rows, heads, queries), float32 or
        float64. Rows that were merged are one row.
    """
    if mask == "anticausal":  # causal, read backwards
        out, lse = run_kernel(query.flip(-2), key.flip(-2), value.flip(-2), scale, "causal")
        if joint:  # before `flip`, which then has fewer rows to copy
            out, lse = join_rows(out, lse)
        return out.flip(-2), lse.flip(-1)
    width, fused = value.shape[-1], KERNELS[query.device.type]
    query, key, value = _pad_head_dims(max(query.shape[-1], width), query, key, value)
    out, lse = fused.run(query.expand(len(key), -1, -1, -1), key, value, scale, mask)
    return out[..., :width], lse


def join_rows(out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the softmaxes of rows that have the same queries and different keys.

    Args:
        out: the attention of each row, (rows, heads, queries, dim).
        lse: the log-sum-exp of the scores of each row, (rows, heads, queries).

    Returns:
        Both for all keys together, with a single row.
    """
    # (queries, heads, 1, rows) @ (queries, heads, rows, head_dim), or heads first, as in memory: no copy.
    order, back = ((2, 1, 0), (2, 1, 0)) if out.stride(1) < out.stride(2) else ((1, 2, 0), (2, 0, 1))
    weights = lse.permute(order).softmax(-1)[:, :, None].to(out.dtype)
    joined = (weights @ out.permute(*order, 3)).to(out.dtype)  # under autocast the product has a shorter dtype
    return joined.permute(*back, 3), lse.logsumexp(0, keepdim=True)


def run_backward(whole: _Three, rows: _Three, scale: float, mask: Mask) -> _Three:
    """Return the gradients of queries, keys and values that took part in a softmax over these keys and others.

    The backward of flash attention computes the weights anew as exp(score - lse). All that it needs of the other keys
    is the product of the output and its gradient, so it is exact for a part of the keys as well (ring attention, Liu et
    al. 2023, arXiv 2310.01889).

    Args:
        whole: the gradient of the output and the output of the softmax over all keys, (rows, heads, queries, head_dim
            of value), and its log-sum-exp, (rows, heads, queries, 1).
        rows: query, key and value, as in `run_kernel`. Where all rows have the same queries, `whole` has one row.
        scale, mask: as in `run_kernel`.
    """
    if mask == "anticausal":
        grad, out, lse, query, key, value = (x.flip(-2) for x in (*whole, *rows))
        dq, dk, dv = run_backward((grad, out, lse), (query, key, value), scale, "causal")
        return dq.flip(-2), dk.flip(-2), dv.flip(-2)
    widths = [x.shape[-1] for x in rows]
    grad, out, query, key, value = _pad_head_dims(max(widths), *whole[:2], *rows)
    backward, same_queries = KERNELS[query.device.type].backward, len(query) < len(key)
    grad, out, lse, query = (x.expand(len(key), -1, -1, -1) for x in (grad, out, whole[2], query))
    dq, dk, dv = backward((grad, out, lse[..., 0]), (query, key, value), scale, mask == "causal")
    if same_queries:
        dq = dq.sum(0, keepdim=True)
    return dq[..., : widths[0]], dk[..., : widths[1]], dv[..., : widths[2]]


def _pad_head_dims(widest: int, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors padded to the same number of dims per head, adjacent in memory, as kernels require.

    `widest`: the largest number of dims per head.
    """
    multiple = KERNELS[tensors[0].device.type].head_dim_multiple
    wide = -(-widest // multiple) * multiple
    padded = list(tensors)
    for index, x in enumerate(tensors):
        if x.shape[-1] != wide or x.stride(-1) != 1:
            padded[index] = nn.functional.pad(x, (0, wide - x.shape[-1])).contiguous()
    return padded
