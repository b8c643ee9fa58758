"""Which two dims of a head turn together: `half` (i, i + d/2) or `interleaved` (2i, 2i + 1); from one to the other.

    >>> interleaved_to_half(torch.arange(8), heads=1)
    tensor([0, 2, 4, 6, 1, 3, 5, 7])

Both pairings compute the same attention when the rows of the query and key projections are in the order that the code
expects: the scores q.k sum over dims, and the same permutation acts on both (RoFormer, arXiv 2104.09864, section 3.2.2
has the interleaved form; GPT-NeoX introduced the half form). Pure tensor functions; nothing here knows of models.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["PAIRINGS", "half_to_interleaved", "interleaved_to_half", "repair", "rotate", "rotate_complex"]

PAIRINGS = ("half", "interleaved")


def interleaved_to_half(
    tensor: Tensor, *, heads: int, rotary_dim: int | None = None, start: int = 0, dim: int = 0
) -> Tensor:
    """Reorder a dimension whose heads are paired (2i, 2i + 1) so that they are paired (i, i + rotary_dim / 2).

    Args:
        tensor: any dtype and shape; dimension `dim` has heads x head_dim entries (rows of a projection weight or of its
            bias, a norm weight, ...).
        heads: of this tensor: key projections count their own.
        rotary_dim: rotated dims per head; default: head_dim. The others stay where they are.
        start: where in a head the rotated dims begin.
        dim: the dimension of the heads.

    Returns:
        A tensor of the same shape; memory is written once.

    Raises:
        ValueError: numbers that do not fit the shape.
    """
    return _reorder(tensor, heads, rotary_dim, start, dim, into=1)


def half_to_interleaved(
    tensor: Tensor, *, heads: int, rotary_dim: int | None = None, start: int = 0, dim: int = 0
) -> Tensor:
    """The inverse of `interleaved_to_half`, whose arguments these are."""
    return _reorder(tensor, heads, rotary_dim, start, dim, into=0)


def repair(
    tensor: Tensor, to: str, *, heads: int, rotary_dim: int | None = None, start: int = 0, dim: int = 0
) -> Tensor:
    """From the other pairing to this one; arguments as `interleaved_to_half`."""
    if to not in PAIRINGS:
        raise ValueError(f"pairing must be one of {', '.join(PAIRINGS)}, got {to!r}")
    function = interleaved_to_half if to == "half" else half_to_interleaved
    return function(tensor, heads=heads, rotary_dim=rotary_dim, start=start, dim=dim)


def _reorder(tensor: Tensor, heads: int, rotary_dim: int | None, start: int, dim: int, into: int) -> Tensor:
    """`into`: which of the two dims that pairs are split into holds a pair's two members, 0 or 1."""
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"dim {dim} is not one of a tensor of shape {tuple(tensor.shape)}")
    dim %= tensor.ndim
    size = tensor.shape[dim]
    if heads < 1 or size % heads:
        raise ValueError(f"{size} rows are not {heads} heads of equal size")
    head_dim = size // heads
    turned = head_dim - start if rotary_dim is None else rotary_dim
    if turned < 0 or turned % 2 or start < 0 or start + turned > head_dim:
        raise ValueError(f"{turned} rotated dims from {start} on do not lie in pairs in a head of {head_dim}")
    heads_apart = _split(tensor, dim, heads, head_dim)
    halves = turned // 2
    pairs = _split(heads_apart.narrow(dim + 1, start, turned), dim + 1, *((halves, 2) if into == 1 else (2, halves)))
    moved = pairs.transpose(dim + 1, dim + 2)
    if turned == head_dim:
        whole: Tensor = moved.reshape(tensor.shape)
        return whole
    out = torch.empty_like(heads_apart, memory_format=torch.contiguous_format)
    for begin, length in ((0, start), (start + turned, head_dim - start - turned)):
        out.narrow(dim + 1, begin, length).copy_(heads_apart.narrow(dim + 1, begin, length))
    _split(out.narrow(dim + 1, start, turned), dim + 1, *moved.shape[dim + 1 : dim + 3]).copy_(moved)
    return out.view(tensor.shape)


def _split(tensor: Tensor, dim: int, first: int, second: int) -> Tensor:
    """One dimension as two; a view, whatever the strides."""
    return tensor.view(*tensor.shape[:dim], first, second, *tensor.shape[dim + 1 :])


def rotate(x: Tensor, angles: Tensor, pairing: str) -> Tensor:
    """Turn every pair of the last dimension by its angle.

    Args:
        x: (..., head_dim).
        angles: (..., rotated pairs), in radians, that broadcast against x; the dims beyond 2 x pairs stay.
        pairing: "half" or "interleaved".

    Returns:
        The shape and dtype of x, worked out in the wider of both dtypes.
    """
    if pairing not in PAIRINGS:
        raise ValueError(f"pairing must be one of {', '.join(PAIRINGS)}, got {pairing!r}")
    count = angles.shape[-1]
    turned, rest = x[..., : 2 * count], x[..., 2 * count :]
    if pairing == "half":
        first, second = turned[..., :count], turned[..., count:]
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    both = (first * cos - second * sin, first * sin + second * cos)
    out = torch.cat(both, -1) if pairing == "half" else torch.stack(both, -1).flatten(-2)
    return torch.cat([out.to(x.dtype), rest.expand(*out.shape[:-1], -1)], -1)


def rotate_complex(x: Tensor, angles: Tensor) -> Tensor:
    """The interleaved rotation as Meta's Llama writes it: adjacent dims are one complex number, times e^(i angle)."""
    count = angles.shape[-1]
    wide = torch.promote_types(x.dtype, angles.dtype)
    wide = torch.promote_types(wide, torch.float32)
    turned = torch.view_as_complex(x[..., : 2 * count].to(wide).reshape(*x.shape[:-1], count, 2).contiguous())
    out = torch.view_as_real(turned * torch.polar(torch.ones_like(angles, dtype=wide), angles.to(wide))).flatten(-2)
    return torch.cat([out.to(x.dtype), x[..., 2 * count :].expand(*out.shape[:-1], -1)], -1)
