"""Rotations of cached keys, and the layout of the dims that they rotate.

When a length-dependent method changes its frequencies from f to g, the key at position p turns by the angle p (g - f)
and is multiplied by the ratio of the two attention factors. A `KeyRotation` holds cos and sin of these angles for all
tokens of a forward, and a `KeyLayout` says which dims of a key they rotate. rotating_cache.py applies them to a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.rotary.exported import is_exporting
from rope_ext_hf.rotary.triton_rotation import can_fuse, rotate_fused

_MAX_LAUNCH_BOUND = 2**20
"""Number of elements up to which, without Triton, fewer launches on CUDA are worth a float32 copy of all of them."""
_FUSED_UPCAST_DEVICES = {"cuda"}
"""Devices whose kernels convert half precision to float32 as they read, so that no separate pass is needed."""


@dataclass(frozen=True)
class KeyLayout:
    """The dims of a cached key that rotate, and the way in which they rotate."""

    pairing: str  # "half" or "interleaved"
    start: int  # the first rotated dim
    dim: int  # the number of rotated dims
    in_values: bool = False  # the cache holds the rotated part of the keys as its values (latent attention)
    negative_angle: bool = False  # keys are rotated by the negative of the rotary module's angles (NanoChat)
    scaled: bool = True  # False where a norm after the rotation removes the attention factor (Llama 4)

    def members(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the first and of the second members of all rotated pairs, (..., dim // 2) each."""
        start, middle, stop = self.start, self.start + self.dim // 2, self.start + self.dim
        if self.pairing == "half":
            return x[..., start:middle], x[..., middle:stop]
        return x[..., start:stop:2], x[..., start + 1 : stop : 2]

    def unrotated(self, width: int) -> list[slice]:
        """Return the dims that do not rotate, in heads of `width` dims."""
        parts = slice(0, self.start), slice(self.start + self.dim, width)
        return [part for part in parts if part.start < part.stop]


@dataclass
class KeyRotation:
    """A rotation of cached keys by an angle that depends on the position of each key.

    Attributes:
        cos, sin: float32 (rows or 1, 1, tokens or 1, dim // 2), both multiplied by the attention factor.
        member_factors: a cache by (half pairing, negative angle): the two tensors that the first and the second members
            of all pairs are multiplied by, see `_rotate_in_two_launches`. They are computed when first needed.
    """

    cos: Tensor
    sin: Tensor
    member_factors: dict[tuple[bool, bool], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def last(self, count: int) -> KeyRotation:
        """Return the rotation for the last `count` tokens.

        `count` may exceed the number of tokens: a static cache has empty places after its tokens.
        """
        tokens = self.cos.shape[-2]
        if count == tokens:
            return self
        if count < tokens:
            return KeyRotation(self.cos[..., tokens - count :, :], self.sin[..., tokens - count :, :])
        # cos = sin = 0 makes the keys in empty places zero, whatever stood there; no query sees them.
        room = (0, 0, 0, count - tokens)
        return KeyRotation(torch.nn.functional.pad(self.cos, room), torch.nn.functional.pad(self.sin, room))

    def ending_with(self, other: KeyRotation) -> KeyRotation:
        """Return this rotation with its last tokens replaced by the tokens of another rotation."""
        kept = self.cos.shape[-2] - other.cos.shape[-2]
        cos = torch.cat((self.cos[..., :kept, :], other.cos), dim=-2)
        sin = torch.cat((self.sin[..., :kept, :], other.sin), dim=-2)
        return KeyRotation(cos, sin)

    def to(self, device: torch.device) -> KeyRotation:
        """Return this rotation with its tensors on another device."""
        return self if self.cos.device == device else KeyRotation(self.cos.to(device), self.sin.to(device))

    def apply(self, keys: Tensor, layout: KeyLayout) -> Tensor:
        """Return rotated copies of keys.

        Args:
            keys: (rows, heads, tokens, head_dim).
            layout: the dims of the keys that rotate.

        Returns:
            New memory, in the shape and dtype of `keys`.
        """
        if torch.compiler.is_compiling() or is_exporting():
            return self._apply_in_graph(keys, layout)
        if can_fuse(keys):
            return self.apply_fused(keys, layout)
        out = torch.empty_like(keys)
        if layout.dim < keys.shape[-1] or keys.requires_grad:  # autograd records writes into a tensor with a history
            out = out.copy_(keys)
        upcasts = keys.device.type in _FUSED_UPCAST_DEVICES and not keys.requires_grad
        if upcasts and keys.numel() <= _MAX_LAUNCH_BOUND:
            rotated = (..., slice(layout.start, layout.start + layout.dim))
            self._rotate_in_two_launches(keys[rotated], layout, out[rotated])
            return out
        cos, sin = self._signed(layout)
        # Every pair of dims is rotated as x' = x cos - y sin, y' = y cos + x sin.
        (x, y), (to_x, to_y) = layout.members(keys), layout.members(out)
        if keys.dtype == cos.dtype and not keys.requires_grad:  # no temporary tensor
            torch.mul(x, cos, out=to_x).addcmul_(y, sin, value=-1)
            torch.mul(y, cos, out=to_y).addcmul_(x, sin)
        elif upcasts:  # no float32 copies of the keys
            torch.addcmul(x * cos, y, sin, value=-1, out=to_x)
            torch.addcmul(y * cos, x, sin, out=to_y)
        else:
            # Autograd allows no `out=`. The products are taken in float32: bfloat16 keeps two digits of cos and sin.
            wide = torch.promote_types(keys.dtype, cos.dtype)
            x, y = x.to(wide), y.to(wide)
            to_x.copy_((x * cos).addcmul_(y, sin, value=-1))
            to_y.copy_((y * cos).addcmul_(x, sin))
        return out

    def _apply_in_graph(self, keys: Tensor, layout: KeyLayout) -> Tensor:
        """Do the same as `apply` without writing into a tensor: torch.compile fuses that, and exporters know it."""
        wide = torch.promote_types(keys.dtype, self.cos.dtype)
        x, y = (part.to(wide) for part in layout.members(keys))
        cos, sin = self._signed(layout)
        turned = x * cos - y * sin, y * cos + x * sin
        half = layout.pairing == "half"
        rotated = torch.cat(turned, dim=-1) if half else torch.stack(turned, dim=-1).flatten(-2)
        rotated = rotated.to(keys.dtype)
        if layout.dim == keys.shape[-1]:
            return rotated
        before, after = keys[..., : layout.start], keys[..., layout.start + layout.dim :]
        before, after = (part.expand(*rotated.shape[:-1], -1) for part in (before, after))
        return torch.cat((before, rotated, after), dim=-1)

    def apply_fused(self, keys: Tensor, layout: KeyLayout, *, in_place: int = 0) -> Tensor:
        """Return rotated copies of keys, as `apply` does, by a Triton kernel.

        The last `in_place` tokens are treated the other way round: they are rotated in `keys` itself, and the result
        has them as they were before.
        """
        half = layout.pairing == "half"
        return rotate_fused(keys, *self._signed(layout), start=layout.start, half=half, in_place=in_place)

    def _signed(self, layout: KeyLayout) -> tuple[Tensor, Tensor]:
        """Return cos and sin with the signs for the direction in which keys of this layout rotate."""
        return self.cos, -self.sin if layout.negative_angle else self.sin

    def _rotate_in_two_launches(self, source: Tensor, layout: KeyLayout, target: Tensor) -> None:
        """Write the rotated dims of `source` to `target`, both members of all pairs at once.

        Small keys are bound by launches, not by memory. With pairs as (..., 2, pairs) or (..., pairs, 2), the rotation
        is (x', y') = x (cos, sin) + y (-sin, cos): one product and one sum of a product.
        """
        half, pairs = layout.pairing == "half", layout.dim // 2
        member = -2 if half else -1  # the dimension of the two members of a pair
        key = (half, layout.negative_angle)
        if key not in self.member_factors:  # the layers of a model share them
            cos, sin = self._signed(layout)
            self.member_factors[key] = torch.stack((cos, sin), member), torch.stack((-sin, cos), member)
        times_first, times_second = self.member_factors[key]
        sizes = (2, pairs) if half else (pairs, 2)
        x = source.view(*source.shape[:-1], *sizes)
        out = target.view(*target.shape[:-1], *sizes)
        torch.addcmul(x.narrow(member, 0, 1) * times_first, x.narrow(member, 1, 1), times_second, out=out)


def candidate_key_layouts(width: int, dim: int) -> Iterator[KeyLayout]:
    """Yield every layout that a key of `width` dims can have, if `dim` of them rotate."""
    starts = sorted({start for start in (0, width - dim) if start >= 0})
    for start, pairing, negative_angle in product(starts, ("half", "interleaved"), (False, True)):
        yield KeyLayout(pairing, start, dim, negative_angle=negative_angle)


def infer_key_layout(unrotated: Any, rotated: Any, rotated_scaled: Any, radians: Tensor) -> KeyLayout | None:
    """Return the layout of the rotated keys in a cache layer, from three copies of it; None: it holds no rotated keys.

    Args:
        unrotated: the layer after one token that was not rotated.
        rotated: the layer after the same token, rotated by `radians`.
        rotated_scaled: as `rotated`, with an attention factor of 1.25 as well.
        radians: (dim // 2,), none near a whole cycle.

    Raises:
        ValueError: the layer changed in a way that no layout explains; the message names the attributes that did.
    """
    before, after = vars(unrotated), vars(rotated)
    changed = [name for name in before if not nearly_equal(before[name], after[name])]
    if not changed:
        return None
    if changed in (["keys"], ["values"]):
        name = changed[0]
        old, new = before[name], after[name]
        wide = radians.to(torch.float32)[None, None, None]
        rotation = KeyRotation(wide.cos(), wide.sin()).to(old.device)
        for candidate in candidate_key_layouts(old.shape[-1], 2 * len(radians)):
            layout = replace(candidate, in_values=name == "values")
            if nearly_equal(rotation.apply(old, layout), new):
                # 1.125 lies halfway between keys with the attention factor of 1.25 and keys that lost it in a norm.
                part = slice(layout.start, layout.start + layout.dim)
                scaled_norm = getattr(rotated_scaled, name)[..., part].float().norm()
                norm = new[..., part].float().norm()
                return replace(layout, scaled=bool(scaled_norm > 1.125 * norm))
    raise ValueError(", ".join(changed))


def nearly_equal(first: Any, second: Any) -> bool:
    """Return whether two tensors, or nested containers of tensors, are equal except for rounding."""
    if isinstance(first, dict):
        first, second = list(first.values()), list(second.values())
    if isinstance(first, (list, tuple)):
        return all(map(nearly_equal, first, second))
    if not isinstance(first, Tensor) or not first.numel():
        return True
    if first.shape != second.shape:
        return False
    tolerance = 1e-3 if first.dtype == torch.float32 else 3e-2
    return bool((first.float() - second.float()).norm() <= tolerance * first.float().norm())
