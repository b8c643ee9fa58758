"""Keys in a cache, turned from the frequencies they were stored with to those of now.

A length-dependent method has new frequencies when a row grows, and all keys that a query meets must share them. Every
cache that was filled under such a method carries a `Stored`: where each key stands, and the length whose frequencies
the keys have. A forward onto the cache then goes one of two ways:

- Rules that change in steps: when a row passes a step, its keys are turned in place, once. Nothing happens between.
- Rules that change with every token: the keys stay as they were stored, and the layer hands out a turned copy; new keys
  are turned back before they are stored. So rounding never accumulates, however long the decoding goes on.

The turn of a key at position p from frequencies f to g is by the angle p (g - f), in fixed point as everywhere here,
and it is scaled by the ratio of the attention factors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from rope_ext_hf.rotary import RotaryEmbedding, angles

__all__ = ["KeyLayout", "Stored", "Turn", "hand_out_turned", "outside_graphs", "turn_in_place"]

P = ParamSpec("P")
R = TypeVar("R")


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """A compiled caller stops for this function and goes on after it; torch's compiler is not loaded on its account."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        result: R = torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-untyped-call]
        return result

    return call


@dataclass(frozen=True)
class KeyLayout:
    """Where in a cached key the rotated dims are: `dim` of them from `start` on, paired "half" or "interleaved".

    `in_values`: latent attention caches its latents as keys, and what rotates of its keys as values.
    """

    pairing: str
    start: int
    dim: int
    in_values: bool = False


@dataclass
class Stored:
    """What a cache holds, rows in the order of its batch.

    Attributes:
        method: `Scaling.to_dict` of the method it was filled under.
        lengths: (rows,) int64, the length whose frequencies a row's keys have.
        positions: (rows or 1, tokens) int64, where each key stands.
        quiet: no row's frequencies change as long as the cache has at most so many tokens.
    """

    method: dict[str, Any]
    lengths: Tensor
    positions: Tensor
    quiet: int


@dataclass
class Turn:
    """A rotation of keys by position: cos and sin, float32 (rows or 1, 1, tokens, dim // 2), factors included."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def between(cls, table: RotaryEmbedding, before: Tensor, after: Tensor, positions: Tensor) -> Turn:
        """From the frequencies at lengths `before` to those at `after`, both (rows,); positions (rows or 1, tokens)."""
        old, old_factor = table.row_frequency(before)
        new, new_factor = table.row_frequency(after)
        angle = angles(positions, new - old)  # wraps around like the fixed-point turns themselves
        cos, sin = angle.cos(), angle.sin()
        if isinstance(new_factor, Tensor) or isinstance(old_factor, Tensor):
            ratio = new_factor / old_factor
            cos, sin = cos * ratio, sin * ratio
        return cls(cos[:, None], sin[:, None])

    def of_last(self, count: int) -> Turn:
        """For the last `count` tokens; where there are fewer, keys that nobody attends to come after them."""
        tokens = self.cos.shape[-2]
        if count <= tokens:
            return Turn(self.cos[..., tokens - count :, :], self.sin[..., tokens - count :, :])
        room = (0, 0, 0, count - tokens)
        return Turn(torch.nn.functional.pad(self.cos, room), torch.nn.functional.pad(self.sin, room))

    def to(self, device: torch.device) -> Turn:
        return Turn(self.cos.to(device), self.sin.to(device))

    def applied(self, keys: Tensor, layout: KeyLayout) -> Tensor:
        """Keys (rows, heads, tokens, head_dim), turned, in new memory."""
        start, pairs = layout.start, layout.dim // 2
        out = torch.empty_like(keys)
        if layout.dim < keys.shape[-1]:
            out.copy_(keys)
        x, y = (part[..., start : start + layout.dim] for part in (keys, out))
        if layout.pairing == "half":
            first, second, to_first, to_second = x[..., :pairs], x[..., pairs:], y[..., :pairs], y[..., pairs:]
        else:
            first, second, to_first, to_second = x[..., 0::2], x[..., 1::2], y[..., 0::2], y[..., 1::2]
        if keys.dtype != torch.float32 or keys.requires_grad:
            first, second = (half.to(torch.promote_types(keys.dtype, torch.float32)) for half in (first, second))
            to_first.copy_(first * self.cos - second * self.sin)
            to_second.copy_(second * self.cos + first * self.sin)
            return out
        torch.mul(first, self.cos, out=to_first).addcmul_(second, self.sin, value=-1)
        torch.mul(second, self.cos, out=to_second).addcmul_(first, self.sin)
        return out


def turn_in_place(layers: Sequence[Any], turn: Turn, layout: KeyLayout) -> None:
    """Turn the keys that plain layers hold; `turn` is for all tokens, of which a layer holds the last."""
    for layer in layers:
        if layer.is_initialized and layer.keys.numel():
            here = turn.of_last(layer.keys.shape[-2]).to(layer.keys.device)
            if layout.in_values:
                layer.values = here.applied(layer.values, layout)
            else:
                layer.keys = here.applied(layer.keys, layout)


@contextmanager
def hand_out_turned(layers: Sequence[Any], back: Turn, forth: Turn, layout: KeyLayout) -> Iterator[None]:
    """Inside, `update` of these layers stores new keys turned `back` and returns all keys turned `forth`."""
    for layer in layers:
        layer.update = _turning(layer.update, back, forth, layout)
    try:
        yield
    finally:
        for layer in layers:
            del layer.update  # the class's own comes to light again


def _turning(
    update: Callable[..., tuple[Tensor, Tensor]], back: Turn, forth: Turn, layout: KeyLayout
) -> Callable[..., tuple[Tensor, Tensor]]:
    def turned(key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        here, there = back.to(key_states.device), forth.to(key_states.device)
        if layout.in_values:
            keys, values = update(key_states, here.applied(value_states, layout), *args, **kwargs)
            return keys, there.of_last(values.shape[-2]).applied(values, layout)
        keys, values = update(here.applied(key_states, layout), value_states, *args, **kwargs)
        return there.of_last(keys.shape[-2]).applied(keys, layout), values

    return outside_graphs(turned)  # what stands there for one forward only is not worth a graph of its own
