"""The memory that a patched model keeps with a key-value cache: how its keys are rotated, for the next forward.

transformers' caches hold keys and no account of their rotation. A `CacheMemory`, an attribute of the cache, is that
account, and goes where the cache goes: it is copied and pickled with it, and follows its rows where beam search moves
them. Every forward onto a cache does the same:

    memory = recall(cache, origin)  # an error where the cache holds keys that this model has not rotated
    ...                             # the forward, which stores more keys
    remember(cache, memory)

and `forget(cache)` where the cache is empty and begins anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.errors import LengthError, short
from rope_ext_hf.methods.base import RopeMethod, Rotary

_MEMORY = "_rope_ext_hf_cache_memory"  # the attribute of a transformers cache that holds its `CacheMemory`


@dataclass(frozen=True)
class KeyOrigin:
    """The rotary modules that the keys in a cache were rotated by, and so the frequencies of those keys."""

    tables: tuple[tuple[RopeMethod, Rotary, int | None], ...]
    """The method, the geometry and the fixed length in tokens of each rotary module of the decoder."""

    @property
    def name(self) -> str:
        """The names of the methods of these rotary modules: "dynamic-yarn", or several joined by "and"."""
        return " and ".join(dict.fromkeys(method.name for method, _, _ in self.tables))

    def differences(self, other: KeyOrigin) -> tuple[str, str]:
        """Return this origin and another one as text, for an error message about keys that do not fit.

        Each text has the method and the parameters that differ between the two origins.
        """
        for own_table, other_table in zip(self.tables, other.tables, strict=False):
            own, others = _settings(*own_table), _settings(*other_table)
            if own != others:
                break
        else:
            own, others = self._summary(), other._summary()
        keys = [key for key in {**own, **others} if key != "method" and own.get(key) != others.get(key)]
        return _settings_text(own, keys), _settings_text(others, keys)

    def _summary(self) -> dict[str, Any]:
        return {"method": self.name, "rotary embeddings": len(self.tables)}


def _settings(method: RopeMethod, rotary: Rotary, fixed_length: int | None) -> dict[str, Any]:
    return method.to_dict() | rotary.to_dict() | {"fixed_length": fixed_length}


def _settings_text(settings: dict[str, Any], keys: Iterable[str]) -> str:
    """Return the method and some of its settings as text: "yarn with factor=8, no fixed_length".

    `keys`: the settings to include.
    """
    values = [f"no {key}" if settings.get(key) is None else f"{key}={short(str(settings[key]), 60)}" for key in keys]
    return f"{settings['method']} with {', '.join(values)}" if values else str(settings["method"])


@dataclass(frozen=True)
class CachedRows:
    """The lengths and positions by which the keys in each row of a cache were rotated, for length-dependent methods."""

    lengths: Tensor  # (rows or 1,) int64, the length in tokens whose frequencies a row's keys have
    positions: Tensor  # (rows or 1, tokens) int64, the position of each key
    valid_up_to: int  # no row's frequencies change while the cache has at most this many tokens
    one_input_each: bool  # each row is known to hold one input, not several one after the other

    def moved(self, move: Callable[[Tensor], Tensor]) -> CachedRows:
        """Return the rows of the cache after they were reordered, picked or repeated.

        `move` does the same to any tensor (rows, ...). A tensor with one row that stands for all rows stays as it is.
        """
        lengths = self.lengths if self.lengths.shape[0] == 1 else move(self.lengths)
        positions = self.positions if self.positions.shape[0] == 1 else move(self.positions)
        return replace(self, lengths=lengths, positions=positions)


@dataclass
class CacheMemory:
    """The rotation of the keys in a cache, kept with a cache that a patched model has filled."""

    origin: KeyOrigin  # the rotary modules that rotated its keys
    packed: bool = False  # a row holds several inputs one after the other, which no later token can continue
    rows: CachedRows | None = None
    """The rotation of each row's keys. None: it follows from their positions alone, or an error interrupted a change
    of it."""
    follows: bool = False  # `rows` move with the rows of the cache
    in_order: bool = False  # the next position of every row is known to be its number of tokens
    counted: bool = False
    """The same after the padding that a row begins with; it is known to have no other padding."""


def remember(cache: Any, memory: CacheMemory) -> None:
    """Keep this memory as an attribute of the cache, and move its rows with those of the cache.

    In compiled code a replaced method of the cache would end the graph: there the first forward onto the cache makes up
    for it.
    """
    setattr(cache, _MEMORY, memory)
    if memory.rows is not None and not torch.compiler.is_compiling():
        follow_rows(cache, memory)


def forget(cache: Any) -> None:
    """Remove what is remembered with a cache, because the cache is filled anew."""
    vars(cache).pop(_MEMORY, None)


def is_counted(cache: Any) -> bool:
    """Return whether a cache is known to hold rows of one input each, with padding at their beginning alone."""
    memory: CacheMemory | None = getattr(cache, _MEMORY, None)
    return memory is not None and memory.counted


def was_filled_by(cache: Any, origin: KeyOrigin) -> bool:
    """Return whether a cache was last filled by these rotary modules.

    This reads no values of tensors, so the host does not wait for the device.
    """
    memory: CacheMemory | None = getattr(cache, _MEMORY, None)
    return memory is not None and memory.origin == origin


def recall(cache: Any, origin: KeyOrigin) -> CacheMemory:
    """Return what is remembered with a cache, whose keys must have been rotated as this model rotates them.

    Raises:
        LengthError: the keys were stored by another model, under another method, or by other code; or a row holds
            several inputs.
    """
    memory: CacheMemory | None = getattr(cache, _MEMORY, None)
    if memory is None:
        raise LengthError(
            f"the keys in this cache were not stored under this model's {origin.name}, but by an unpatched model, "
            "under a static method, or by other code, and cannot be continued: fill a new cache with this model. "
            "Prefix tuning of PEFT begins every forward with such keys, and so does the check that follows a trace of "
            "torch.jit (optimum-intel): use LoRA under this method, trace with check_trace=False, or patch a static "
            "method, such as yarn"
        )
    if memory.origin is not origin and memory.origin != origin:
        before, now = memory.origin.differences(origin)
        raise LengthError(
            f"the keys in this cache were stored under {before}, and this model is under {now}: fill a new cache, or "
            "continue this one with the model as it was"
        )
    if memory.packed:
        raise packed_error()
    return memory


def packed_error() -> LengthError:
    """Return the error to raise when new tokens follow a row of the cache that holds several inputs."""
    return LengthError(
        "a row of this cache holds several inputs one after the other (its position_ids start anew), and it is not "
        "known which of them the new tokens continue: fill a cache with one input per row"
    )


# --- rows that move ---------------------------------------------------------------------------------------------------


def follow_rows(cache: Any, memory: CacheMemory) -> None:
    """From now on, move the rows of this memory whenever the rows of its cache are moved."""
    if memory.follows:
        return
    layer = next(iter(cache.layers), None)
    if layer is None:
        return
    for name in _MOVES:
        if hasattr(type(layer), name):
            setattr(layer, name, _RowFollower(layer, name, memory))
    memory.follows = True


class _RowFollower:
    """A replacement for a cache layer's method that moves rows: it moves the rows of a `CacheMemory` too.

    A cache calls the method on each of its layers, so one layer with followers is enough. The layer is held weakly, so
    that a cache is freed with its last reference; copies and pickles of the layer get a follower of their own.
    """

    def __init__(self, layer: Any, name: str, memory: CacheMemory) -> None:
        self.layer = weakref.ref(layer)
        self.name = name
        self.memory = memory

    def __call__(self, rows: Any) -> None:
        layer = self.layer()
        getattr(type(layer), self.name)(layer, rows)
        if self.memory.rows is not None:
            self.memory.rows = self.memory.rows.moved(lambda tensor: _MOVES[self.name](tensor, rows))

    def __reduce__(self) -> tuple[Any, ...]:
        return _RowFollower, (self.layer(), self.name, self.memory)


def _on_device_of(tensor: Tensor, rows: Any) -> Any:
    return rows.to(tensor.device) if isinstance(rows, Tensor) else rows


_MOVES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "reorder_cache": lambda tensor, rows: tensor.index_select(0, _on_device_of(tensor, rows)),
    "batch_select_indices": lambda tensor, rows: tensor[_on_device_of(tensor, rows)],
    "batch_repeat_interleave": lambda tensor, repeats: tensor.repeat_interleave(repeats, dim=0),
}
"""The methods of a cache layer that move its rows, and what each does to a tensor (rows, ...)."""
