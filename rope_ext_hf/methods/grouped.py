"""Remapping methods that see far keys in groups: several neighbouring keys at one relative position.

    >>> method = JetLong(window=2, max_distance=8)
    >>> method.distance(torch.tensor(15), torch.arange(16)).int().tolist()    # 16 tokens: groups of 2
    [7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 2, 1, 0]

The group is one number, or "length": the smallest group that the present length of each row needs, and none up to
`max_distance`, where the model runs as loaded. Symbols as in remapping.py.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any, ClassVar, Self

from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.registry import register_method
from rope_ext_hf.methods.remapping import DEFAULT_GROUP, RemappedPosition, RemappingMethod, WindowedRemapping

_BY_LENGTH = "length"


@dataclass(frozen=True, kw_only=True)
class _Grouped(WindowedRemapping):
    """Keys at distances below `window` are seen where they are, those beyond by floor(m / G) and floor(n / G).

    `group`: G, keys that are seen at one place; "length": the smallest that the present length of a row needs;
    default: as small as the target length allows, 16 where there is none.
    """

    group: int | str | None = None

    def __post_init__(self) -> None:
        if self.group not in (None, _BY_LENGTH) and (isinstance(self.group, bool) or not isinstance(self.group, int)):
            raise MethodError(f'{self.name}: group must be a whole number or "{_BY_LENGTH}", got {self.group!r}')
        super().__post_init__()

    @property
    def by_length(self) -> bool:
        return self.beyond_only or self.group == _BY_LENGTH

    def at_length(self, length: int) -> Self | None:
        rule = super().at_length(length)
        return rule and (_with_group(rule, rule.smallest_group(length)) if self.group == _BY_LENGTH else rule)

    @property
    def size(self) -> int:
        """`group` as a number, which `bind` or `at_length` has filled in."""
        assert isinstance(self.group, int)
        return self.group

    @abstractmethod
    def shift(self, group: int) -> float:
        """The distance in tokens that a query is moved by for far keys in groups of this size."""

    def farthest(self, length: int, group: int) -> float:
        """The relative position of the first of `length` keys, seen by the last of them."""
        return (length - 1) // group + self.shift(group)

    def smallest_group(self, length: int) -> int:
        """The smallest group that keeps rows of `length` tokens within `max_distance`; `length` where none does."""
        assert self.max_distance is not None
        # Two floors stand in the farthest place, so the smallest group is searched for, from below, and not solved for.
        near = self.shift(length)
        least = max(1, math.ceil((length - near) / max(1, self.max_distance - near + 1)) - 1)
        fits = (size for size in count(least) if size >= length or self.farthest(length, size) <= self.max_distance - 1)
        return next(fits)

    def with_defaults(self, limit: int, target_length: int | None) -> Self:
        method = super().with_defaults(limit, target_length)
        if method.group == _BY_LENGTH:
            return method
        if method.group is None:
            method = replace(method, group=method.smallest_group(target_length) if target_length else DEFAULT_GROUP)
        if target_length is not None:
            what = f"with group={method.group} the farthest place"
            method.check_reach(limit - 1, what, method.farthest(target_length, method.size))
        return method

    def extended_length(self, rotary: Rotary) -> int | None:
        if self.max_distance is None or self.window is None or not isinstance(self.group, int):
            return None
        return math.floor(self.max_distance - self.shift(self.group)) * self.group

    def key_position(self, n: Tensor) -> RemappedPosition:
        return RemappedPosition(n // self.size)

    def query_position(self, m: Tensor, zone: int) -> RemappedPosition:
        # The floors of query and key are taken apart, so that cached keys need no other rotation for another query. The
        # place is then one off for some pairs, as in the papers.
        return RemappedPosition(m // self.size, offset=self.shift(self.size))


@lru_cache(maxsize=256)
def _with_group(method: Any, group: int) -> Any:
    # Every forward of a row asks: a rule that was made once is not checked again.
    return replace(method, group=group, beyond_only=True)


@register_method("self-extend")
@dataclass(frozen=True, kw_only=True)
class SelfExtend(_Grouped):
    """Self-Extend (Jin et al. 2024, arXiv 2401.01325): beyond the window keys are seen in groups.

    A query m sees a far key n at distance floor(m / G) - floor(n / G) + w - floor(w / G). `window`: default a quarter
    of the limit; `group`: a number, or "length" (dynamic-self-extend); `floor_window`: False for w / G in place of
    floor(w / G), as the authors' code has it for Llama and Gemma (datamllab/LongLM).
    """

    window_share = 4
    left_out: ClassVar = {**RemappingMethod.left_out, "floor_window": True}

    floor_window: bool = True

    def shift(self, group: int) -> float:
        return self.exact_window - (self.exact_window // group if self.floor_window else self.exact_window / group)

    @property
    def exact_length(self) -> int:
        whole = self.floor_window or self.exact_window % self.size == 0  # else the first far key is seen below w
        return super().exact_length if whole else self.exact_window


@register_method("dynamic-self-extend")
@dataclass(frozen=True, kw_only=True)
class DynamicSelfExtend(SelfExtend):
    """Self-Extend with the smallest group that the present length of each row needs, and none up to the context length.

    The shift of Self-Extend (arXiv 2401.01325) with the group of Jet-Long: short rows are read by the model as loaded,
    bit for bit, and no extended length has to be chosen.
    """

    group: int | str | None = _BY_LENGTH


@register_method("jet-long")
@dataclass(frozen=True, kw_only=True)
class JetLong(_Grouped):
    """Jet-Long (NVIDIA 2026, github.com/jet-ai-projects/Jet-Long): groups of the smallest size that a row needs.

    A query m sees keys at distances up to w where they are, and farther ones at floor(m / G) - floor(n / G), with
    G = ceil(L / C) for a row of L tokens; rows of up to C tokens are read by the model as loaded. There is no shift, so
    that a key just beyond w is seen nearer than one just inside. There the longest row of a batch decides for all; here
    each row has a G of its own. `window`: w, default a sixteenth of the limit, as published; `group`: "length", or a
    number.
    """

    default_temperature = "none"  # the authors have none
    window_share = 16

    group: int | str | None = _BY_LENGTH

    @property
    def exact_window(self) -> int:
        return super().exact_window + 1  # the key at the distance w is near, where others see it as far

    def shift(self, group: int) -> float:
        return 0.0

    @property
    def exact_length(self) -> int:
        return self.exact_window  # the key behind is already seen nearer
