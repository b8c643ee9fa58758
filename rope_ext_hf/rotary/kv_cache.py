"""Re-rotate cached keys when a length-dependent method changes its frequencies, by the `CacheState` of the cache.

Where frequencies change in steps, the keys of a row that passes a step are rotated in place, once. Where they change
with every token, the keys stay as they were stored, and the layer returns a rotated copy; new keys are rotated back
before they are stored. So rounding never accumulates, however long the decoding goes on. A key at position p is rotated
from frequencies f to g by the angle p (g - f), in fixed point, and multiplied by the ratio of the attention factors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.errors import LengthError, short
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.rotary.embedding import RotaryEmbedding
from rope_ext_hf.rotary.forward_state import graph_break
from rope_ext_hf.rotary.phase import angles
from rope_ext_hf.rotary.triton_rotation import can_fuse, rotate_fused

_ROTATE_CHUNK_TOKENS = 512  # tokens that are rotated in place at a time, so that float32 copies of the keys stay small
_MAX_LAUNCH_BOUND = 2**20
"""Elements up to which, without Triton, fewer launches on CUDA are worth a float32 copy of all of them."""
_FUSED_UPCAST_DEVICES = {"cuda"}
"""Devices whose kernels convert half precision to float32 as they read, without a pass of their own."""


@dataclass(frozen=True)
class KeyLayout:
    """The rotated dims of a cached key, and how they rotate."""

    pairing: str  # "half" or "interleaved"
    start: int
    dim: int  # `dim` dims from `start` on are rotated
    in_values: bool = False  # the cache holds the rotated part of the keys as its values (latent attention)
    negative_angle: bool = False  # keys are rotated by the negative of the rotary module's angles (NanoChat)
    scaled: bool = True  # False where a norm after the rotation removes the attention factor (Llama 4)


@dataclass
class KeyRotation:
    """A rotation of keys by position; cos and sin are float32 (rows or 1, 1, tokens or 1, dim // 2)."""

    cos: Tensor  # times the attention factor, as sin
    sin: Tensor
    of_members: dict[tuple[bool, bool], tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By pairing and sign, what both members of each pair are multiplied by to give both; made when first needed."""

    @classmethod
    def read_and_store(
        cls, table: RotaryEmbedding, stored: Tensor, present: Tensor, positions: Tensor, new: int, scaled: bool = True
    ) -> tuple[KeyRotation, KeyRotation]:
        """The rotation of all keys from the frequencies at lengths `stored` to `present`, and of the new ones back.

        Args:
            stored, present: (rows,).
            positions: (rows or 1, tokens) integers, of all keys; the last `new` are of the new ones.
            scaled: keys carry the attention factor.
        """
        rows = max(stored.shape[0], present.shape[0])
        both = torch.stack((stored.expand(rows), present.expand(rows)), dim=-1)  # at once, which halves the launches
        phase, factor = table.phase_per_position(both)
        # Fixed point, because p (g - f) grows with the position: float32 numbers around 2^20 are an eighth of a radian
        # apart. (rows, 1, tokens, pairs).
        angle = angles(positions, phase[:, 1:] - phase[:, :1])[:, None]  # int64 overflow drops whole cycles
        cos, sin = angle.cos(), angle.sin()
        # The inverse of a rotation has the opposite angle; the ratio of attention factors is no part of it, and is
        # divided out on its own.
        back = cls(cos, sin).last(new)
        if not scaled or not isinstance(factor, Tensor):
            return cls(cos, sin), cls(back.cos, -back.sin)
        ratio = (factor[:, 1:] / factor[:, :1])[:, None]
        return cls(cos * ratio, sin * ratio), cls(back.cos / ratio, -back.sin / ratio)

    def last(self, count: int) -> KeyRotation:
        """The rotation of the last `count` tokens; a static cache has empty places behind, which no query sees."""
        tokens = self.cos.shape[-2]
        if count == tokens:
            return self
        if count < tokens:
            return KeyRotation(self.cos[..., tokens - count :, :], self.sin[..., tokens - count :, :])
        # Zeros make the empty places zero, whatever stands there; no softmax reads them.
        room = (0, 0, 0, count - tokens)
        return KeyRotation(torch.nn.functional.pad(self.cos, room), torch.nn.functional.pad(self.sin, room))

    def ending_with(self, other: KeyRotation) -> KeyRotation:
        before = self.cos.shape[-2] - other.cos.shape[-2]
        pairs = (self.cos, other.cos), (self.sin, other.sin)
        return KeyRotation(*(torch.cat((mine[..., :before, :], last), dim=-2) for mine, last in pairs))

    def to(self, device: torch.device) -> KeyRotation:
        return self if self.cos.device == device else KeyRotation(self.cos.to(device), self.sin.to(device))

    def apply(self, keys: Tensor, layout: KeyLayout) -> Tensor:
        """Rotated keys (rows, heads, tokens, head_dim), in new memory."""
        start, pairs = layout.start, layout.dim // 2
        if can_fuse(keys):
            return self.apply_fused(keys, layout)
        out = torch.empty_like(keys)
        # Autograd records writes into a tensor that has a history.
        if layout.dim < keys.shape[-1] or keys.requires_grad:
            out = out.copy_(keys)
        # Views of (rows, heads, tokens, rotated dims); below, x' = x cos - y sin and y' = y cos + x sin of every pair.
        x, y = (part[..., start : start + layout.dim] for part in (keys, out))
        on_cuda = keys.device.type in _FUSED_UPCAST_DEVICES and not keys.requires_grad
        if on_cuda and keys.numel() <= _MAX_LAUNCH_BOUND:
            self._rotate_in_two_launches(x, layout, y)
            return out
        cos, sin = self._signed(layout)
        if layout.pairing == "half":
            first, second, to_first, to_second = x[..., :pairs], x[..., pairs:], y[..., :pairs], y[..., pairs:]
        else:
            first, second, to_first, to_second = x[..., 0::2], x[..., 1::2], y[..., 0::2], y[..., 1::2]
        if keys.dtype == cos.dtype and not keys.requires_grad:  # no temporary tensor
            torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
            torch.mul(second, cos, out=to_second).addcmul_(first, sin)
        # CUDA kernels convert half precision as they read, so float32 copies of the keys are not needed there.
        elif on_cuda:
            torch.addcmul(first * cos, second, sin, value=-1, out=to_first)
            torch.addcmul(second * cos, first, sin, out=to_second)
        else:
            # Autograd allows no `out=`. The products are taken in float32: bfloat16 keeps two digits of cos and sin.
            first, second = (half.to(torch.promote_types(half.dtype, cos.dtype)) for half in (first, second))
            to_first.copy_((first * cos).addcmul_(second, sin, value=-1))
            to_second.copy_((second * cos).addcmul_(first, sin))
        return out

    def apply_fused(self, keys: Tensor, layout: KeyLayout, *, in_place: int = 0) -> Tensor:
        """`apply` by the Triton kernel; the last `in_place` tokens are returned as they are, and rotated in `keys`."""
        half = layout.pairing == "half"
        return rotate_fused(keys, *self._signed(layout), start=layout.start, half=half, in_place=in_place)

    def _signed(self, layout: KeyLayout) -> tuple[Tensor, Tensor]:
        return self.cos, -self.sin if layout.negative_angle else self.sin

    def _rotate_in_two_launches(self, x: Tensor, layout: KeyLayout, out: Tensor) -> None:
        """Write the rotated dims of `x` to `out`, both members of all pairs at once."""
        half, pairs = layout.pairing == "half", layout.dim // 2
        member = -2 if half else -1
        key = (half, layout.negative_angle)
        if key not in self.of_members:  # the layers of a model share it
            cos, sin = self._signed(layout)
            self.of_members[key] = torch.stack((cos, sin), member), torch.stack((-sin, cos), member)
        # Both members at once, (..., 2, pairs) or (..., pairs, 2): small keys are bound by launches, not by memory.
        times_first, times_second = self.of_members[key]
        sizes = (2, pairs) if half else (pairs, 2)
        x, out = (part.view(*part.shape[:-1], *sizes) for part in (x, out))
        torch.addcmul(x.narrow(member, 0, 1) * times_first, x.narrow(member, 1, 1), times_second, out=out)


def candidate_key_layouts(width: int, dim: int) -> Iterator[KeyLayout]:
    """Every layout with `dim` rotated dims in a head of `width` dims."""
    starts = sorted({start for start in (0, width - dim) if start >= 0})
    for start, pairing, negative_angle in product(starts, ("half", "interleaved"), (False, True)):
        yield KeyLayout(pairing, start, dim, negative_angle=negative_angle)


def infer_key_layout(unrotated: Any, rotated: Any, rotated_scaled: Any, radians: Tensor) -> KeyLayout | None:
    """Find out which dims of its keys a cache layer keeps rotated, from three copies of it; None: it keeps none.

    Args:
        unrotated, rotated, rotated_scaled: the layer after one token that was not rotated, after the same token
            rotated by `radians`, and the latter with an attention factor of 1.25 as well.
        radians: (dim // 2,), none near a whole cycle. ValueError names attributes that change in another way.
    """
    before, after = vars(unrotated), vars(rotated)
    changed = [name for name in before if not nearly_equal(before[name], after[name])]
    if not changed:
        return None
    rotation = KeyRotation(*(f(radians.to(torch.float32))[None, None, None] for f in (torch.cos, torch.sin)))
    dim = 2 * len(radians)
    if changed in (["keys"], ["values"]):
        name = changed[0]
        old, new = before[name], after[name]
        for possible in candidate_key_layouts(old.shape[-1], dim):
            layout = replace(possible, in_values=name == "values")
            if nearly_equal(rotation.to(old.device).apply(old, layout), new):
                # 1.125 lies halfway between keys with the attention factor of 1.25 and keys that lost it in a norm.
                part = slice(layout.start, layout.start + dim)
                long, short = (x[..., part].float().norm() for x in (getattr(rotated_scaled, name), new))
                return replace(layout, scaled=bool(long > 1.125 * short))
    raise ValueError(", ".join(changed))


def nearly_equal(one: Any, other: Any) -> bool:
    """Whether two tensors, or nested containers of tensors, are equal but for rounding."""
    if isinstance(one, dict):
        one, other = list(one.values()), list(other.values())
    if isinstance(one, (list, tuple)):
        return all(map(nearly_equal, one, other))
    if not isinstance(one, Tensor) or not one.numel():
        return True
    tolerance = 1e-3 if one.dtype == torch.float32 else 3e-2
    return one.shape == other.shape and bool((one.float() - other.float()).norm() <= tolerance * one.float().norm())


Layers = Sequence[tuple[Any, KeyLayout]]  # layers of a cache, each with the layout of its keys


def rotate_cached_keys_(layers: Layers, rotation: KeyRotation) -> None:
    """Rotate the keys in plain layers in place, by a rotation of all tokens; sliding windows hold the last ones."""
    for layer, layout in layers:
        if not layer.is_initialized or not layer.keys.numel():
            continue
        name = "values" if layout.in_values else "keys"
        old = getattr(layer, name)
        new, own = torch.empty_like(old), rotation.last(old.shape[-2]).to(old.device)
        # The cache is the largest tensor of a long input; a float32 copy of all of it would double its peak.
        for start in range(0, old.shape[-2], _ROTATE_CHUNK_TOKENS):
            part = (..., slice(start, start + _ROTATE_CHUNK_TOKENS), slice(None))
            new[part] = KeyRotation(own.cos[part], own.sin[part]).apply(old[part], layout)
        setattr(layer, name, new)


@contextmanager
def rotate_keys_on_read(layers: Layers, before_storing: KeyRotation, after_reading: KeyRotation) -> Iterator[None]:
    """Replace `update` of these layers: it stores new keys rotated one way and returns all keys rotated the other."""
    from transformers.cache_utils import DynamicLayer

    @cache
    def both(device: torch.device) -> KeyRotation:
        return after_reading.ending_with(before_storing).to(device)

    def rotating_update(layer: Any, layout: KeyLayout) -> Callable[..., tuple[Tensor, Tensor]]:
        """The `update` of a layer with rotations around it."""
        update, which = layer.update, int(layout.in_values)  # of keys and values: what is rotated
        returns_stored = type(layer) is DynamicLayer  # the new keys last

        def rotating(key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            given = [key_states, value_states]
            new, device = given[which], key_states.device
            stored = layer.values if layout.in_values else layer.keys
            if returns_stored and can_fuse(new) and can_fuse(stored):  # one launch instead of two
                found = list(update(*given, *args, **kwargs))
                rotation = both(device).last(found[which].shape[-2])
                found[which] = rotation.apply_fused(found[which], layout, in_place=new.shape[-2])
            else:
                given[which] = before_storing.to(device).apply(new, layout)
                found = list(update(*given, *args, **kwargs))
                reading = after_reading.to(device).last(found[which].shape[-2])
                found[which] = reading.apply(found[which], layout)
            return found[0], found[1]

        return graph_break(rotating)  # not compiled: the wrapper lives for a single forward

    for layer, layout in layers:
        # An attribute of the instance hides the method of the class, which other caches go on using.
        layer.update = rotating_update(layer, layout)
    try:
        yield
    finally:
        for layer, _ in layers:
            del layer.update  # restores the class's method


# --- the record that a cache carries between forwards -----------------------------------------------------------------

# transformers' caches hold keys and no account of their rotation. A `CacheState`, an attribute of the cache, holds it,
# so that a forward onto the cache either continues it right or refuses it. It is copied and pickled with its cache.

_CACHE_STATE = "_rope_ext_hf_cache_state"  # the attribute of a transformers cache that holds its `CacheState`


@dataclass(frozen=True)
class KeyOrigin:
    """The origin of the keys that a patched model stores in a cache."""

    tables: tuple[tuple[RopeMethod, Rotary, int | None], ...]
    """The method, the geometry and the fixed length in tokens of each rotary module of the decoder."""

    def differences(self, other: KeyOrigin) -> tuple[str, str]:
        """Both origins as text, each with the parameters in which it differs from the other."""
        tables = zip(self.tables, other.tables, strict=False)
        pairs = [tuple(_settings(*table) for table in both) for both in tables]
        counts = tuple({"method": each.name, "rotary embeddings": len(each.tables)} for each in (self, other))
        one, two = next((pair for pair in pairs if pair[0] != pair[1]), counts)
        keys = [key for key in {**one, **two} if key != "method" and one.get(key) != two.get(key)]
        return _words(one, keys), _words(two, keys)

    @property
    def name(self) -> str:
        return " and ".join(dict.fromkeys(method.name for method, _, _ in self.tables))


def _settings(method: RopeMethod, rotary: Rotary, fixed_length: int | None) -> dict[str, Any]:
    return method.to_dict() | rotary.to_dict() | {"fixed_length": fixed_length}


def _words(settings: dict[str, Any], keys: Iterable[str]) -> str:
    shown = [f"no {key}" if settings.get(key) is None else f"{key}={short(str(settings[key]), 60)}" for key in keys]
    return f"{settings['method']} with {', '.join(shown)}" if shown else str(settings["method"])


@dataclass(frozen=True)
class RowState:
    """How the keys of each row are rotated under a length-dependent method; rows in the order of the cache."""

    lengths: Tensor  # (rows or 1,) int64, the length whose frequencies a row's keys have
    positions: Tensor  # (rows or 1, tokens) int64, the position of each key
    valid_up_to: int  # no row's frequencies change while the cache has at most this many tokens
    one_input_each: bool  # each row is known to hold one input, not several one after the other

    def moved(self, pick: Callable[[Tensor], Tensor]) -> RowState:
        """The state of the rows that `pick` takes out of a tensor; a state that all rows share stays."""
        lengths, positions = (each if each.shape[0] == 1 else pick(each) for each in (self.lengths, self.positions))
        return replace(self, lengths=lengths, positions=positions)


@dataclass
class CacheState:
    """The record that is kept with a cache which a patched model has filled."""

    origin: KeyOrigin  # the rotary modules that rotated its keys
    packed: bool = False  # a row holds several inputs one after the other, which no later token continues
    rows: RowState | None = None  # None: all keys by their positions alone, or half-way after an error
    follows: bool = False  # the rows of this state move with those of the cache
    in_order: bool = False  # the next position of every row is known to be its number of tokens


def store_state(cache: Any, state: CacheState) -> None:
    setattr(cache, _CACHE_STATE, state)


def discard_state(cache: Any) -> None:
    """Forget the state of a cache that is filled anew."""
    vars(cache).pop(_CACHE_STATE, None)


def has_origin(cache: Any, origin: KeyOrigin) -> bool:
    """Whether a cache was last filled by this origin; without a wait for the device."""
    stored: CacheState | None = getattr(cache, _CACHE_STATE, None)
    return stored is not None and stored.origin == origin


def check_origin(cache: Any, origin: KeyOrigin) -> CacheState:
    """The state of a cache with keys in it that were rotated as this model rotates them; else LengthError."""
    stored: CacheState | None = getattr(cache, _CACHE_STATE, None)
    if stored is None:
        raise LengthError(
            f"the keys in this cache were not stored under this model's {origin.name}, but by an unpatched model, "
            "under a static method, or by other code, and cannot be continued: fill a new cache with this model. "
            "Prefix tuning of PEFT begins every forward with such keys: use LoRA under this method, or prefix tuning "
            "under a static one, such as yarn"
        )
    if stored.origin is not origin and stored.origin != origin:
        before, now = stored.origin.differences(origin)
        raise LengthError(
            f"the keys in this cache were stored under {before}, and this model is under {now}: fill a new cache, or "
            "continue this one with the model as it was"
        )
    if stored.packed:
        raise packed_error()
    return stored


def packed_error() -> LengthError:
    return LengthError(
        "a row of this cache holds several inputs one after the other (its position_ids start anew), and which of them "
        "the new tokens continue is not known: fill a cache with one input per row"
    )


class _RowFollower:
    """In place of a method of a cache layer that moves rows (beam search): calls it, and moves the state's rows, too.

    A cache calls the method of each of its layers, so one layer with followers is enough. The layer is held weakly, so
    that a cache is freed with its last reference; copies and pickles of the layer get a follower of their own.
    """

    def __init__(self, layer: Any, name: str, state: CacheState) -> None:
        self.layer = weakref.ref(layer)
        self.name = name
        self.state = state

    def __call__(self, rows: Any) -> None:
        layer = self.layer()
        getattr(type(layer), self.name)(layer, rows)
        if self.state.rows is not None:
            self.state.rows = self.state.rows.moved(lambda each: _MOVES[self.name](each, rows))

    def __reduce__(self) -> tuple[Any, ...]:
        return _RowFollower, (self.layer(), self.name, self.state)


def _on_device_of(tensor: Tensor, rows: Any) -> Any:
    return rows.to(tensor.device) if isinstance(rows, Tensor) else rows


_MOVES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "reorder_cache": lambda tensor, rows: tensor.index_select(0, _on_device_of(tensor, rows)),
    "batch_select_indices": lambda tensor, rows: tensor[_on_device_of(tensor, rows)],
    "batch_repeat_interleave": lambda tensor, repeats: tensor.repeat_interleave(repeats, dim=0),
}
"""The methods of a cache layer that move its rows, and what they do to a tensor (rows, ...)."""


def follow_rows(cache: Any, state: CacheState) -> None:
    """From now on, move the rows of this state with those of its cache."""
    if not state.follows and (layer := next(iter(cache.layers), None)) is not None:
        for name in _MOVES:
            if hasattr(type(layer), name):
                setattr(layer, name, _RowFollower(layer, name, state))
        state.follows = True
