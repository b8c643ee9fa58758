"""What papers report of methods, with the source of each number; nothing here was measured by this project.

    >>> reported("mrrope", "llama")[0].numbers("mrrope")
    '86.6'

The numbers stand in reported.toml.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, kw_only=True)
class Reported:
    """One table that is reported, or a part of it.

    Attributes:
        source, url, place: who reports it, and where in it.
        model, model_types, context_length: the model, its types in transformers, and its length in tokens.
        benchmark, unit, better: what was measured, in which unit, and whether "higher" or "lower" is better.
        lengths: what the numbers of each method belong to.
        values: the numbers by method, in the order of `lengths`; text where no number is reported.
        trained: whether they are of models fine-tuned under each method.
    """

    source: str
    url: str
    place: str
    model: str
    model_types: tuple[str, ...]
    context_length: int
    benchmark: str
    unit: str
    better: str
    lengths: tuple[str, ...]
    values: dict[str, tuple[float | str, ...]]
    trained: bool = False

    def numbers(self, method: str) -> str:
        """The numbers of a method, in the order of `lengths`."""
        return " / ".join(map(str, self.values[method]))

    @property
    def subject(self) -> str:
        """The model, and how it was trained."""
        return f"{self.model}, fine-tuned" if self.trained else self.model

    def __str__(self) -> str:
        numbers = "; ".join(f"{method} {self.numbers(method)}" for method in self.values)
        what = f"{self.subject}, {self.benchmark} ({self.unit}, {self.better} is better), {' / '.join(self.lengths)}"
        return f"reported by {self.source} ({self.place}): {what}: {numbers}"


def reported(method: str | None = None, model_type: str | None = None) -> tuple[Reported, ...]:
    """What is reported of a method, on models of a type; None: of every one."""
    return tuple(
        [
            each
            for each in _tables()
            if method in (None, *each.values) and (model_type is None or model_type in each.model_types)
        ]
    )


@cache
def _tables() -> tuple[Reported, ...]:
    text = resources.files("rope_ext_hf.advice").joinpath("reported.toml").read_text(encoding="utf-8")
    tables = []
    for saved in tomllib.loads(text)["reported"]:
        saved["values"] = {method: tuple(numbers) for method, numbers in saved["values"].items()}
        saved |= {key: tuple(saved[key]) for key in ("model_types", "lengths")}
        tables.append(Reported(**saved))
    return tuple(tables)
