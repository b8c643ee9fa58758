"""From a choice of methods to methods bound to a model, with every factor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from rope_ext_hf.method_choice import MethodChoice, PatchChoice
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import accepts_factor, list_methods, resolve_method
from rope_ext_hf.patches.geometry import base_rope_of_model, stated_length
from rope_ext_hf.patches.patching import patch


def resolve_choice(
    choice: MethodChoice, model: nn.Module, longest: int, lengths: Sequence[int] = ()
) -> list[RopeMethod]:
    """Every method asked for, with every factor, bound to a model, which may be on the meta device.

    Args:
        longest: the extended length where neither a factor nor a target length is given, in tokens.
        lengths: extended lengths that a method with a factor is fitted to instead, one after the other.
    """
    choice.check()
    base = base_rope_of_model(model, **choice.underneath)
    chosen = over_rotary(choice, base.rotary, max(longest, base.rotary.context_length), lengths)
    return list(dict.fromkeys(base.bind(method, length) for method, length in chosen))


def over_rotary(
    choice: MethodChoice, rotary: Rotary, longest: int, lengths: Sequence[int] = ()
) -> Iterator[tuple[RopeMethod, int]]:
    """Every method asked for, with every factor, before it is bound to a model, and its extended length."""
    for name in choice.method:
        parameters = _parameters_for(name, choice)
        beyond = [length for length in lengths if length > rotary.context_length and accepts_factor(name)]
        given: list[tuple[float | None, int | None]] = [(factor, None) for factor in choice.factor]
        if isinstance(name, RopeMethod):
            given = [(None, None)]
        for factor, fitted in given or [(None, length) for length in beyond or [longest]]:
            length = choice.target_length or fitted
            method = resolve_method(name, rotary, factor=factor, target_length=length, **parameters)
            yield method, length or stated_length(method, rotary, factor) or longest


def _parameters_for(name: str | RopeMethod, choice: MethodChoice) -> dict[str, Any]:
    """The further parameters for one of several methods: those it takes, and those that none of them takes."""
    fields = {other: {field.name for field in dataclasses.fields(method)} for other, method in list_methods().items()}

    def takes(method: str | RopeMethod, parameter: str) -> bool:  # a method without fields here is an alias, or unknown
        return method not in fields or not fields[str(method)].isdisjoint({parameter, "frequency"})

    return {
        parameter: value
        for parameter, value in choice.parameters.items()
        if takes(name, parameter) or not any(takes(other, parameter) for other in choice.method)
    }


def apply_choice(choice: PatchChoice, model: nn.Module, *, native: bool = False) -> None:
    if choice.method:
        patch(model, native=native, **choice.arguments_of_patch)
