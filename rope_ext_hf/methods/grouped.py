"""Remapping methods that show far keys in groups, several neighbouring keys at one relative position.

    >>> method = JetLong(window=2, max_distance=8)
    >>> method.distance(torch.tensor(15), torch.arange(16)).int().tolist()    # 16 tokens: groups of 2
    [7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 2, 1, 0]

The size of the groups is a number, or "length": the smallest size that the present length of each row needs. Rows of up
to `max_distance` tokens then need none, and are read as by the unpatched model. Symbols as in remapping.py.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.registry import register_method
from rope_ext_hf.methods.remapping import DEFAULT_GROUP, RemappedPosition, RemappingMethod, WindowedRemapping

_BY_LENGTH = "length"


@dataclass(frozen=True, kw_only=True)
class _Grouped(WindowedRemapping):
    """Base class of methods with groups: far keys at n are placed at floor(n / G), queries at floor(m / G) + a shift.

    `group`: G, the number of neighbouring keys that share one position. "length": the smallest number that the present
    length of the row needs. Default: the smallest with which the target length fits, or 16 if no length is stated.
    """

    group: int | str | None = None

    def __post_init__(self) -> None:
        if self.group not in (None, _BY_LENGTH) and (isinstance(self.group, bool) or not isinstance(self.group, int)):
            raise MethodError(f'{self.name}: group must be a whole number or "{_BY_LENGTH}", got {self.group!r}')
        super().__post_init__()

    @property
    def depends_on_total_length(self) -> bool:
        return self.beyond_only or self.group == _BY_LENGTH

    def at_length(self, length: int) -> Self | None:
        rule = super().at_length(length)
        if rule is None or self.group != _BY_LENGTH:
            return rule
        sized: Self = _with_group(rule, rule.smallest_group(length))
        return sized

    @property
    def size(self) -> int:
        """The number of keys in a group: `group`, once `bind` or `at_length` has made it a number."""
        assert isinstance(self.group, int)
        return self.group

    @abstractmethod
    def shift(self, group: int) -> float:
        """Return the tokens to add to the position of a query for far keys, which are in groups of this size."""

    def farthest(self, length: int, group: int) -> float:
        """Return the relative position at which the last of `length` tokens sees the first one."""
        return (length - 1) // group + self.shift(group)

    def smallest_group(self, length: int) -> int:
        """Return the smallest group size that keeps all relative positions within `max_distance`.

        It is for an input of `length` tokens. If no size is large enough, `length` is returned.
        """
        assert self.max_distance is not None
        # `farthest` contains two floors, so the smallest group is searched for from a lower bound, not solved for.
        largest_shift = self.shift(length)
        bound = math.ceil((length - largest_shift) / max(1, self.max_distance - largest_shift + 1)) - 1
        for size in range(max(1, bound), length):
            if self.farthest(length, size) <= self.max_distance - 1:
                return size
        return max(1, bound, length)

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        method = super().with_defaults(limit, target_length)
        if method.group == _BY_LENGTH:
            return method
        if method.group is None:
            method = replace(method, group=method.smallest_group(target_length) if target_length else DEFAULT_GROUP)
        if target_length is not None:
            subject = f"with group={method.group} the relative position of the first key"
            method.check_reach(limit - 1, subject, method.farthest(target_length, method.size))
        return method

    def extended_length(self, rotary: Rotary) -> int | None:
        if self.max_distance is None or self.window is None or not isinstance(self.group, int):
            return None
        return math.floor(self.max_distance - self.shift(self.group)) * self.group

    def key_position(self, n: Tensor) -> RemappedPosition:
        return RemappedPosition(n // self.size)

    @property
    def key_period(self) -> int:
        return self.size

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        # The floors of query and key are taken separately, so that a cached key has one place for all queries. Relative
        # positions are then off by one for some pairs, as in the papers.
        return RemappedPosition(m // self.size, offset=self.shift(self.size))


@lru_cache(maxsize=256)
def _with_group(method: Any, group: int) -> Any:
    # Cached, because every forward asks for it, and making a method checks its parameters.
    return replace(method, group=group, beyond_only=True)


@register_method("self-extend")
@dataclass(frozen=True, kw_only=True)
class SelfExtend(_Grouped):
    """Self-Extend (Jin et al. 2024, arXiv 2401.01325): beyond the window keys are seen in groups.

    A query at m sees a key at n at m - n within the window w, and at floor(m / G) - floor(n / G) + w - floor(w / G)
    beyond it. `window`: w, default a quarter of `max_distance`; `group`: G, a number, or "length" (as in
    dynamic-self-extend); `floor_window`: False for w / G in place of floor(w / G), as in the authors' code for Llama
    and Gemma (datamllab/LongLM).
    """

    window_share = 4
    omitted_values: ClassVar = {**RemappingMethod.omitted_values, "floor_window": True}

    floor_window: bool = True

    def shift(self, group: int) -> float:
        return self.exact_window - (self.exact_window // group if self.floor_window else self.exact_window / group)

    @property
    def exact_length(self) -> int:
        if self.floor_window or self.exact_window % self.size == 0:
            return super().exact_length
        return self.exact_window  # the first far key is seen nearer than w


@register_method("dynamic-self-extend")
@dataclass(frozen=True, kw_only=True)
class DynamicSelfExtend(SelfExtend):
    """Self-Extend (arXiv 2401.01325) with the smallest group that each row needs at its present length, as Jet-Long.

    Rows of up to `max_distance` tokens need no groups: they are read as by the unpatched model, bit for bit. There is
    no extended length to choose.
    """

    group: int | str | None = _BY_LENGTH


@register_method("jet-long")
@dataclass(frozen=True, kw_only=True)
class JetLong(_Grouped):
    """Jet-Long (NVIDIA 2026, github.com/jet-ai-projects/Jet-Long): groups of the smallest size that a row needs.

    A query at m sees keys at distances up to w where they are, and farther ones at floor(m / G) - floor(n / G), with
    G = ceil(L / C) for a row of L tokens; rows of up to C tokens are read as by the unpatched model. There is no shift,
    so that a key just beyond w is seen nearer than one just inside. In the authors' code the longest row of a batch
    decides for all rows; here each row has a G of its own. `window`: w, default a sixteenth of `max_distance`, as
    published; `group`: "length", or a number.
    """

    default_temperature = "none"  # the authors have none
    window_share = 16

    group: int | str | None = _BY_LENGTH

    @property
    def exact_window(self) -> int:
        return super().exact_window + 1  # the key at the distance w is near; in other methods it is far

    def shift(self, group: int) -> float:
        return 0.0

    @property
    def exact_length(self) -> int:
        return self.exact_window  # the next key is already seen nearer than it is
