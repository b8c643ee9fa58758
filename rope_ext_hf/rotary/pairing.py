"""The two pairings of rotated dims, `half` (i, i + d/2) and `interleaved` (2i, 2i + 1), and the order of rows in each.

    >>> to_pairing(torch.arange(8), "half", heads=1)
    tensor([0, 2, 4, 6, 1, 3, 5, 7])

Both compute the same attention if the rows of the query and key projections are in the order that the code expects: the
scores q.k are sums over dims, and the same permutation acts on q and k. RoFormer (arXiv 2104.09864, section 3.2.2) has
the interleaved form; GPT-NeoX introduced the half form. All functions are pure functions of tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rope_ext_hf.rotary.pairing_names import check_pairing, row_order


def to_pairing(
    tensor: Tensor, to: str, *, heads: int, rotary_dim: int | None = None, start: int = 0, dim: int = 0
) -> Tensor:
    """Return a copy of a tensor with the dims of its heads reordered from the other pairing to the pairing `to`.

    Args:
        tensor: any dtype and shape; dimension `dim` has heads x head_dim entries (rows of a projection weight or of its
            bias, a norm weight, ...).
        to: "half", where dims (i, i + rotary_dim / 2) are a pair, or "interleaved", where (2i, 2i + 1) are.
        heads: heads in this tensor; a key projection may have fewer than the query projection.
        rotary_dim: rotated dims per head; default: all from `start` on. The others keep their place.
        start: first rotated dim of a head.
        dim: the dimension that holds the heads.

    Raises:
        ValueError: an unknown pairing, or sizes that do not fit the tensor.
    """
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"dim {dim} does not exist in a tensor of shape {tuple(tensor.shape)}")
    dim %= tensor.ndim
    size = tensor.shape[dim]
    if heads < 1 or size % heads:
        raise ValueError(f"{size} rows cannot be divided into {heads} heads")
    head_dim = size // heads
    order = row_order(to, head_dim, head_dim - start if rotary_dim is None else rotary_dim, start)
    by_head = torch.unflatten(tensor, dim, (heads, head_dim))
    moved: Tensor = by_head.index_select(dim + 1, torch.from_numpy(order).to(tensor.device)).reshape(tensor.shape)
    return moved


def rotate(x: Tensor, angles: Tensor, pairing: str) -> Tensor:
    """Return x with every pair of its last dimension rotated by its angle.

    Args:
        x: (..., head_dim).
        angles: (..., rotated pairs), in radians; must broadcast against x. Dims beyond 2 x pairs are copied.
        pairing: "half" or "interleaved".

    Returns:
        (..., head_dim) in the dtype of x; it is computed in the wider dtype of x and angles.
    """
    check_pairing(pairing)
    count = angles.shape[-1]
    rotated, rest = x[..., : 2 * count], x[..., 2 * count :]
    if pairing == "half":
        first, second = rotated[..., :count], rotated[..., count:]
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    both = (first * cos - second * sin, first * sin + second * cos)
    out = torch.cat(both, -1) if pairing == "half" else torch.stack(both, -1).flatten(-2)
    return torch.cat([out.to(x.dtype), rest.expand(*out.shape[:-1], -1)], -1)
