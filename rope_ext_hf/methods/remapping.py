"""Every attention-level method: at which relative position a query sees a key.

    >>> from rope_ext_hf.methods.remapping import SelfExtend
    >>> SelfExtend(group=8, window=1024)
    SelfExtend(max_distance=None, log_n=False, frequency=None, window=1024, group=8)

Positions that a model was not trained at never occur: far keys are seen at positions it knows. A method divides the
keys before a query into zones, nearest first. In a zone the query stands at one place and the keys at theirs, and the
difference is the relative position. Keys are stored in the cache at one place each, `key_position`, which is theirs in
every zone but the nearest of the methods with an exact local zone, where they stand where they are.

Symbols as in the papers: m and n, the positions of a query and a key; w = `window`, G = `group`, s = `chunk`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import method_from_dict, register_method
from rope_ext_hf.methods.static import Default
from rope_ext_hf.methods.tiles import Tile, local_window_tiles

__all__ = ["DEFAULT_GROUP", "DualChunk", "LeakyReRoPE", "ReRoPE", "RemappedPosition", "RemappingMethod", "SelfExtend"]

DEFAULT_GROUP = 16
"""`group` and `k` where nothing says how long the input will be: about 8 to 12 times the trained length."""


class RemappedPosition(NamedTuple):
    """Where something stands, in tokens: positions / divisor + offset."""

    positions: Tensor | None = None
    divisor: float = 1.0
    offset: float = 0.0

    def tokens(self) -> Tensor:
        """As float64."""
        whole = torch.zeros(()) if self.positions is None else self.positions
        return whole.double() / self.divisor + self.offset


@dataclass(frozen=True, kw_only=True)
class RemappingMethod(RopeMethod):
    """Base of the attention-level methods.

    Attributes:
        limit: the longest distance in tokens that the model knows; default: its trained length, or what its
            frequencies are extended to.
        log_n: multiply queries by max(1, ln(m + 1) / ln limit), which keeps the entropy of attention as it is at the
            limit (Su 2022, https://kexue.fm/archives/8823).
        frequency: a static frequency-level method underneath; default: the model's own.
    """

    max_distance: int | None = None
    log_n: bool = False
    frequency: RopeMethod | None = None

    def __post_init__(self) -> None:
        if isinstance(self.frequency, Mapping):
            object.__setattr__(self, "frequency", method_from_dict(self.frequency))
        super().__post_init__()
        if self.frequency is not None and (
            not isinstance(self.frequency, RopeMethod)
            or isinstance(self.frequency, RemappingMethod)
            or self.frequency.length_dependent
        ):
            raise MethodError(
                f"{self.name}: frequency must be a frequency-level method that does not follow the input, "
                f"got {self.frequency!r}"
            )
        for name in ("max_distance", "window", "group", "chunk"):
            value = getattr(self, name, None)
            if value is not None and value < 1:
                raise MethodError(f"{self.name}: {name} must be at least 1, got {value}")

    def bind(self, rotary: Rotary, own: RopeMethod, own_length: int, target_length: int | None) -> Self:
        """With every parameter that was not given worked out.

        Args:
            own: the model's own frequency-level method.
            own_length: the length that one is for, in tokens.
            target_length: the length asked for.

        Raises:
            MethodError: parameters that lead to positions beyond the limit, or frequencies that follow the input.
        """
        method = self
        if method.frequency is None and own.name != "default":
            if own.length_dependent:
                raise MethodError(
                    f"{self.name} needs frequencies that stay, and this model's own {own.name} follows the input; "
                    "give another one (frequency)"
                )
            method = replace(method, frequency=own)
        if method.max_distance is None:
            length = own_length if self.frequency is None else self.frequency.extended_length(rotary)
            method = replace(method, max_distance=length or rotary.trained_length)
        assert method.max_distance is not None
        if method.max_distance < 8:
            raise MethodError(f"{self.name} needs a trained length of at least 8 tokens, got {method.max_distance}")
        return method._with_defaults(method.max_distance, target_length)

    @abstractmethod
    def _with_defaults(self, limit: int, target_length: int | None) -> Self: ...

    def _check_reach(self, limit: int, what: str, size: float) -> None:
        if size > limit:
            raise MethodError(
                f"{self.name}: {what} is {size:g} tokens, and the model knows distances up to {limit} only"
            )

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return (self.frequency or Default()).at_lengths(rotary, length.squeeze(-1))

    def check(self, rotary: Rotary) -> None:
        (self.frequency or Default()).check(rotary)

    def native(self, rotary: Rotary) -> dict[str, Any] | None:
        return None

    def extended_length(self, rotary: Rotary) -> int | None:
        return None

    def to_dict(self) -> dict[str, Any]:
        saved = super().to_dict()
        return saved if self.frequency is None else saved | {"frequency": self.frequency.to_dict()}

    @property
    def local_zone_exact(self) -> bool:
        """Whether keys and queries stand where they are in the nearest zone, not where they are stored."""
        return True

    @property
    def window_size(self) -> int | None:
        """Keys by index that a query sees, itself included; None: all before it."""
        return None

    @abstractmethod
    def key_position(self, n: Tensor) -> RemappedPosition:
        """Where keys stand in the cache."""

    @abstractmethod
    def query_positions(self, m: Tensor) -> tuple[RemappedPosition, ...]:
        """Where queries stand in each zone but the nearest, where they stand as its keys do."""

    def query_scale(self, m: Tensor) -> Tensor | None:
        """What queries are multiplied by, float32; None: nothing."""
        if not self.log_n:
            return None
        assert self.max_distance is not None
        return ((m + 1).to(torch.float32).log() / math.log(self.max_distance)).clamp(min=1)

    @abstractmethod
    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        """The zone of each pair; of those with n > m anything."""

    def distance(self, m: Tensor, n: Tensor) -> Tensor:
        """The relative position at which a query at m sees a key at n <= m, in tokens; float64, shapes broadcast.

        The method must be fitted.
        """
        key = self.key_position(n).tokens()
        near = m.double() - n if self.local_zone_exact else self.key_position(m).tokens() - key
        zones = self.zone(m, n)
        for zone, place in enumerate(self.query_positions(m), start=1):
            near = torch.where(zones == zone, place.tokens() - key, near)
        return near

    @property
    def zones(self) -> int:
        return 2

    @property
    @abstractmethod
    def last_zone_start(self) -> int:
        """Keys at this distance and beyond are in the last zone."""

    @abstractmethod
    def tiles(self, first: int, last: int) -> Iterator[Tile]:
        """All keys that the queries first..last see, piece by piece."""


@dataclass(frozen=True, kw_only=True)
class _WindowedRemapping(RemappingMethod):
    """Keys at distances below `window` are seen where they are, those beyond at one further place each."""

    window: int | None = None

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        return (m - n >= self.last_zone_start).long()

    @property
    def last_zone_start(self) -> int:
        assert self.window is not None
        return self.window

    def tiles(self, first: int, last: int) -> Iterator[Tile]:
        yield from local_window_tiles(self.last_zone_start, first, last)
        if last > self.last_zone_start:
            yield Tile(1, (first, last), (0, last - self.last_zone_start), self.last_zone_start)


@register_method("rerope")
@dataclass(frozen=True, kw_only=True)
class ReRoPE(_WindowedRemapping):
    """ReRoPE (Su 2023, https://kexue.fm/archives/9708): beyond the window every key is seen at distance w.

    `window`: default half the limit.
    """

    def _with_defaults(self, limit: int, target_length: int | None) -> Self:
        method = replace(self, window=self.window or limit // 2)
        method._check_reach(limit, "window", method.last_zone_start)
        return method

    def key_position(self, n: Tensor) -> RemappedPosition:
        return RemappedPosition(torch.zeros_like(n))

    def query_positions(self, m: Tensor) -> tuple[RemappedPosition, ...]:
        return (RemappedPosition(offset=self.last_zone_start),)


@register_method("leaky-rerope")
@dataclass(frozen=True, kw_only=True)
class LeakyReRoPE(_WindowedRemapping):
    """Leaky ReRoPE (Su 2023, https://kexue.fm/archives/9708): beyond the window distances grow k times as slowly.

    `window`: default half the limit; `k`: default as small as the target length allows, 16 where there is none.
    """

    k: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k is not None and self.k < 1:
            raise MethodError(f"{self.name}: k must be at least 1, got {self.k:g}")

    def _with_defaults(self, limit: int, target_length: int | None) -> Self:
        window = self.window or limit // 2
        self._check_reach(limit, "window", window)
        k = self.k
        if k is None:
            k = float(
                DEFAULT_GROUP
                if target_length is None or window == limit
                else max(1, math.ceil((target_length - window) / (limit - window)))
            )
        method = replace(self, window=window, k=k)
        if target_length is not None:
            method._check_reach(
                limit,
                f"with k={k:g} the place of a key {target_length} tokens back",
                window + (target_length - window) / k,
            )
        return method

    def extended_length(self, rotary: Rotary) -> int | None:
        if self.max_distance is None or self.window is None or self.k is None:
            return None
        return int(self.window + (self.max_distance - self.window) * self.k)

    def key_position(self, n: Tensor) -> RemappedPosition:
        assert self.k is not None
        return RemappedPosition(n, self.k)

    def query_positions(self, m: Tensor) -> tuple[RemappedPosition, ...]:
        assert self.k is not None
        return (RemappedPosition(m, self.k, self.last_zone_start - self.last_zone_start / self.k),)


@register_method("self-extend")
@dataclass(frozen=True, kw_only=True)
class SelfExtend(_WindowedRemapping):
    """Self-Extend (Jin et al. 2024, arXiv 2401.01325): beyond the window keys are seen in groups.

    A query m sees a far key n at distance floor(m / G) - floor(n / G) + w - floor(w / G). `window`: default a quarter
    of the limit; `group`: default as small as the target length allows, 16 where there is none.
    """

    group: int | None = None

    def _farthest(self, length: int, window: int, group: int) -> int:
        return (length - 1) // group + window - window // group

    def _with_defaults(self, limit: int, target_length: int | None) -> Self:
        window = self.window or limit // 4
        self._check_reach(limit, "window", window)
        group = self.group
        if group is None:
            group = DEFAULT_GROUP
            if target_length is not None:
                sizes = range(1, target_length + 1)
                group = next(
                    (size for size in sizes if self._farthest(target_length, window, size) < limit), target_length
                )
        if target_length is not None:
            self._check_reach(
                limit - 1, f"with group={group} the farthest place", self._farthest(target_length, window, group)
            )
        return replace(self, window=window, group=group)

    def extended_length(self, rotary: Rotary) -> int | None:
        if self.max_distance is None or self.window is None or self.group is None:
            return None
        return (self.max_distance - self.window + self.window // self.group) * self.group

    def key_position(self, n: Tensor) -> RemappedPosition:
        assert self.group is not None
        return RemappedPosition(n // self.group)

    def query_positions(self, m: Tensor) -> tuple[RemappedPosition, ...]:
        assert self.group is not None
        return (RemappedPosition(m // self.group, offset=self.last_zone_start - self.last_zone_start // self.group),)


@register_method("dca")
@dataclass(frozen=True, kw_only=True)
class DualChunk(RemappingMethod):
    """Dual Chunk Attention (An et al. 2024, arXiv 2402.17463).

    The input is cut into chunks of s tokens, and a key n stands at n mod s. A query m stands at m mod s for keys of
    its own chunk, at min(m mod s + s, s + w - 1) for those of the chunk before, so that the last w tokens are where
    they are, and at s + w - 1 for all older ones. (The paper's ceiling c is s + w.) `chunk`: default three quarters of
    the limit; `window`: default what is left of the limit.
    """

    chunk: int | None = None
    window: int | None = None

    def _with_defaults(self, limit: int, target_length: int | None) -> Self:
        chunk = self.chunk or 3 * limit // 4
        window = self.window or max(1, limit - chunk)
        self._check_reach(limit, "chunk and window together", chunk + window)
        return replace(self, chunk=chunk, window=window)

    @property
    def local_zone_exact(self) -> bool:
        return False

    @property
    def zones(self) -> int:
        return 3

    @property
    def size(self) -> int:
        assert self.chunk is not None
        return self.chunk

    @property
    def farthest(self) -> int:
        assert self.window is not None
        return self.size + self.window - 1

    def key_position(self, n: Tensor) -> RemappedPosition:
        return RemappedPosition(n % self.size)

    def query_positions(self, m: Tensor) -> tuple[RemappedPosition, ...]:
        return RemappedPosition((m % self.size + self.size).clamp(max=self.farthest)), RemappedPosition(
            offset=self.farthest
        )

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        return (m // self.size - n // self.size).clamp(0, 2)

    @property
    def last_zone_start(self) -> int:
        return 2 * self.size

    def tiles(self, first: int, last: int) -> Iterator[Tile]:
        for start in range(first - first % self.size, last, self.size):
            queries = max(first, start), min(last, start + self.size)
            yield Tile(0, queries, (start, queries[1]))
            if start:
                yield Tile(1, queries, (start - self.size, start))
            if start > self.size:
                yield Tile(2, queries, (0, start - self.size))
