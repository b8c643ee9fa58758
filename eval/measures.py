"""What runs of any kind say of a method at a context length: one number, with the items it was made of.

    for measure in run.kind.measures(run):
        print(measure.name, measure.value(method_key(None), 4096))

Items of one length are the same documents or prompts for every method, so methods are compared item by item.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from rope_ext_hf.eval.results import interval, resample

__all__ = ["EffectiveLength", "Evidence", "Measure", "kendall_tau"]


class EffectiveLength(NamedTuple):
    """Up to which length a model reads well, in tokens, with its 95% interval over prompts; 0: at none."""

    length: int
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.length:,} [{self.low:,} to {self.high:,}]"


class Evidence(IntEnum):
    """How close a measure is to what a model is used for; the closer one decides first."""

    ANSWERS = 1
    RETRIEVAL = 2
    KEY_TOKENS = 3
    LOSS = 4


@dataclass(frozen=True)
class Measure:
    """One number per method and context length.

    Attributes:
        name: in words, such as "loss".
        unit: of its values, such as "nats per token"; "%" for shares, whose values are 0 to 1.
        evidence: how close it is to use.
        higher_is_better: false for losses.
        items: per document or prompt a sum and what it is divided by, by method key and length.
        reaches: effective lengths by method key, where the kind of run has them.
        threshold: the value that they are measured by.
        chance: the value by luck, of shares.
        least: documents or prompts that it takes to decide anything.
    """

    name: str
    unit: str
    evidence: Evidence
    higher_is_better: bool
    items: Mapping[str, Mapping[int, Sequence[tuple[float, float]]]]
    reaches: Mapping[str, EffectiveLength] = field(default_factory=dict)
    threshold: float | None = None
    chance: float = 0.0
    least: int = 1

    @cached_property
    def flaw(self) -> str:
        """Why it can decide nothing, in words: too few items, or no method better than luck; empty where it can.

        Better than luck is one method at one length, in one-sided tests at 2.5% together: the level of one test is
        divided by their number (Bonferroni), because among many one is lucky. A loss is never luck.
        """
        fewest = min(len(items) for row in self.items.values() for items in row.values())
        if fewest < self.least:
            return f"rests on {fewest} document{'s' * (fewest != 1)}"
        cells = [(key, length) for key, row in self.items.items() for length in row]
        level = 0.025 / len(cells)
        if not self.higher_is_better or any(
            self.drawn([key], length)[:, 0].quantile(level).item() > self.chance for key, length in cells
        ):
            return ""
        return f"is better than luck{f' ({self.chance:.1%})' if self.chance else ''} with no method"

    def lengths(self, key: str) -> list[int]:
        """The lengths at which a method was measured, ascending."""
        return sorted(self.items.get(key, {}))

    @property
    def longest(self) -> int:
        """The longest length at which any method was measured."""
        return max(length for row in self.items.values() for length in row)

    def measured(self, length: int) -> list[str]:
        """The keys of the methods measured at a length."""
        return [key for key, row in self.items.items() if length in row]

    def value(self, key: str, length: int) -> float:
        """The value of one method at one length."""
        sums, weights = zip(*self.items[key][length], strict=True)
        return float(sum(sums) / sum(weights))

    def drawn(self, keys: Sequence[str], length: int, draws: int = 2000, seed: int = 0) -> Tensor:
        """(draws, methods): the values when items are drawn anew, with replacement, the same ones for all methods."""
        table = torch.tensor([self.items[key][length] for key in keys], dtype=torch.float64)  # (methods, items, 2)
        sums, weights = resample(table.permute(2, 0, 1).flatten(0, 1), draws, seed).chunk(2)  # (methods, draws) each
        return (sums / weights).T

    def change(self, key: str, other: str, length: int) -> tuple[float, float, float]:
        """How much higher the value of `key` is than that of `other`, with its 95% interval, paired by item."""
        drawn = self.drawn([key, other], length)
        low, high = interval(drawn[:, 0] - drawn[:, 1])
        return self.value(key, length) - self.value(other, length), low, high

    def best(self, length: int, among: Sequence[str]) -> tuple[str | None, list[str]]:
        """The best method at a length, and all that its interval does not tell from it, the best one among them.

        Values that are not finite come last.
        """
        keys = [key for key in among if key in self.measured(length)]
        if not keys:
            return None, []
        sign = 1 if self.higher_is_better else -1
        best = max(keys, key=lambda key: _finite(sign * self.value(key, length)))
        equal = []
        for key in keys:
            _, low, high = self.change(best, key, length)
            if key == best or low <= 0 <= high:
                equal.append(key)
        return best, equal

    @property
    def behind(self) -> str:
        """The unit as it stands behind a value of `text`."""
        return "" if self.unit == "%" else f" {self.unit}"

    def text(self, value: float) -> str:
        """A value with as many digits as mean something."""
        return f"{value:.1%}" if self.unit == "%" else f"{value:.3f}"

    def change_text(self, change: tuple[float, float, float]) -> str:
        """A change with its sign, its interval and its unit; of shares in percentage points."""
        first, low, high = map(self.signed, change)
        return f"{first} [{low} to {high}] {'points' if self.unit == '%' else self.unit}"

    def signed(self, change: float) -> str:
        """A change with its sign; of shares in percentage points."""
        return f"{100 * change:+.1f}" if self.unit == "%" else f"{change:+.3f}"


def _finite(value: float) -> float:
    return value if value == value else float("-inf")


def kendall_tau(one: Tensor, other: Tensor) -> Tensor:
    """How alike two measures rank methods: 1 the same order, 0 no relation, -1 the reverse; ties count as tau-b.

    Args:
        one, other: (..., methods), two values of each method.

    Returns:
        (...,); NaN where all values of one measure are equal.

    Source: Kendall, The treatment of ties in ranking problems (1945).
    """
    first, second = (torch.sign(values.unsqueeze(-1) - values.unsqueeze(-2)).flatten(-2) for values in (one, other))
    return (first * second).sum(-1) / (first.square().sum(-1) * second.square().sum(-1)).sqrt()
