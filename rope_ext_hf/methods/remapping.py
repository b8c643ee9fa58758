"""Remapping methods, which show far keys to a query at relative positions that the model was trained at.

A method divides the keys before a query into zones, numbered from 0, the nearest. In each zone the query is rotated to
one position and the keys to theirs; the difference is the relative position. The cache holds keys rotated to
`key_position`, which is where every zone sees them, with one exception: if the local zone is exact
(`local_zone_exact`), the nearest zone sees keys at their own positions.

Some rules depend on the length of a row (`beyond_only`, and a group "length"): short rows are read as by the unpatched
model. Under such a rule keys are cached at their own positions, whatever the length is, and rotated to `key_position`
when they are read.

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
from rope_ext_hf.methods.tiles import Tile, ZoneEdges

__all__ = ["RemappingMethod", "ScoreBias"]

ScoreBias = Callable[[Tensor, Tensor], Tensor]
"""(m, n) -> a number to add to each score, (rows or 1, heads or 1, queries, keys).

m, (rows or 1, queries), and n, (rows or 1, keys), are the positions of queries and keys.
"""
DEFAULT_GROUP = 16
"""`group` and `k` where no target length is given: enough for about 8 to 12 times the context length."""

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
        """Return the position, in tokens, as a float64 tensor."""
        whole = torch.zeros(()) if self.positions is None else self.positions
        return whole.double() / self.divisor + self.offset


class AttentionRule:
    """The keys that a query sees, and the relative positions at which it sees them.

    This base class is the rule of a model without a remapping method: a query sees all keys before it, where they are.
    """

    local_zone_exact: ClassVar[bool] = True
    """Whether the nearest zone sees keys and queries at their own positions; False: where they are stored."""
    scales_queries_only: ClassVar[bool] = False
    """Whether the rule changes nothing but the size of queries. The model's own attention function then runs."""

    @property
    def depends_on_total_length(self) -> bool:
        """True if the rule for a row of the batch depends on the length of that row."""
        return False

    @property
    def window_size(self) -> int | None:
        """The number of keys that a query sees, its own included. None: it sees all keys before it."""
        return None

    def key_position(self, n: Tensor) -> RemappedPosition:
        """Return the positions that keys at `n` are rotated to for every zone except the nearest one."""
        return RemappedPosition(n)

    @property
    def key_period(self) -> int | None:
        """The number of tokens G for which key_position(n + G) is key_position(n) + key_position(G), whatever n is.

        It is None for a rule that has no such number, or for which none is known.
        """
        return None

    def stored_position(self, n: Tensor) -> RemappedPosition:
        """Return the positions that keys at `n` are rotated to in the cache, the same for rows of every length.

        Queries arrive rotated to the same positions, before a zone is chosen for them.
        """
        return RemappedPosition(n) if self.depends_on_total_length else self.key_position(n)

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        """Return the positions that queries at `m` are rotated to for the keys of a far zone, numbered from 1.

        In the nearest zone, 0, queries are rotated to the same positions as its keys.
        """
        return self.key_position(m)

    def query_scale(self, m: Tensor) -> Tensor | None:
        """Return the factor for queries at positions `m`, a float32 tensor. None: queries stay as they are."""
        return None

    def score_bias(self, heads: int, length: int) -> ScoreBias | None:
        """Return the function that gives the numbers to add to attention scores, for an input of `length` tokens.

        None: nothing is added.

        Raises:
            MethodError: the parameters are for another number of heads.
        """
        return None

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        """Return the zone that a key at n is in for a query at m, for each pair of them with n <= m.

        A zone is a range of keys with one rule of relative positions. The values for n > m are not used.
        """
        return torch.zeros_like(m - n)

    def zone_distances(self, length: int) -> tuple[tuple[int, int], ...]:
        """Return for each zone the smallest distance from query to key in it, and a bound above the largest.

        They are for an input of `length` tokens; the nearest zone comes first. The ranges of distances may overlap: the
        `zone` of a pair decides.
        """
        return ((0, self.window_size or UNBOUNDED),)

    def zone_edges(self, length: int) -> ZoneEdges | None:
        """Return where the zones of a query begin and end, for an input of `length` tokens.

        A rule whose zones overlap in distance overrides it. None: no `ZoneEdges` describes its zones.
        """
        return ZoneEdges.from_distances(self.zone_distances(length))

    def tiles(self, first: int, last: int) -> Iterator[Tile]:
        """Yield tiles that cover all keys which the queries at first ... last - 1 see, each pair once.

        A rule whose zones overlap in distance overrides it.
        """
        for zone, (near, far) in enumerate(self.zone_distances(last)):
            yield Tile.band(zone, near, far, first, last)

    def for_queries(self, first: int, count: int) -> tuple[AttentionRule, int, int]:
        """Return an equal rule that needs fewer rotations for many queries, and where to begin blocks of them.

        Args:
            first: the position of the first query.
            count: the number of queries, those of all heads that share a key.

        Returns:
            The rule; a position at which a block of queries should begin; and the distance from there to the next such
            position.
        """
        return self, 0, 1


@dataclass(frozen=True, kw_only=True)
class RemappingMethod(RopeMethod, AttentionRule):
    """Base of the remapping methods.

    Attributes:
        max_distance: the longest relative position that is used, in tokens; default: the model's context length, or
            the length that `frequency` extends it to.
        temperature: the factor of queries that makes the softmax sharper as their position grows: "none", "log-n" or
            "llama4", see `_TEMPERATURES`. Full-attention layers without RoPE get it as well. Default:
            `default_temperature`, and "none" for models whose attention has such a factor of its own.
        frequency: a static frequency method for the rotations; default: the model's own frequencies.
        beyond_only: rows of at most `max_distance` tokens are read by the modules of the unpatched model, so that no
            bit changes, also in rows that grow longer later. A token then costs one more rotation of the keys, except
            in `stairs`.
    """

    omitted_values: ClassVar[Mapping[str, Any]] = {"beyond_only": False}
    """Parameters that `to_dict` leaves out at these values; folders saved before the parameters existed mean them."""
    moves_keys: ClassVar[bool] = True
    """Whether any key is seen at a relative position other than its own."""
    default_temperature: ClassVar[str] = "llama4"
    """The temperature where none is given."""
    composable = False
    changes_frequencies = False  # where no layer rotates, the probe of a patch says so

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
        if self.frequency is not None:
            self._check_frequency(self.frequency)

    def _check_frequency(self, frequency: RopeMethod) -> None:
        is_frequency_method = isinstance(frequency, RopeMethod) and not isinstance(frequency, RemappingMethod)
        if not is_frequency_method or frequency.length_dependent:
            raise MethodError(
                f"{self.name}: frequency must be a frequency method that does not depend on the length of the input, "
                f"such as yarn; got {frequency!r}"
            )
        if self.depends_on_total_length:
            raise MethodError(
                f"{self.name}: short rows are read by the model as loaded, and {frequency.name} would change their "
                "frequencies. Leave frequency out, or remap rows of every length (no beyond_only, a number as group)"
            )

    def bind(self, rotary: Rotary, target_length: int | None, *, own_temperature: bool = False) -> Self:
        """Return the method with values for a model in place of every parameter that is None.

        Args:
            rotary: the rotary embedding of the model.
            target_length: the length in tokens to extend to; None: none is stated.
            own_temperature: whether the model's attention has a temperature by position of its own.

        Raises:
            MethodError: parameters that lead to relative positions beyond `max_distance`, or frequencies underneath
                that depend on the length of the input.
        """
        if rotary.length_dependent:
            assert rotary.own is not None
            raise MethodError(
                f"{self.name} needs frequencies that do not change, and this model's own {rotary.own.method.name} has "
                "frequencies that depend on the length of the input; replace them with over='original'"
            )
        length = rotary.context_length if self.frequency is None else self.frequency.extended_length(rotary)
        temperature = self.temperature or ("none" if own_temperature else self.default_temperature)
        max_distance = self.max_distance or length or rotary.context_length
        if max_distance < 8:
            raise MethodError(f"{self.name} needs a context length of at least 8 tokens, got {max_distance}")
        bound = replace(self, max_distance=max_distance, temperature=temperature)
        return bound.with_defaults(max_distance, target_length)

    def as_stated(self, config: Any, limit: int) -> Self:
        """Return the method with the parameters that the model's config states for it, unless they exceed `limit`."""
        return self

    @abstractmethod
    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        """Return the method with a value for each parameter of its class that is None.

        `bind` calls it, and has filled in `max_distance` and `temperature`.

        Args:
            limit: the longest relative position that may be used, in tokens.
            target_length: the length in tokens to extend to; None: none is stated.

        Raises:
            MethodError: parameters that lead beyond `limit`, see `check_reach`.
        """

    def check_reach(self, limit: int, subject: str, size: float) -> None:
        """Raise MethodError if `size` tokens exceed `limit`; `subject` says in the message what has this size."""
        if size > limit:
            raise MethodError(
                f"{self.name}: {subject} is {size:g} tokens, which must not exceed the longest relative position that "
                f"the model was trained at, {limit} tokens; give a smaller one"
            )

    @property
    def depends_on_total_length(self) -> bool:
        """True if the rule for a row depends on its length.

        Rows of up to `max_distance` tokens are then not remapped, and longer ones are.
        """
        return self.beyond_only

    @property
    def keeps_bits(self) -> bool:
        return self.depends_on_total_length

    def depends_on_length(self, rotary: Rotary) -> bool:
        return self.depends_on_total_length or super().depends_on_length(rotary)

    def at_length(self, length: int) -> Self | None:
        """Return the rule for rows of `length` tokens, which no longer depends on a length.

        None: rows of this length are read as by the unpatched model.
        """
        if not self.depends_on_total_length:
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
        saved = super().to_dict()
        for key, value in self.omitted_values.items():
            if saved.get(key) == value:
                del saved[key]
        return saved

    def unchanged_length(self, rotary: Rotary) -> int:
        if self.depends_on_total_length:
            return self.max_distance or rotary.context_length
        if self.frequency is not None and not super().unchanged_length(rotary):
            return 0
        formula = _TEMPERATURES[self.temperature or "none"]
        if formula is None:
            return self.exact_length
        assert self.max_distance is not None
        # The first position whose factor is not 1. There is one: at max_distance every formula is above 1.
        scaled = formula(torch.arange(self.max_distance + 1, dtype=torch.float32), self.max_distance) != 1
        return min(self.exact_length, int(scaled.to(torch.int8).argmax()))

    @property
    def exact_length(self) -> int:
        """The longest input, in tokens, whose scores the method leaves as they are, apart from the temperature."""
        return 0

    @property
    def note(self) -> str | None:
        """A sentence that says what the method, once bound to a model, does with far keys."""
        short = f"Rows of up to {self.max_distance:,} tokens are not remapped. " if self.depends_on_total_length else ""
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
        """Return the relative position in tokens at which a query at m sees a key at n <= m, float64.

        m and n broadcast against each other. `bind` must have filled in every parameter. Where the rule depends on the
        length of the row, the largest m is taken as the last token of the row.
        """
        rule = self.at_length(int(m.max()) + 1)
        if rule is not self:
            return (m.double() - n) if rule is None else rule.distance(m, n)
        # float64: positions are divided (Leaky ReRoPE), and float32 holds whole numbers up to 2^24 only.
        key = self.key_position(n).tokens()
        distance = m.double() - n if self.local_zone_exact else self.key_position(m).tokens() - key
        zones = self.zone(m, n)
        for zone in range(1, len(self.zone_distances(int((m - n).max()) + 1))):
            distance = torch.where(zones == zone, self.query_position(m, zone).tokens() - key, distance)
        return distance


@dataclass(frozen=True, kw_only=True)
class WindowedRemapping(RemappingMethod):
    """Base of methods with two zones: keys at distances below w = `window` are seen where they are, others remapped.

    `window`: default `max_distance` / `window_share`.
    """

    window_share: ClassVar[int] = 2
    """`max_distance` over the default window."""

    window: int | None = None

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        method = replace(self, window=self.window or max(1, limit // self.window_share))
        method.check_reach(limit, "window", method.exact_window)
        return method

    def zone(self, m: Tensor, n: Tensor) -> Tensor:
        return (m - n >= self.exact_window).long()

    @property
    def exact_window(self) -> int:
        """The smallest distance at which keys are remapped: `window`, which `bind` has filled in."""
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
    """ReRoPE (Su 2023, https://kexue.fm/archives/9708): beyond the window w every key is seen at distance w.

    A query at m sees a key at n at min(m - n, w). `window`: w, default half of `max_distance`.
    """

    def key_position(self, n: Tensor) -> RemappedPosition:
        # All far keys are at one distance: they are stored as if at position 0, and the query is rotated to w.
        return RemappedPosition(torch.zeros_like(n))

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        return RemappedPosition(offset=self.exact_window)


@register_method("leaky-rerope")
@dataclass(frozen=True, kw_only=True)
class LeakyReRoPE(WindowedRemapping):
    """Leaky ReRoPE (Su 2023, https://kexue.fm/archives/9708): beyond the window distances grow k times as slowly.

    A query at m sees a key at a distance m - n >= w at w + (m - n - w) / k. `window`: w, default half of
    `max_distance`; `k`: default the smallest whole number with which the target length fits, 16 where none is stated.
    """

    k: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_least(1, "k")

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        method = super().with_defaults(limit, target_length)
        window = method.exact_window
        default = DEFAULT_GROUP
        if target_length is not None and window < limit:  # the smallest with w + (target - w) / k <= limit
            default = max(1, math.ceil((target_length - window) / (limit - window)))
        k = self.k or float(default)
        method = replace(method, k=k)
        if target_length is not None:
            subject = f"with k={k:g} the relative position of a key {target_length} tokens back"
            method.check_reach(limit, subject, window + (target_length - window) / k)
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
