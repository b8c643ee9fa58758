"""Measurements of methods without training: how much the loss of a real or small model rises, by factor and length.

A rise is over the loss of the unpatched model with no more than its context length before the same tokens: in bits per
token on real models, which published tokenizers read for, and in bits per byte on small ones, which were trained for
this project. The numbers are from benchmarks/real_models.py and benchmarks/factors.py; `make figures` writes them into
measured.json. Lengths are multiples of the context length. For a factor or length that was not measured, the next
larger one that was is taken.
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

RECOVERED = 0.8
"""The share of the unpatched model's rise at a length that a method must take away, to count as helping there."""


class Rise(NamedTuple):
    """The rise of one model's loss with a method at one length, in bits per token or byte, with its interval."""

    model: _MeasuredModel
    factor: float | None  # the factor of the method; None: it was fitted to the longest length that was measured
    scale: float  # the length, as a multiple of the context length
    increase: float
    low: float | None  # the 95% confidence interval of `increase` over the documents; None: there are too few
    high: float | None
    as_loaded: float  # the rise of the unpatched model at this length

    @property
    def is_by_chance(self) -> bool:
        """True if the interval leaves open whether the loss changes at all."""
        return self.low is not None and self.high is not None and self.low <= 0 <= self.high


@dataclass(frozen=True)
class _MeasuredModel:
    name: str
    rotated_dims: int
    theta: float
    context_length: int
    parameters: int
    unit: str  # what a loss is of: "token", or "byte" on a small model that was trained for this project

    def __str__(self) -> str:
        return (
            f"{self.noun} ({self.parameters / 1e6:.1f} million parameters, {self.rotated_dims} rotated dims, "
            f"theta {self.theta:,.0f}, trained at {self.context_length:,})"
        )

    @property
    def is_small(self) -> bool:
        """True for a model that was trained for this project; such models have at most a few million parameters."""
        return self.unit == "byte"

    @property
    def noun(self) -> str:
        """The name as it stands in a sentence."""
        return f"the {self.name}" if self.is_small else self.name


_Index = dict[tuple[str, float], tuple[Rise, ...]]
"""The rises on all models that were measured, by method and size: a length or a factor."""


@cache
def _measurements() -> tuple[tuple[_MeasuredModel, ...], _Index, _Index]:
    """Return the models, and two indices of the rises.

    The first index has rises at longer lengths, by the length, of methods fitted to that length. The second has rises
    at the context length, by the factor of the method; a method without a factor has infinity.
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
    by_length, by_factor = ({key: tuple(rises) for key, rises in sorted(index.items())} for index in (fitted, short))
    return tuple(models), by_length, by_factor


def _smallest(index: _Index, method: str, size: float) -> tuple[Rise, ...]:
    """Return the rises of a method for the smallest measured size that is at least `size`; empty if there is none.

    A size is a length in context lengths, or the factor of the method.
    """
    sizes = [measured for name, measured in index if name == method and measured >= size]
    return index[method, min(sizes)] if sizes else ()


def measured_models() -> tuple[_MeasuredModel, ...]:
    """Return the models that methods were measured on: real ones first, then small ones, of which the bundled first."""
    return _measurements()[0]


def rises_at(method: str, scale: float) -> tuple[Rise, ...]:
    """Return the rises of the loss with a method at `scale` context lengths, fitted to that; empty if unmeasured."""
    return _smallest(_measurements()[1], method, scale)


def rises_for_short_inputs(method: str, factor: float) -> tuple[Rise, ...]:
    """Return the rises of the loss at the context length with a method and a factor; empty if unmeasured."""
    return _smallest(_measurements()[2], method, factor)


def helped(rises: Sequence[Rise]) -> tuple[_MeasuredModel, ...]:
    """Return the models that a method helped, given its rises of their losses.

    It helped if it removed at least the share `RECOVERED` of the rise of the unpatched model's loss.
    """
    return tuple([rise.model for rise in rises if rise.increase <= (1 - RECOVERED) * rise.as_loaded])


def deciding(rises: Sequence[Rise]) -> Sequence[Rise]:
    """Return the rises by which a method is judged: those of real models, or if there are none, of small ones."""
    return [rise for rise in rises if not rise.model.is_small] or rises


@cache
def reach(method: str) -> dict[str, str]:
    """Return, by model name, the longest length at which a method helped the model, such as "8x", or "no".

    Models do not agree, and the reason is not known.
    """
    models, fitted, _ = _measurements()
    scales = [scale for name, scale in fitted if name == method and scale > 1]
    measured = {rise.model for scale in scales for rise in fitted[method, scale]}
    reached = {model.name: "no" for model in models if model in measured}
    still_helping = measured
    for scale in scales:
        still_helping = still_helping & set(helped(fitted[method, scale]))
        reached |= {model.name: f"{scale:g}x" for model in still_helping}
    return reached


def reach_text(method: str) -> str:
    """Return `reach` in words: "to 4x on the bundled model, no on the docstring model"."""
    reached = reach(method)
    if not reached:
        return "not measured"
    nouns = {model.name: model.noun for model in measured_models()}
    models_by_reach: dict[str, list[str]] = {}
    for model, length in reached.items():
        models_by_reach.setdefault("no" if length == "no" else f"to {length}", []).append(nouns[model])
    if len(models_by_reach) == 1 and len(reached) == len(measured_models()):
        (text,) = models_by_reach
        return f"{text} on {'any' if text == 'no' else 'all'}"
    return ", ".join(f"{text} on {' and '.join(models)}" for text, models in models_by_reach.items())


def evidence(method: str, scale: float) -> str:
    """Return a clause on the gain from a method at `scale` context lengths; empty if it helped no measured model.

    Small models count only where no real one was measured.
    """
    rises = deciding(rises_at(method, scale))
    rise = next((rise for rise in rises if rise.model in helped(rises)), None)
    if rise is None:
        return ""
    value = "its value on short inputs"
    change = f"does not differ significantly from {value}" if rise.is_by_chance else _against(rise.increase, value)
    return (
        f"on {_named(rise.model)}, perplexity per {rise.model.unit} at {rise.scale:g}x the trained length {change}; "
        f"unpatched it {_against(rise.as_loaded)}"
    )


def price(method: str, factor: float) -> str:
    """Return a clause on how a factor changes inputs within the context length; empty if it was not measured."""
    rises = rises_for_short_inputs(method, factor)
    if not rises:
        return ""
    rise = rises[0]
    setting = f"on {_named(rise.model)}" + (f" with factor {rise.factor:g}" if rise.factor else "")
    if rise.is_by_chance or _ratio(rise.increase) == "1":
        return f"read as before {setting}"
    change = "worse" if rise.increase > 0 else "better"
    return (
        f"read {change}: {setting}, their perplexity per {rise.model.unit} is {_ratio(rise.increase)} times that of "
        "the unpatched model"
    )


def _named(model: _MeasuredModel) -> str:
    if not model.is_small:
        return model.name
    return f"a small model ({model.parameters / 1e6:.1f}M parameters)"


def _ratio(bits: float) -> str:
    """Return the ratio between two perplexities as text, from the difference of their losses in bits."""
    return f"{2**bits:.3g}"


def _against(bits: float, value: str = "") -> str:
    """Return a clause on a change of perplexity: "rises to 1.2 times its value on short inputs".

    `bits` is the difference of the losses in bits; `value` names the value compared with, unless the sentence has named
    it before.
    """
    ratio = _ratio(bits)
    if ratio == "1":
        return f"stays at {value}" if value else "does not change"
    if bits > 0:
        return f"rises to {ratio} times {value or 'that value'}"
    return f"stays at {ratio} of {value}" if value else f"falls to {ratio} of that value"
