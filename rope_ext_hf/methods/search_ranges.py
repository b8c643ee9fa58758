"""Where a search looks for the numbers of a method: each method declares it beside its parameters.

class Yarn(RampedMethod):
    search_ranges = RampedMethod.search_ranges | {"attention_factor": SearchRange(0.9, 1.4)}
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FACTOR_RANGE", "SearchRange"]


@dataclass(frozen=True)
class SearchRange:
    """The values of one parameter that are worth trying, evenly by their logarithm.

    Attributes:
        low, high: the ends, both above 0.
        times_factor: whether both are multiples of the factor that the target length needs.
    """

    low: float
    high: float
    times_factor: bool = False

    def ends(self, factor: float) -> tuple[float, float]:
        """The ends for a target length that needs this factor."""
        scale = factor if self.times_factor else 1.0
        return max(self.low * scale, 1.0) if self.times_factor else self.low, self.high * scale


FACTOR_RANGE = {"factor": SearchRange(0.75, 3.0, times_factor=True)}
"""Of methods whose factor states the extended length: also larger and smaller ones than the target needs."""
