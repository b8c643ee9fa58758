"""What was measured of every method without training: how much the loss rises, by model, factor and length.

A rise is in bits per byte, over the loss of the model as loaded at its context length, on the same tokens. The numbers
are those of benchmarks/factors.py: `make figures` writes them into measured.json. Lengths are counted in context
lengths, and what was not measured is answered by the next larger factor or length that was.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import NamedTuple

RECOVERED = 2 / 3  # a method helps where it takes away this share of what the model as loaded loses at the length


class Rise(NamedTuple):
    """How much the loss of a model rises under a method, in bits per byte."""

    model: _MeasuredModel
    factor: float | None  # of the method; None: it was fitted to the longest length that was measured
    scale: float  # the length, in context lengths
    increase: float  # `low` to `high` is its 95% interval over the documents
    low: float
    high: float
    as_loaded: float  # at this length without the method


@dataclass(frozen=True)
class _MeasuredModel:
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


_Index = dict[tuple[str, float], tuple[Rise, ...]]
"""One rise for every model that was measured there, by method and size."""


@cache
def _measurements() -> tuple[tuple[_MeasuredModel, ...], _Index, _Index]:
    """The models, and two indices of the rises.

    The first is by the length, in context lengths, of methods that are fitted to it; the second, at the context length,
    by the factor, with infinity for a method without one.
    """
    text = resources.files("rope_ext_hf.tools.advice").joinpath("measured.json").read_text(encoding="utf-8")
    models: list[_MeasuredModel] = []
    fitted, short = defaultdict[tuple[str, float], list[Rise]](list), defaultdict[tuple[str, float], list[Rise]](list)
    for saved in json.loads(text):
        rows = saved.pop("rises")
        model = _MeasuredModel(**saved)
        models.append(model)
        as_loaded = {scale: increase for method, _, scale, increase, *_ in rows if method == "unpatched"}
        for method, factor, scale, increase, low, high in rows:
            rise = Rise(model, factor, scale, increase, low, high, as_loaded[scale])
            if factor in (None, scale):
                fitted[method, scale].append(rise)
            if scale == 1:
                short[method, factor or math.inf].append(rise)
    in_order = [{key: tuple(rises) for key, rises in sorted(found.items())} for found in (fitted, short)]
    return tuple(models), in_order[0], in_order[1]


def _smallest(index: _Index, method: str, size: float) -> tuple[Rise, ...]:
    """The rises of a method for the smallest size from this one on; empty where there is none."""
    sizes = [known for name, known in index if name == method and known >= size]
    return index[method, min(sizes)] if sizes else ()


def measured_models() -> tuple[_MeasuredModel, ...]:
    """The models, the bundled one first."""
    return _measurements()[0]


def rises_at(method: str, scale: float) -> tuple[Rise, ...]:
    """The rise on every measured model of the method fitted to so many context lengths; empty: none there."""
    return _smallest(_measurements()[1], method, scale)


def rises_for_short_inputs(method: str, factor: float) -> tuple[Rise, ...]:
    """The rise on every measured model at its context length, with the factor; empty where none so large was."""
    return _smallest(_measurements()[2], method, factor)


def helped(rises: Sequence[Rise]) -> tuple[_MeasuredModel, ...]:
    """The models on which the method takes away `RECOVERED` of what the model as loaded loses at the length."""
    return tuple([rise.model for rise in rises if rise.increase <= (1 - RECOVERED) * rise.as_loaded])


@cache
def reach(method: str) -> dict[str, str]:
    """Where a method helped, by the name of a model; models do not agree, and what decides it is not known."""
    models, fitted, _ = _measurements()
    scales = [scale for name, scale in fitted if name == method and scale > 1]
    known = {rise.model for scale in scales for rise in fitted[method, scale]}
    reached, helping = {model.name: "no" for model in models if model in known}, known
    for scale in scales:
        helping = helping & set(helped(fitted[method, scale]))  # only up to the first length where it does not help
        reached |= {model.name: f"{scale:g}x" for model in helping}
    return reached


def reach_text(method: str) -> str:
    """What `reach` returns, in words."""
    reached = reach(method)
    if not reached:
        return "not measured"
    on: dict[str, list[str]] = {}
    for model, how in reached.items():
        on.setdefault(how if how == "no" else f"to {how}", []).append(f"the {model}")
    alike = len(on) == 1 and len(reached) == len(measured_models())
    everywhere = {"no": "any"}.get(next(iter(on)), "all") if alike else ""
    return ", ".join(f"{how} on {everywhere or ' and '.join(names)}" for how, names in on.items())


def evidence(method: str, scale: float) -> str:
    """Return a sentence with what a method brings at so many context lengths; empty where it helped no model there."""
    rises = rises_at(method, scale)
    rise = next((each for each in rises if each.model in helped(rises)), None)
    if rise is None:
        return ""
    return (
        f"on {_small(rise.model)} perplexity per byte at {rise.scale:g}x the trained length "
        f"{_against(rise.increase, 'its value on short inputs')}; unpatched it {_against(rise.as_loaded)}"
    )


def price(method: str, factor: float) -> str:
    """Return a predicate: how inputs within the context length read under a factor; empty where none was measured."""
    rises = rises_for_short_inputs(method, factor)
    if not rises:
        return ""
    rise = rises[0]
    on = f"on {_small(rise.model)}" + (f" with factor {rise.factor:g}" if rise.factor else "")
    if rise.low <= 0 <= rise.high or _ratio(rise.increase) == "1":
        return f"read as before {on}"
    how = "worse" if rise.increase > 0 else "better"
    return f"read {how}: {on}, their perplexity per byte {_against(rise.increase)}"


def _small(model: _MeasuredModel) -> str:
    return f"a small model ({model.parameters / 1e6:.1f}M parameters)"


def _ratio(bits: float) -> str:
    """Return the ratio of two perplexities, from the difference of their bits."""
    return f"{2**bits:.2g}"


def _against(bits: float, value: str = "") -> str:
    """Return a predicate of a perplexity, from its bits less those of `value`, which has been named before if empty."""
    ratio = _ratio(bits)
    if ratio == "1":
        return f"stayed at {value}" if value else "did not change"
    verb, times = (
        ("rose to", f"{ratio} times") if bits > 0 else ("stayed at", f"{ratio} of" if value else f"{ratio} times")
    )
    return f"{verb} {times} {value}".rstrip()
