"""Remapping methods: no key is seen at a relative position beyond those of training; far keys are seen at trained ones.

A method divides the keys before a query into zones, nearest first. In each zone the query is rotated to one position
and the keys to theirs, and the difference is the relative position. The cache holds keys rotated to `key_position`;
that is their position in every zone, except the nearest of methods whose local zone is exact, where keys keep their
own.

Some rules depend on the length of a row (`beyond_only`, and a group "length"): short rows are read by the model as
loaded. Their keys are cached at their own positions, whatever the length is, and turned to `key_position` when read.

Symbols as in the papers: m and n, the positions of a query and a key; w = `window`, G = `group`, s = `chunk`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import UNBOUNDED, RopeMethod, Rotary
from rope_ext_hf.methods.registry import register_method
from rope_ext_hf.methods.static import Default
from rope_ext_hf.methods.tiles import Tile

ScoreBias = Callable[[Tensor, Tensor], Tensor]
"""(m, n) -> the addition to scores, (rows or 1, heads or 1, queries, keys), for positions m (rows or 1, queries) of
queries and n (rows or 1, keys) of keys."""
DEFAULT_GROUP = 16  # `group` and `k` where no target length is given: enough for about 8 to 12 times the context length

_TEMPERATURES: dict[str, Callable[[Tensor, int], Tensor] | None] = {
    "none": None,
    "log-n": lambda m, known: ((m + 1).log() / math.log(known)).clamp(min=1),
    "llama4": lambda m, known: 1 + 0.1 * (1 + torch.floor((m + 1) / known)).log(),
}
"""The factor of queries at position m (float32), where the model was trained at up to `known` positions.

"log-n": max(1, ln(m + 1) / ln known), which keeps the entropy of attention what it is at `known` keys (Su 2022,
https://kexue.fm/archives/8823). "llama4": 1 + 0.1 ln(1 + floor((m + 1) / known)) (Llama 4's attention scale).
"""


class RemappedPosition(NamedTuple):
    """The position that queries or keys are rotated to, in tokens: positions / divisor + offset."""

    positions: Tensor | None = None
    divisor: float = 1.0
    offset: float = 0.0

    def tokens(self) -> Tensor:
        whole = torch.zeros(()) if self.positions is None else self.positions
        return whole.double() / self.divisor + self.offset


class AttentionRule:
    """The keys that a query sees, and at which relative positions: as it stands here, all before it, where they are."""

    local_zone_exact: ClassVar[bool] = True
    """Whether keys and queries stand where they are in the nearest zone, not where they are stored."""

    @property
    def by_length(self) -> bool:
        """Whether the rule of a row depends on its length."""
        return False

    @property
    def window_size(self) -> int | None:
        """Keys by index that a query sees, itself included; None: all before it."""
        return None

    def key_position(self, n: Tensor) -> RemappedPosition:
        """Where keys stand for queries of every zone but the nearest."""
        return RemappedPosition(n)

    def stored_position(self, n: Tensor) -> RemappedPosition:
        """Where keys stand in the cache, and queries before a zone is chosen: one place for rows of every length."""
        return RemappedPosition(n) if self.by_length else self.key_position(n)

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        """Where queries stand in a zone from 1 on; in the nearest, 0, they stand as its keys do."""
        return self.key_position(m)

    def query_scale(self, m: Tensor) -> Tensor | None:
        """The factor of queries at positions m, float32; None: 1."""
        return None

    def score_bias(self, heads: int, length: int) -> ScoreBias | None:
        """The function that adds to the scores of an input of `length` tokens; None: nothing.

        Raises:
            MethodError: parameters for another number of heads.
        """
        return None

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        """The zone of each pair; of those with n > m anything."""
        return torch.zeros_like(m - n)

    def zone_distances(self, length: int) -> tuple[tuple[int, int], ...]:
        """The zones of an input of `length` tokens, nearest first: the smallest distance in each, and a bound above.

        Zones may overlap; a pair of a query and a key is at a distance of its `zone`.
        """
        return ((0, self.window_size or UNBOUNDED),)

    def tiles(self, first: int, last: int) -> Iterator[Tile]:
        """All keys that the queries first..last see, each once; where zones overlap, not by distance alone."""
        for zone, (near, far) in enumerate(self.zone_distances(last)):
            yield Tile.band(zone, near, far, first, last)

    def for_queries(self, first: int, count: int) -> tuple[AttentionRule, int, int]:
        """The rule in a form in which fewer rotations take the queries from position `first` on.

        `count`: queries, those of all heads that share a key. Also returned: where blocks of queries are best begun, a
        position and the step from there.
        """
        return self, 0, 1


@dataclass(frozen=True, kw_only=True)
class RemappingMethod(RopeMethod, AttentionRule):
    """Base of the remapping methods.

    Attributes:
        max_distance: the longest relative position that is used, in tokens; default: the model's context length, or
            what `frequency` extends it to.
        temperature: how the softmax gets sharper with the position of a query, see `_TEMPERATURES`, also in
            full-attention layers without RoPE; default: `default_temperature`, and "none" for models whose attention
            does so by itself.
        frequency: a static frequency method underneath; default: the model's own frequencies.
        beyond_only: rows of at most `max_distance` tokens are read by the model as loaded, bit for bit, also rows that
            grow longer later. A token then costs one more rotation of the keys, except in `stairs`.
    """

    left_out: ClassVar[Mapping[str, Any]] = {"beyond_only": False}
    """Values that `to_dict` leaves out, because folders of before have no such keys."""
    moves_keys: ClassVar[bool] = True
    """Whether any key is seen at another relative position than its own."""
    default_temperature: ClassVar[str] = "llama4"
    composable = False

    # Not in the label: it follows from the model, and where it was given, the other parameters follow from it.
    max_distance: int | None = field(default=None, metadata={"in_label": False})
    temperature: str | None = None
    frequency: RopeMethod | None = None
    beyond_only: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(1, "max_distance", "window", "group", "chunk")
        if self.temperature is not None:
            self.check_choice("temperature", tuple(_TEMPERATURES))
        of_frequencies = isinstance(self.frequency, RopeMethod) and not isinstance(self.frequency, RemappingMethod)
        if self.frequency is not None and (not of_frequencies or self.frequency.length_dependent):
            raise MethodError(
                f"{self.name}: frequency must be a frequency method that does not depend on the length of the input, "
                f"got {self.frequency!r}"
            )
        if self.frequency is not None and self.by_length:
            raise MethodError(
                f"{self.name}: short rows are read by the model as loaded, and {self.frequency.name} would change "
                "their frequencies; leave frequency out, or have every row remapped"
            )

    def bind(self, rotary: Rotary, target_length: int | None, *, own_temperature: bool = False) -> Self:
        """The method with every parameter that was not given filled in.

        Args:
            rotary: the rotary embedding of the model.
            target_length: the length in tokens that was asked for.
            own_temperature: whether the model's attention has a temperature that depends on the position by itself.

        Raises:
            MethodError: parameters that lead to relative positions beyond `max_distance`, or frequencies underneath
                that depend on the length of the input.
        """
        if rotary.length_dependent:
            assert rotary.own is not None
            raise MethodError(
                f"{self.name} needs frequencies that do not change, and those of this model's own "
                f"{rotary.own.method.name} depend on the length of the input; replace them with over='original'"
            )
        length = rotary.context_length if self.frequency is None else self.frequency.extended_length(rotary)
        temperature = self.temperature or ("none" if own_temperature else self.default_temperature)
        max_distance = self.max_distance or length or rotary.context_length
        if max_distance < 8:
            raise MethodError(f"{self.name} needs a context length of at least 8 tokens, got {max_distance}")
        bound = replace(self, max_distance=max_distance, temperature=temperature)
        return bound.with_defaults(max_distance, target_length)

    def as_stated(self, config: Any, limit: int) -> Self:
        """The method with parameters that the config of a model states for it, which `limit` tokens allow."""
        return self

    @abstractmethod
    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        """The method with its own parameters filled in; `max_distance` and `temperature` are filled in already.

        Args:
            limit: the longest relative position that may be used, in tokens.
            target_length: the length in tokens that was asked for; None: none.

        Raises:
            MethodError: parameters that lead beyond `limit`, see `check_reach`.
        """

    def check_reach(self, limit: int, what: str, size: float) -> None:
        """Raise MethodError where `size`, in tokens, is above `limit`; `what` names it in the message."""
        if size > limit:
            raise MethodError(
                f"{self.name}: {what} is {size:g} tokens, and the longest relative position the model was trained at "
                f"is {limit} tokens"
            )

    @property
    def by_length(self) -> bool:
        """Whether the rule of a row depends on its length: as loaded up to `max_distance`, and remapped beyond."""
        return self.beyond_only

    def depends_on_length(self, rotary: Rotary) -> bool:
        return self.by_length or super().depends_on_length(rotary)

    def at_length(self, length: int) -> Self | None:
        """The rule of rows of `length` tokens, one that no longer depends on it; None: the model as loaded."""
        if not self.by_length:
            return self
        assert self.max_distance is not None
        return None if length <= self.max_distance else self

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        return (self.frequency or Default()).compute(rotary, length)

    def check(self, rotary: Rotary) -> None:
        if self.frequency is not None:
            self.frequency.check(rotary)

    def rope_parameters(self, rotary: Rotary) -> dict[str, Any] | None:
        return None

    def extended_length(self, rotary: Rotary) -> int | None:
        return None

    def to_dict(self) -> dict[str, Any]:
        missing = object()
        return {key: value for key, value in super().to_dict().items() if self.left_out.get(key, missing) != value}

    def unchanged_length(self, rotary: Rotary) -> int:
        if self.by_length:
            return self.max_distance or rotary.context_length
        if self.frequency is not None and not super().unchanged_length(rotary):
            return 0
        formula = _TEMPERATURES[self.temperature or "none"]
        if formula is None:
            return self.exact_length
        assert self.max_distance is not None
        # Up to max_distance itself: there every formula is above 1, so that argmax has a first place to name.
        sharper = formula(torch.arange(self.max_distance + 1, dtype=torch.float32), self.max_distance) != 1
        return min(self.exact_length, int(sharper.to(torch.int8).argmax()))

    @property
    def exact_length(self) -> int:
        """The longest input, in tokens, whose scores are known to stay as they are, but for the temperature."""
        return 0

    @property
    def note(self) -> str:
        """The effect of a bound method on far keys, in one sentence."""
        short = f"Rows of up to {self.max_distance:,} tokens are read as loaded. " if self.by_length else ""
        return (
            f"{short}Far keys are seen at relative positions up to {self.max_distance:,}, which the model was trained "
            "at; frequencies stay as they are."
        )

    def query_scale(self, m: Tensor) -> Tensor | None:
        formula = _TEMPERATURES[self.temperature or "none"]
        if formula is None:
            return None
        assert self.max_distance is not None
        return formula(m.to(torch.float32), self.max_distance)

    def distance(self, m: Tensor, n: Tensor) -> Tensor:
        """The relative position at which a query at m sees a key at n <= m, in tokens; float64, shapes broadcast.

        `bind` must have filled in every parameter. Where the rule depends on the length of the row, the largest m is
        the last token of the row.
        """
        rule = self.at_length(int(m.max()) + 1)
        if rule is not self:
            return (m.double() - n) if rule is None else rule.distance(m, n)
        # float64: positions are divided (Leaky ReRoPE), and float32 holds whole numbers up to 2^24 only.
        key = self.key_position(n).tokens()
        near = m.double() - n if self.local_zone_exact else self.key_position(m).tokens() - key
        zones = self.zone(m, n)
        for zone in range(1, len(self.zone_distances(int((m - n).max()) + 1))):
            near = torch.where(zones == zone, self.query_position(m, zone).tokens() - key, near)
        return near


@dataclass(frozen=True, kw_only=True)
class WindowedRemapping(RemappingMethod):
    """Keys at distances below w = `window` are seen where they are, those beyond at one further place each.

    `window`: default the limit over `window_share`.
    """

    window_share: ClassVar[int] = 2

    window: int | None = None

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        method = replace(self, window=self.window or max(1, limit // self.window_share))
        method.check_reach(limit, "window", method.exact_window)
        return method

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        return (m - n >= self.exact_window).long()

    @property
    def exact_window(self) -> int:
        """`window`, which `bind` has filled in."""
        assert self.window is not None
        return self.window

    @property
    def exact_length(self) -> int:
        return self.exact_window + 1  # a key at the distance w itself is seen at w

    def zone_distances(self, length: int) -> tuple[tuple[int, int], ...]:
        return (0, self.exact_window), (self.exact_window, UNBOUNDED)


@register_method("rerope")
@dataclass(frozen=True, kw_only=True)
class ReRoPE(WindowedRemapping):
    """ReRoPE (Su 2023, https://kexue.fm/archives/9708): beyond the window every key is seen at distance w.

    `window`: default half the limit.
    """

    def key_position(self, n: Tensor) -> RemappedPosition:
        # All far keys are at one distance, so the query alone rotates, by w: keys are stored as if at position 0.
        return RemappedPosition(torch.zeros_like(n))

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        return RemappedPosition(offset=self.exact_window)


@register_method("leaky-rerope")
@dataclass(frozen=True, kw_only=True)
class LeakyReRoPE(WindowedRemapping):
    """Leaky ReRoPE (Su 2023, https://kexue.fm/archives/9708): beyond the window distances grow k times as slowly.

    `window`: default half the limit; `k`: default as small as the target length allows, 16 where there is none.
    """

    k: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(1, "k")

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        method = super().with_defaults(limit, target_length)
        window = method.exact_window
        fitted = DEFAULT_GROUP
        if target_length is not None and window < limit:  # the smallest with w + (target - w) / k <= limit
            fitted = max(1, math.ceil((target_length - window) / (limit - window)))
        k = self.k or float(fitted)
        method = replace(method, k=k)
        if target_length is not None:
            what = f"with k={k:g} the place of a key {target_length} tokens back"
            method.check_reach(limit, what, window + (target_length - window) / k)
        return method

    def extended_length(self, rotary: Rotary) -> int | None:
        if self.max_distance is None or self.window is None or self.k is None:
            return None
        return int(self.window + (self.max_distance - self.window) * self.k)

    def key_position(self, n: Tensor) -> RemappedPosition:
        assert self.k is not None
        return RemappedPosition(n, self.k)

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        assert self.k is not None
        # (m - n) / k + w - w / k is w at distance w: the far zone begins where the near one ends.
        return RemappedPosition(m, self.k, self.exact_window - self.exact_window / self.k)
