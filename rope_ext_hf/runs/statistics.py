"""Numbers with their 95% intervals: every interval of a result, a comparison or a verdict is computed here.

    >>> estimate([1.0, 1.2, 0.9, 1.1, 1.4])
    Estimate(value=1.1..., low=0.9..., high=1.4..., items=5)

Items are documents, prompts or passages, drawn from more of their kind; the tokens of one item are not independent. A
percentile bootstrap over few items is too narrow: of intervals that should hold 95% it holds 84% at five normal losses.
The interval here is Student's with Hall's correction for skewness (On the removal of skewness by transformation, 1992);
docs/evaluation.md states by number of items how often it covers the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

FEWEST = 3  # items that an interval takes: from two, it is hundreds of times as wide as they are apart
_DRAWN_AT_ONCE = 2**20  # indices that `resample` holds in memory at a time


class Estimate(NamedTuple):
    """A mean over items with its 95% interval."""

    value: float  # the mean; not finite where an item's value is not
    # low, high: the ends of the interval; None with fewer than `FEWEST` items, or where the value is not finite
    low: float | None
    high: float | None
    items: int  # how many there are

    def text(self, number: Callable[[float], str]) -> str:
        """The value with its interval in brackets, as `number` writes them; without brackets where there is none."""
        if self.low is None or self.high is None:
            return number(self.value)
        return f"{number(self.value)} [{number(self.low)} to {number(self.high)}]"

    def minus(self, other: Estimate, times: float = 1.0) -> Estimate:
        """This mean less a multiple of another one over other items, by recovered variances (MOVER).

        Source: Zou and Donner, Construction of confidence limits about effect measures (2008), sec. 2.
        """
        value, items = self.value - times * other.value, min(self.items, other.items)
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return Estimate(value, None, None, items)
        below = math.hypot(self.value - self.low, times * (other.high - other.value))
        above = math.hypot(self.high - self.value, times * (other.value - other.low))
        return Estimate(value, value - below, value + above, items)


def estimate(sums: Sequence[float], weights: Sequence[float] | None = None, *, level: float = 0.975) -> Estimate:
    """The mean of items, sum(sums) / sum(weights), with its interval, `level` being that of each end.

    An item has a sum, of nats for example, and a weight that divides it, such as its tokens; None: 1 each. Its value,
    the sum over the weight, varies alike whatever its weight: documents differ more than their tokens do. So the
    variance of a value is that of all items, and the weights say how far the mean averages it out. Items without weight
    are left out.
    """
    total = torch.tensor(sums, dtype=torch.float64)
    weight = torch.ones_like(total) if weights is None else torch.tensor(weights, dtype=torch.float64)
    value = math.fsum(total.tolist()) / math.fsum(weight.tolist())
    total, weight = total[weight > 0], weight[weight > 0]
    items = len(total)
    if items < FEWEST or not math.isfinite(value):
        return Estimate(value, None, None, items)
    share, values = weight / weight.sum(), total / weight
    deviations, squares = values - values.mean(), float(share.square().sum())
    variance = float(deviations.var()) * squares
    if not variance > 0:
        return Estimate(value, value, value, items)
    skewness = float(deviations.pow(3).mean() / deviations.square().mean() ** 1.5)
    of_mean = skewness * float(share.pow(3).sum()) / squares**1.5
    most = t_quantile(level, items - 1)
    low, high = (value - _hall(end, of_mean) * math.sqrt(variance) for end in (most, -most))
    return Estimate(value, low, high, items)


def _hall(quantile: float, skewness: float) -> float:
    """The quantile of a mean's deviation in standard errors, from Student's, for the skewness of the mean."""
    if abs(skewness) < 1e-6:
        return quantile
    inner = 1 + skewness * (quantile - skewness / 6)
    return 3 * (math.copysign(abs(inner) ** (1 / 3), inner) - 1) / skewness


def estimate_share(shares: Sequence[float], *, level: float = 0.975) -> Estimate:
    """The mean of values from 0 to 1 with its interval, never of no width: four items are added, two of them 0.

    Source: Agresti and Coull, Approximate is better than "exact" for interval estimation of proportions (1998).
    """
    return _widened(shares, (0.0, 0.0, 1.0, 1.0), (0.0, 1.0), level)


def estimate_share_change(changes: Sequence[float]) -> Estimate:
    """The mean of paired differences of such values, -1 to 1: half an item is added at each end, and one at 0.

    Source: Agresti and Min, Simple improved confidence intervals for comparing matched proportions (2005).
    """
    return _widened(changes, (-(0.5**0.5), 0.5**0.5), (-1.0, 1.0))


def _widened(
    values: Sequence[float], added: Sequence[float], ends: tuple[float, float], level: float = 0.975
) -> Estimate:
    value, items = math.fsum(values) / len(values), len(values)
    if items < FEWEST:
        return Estimate(value, None, None, items)
    wider = torch.tensor([*values, *added], dtype=torch.float64)
    half = t_quantile(level, items - 1) * float(wider.std(correction=0)) / math.sqrt(len(wider))
    middle = float(wider.mean())
    return Estimate(value, max(ends[0], min(value, middle - half)), min(ends[1], max(value, middle + half)), items)


@cache
def t_quantile(level: float, freedom: float) -> float:
    """The quantile of Student's distribution, for a level above 1/2; to 1e-5."""
    freedom = min(freedom, 1e4)  # from there on it is the normal one to 1e-4
    # With x = sqrt(freedom) tan(angle), its density is proportional to cos(angle)^(freedom - 1).
    angles = torch.linspace(0, math.pi / 2, 16385, dtype=torch.float64)
    area = torch.cumulative_trapezoid(angles.cos().clamp(min=0) ** (freedom - 1), angles)
    wanted = (2 * level - 1) * float(area[-1])
    index = min(int(torch.searchsorted(area, wanted)), len(area) - 2)
    before = float(area[index - 1]) if index else 0.0
    part = (wanted - before) / (float(area[index]) - before)
    return math.sqrt(freedom) * math.tan(float(angles[index] + part * angles[1]))


def resample(values: Tensor, draws: int = 2000, seed: int = 0) -> Tensor:
    """Sums (rows, draws) of values (rows, items), items drawn anew with replacement, the same for every row."""
    rows, items = values.shape
    generator, at_once = torch.Generator().manual_seed(seed), max(1, 2 * _DRAWN_AT_ONCE // (rows * items))
    parts = []
    for start in range(0, draws, at_once):  # the generator's numbers do not depend on the size of the parts
        chosen = torch.randint(items, (min(at_once, draws - start), items), generator=generator)
        parts.append(values[:, chosen].sum(dim=-1))
    return torch.cat(parts, dim=-1)
