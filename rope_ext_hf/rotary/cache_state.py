"""The record that a cache carries between forwards of a patched model: how its keys are rotated, row by row.

transformers' caches hold keys and no account of their rotation. A `CacheState`, an attribute of the cache, holds it, so
that a forward onto the cache either continues it right or refuses it. It is copied and pickled with its cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rope_ext_hf.errors import LengthError, short
from rope_ext_hf.methods.base import RopeMethod, Rotary

_CACHE_STATE = "_rope_ext_hf_cache_state"  # the attribute of a transformers cache that holds its `CacheState`


@dataclass(frozen=True)
class KeyOrigin:
    """The origin of the keys that a patched model stores in a cache."""

    tables: tuple[tuple[RopeMethod, Rotary, int | None], ...]
    """The method, the geometry and the fixed length in tokens of each rotary module of the decoder."""

    def differences(self, other: KeyOrigin) -> tuple[str, str]:
        """Both origins as text, each with the parameters in which it differs from the other."""
        mine, others = [_settings(self)], [_settings(other)]
        if len(self.tables) == len(other.tables):
            mine, others = ([_settings(KeyOrigin((one,))) for one in each.tables] for each in (self, other))
        one, two = next(pair for pair in zip(mine, others, strict=True) if pair[0] != pair[1])
        keys = [key for key in {**one, **two} if key != "method" and one.get(key) != two.get(key)]
        return _words(one, keys), _words(two, keys)

    @property
    def name(self) -> str:
        return " and ".join(dict.fromkeys(method.name for method, _, _ in self.tables))


def _settings(origin: KeyOrigin) -> dict[str, Any]:
    if len(origin.tables) != 1:
        return {"method": origin.name, "rotary embeddings": len(origin.tables)}
    method, rotary, length = origin.tables[0]
    return method.to_dict() | rotary.to_dict() | {"fixed_length": length}


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
            "under a static method, or by other code, and cannot be continued: fill a new cache with this model"
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
