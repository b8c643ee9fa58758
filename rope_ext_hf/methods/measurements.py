"""What was measured of every method without training: how much the loss rises, by model, factor and length.

    >>> [f"{rise.model.name}: {rise.increase:+.2f}" for rise in rises_at("yarn", 4)]  # doctest: +SKIP
    ['bundled model: +0.13', 'docstring model: +0.25']

A rise is in bits per byte, over the loss of the model as loaded at its context length, on the same tokens. The numbers
are those of benchmarks/factors.py: `make figures` writes them into measured.json. Lengths are counted in context
lengths, and what was not measured is answered by the next larger factor or length that was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import takewhile
from typing import NamedTuple

from rope_ext_hf.methods.base import UNBOUNDED, RopeMethod, Rotary

_AS_LOADED = "as loaded"
RECOVERED = 2 / 3
"""A method helps where it takes away this share of what the model as loaded loses at the length."""


class Rise(NamedTuple):
    """How much the loss of a model rises under a method.

    Attributes:
        model: the model.
        factor: the factor of the method; None: it was fitted to the longest length that was measured.
        scale: the length, in context lengths.
        increase, low, high: bits per byte, and the 95% interval over the documents.
        as_loaded: how much it rises at this length without the method.
    """

    model: _MeasuredModel
    factor: float | None
    scale: float
    increase: float
    low: float
    high: float
    as_loaded: float


@dataclass(frozen=True)
class _MeasuredModel:
    """A model that methods were measured on.

    Attributes:
        name: what it is called in tables.
        rotated_dims, theta, context_length, parameters: its rotary embedding and size.
    """

    name: str
    rotated_dims: int
    theta: float
    context_length: int
    parameters: int

    def __str__(self) -> str:
        return (
            f"{self.name} ({self.parameters / 1e6:.1f} million parameters, {self.rotated_dims} rotated dims, "
            f"theta {self.theta:,.0f}, trained at {self.context_length})"
        )


@cache
def _measurements() -> dict[_MeasuredModel, dict[str, list[Rise]]]:
    """The rises of every model, by method."""
    text = resources.files("rope_ext_hf.methods").joinpath("measured.json").read_text(encoding="utf-8")
    result = {}
    for saved in json.loads(text):
        rows = saved.pop("rises")
        model = _MeasuredModel(**saved)
        as_loaded = {scale: increase for method, _, scale, increase, *_ in rows if method == _AS_LOADED}
        methods: dict[str, list[Rise]] = {}
        for method, factor, scale, increase, low, high in rows:
            rise = Rise(model, factor, scale, increase, low, high, as_loaded[scale])
            methods.setdefault(method, []).append(rise)
        result[model] = methods
    return result


def measured_models() -> tuple[_MeasuredModel, ...]:
    """The models, the bundled one first."""
    return tuple(_measurements())


def rises_at(method: str, scale: float) -> tuple[Rise, ...]:
    """The rise on every model at a length, of the method fitted to it; empty where nothing so long was measured.

    Args:
        method: its name.
        scale: the length, in context lengths.
    """
    return _smallest(method, lambda rise: rise.scale >= scale and rise.factor in (None, rise.scale))


def rises_for_short_inputs(method: str, factor: float) -> tuple[Rise, ...]:
    """The rise on every model at its context length, with the factor; empty where none so large was measured."""
    return _smallest(method, lambda rise: rise.scale == 1 and (rise.factor is None or rise.factor >= factor))


def _smallest(method: str, fits: Callable[[Rise], bool]) -> tuple[Rise, ...]:
    """Of every model the fitting rise with the smallest factor and scale; empty where a model has none."""
    fitting = [[rise for rise in methods.get(method, ()) if fits(rise)] for methods in _measurements().values()]
    return tuple(min(some, key=lambda rise: (rise.factor or 0, rise.scale)) for some in fitting) if all(fitting) else ()


def helped(rises: Sequence[Rise]) -> tuple[_MeasuredModel, ...]:
    """The models on which the method takes away `RECOVERED` of what the model as loaded loses at the length."""
    return tuple(rise.model for rise in rises if rise.increase <= (1 - RECOVERED) * rise.as_loaded)


def _measured_reaches(method: str) -> tuple[dict[_MeasuredModel, float], float]:
    """Up to how many context lengths a method helped each model (1: at none), and up to how many it was measured."""
    scales = sorted({rise.scale for each in _measurements().values() for rise in each.get(method, ())})
    reaches = {
        model: max(takewhile(lambda n, m=model: n == 1 or m in helped(rises_at(method, n)), scales), default=1.0)  # type: ignore[misc]
        for model in measured_models()
    }
    return reaches, max(scales, default=1.0)


def reach_text(method: str) -> str:
    """Where a method helped, model by model, in words; models do not agree, and what decides it is not known."""
    reaches, longest = _measured_reaches(method)
    if longest == 1:
        return "not measured"
    names = [f"to {reach:g}x" if reach > 1 else "no" for reach in reaches.values()]
    if len(set(names)) == 1:
        count = "both" if len(names) == 2 else f"all {len(names)}"
        return f"{names[0]} on {count if reaches and names[0] != 'no' else count.replace('both', 'either')}"
    return ", ".join(f"{name} on the {model.name}" for name, model in zip(names, reaches, strict=True))


def cost_notes(method: RopeMethod, rotary: Rotary) -> tuple[str, ...]:
    """What a method does to inputs within the context length, and what is unusual about it, a sentence each."""
    kept, factor = method.unchanged_length(rotary), getattr(method, "factor", None)
    rises = rises_for_short_inputs(method.name, factor) if factor and factor > 1 and not kept else ()
    notes = []
    if 0 < kept < UNBOUNDED:
        notes.append(f"Inputs of up to {kept:,} tokens give the output of the model without {method.name}.")
    if rises:
        measured = " and ".join(f"{rise.increase:+.2f} on the {rise.model.name}" for rise in rises)
        notes.append(
            f"Inputs within the context length lose as well: with a factor of {rises[0].factor:g}, {measured}, in bits "
            "per byte. How much this model loses is known when it is measured. Take the smallest factor that reaches "
            "the length you need."
        )
    return (*notes, *method.cautions(rotary))
