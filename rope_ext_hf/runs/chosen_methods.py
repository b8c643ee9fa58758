"""The methods that a command line or a script chose by name, as method objects for one model.

`rope_ext_hf.options.method_choice` holds the choice itself, as plain values that are read without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import accepts_factor, list_methods, registered_name, resolve_method, stated_length
from rope_ext_hf.options.method_choice import MethodChoice, PatchChoice
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.patching import patch
from rope_ext_hf.patches.small_replica import check_without_weights


def resolve_choice(
    choice: MethodChoice, model: nn.Module, longest: int, lengths: Sequence[int] = ()
) -> list[RopeMethod]:
    """Return every chosen method with every chosen factor, with all parameters set for a model, without duplicates.

    Args:
        choice: the methods, their factors or target length, and what they extend.
        model: the model that the methods are for; it may be on the meta device.
        longest: the extended length in tokens where the choice has neither a factor nor a target length.
        lengths: extended lengths in tokens; where the choice has neither a factor nor a target length, a method with a
            factor is fitted to each of them that exceeds the context length, instead of to `longest`.

    Raises:
        MethodError: the choice is not consistent, or a method, a parameter or a value is impossible.
        UnsupportedModelError: the model has no rotary embeddings that could be replaced.
    """
    choice.check()
    rope = ModelRope.of_model(model).extending(**choice.base_arguments)
    longest = max(longest, rope.rotary.context_length)
    methods = [rope.bind(method, length) for method, length in over_rotary(choice, rope.rotary, longest, lengths)]
    return list(dict.fromkeys(methods))


def over_rotary(
    choice: MethodChoice, rotary: Rotary, longest: int, lengths: Sequence[int] = ()
) -> Iterator[tuple[RopeMethod, int]]:
    """Yield every chosen method with every chosen factor, together with the length in tokens that it extends to.

    The methods are set for the rotary embedding `rotary`, and not yet bound to a model. The arguments are those of
    `resolve_choice`.
    """
    for name in choice.method:
        parameters = _parameters_for(name, choice)
        for factor, target_length in _extents(name, choice, rotary, longest, lengths):
            method = resolve_method(name, rotary, factor=factor, target_length=target_length, **parameters)
            yield method, target_length or stated_length(method, rotary, factor) or longest


def _extents(
    name: str | RopeMethod, choice: MethodChoice, rotary: Rotary, longest: int, lengths: Sequence[int]
) -> list[tuple[float | None, int | None]]:
    """Return the factors and target lengths for a chosen method, one pair for each variant of it to be made.

    A choice with both a factor and a target length is passed on as it is, and `resolve_method` refuses it.
    """
    if isinstance(name, RopeMethod):  # it has its factor already
        return [(None, choice.target_length)]
    if choice.factor:
        return [(factor, choice.target_length) for factor in choice.factor]
    if choice.target_length is not None:
        return [(None, choice.target_length)]
    fitted = [length for length in lengths if length > rotary.context_length] if accepts_factor(name) else []
    return [(None, length) for length in fitted or [longest]]


def _parameters_for(name: str | RopeMethod, choice: MethodChoice) -> dict[str, Any]:
    """Return those of the choice's further parameters that one of the chosen methods gets.

    Those are the parameters that this method takes, and also those that none of the chosen methods takes, so that a
    misspelt parameter is refused instead of ignored.
    """
    parameters = {}
    for parameter, value in choice.parameters.items():
        if _may_take(name, parameter) or not any(_may_take(other, parameter) for other in choice.method):
            parameters[parameter] = value
    return parameters


def _may_take(method: str | RopeMethod, parameter: str) -> bool:
    """Return whether a method may have a parameter; True for aliases, unknown names and method objects as well.

    A method that contains another method, its `frequency`, may pass any parameter on to that one.
    """
    if isinstance(method, RopeMethod):
        return True
    registered = list_methods().get(registered_name(method))
    return registered is None or not registered.parameters.keys().isdisjoint({parameter, "frequency"})


def apply_choice(choice: PatchChoice, model: nn.Module, *, native: bool = False) -> None:
    """Patch a model with the chosen method, if there is one.

    A model without weights, on the meta device, raises the same errors as the model with its weights.

    Args:
        choice: one method with at most one factor.
        model: the model to patch, in place.
        native: as `rope_ext_hf.patch` takes it.

    Raises:
        MethodError, UnsupportedModelError: as `rope_ext_hf.patch` does.
    """
    if choice.method:
        patch(model, native=native, **choice.arguments_of_patch)
        check_without_weights(model)
