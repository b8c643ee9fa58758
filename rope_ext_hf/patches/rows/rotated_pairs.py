"""Rotation of a small model by chosen angles, and the pairs of dims that these angles mix."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.errors import UnsupportedModelError
from rope_ext_hf.patches.rows.score_products import Product
from rope_ext_hf.patches.slots.patched_slot import Slot

_ROUNDING = 1e-8
"""The part of the square of a dim that rounding may leave over."""


class NotUnderstoodError(UnsupportedModelError):
    """The error for a class whose rotation the probe does not understand."""


class Dim(NamedTuple):
    """One dim of queries or keys."""

    score: int  # the number of the scores
    side: int  # 0: queries, 1: keys
    dim: int


@dataclass(frozen=True)
class Score:
    """The scores of queries and keys in one module.

    Attributes:
        layer: the path of its layer.
        products: the numbers of the products that compute them: one, or one for each part of them.
        pairs: the two dims that each angle mixes, of the queries and of the keys.
        dims: the number of dims.
    """

    layer: str
    products: list[int]
    pairs: tuple[list[tuple[int, int]], list[tuple[int, int]]]
    dims: int

    def pair_of(self, side: int) -> dict[int, int]:
        """Return the number of its pair for each dim that rotates."""
        return {dim: pair for pair, both in enumerate(self.pairs[side]) for dim in both}


def distinct_angles(pairs: Tensor) -> Tensor:
    """Return angles in radians for pairs with these numbers: between 0.3 and 1.2, and far from each other."""
    return 0.3 + 0.9 * torch.frac(pairs * 0.6180339887)


@contextmanager
def rotating(slots: Sequence[Slot], angle: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Rotate each pair by an angle, the same at every position, inside the with block.

    `angle`: returns the angles of pairs, given their numbers.
    """

    def hook(slot: Slot, output: Any) -> Any:
        one = output[0] if isinstance(output, tuple) else output
        bare = slot.layout in ("bare", "complex")
        angles = angle(torch.arange(one.shape[-1] if bare else one.shape[-1] // 2, dtype=torch.float64))
        if slot.layout == "half":
            angles = torch.cat((angles, angles))
        elif slot.layout == "interleaved":
            angles = angles.repeat_interleave(2)
        if slot.layout == "complex":
            return torch.polar(torch.ones_like(angles), angles).to(one.dtype).expand_as(one)
        return tuple(part.to(one.dtype).expand_as(one) for part in (angles.cos(), angles.sin()))

    with ExitStack() as stack:
        for slot in slots:
            handle = slot.module.register_forward_hook(lambda _, __, output, slot=slot: hook(slot, output))
            stack.callback(handle.remove)
        yield


def left_operand(product: Product) -> Tensor:
    return product.left


def right_operand(product: Product) -> Tensor:
    assert product.right is not None
    return product.right


def pairs_of_heads(before: list[Tensor], after: list[Tensor]) -> list[tuple[int, int]]:
    """Return the two dims that each angle has mixed, from the operands of a few products before and after.

    If the heads have factors of their own (Dory), each head is looked at alone: (texts, heads, tokens, dims).
    """
    try:
        return _pairs(*(torch.cat([x.flatten(0, -2) for x in parts]) for parts in (before, after)))
    except NotUnderstoodError:
        if any(x.ndim != 4 or x.shape[1:] != before[0].shape[1:] for x in before):
            raise
        heads = zip(torch.cat(before).unbind(1), torch.cat(after).unbind(1), strict=True)
        first, *others = [_pairs(one.flatten(0, -2), other.flatten(0, -2)) for one, other in heads]
        if any(other != first for other in others):
            raise
        return first


def _pairs(before: Tensor, after: Tensor) -> list[tuple[int, int]]:
    """Return the two dims that each angle has mixed, from vectors (n, dims) before and after.

    The list is empty if nothing was rotated. A factor of a dim after the rotation does not matter.
    """
    one, other = before.double(), after.double()
    dims = (one != other).any(0).nonzero().flatten()
    one, other = one[:, dims], other[:, dims]
    # Each dim after the rotation is a sum of itself and of one other dim before it. For every two dims, the factors of
    # the best such sum, and what it leaves over.
    own, with_own = one.square().sum(0), (one * other).sum(0)
    products, with_others = one.T @ one, other.T @ one  # (dims after or before, dims before)
    determinant = own[:, None] * own - products.square()
    factor = (with_own[:, None] * own - with_others * products) / determinant
    other_factor = (with_others * own[:, None] - with_own[:, None] * products) / determinant
    left = other.square().sum(0)[:, None] - factor * with_own[:, None] - other_factor * with_others
    left = (left / other.square().sum(0)[:, None]).fill_diagonal_(torch.inf).nan_to_num(torch.inf, torch.inf, torch.inf)
    rest, partner = left.min(1) if len(dims) > 1 else (torch.full((len(dims),), torch.inf), dims)
    count = len(dims) // 2
    cosines = distinct_angles(torch.arange(count, dtype=torch.float64)).cos()
    pairs: dict[int, tuple[int, int]] = {}
    for dim, second in enumerate(partner.tolist()):
        error, pair = (cosines - factor[dim, second]).abs().min(0) if count else (torch.inf, -1)
        if rest[dim] > _ROUNDING or error > _ROUNDING**0.5 or partner[second] != dim:
            raise NotUnderstoodError("its queries or keys are not rotated pair by pair, or a norm with a mean follows")
        pairs[int(pair)] = tuple(sorted((int(dims[dim]), int(dims[second]))))  # type: ignore[assignment]
    return [pairs[pair] for pair in sorted(pairs)]
