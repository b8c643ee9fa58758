"""Results that papers report, from reported.toml, with the source of each number.

Nothing in that file was measured by this project.

    >>> [table.numbers("jet-long") for table in reported() if "jet-long" in table.values]
    ['4.79 / 2.18 / 2.03']
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from rope_ext_hf.files.whole import package_table


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A table in a paper, or a part of it: results for several methods on one benchmark."""

    source: str
    url: str
    place: str  # the table or section of the source
    model: str  # and how it was trained further
    model_types: tuple[str, ...]  # in transformers
    benchmark: str
    unit: str  # and whether higher or lower is better
    lengths: tuple[str, ...]  # the columns
    values: dict[str, tuple[float | str, ...]]  # by method, in the order of `lengths`; text where there is no number

    def numbers(self, method: str) -> str:
        """Return the numbers that the paper reports for a method, as text."""
        return " / ".join(map(str, self.values[method]))

    def __str__(self) -> str:
        numbers = "; ".join([f"{method} {self.numbers(method)}" for method in self.values])
        setting = f"{self.model}, {self.benchmark} ({self.unit}), {' / '.join(self.lengths)}"
        return f"reported by {self.source} ({self.place}): {setting}: {numbers}"


@cache
def reported() -> tuple[Reported, ...]:
    """Return all tables in reported.toml."""
    tables = []
    for saved in package_table("rope_ext_hf.tools.advice", "reported.toml")["reported"]:
        fields = dict(saved)
        fields["values"] = {method: tuple(numbers) for method, numbers in saved["values"].items()}
        fields["model_types"], fields["lengths"] = tuple(saved["model_types"]), tuple(saved["lengths"])
        tables.append(Reported(**fields))
    return tuple(tables)
