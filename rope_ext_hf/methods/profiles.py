"""Length profiles: a static method at several factors, of which every input gets the smallest that covers it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rope_ext_hf.errors import MethodError
from rope_ext_hf.methods.base import UNBOUNDED, RopeMethod, Rotary, is_number
from rope_ext_hf.methods.guidance import Guidance
from rope_ext_hf.methods.registry import register_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.methods.static import Default, Yarn


@register_method("profiles")
@dataclass(frozen=True, kw_only=True)
class Profiles(RopeMethod):
    """A static method at the smallest of several factors that covers an input and what is generated after it.

    A factor f covers lengths up to f C; the largest one has every longer input too. At factor 1 a model runs as loaded.

    Attributes:
        factor: the largest factor.
        smaller: the other factors, ascending; default: the powers of two below `factor`, 1 among them.
        frequency: a static frequency method, whose own factor, if it has one, is `factor`; default: yarn.
    """

    guidance = Guidance(
        when="a row must keep the frequencies that it began with",
        unmeasured="each length as under the method at its factor",
    )
    length_dependent = True
    piecewise_constant = True
    one_per_cache = True

    factor: float
    smaller: tuple[float, ...] | None = None
    frequency: RopeMethod | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        smaller: Any = self.smaller
        if smaller is None:
            smaller = [2.0**power for power in range(32) if 2.0**power < self.factor]
        smaller = (smaller,) if is_number(smaller) else smaller
        if not isinstance(smaller, (list, tuple)) or not all(is_number(each) and each >= 1 for each in smaller):
            raise MethodError(f"{self.name}: smaller must be a list of factors of at least 1, got {smaller!r}")
        if list(smaller) != sorted({*smaller} - {self.factor}) or max(smaller, default=0) > self.factor:
            raise MethodError(
                f"{self.name}: smaller must be different factors below {self.factor:g}, ascending; got {list(smaller)}"
            )
        object.__setattr__(self, "smaller", tuple(map(float, smaller)))
        method = Yarn(factor=self.factor) if self.frequency is None else self.frequency
        of_frequencies = isinstance(method, RopeMethod) and not isinstance(method, RemappingMethod)
        if not of_frequencies or method.length_dependent or method.trainable:
            raise MethodError(f"{self.name}: frequency must be a static frequency method, got {method!r}")
        if getattr(method, "factor", None) not in (None, self.factor):
            raise MethodError(
                f"{self.name}: the factor of frequency must be the largest, {self.factor:g}, got {method.label()}"
            )
        object.__setattr__(self, "frequency", method)

    @property
    def factors(self) -> tuple[float, ...]:
        return (*(self.smaller or ()), self.factor)

    def profiles(self, rotary: Rotary) -> tuple[tuple[int, RopeMethod], ...]:
        return tuple((round(rotary.context_length * factor), self._at(factor)) for factor in self.factors)

    def _at(self, factor: float) -> RopeMethod:
        assert self.frequency is not None
        if factor == 1:
            return Default()
        factors = {"factor": factor} if self.frequency.takes_factor({}) else {}
        return replace(self.frequency, **factors)

    def _limits(self, rotary: Rotary) -> list[int]:
        """The longest input of each profile but the last, which has every longer one, in tokens."""
        return [length for length, _ in self.profiles(rotary)[:-1]]

    def next_change(self, rotary: Rotary, length: int) -> int:
        return next((limit for limit in self._limits(rotary) if length <= limit), UNBOUNDED)

    def check(self, rotary: Rotary) -> None:
        for _, method in self.profiles(rotary):
            method.check(rotary)

    def compute(self, rotary: Rotary, length: Tensor) -> tuple[Tensor, Tensor | float]:
        tables = [method.compute(rotary, length) for _, method in self.profiles(rotary)]
        inv_freq, factors = (
            [torch.as_tensor(each, dtype=torch.float64, device=length.device) for each in column]
            for column in zip(*tables, strict=True)
        )
        profile = sum((length > limit).long() for limit in self._limits(rotary))
        if isinstance(profile, int):  # there is one profile
            return tables[0]
        return torch.stack(inv_freq)[profile.squeeze(-1)], torch.stack(factors)[profile]

    def cautions(self, rotary: Rotary) -> tuple[str, ...]:
        ends = [f"up to {limit:,} tokens" for limit in self._limits(rotary)] + ["beyond"]
        steps = ", ".join(f"x{factor:g} {end}" for factor, end in zip(self.factors, ends, strict=True))
        return (f"Each row, with all that is generated after it, has one factor: {steps}.",)

    def label(self) -> str:
        assert self.frequency is not None
        factors = "/".join(f"{factor:g}" for factor in self.factors)
        return f"{self.name} x{factors} on {self.frequency.label()}"
