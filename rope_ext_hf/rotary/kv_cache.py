"""Keys in a cache, turned from the frequencies they were stored with to those of now.

A length-dependent method has new frequencies when a row grows, and all keys that a query meets must share them. Every
cache that was filled under such a method carries a `CacheState`: where each key stands, and the length whose
frequencies the keys have. A forward onto the cache then goes one of two ways:

- Rules that change in steps: when a row passes a step, its keys are turned in place, once. Nothing happens between.
- Rules that change with every token: the keys stay as they were stored, and the layer hands out a turned copy; new keys
  are turned back before they are stored. So rounding never accumulates, however long the decoding goes on.

The turn of a key at position p from frequencies f to g is by the angle p (g - f), in fixed point as everywhere here,
and it is scaled by the ratio of the attention factors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.rotary.graphs import graph_break
from rope_ext_hf.rotary.phase import angles, phase_to_radians

__all__ = [
    "FUSED_UPCAST_DEVICES",
    "ROTATE_CHUNK_TOKENS",
    "CacheState",
    "KeyLayout",
    "KeyRotation",
    "Layers",
    "candidate_key_layouts",
    "infer_key_layout",
    "nearly_equal",
    "rotate_cached_keys_",
    "rotate_keys_on_read",
]

ROTATE_CHUNK_TOKENS = 512  # rotated at a time, so that the float32 copies of the keys stay small

FUSED_UPCAST_DEVICES = {"cuda"}  # devices whose kernels widen what they read, without a pass of its own


@dataclass(frozen=True)
class KeyLayout:
    """Where in a cached key the rotated dims are: `dim` of them from `start` on, paired "half" or "interleaved".

    `in_values`: latent attention caches its latents as keys, and what rotates of its keys as values.
    `negative_angle`: by the negative of the angles that the rotary module gives (NanoChat).
    `scaled`: False where a norm after the rotation takes the attention factor away again (Llama 4).
    """

    pairing: str
    start: int
    dim: int
    in_values: bool = False
    negative_angle: bool = False
    scaled: bool = True


@dataclass
class CacheState:
    """What a cache holds, rows in the order of its batch.

    Attributes:
        method: `RopeMethod.to_dict` of the method it was filled under.
        lengths: (rows,) int64, the length whose frequencies a row's keys have.
        positions: (rows or 1, tokens) int64, where each key stands.
        valid_up_to: no row's frequencies change as long as the cache has at most so many tokens.
    """

    method: dict[str, Any]
    lengths: Tensor
    positions: Tensor
    valid_up_to: int


@dataclass
class KeyRotation:
    """A rotation of keys by position: cos and sin, float32 (rows or 1, 1, tokens, dim // 2), factors included."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def between_lengths(
        cls, table: RotaryEmbedding, before: Tensor, after: Tensor, positions: Tensor, scaled: bool = True
    ) -> KeyRotation:
        """From the frequencies at lengths `before` to those at `after`, both (rows,); positions (rows or 1, tokens)."""
        old, old_factor = table.phase_per_position(before)
        new, new_factor = table.phase_per_position(after)
        angle = angles(positions, new - old)  # wraps around like the fixed-point turns themselves
        cos, sin = angle.cos(), angle.sin()
        if scaled and (isinstance(new_factor, Tensor) or isinstance(old_factor, Tensor)):
            ratio = new_factor / old_factor
            cos, sin = cos * ratio, sin * ratio
        return cls(cos[:, None], sin[:, None])

    @classmethod
    def from_phase(cls, phase: Tensor) -> KeyRotation:
        """By fixed-point angles, int64 (rows or 1, tokens, dim // 2)."""
        angle = phase_to_radians(phase)
        return cls(angle.cos()[:, None], angle.sin()[:, None])

    def last(self, count: int) -> KeyRotation:
        """For the last `count` tokens; where there are fewer, keys that nobody attends to come after them."""
        tokens = self.cos.shape[-2]
        if count <= tokens:
            return KeyRotation(self.cos[..., tokens - count :, :], self.sin[..., tokens - count :, :])
        room = (0, 0, 0, count - tokens)
        return KeyRotation(torch.nn.functional.pad(self.cos, room), torch.nn.functional.pad(self.sin, room))

    def to(self, device: torch.device) -> KeyRotation:
        return KeyRotation(self.cos.to(device), self.sin.to(device))

    def apply(self, keys: Tensor, layout: KeyLayout) -> Tensor:
        """Keys (rows, heads, tokens, head_dim), turned, in new memory."""
        start, pairs = layout.start, layout.dim // 2
        cos, sin = self.cos, -self.sin if layout.negative_angle else self.sin
        out = torch.empty_like(keys)
        if layout.dim < keys.shape[-1] or keys.requires_grad:  # the gradient wants what is written into to have one
            out = out.copy_(keys)
        x, y = (part[..., start : start + layout.dim] for part in (keys, out))
        if layout.pairing == "half":
            first, second, to_first, to_second = x[..., :pairs], x[..., pairs:], y[..., :pairs], y[..., pairs:]
        else:
            first, second, to_first, to_second = x[..., 0::2], x[..., 1::2], y[..., 0::2], y[..., 1::2]
        if keys.dtype == cos.dtype and not keys.requires_grad:  # without memory of its own
            torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
            torch.mul(second, cos, out=to_second).addcmul_(first, sin)
        elif keys.device.type in FUSED_UPCAST_DEVICES and not keys.requires_grad:
            torch.addcmul(first * cos, second, sin, value=-1, out=to_first)
            torch.addcmul(second * cos, first, sin, out=to_second)
        else:
            first, second = (half.to(torch.promote_types(half.dtype, cos.dtype)) for half in (first, second))
            to_first.copy_((first * cos).addcmul_(second, sin, value=-1))
            to_second.copy_((second * cos).addcmul_(first, sin))
        return out


def candidate_key_layouts(width: int, dim: int) -> Iterator[KeyLayout]:
    """Every way to have `dim` rotated dims among the `width` of a head."""
    starts = sorted({start for start in (0, width - dim) if start >= 0})
    for start, pairing, negative_angle in product(starts, ("half", "interleaved"), (False, True)):
        yield KeyLayout(pairing, start, dim, negative_angle=negative_angle)


def infer_key_layout(unrotated: Any, rotated: Any, rotated_scaled: Any, radians: Tensor) -> KeyLayout | None:
    """How a layer of a cache keeps what turns of its keys, by looking; None: it keeps nothing that turns.

    Args:
        unrotated, rotated, rotated_scaled: the layer after one token that was not turned, after the same token turned
            by `radians`, and with an attention factor of 1.25 as well.
        radians: (dim // 2,), none near a whole turn.

    Raises:
        ValueError: naming what else it keeps that follows the turn, or follows it in another way.
    """
    before, after = vars(unrotated), vars(rotated)
    changed = [name for name in before if not nearly_equal(before[name], after[name])]
    if not changed:
        return None
    turn = KeyRotation(*(f(radians.to(torch.float32))[None, None, None] for f in (torch.cos, torch.sin)))
    dim = 2 * len(radians)
    if changed in (["keys"], ["values"]):
        name = changed[0]
        old, new = before[name], after[name]
        for possible in candidate_key_layouts(old.shape[-1], dim):
            layout = replace(possible, in_values=name == "values")
            if nearly_equal(turn.to(old.device).apply(old, layout), new):
                part = slice(layout.start, layout.start + dim)
                long, short = (x[..., part].float().norm() for x in (getattr(rotated_scaled, name), new))
                return replace(layout, scaled=bool(long > 1.125 * short))
    raise ValueError(", ".join(changed))


def nearly_equal(one: Any, other: Any) -> bool:
    """Whether two attributes of cache layers hold the same numbers but for rounding."""
    if isinstance(one, dict):
        one, other = list(one.values()), list(other.values())
    if isinstance(one, (list, tuple)):
        return all(map(nearly_equal, one, other))
    if not isinstance(one, Tensor) or not one.numel():
        return True
    tolerance = 1e-3 if one.dtype == torch.float32 else 3e-2
    return one.shape == other.shape and bool((one.float() - other.float()).norm() <= tolerance * one.float().norm())


Layers = Sequence[tuple[Any, KeyLayout]]
"""Layers of a cache, each with how it keeps its keys."""


def rotate_cached_keys_(layers: Layers, turn: KeyRotation) -> None:
    """KeyRotation the keys that plain layers hold; `turn` is for all tokens, of which a layer holds the last."""
    for layer, layout in layers:
        if not layer.is_initialized or not layer.keys.numel():
            continue
        name = "values" if layout.in_values else "keys"
        old = getattr(layer, name)
        new, here = torch.empty_like(old), turn.last(old.shape[-2]).to(old.device)
        for at in range(0, old.shape[-2], ROTATE_CHUNK_TOKENS):
            part = (..., slice(at, at + ROTATE_CHUNK_TOKENS), slice(None))
            new[part] = KeyRotation(here.cos[part], here.sin[part]).apply(old[part], layout)
        setattr(layer, name, new)


@contextmanager
def rotate_keys_on_read(layers: Layers, back: KeyRotation, forth: KeyRotation) -> Iterator[None]:
    """Inside, `update` of these layers stores new keys turned `back` and returns all keys turned `forth`."""
    for layer, layout in layers:
        layer.update = _turning(layer.update, back, forth, layout)
    try:
        yield
    finally:
        for layer, _ in layers:
            del layer.update  # the class's own comes to light again


def _turning(
    update: Callable[..., tuple[Tensor, Tensor]], back: KeyRotation, forth: KeyRotation, layout: KeyLayout
) -> Callable[..., tuple[Tensor, Tensor]]:
    def turned(key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        here, there = back.to(key_states.device), forth.to(key_states.device)
        if layout.in_values:
            keys, values = update(key_states, here.apply(value_states, layout), *args, **kwargs)
            return keys, there.last(values.shape[-2]).apply(values, layout)
        keys, values = update(here.apply(key_states, layout), value_states, *args, **kwargs)
        return there.last(keys.shape[-2]).apply(keys, layout), values

    return graph_break(turned)  # what stands there for one forward only is not worth a graph of its own
