"""What papers report of methods, with the source of each number; nothing here was measured by this project.

    >>> [each.numbers("jet-long") for each in reported() if "jet-long" in each.values]
    ['4.79 / 2.18 / 2.03']

The numbers stand in reported.toml.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class Reported:
    """One table that is reported, or a part of it."""

    source: str
    url: str
    place: str  # where in the source
    model: str  # and how it was trained further
    model_types: tuple[str, ...]  # in transformers
    benchmark: str
    unit: str  # and whether higher or lower is better
    lengths: tuple[str, ...]  # what the numbers of each method belong to
    values: dict[str, tuple[float | str, ...]]  # by method, in the order of `lengths`; text where no number is reported

    def numbers(self, method: str) -> str:
        return " / ".join(map(str, self.values[method]))

    def __str__(self) -> str:
        numbers = "; ".join(f"{method} {self.numbers(method)}" for method in self.values)
        what = f"{self.model}, {self.benchmark} ({self.unit}), {' / '.join(self.lengths)}"
        return f"reported by {self.source} ({self.place}): {what}: {numbers}"


@cache
def reported() -> tuple[Reported, ...]:
    text = resources.files("rope_ext_hf.advice").joinpath("reported.toml").read_text(encoding="utf-8")
    tables = []
    for saved in tomllib.loads(text)["reported"]:
        saved["values"] = {method: tuple(numbers) for method, numbers in saved["values"].items()}
        saved |= {key: tuple(saved[key]) for key in ("model_types", "lengths")}
        tables.append(Reported(**saved))
    return tuple(tables)
