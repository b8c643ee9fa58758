"""Put a method into a live model, and take it out again.

What changes is planned first, then applied (planning.py). A model may be given by its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from torch import nn

from rope_ext_hf.bounds import Length, parse_length, whole
from rope_ext_hf.errors import MethodError, UnsupportedModelError
from rope_ext_hf.method_choice import MethodChoice, PatchChoice
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import accepts_factor, list_methods, registered_name, resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.patches.geometry import base_rope_of_model, stated_length
from rope_ext_hf.patches.layer_types import Layers
from rope_ext_hf.patches.loading import from_pretrained
from rope_ext_hf.patches.planning import patch_as_planned, plan_patch, replay, take_off
from rope_ext_hf.patches.slot_finding import find_slots
from rope_ext_hf.patches.slots import patched_slots, present_specs, tables_of
from rope_ext_hf.patches.stand_in import check_without_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


M = TypeVar("M", bound=nn.Module)


@overload
def patch(
    model: M,
    method: str | RopeMethod,
    *,
    factor: float | None = None,
    target_length: Length | None = None,
    over: str = "own",
    context_length: Length | None = None,
    layers: Layers | None = None,
    native: bool = False,
    **params: Any,
) -> M: ...
@overload
def patch(model: str | Path, method: str | RopeMethod, **options: Any) -> PreTrainedModel: ...
def patch(
    model: Any,
    method: str | RopeMethod,
    *,
    factor: float | None = None,
    target_length: Length | None = None,
    over: str = "own",
    context_length: Length | None = None,
    layers: Layers | None = None,
    native: bool = False,
    **params: Any,
) -> Any:
    """Change the RoPE method of a loaded model, in place; a patched model gets the new method instead of the old.

    Args:
        model: a transformers model with rotary embeddings, bare or inside PEFT, DDP and the like; the whole model,
            because a decoder taken out of it has no hold on the config that is saved. A folder, a Hub id or "reference"
            is loaded by `rope_ext_hf.from_pretrained` with its defaults.
        method: a name of `rope_ext_hf.list_methods()`, or a method object.
        factor: how many times its context length the model is to reach. Where the method has no factor, it states the
            extended length, and parameters that follow from that are fitted.
        target_length: the same in tokens; also as text, "32k".
        over: what is extended. "own": the model as loaded, with the scaling it was trained under. "original": the model
            without that scaling, counted from its original length. "patched": the present patch, live or recorded in
            the folder the model was loaded from, for a model that was trained under it.
        context_length: the length in tokens that the model as loaded is for, where its config misleads.
        layers: the layers to change, by layer type or by index, in a model that has several rotary embeddings; layers
            that share one change together. None: the layers that attend to everything before them.
        native: save in a native form of transformers even where that is known to behave otherwise ("dynamic").
        **params: further parameters of the method.

    Returns:
        The model. Its config now carries the method and the extended length, so that `generate`, `save_pretrained` and
        serving engines agree; other models that shared its config keep theirs.

    Raises:
        MethodError: unknown method or parameter, a value it cannot work with, or layers that do not exist.
        UnsupportedModelError: a model without rotary embeddings, or with some that cannot be replaced; layers that
            share theirs with others.
        CheckpointError: a name that is no model's.

    The model is unchanged when an exception is raised.
    """
    if isinstance(model, (str, Path)):
        model = from_pretrained(model)
    plan = plan_patch(
        model,
        method,
        factor=factor,
        target_length=target_length,
        over=over,
        context_length=context_length,
        layers=layers,
        native=native,
        **params,
    )
    patch_as_planned(plan)
    return model


def unpatch(model: M) -> M:
    """Take the last patch off: modules, configs, hooks. A model that is not patched is left alone.

    Logits, config and state_dict keys are bit for bit those of a model that was never patched and went through the
    same `.to` calls. A patch that was put over another one (over="patched") gives way to that one.
    """
    below = present_specs(model)[:-1]
    take_off(model)
    return replay(model, below) if below else model


@contextmanager
def patched(model: M, method: str | RopeMethod, **kwargs: Any) -> Iterator[M]:
    """`patch` for the length of a `with` block; what the model had before comes back, also after an exception."""
    before = present_specs(model)
    patch(model, method, **kwargs)
    try:
        yield model
    finally:
        take_off(model)
        if before:
            replay(model, before)


@contextmanager
def fixed_length(model: M, length: Length) -> Iterator[M]:
    """Inside, length-dependent methods use the frequencies of an input of `length` tokens for every forward.

        with fixed_length(model, prompt_length + max_new_tokens):
            model.generate(...)

    Static methods are not affected.

    Raises:
        MethodError: a length below 1.
        UnsupportedModelError: an unpatched model whose own config is length-dependent; patch it first.
    """
    length = whole("length", parse_length(length))
    for name in () if (slots := patched_slots(model)) else _own_length_dependent(model):
        raise UnsupportedModelError(
            f"this model's own {name} follows the input inside transformers and cannot be held from here; patch it "
            "first: rope_ext_hf.patch(model, ...)"
        )
    with ExitStack() as stack:
        for table in tables_of(slots):
            if table.method.depends_on_length(table.rotary):
                stack.enter_context(table.at_length(length))
        yield model


def reset(model: M) -> M:
    """Forget the longest input a sticky method has met."""
    for table in tables_of(patched_slots(model)):
        table.reset()
    return model


def check_context_parallel(model: nn.Module) -> None:
    """Check that a model, patched or not, rotates right where each process has a part of every row.

    That is context or sequence parallelism. Call it inside `fixed_length`, where that is used. `RopeCallback` calls it
    in a Trainer with such parallelism.

    Raises:
        MethodError: a method whose frequencies follow the length of the input, which each process would take from its
            own part, so that they rotate by different ones; or a remapping method, whose attention needs all keys.
        UnsupportedModelError: a model without rotary embeddings that could be replaced.
    """
    rule = "under context parallelism each process has a part of every row only"
    for table in tables_of(patched_slots(model)):
        if isinstance(table.method, RemappingMethod):
            raise MethodError(
                f"{rule}, and {table.method.name} needs all keys at their places; choose a frequency method, such as "
                "yarn"
            )
        if table.length_dependent:
            raise MethodError(
                f"{rule}, and the frequencies of {table.method.name} follow the longest position of each part; hold "
                "one length: with rope_ext_hf.fixed_length(model, LENGTH): trainer.train()"
            )
    for name in _own_length_dependent(model):
        raise MethodError(
            f"{rule}, and the model's own {name} takes the length of the input from it; patch the model with a static "
            "method, or patch it and hold one length with rope_ext_hf.fixed_length"
        )


def _own_length_dependent(model: nn.Module) -> Iterator[str]:
    """Methods of a model as loaded that follow the length of the input; none where it is patched."""
    for slot in () if patched_slots(model) else find_slots(model):
        yield from (own.method.name for own in slot.as_loaded.values() if own.method.depends_on_length(own.plain))


def patched_method(model: nn.Module) -> RopeMethod | None:
    """The method `patch` put into a model, None if it runs as loaded."""
    specs = present_specs(model)
    return specs[-1].method if specs else None


# --- a choice of methods, bound to a model, with every factor ------------------------------------------------------


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
    return list(dict.fromkeys([base.bind(method, length) for method, length in chosen]))


def over_rotary(
    choice: MethodChoice, rotary: Rotary, longest: int, lengths: Sequence[int] = ()
) -> Iterator[tuple[RopeMethod, int]]:
    """Every method asked for, with every factor, before it is bound to a model, and its extended length."""
    for name in choice.method:
        parameters = _parameters_for(name, choice)
        takes_factor = not isinstance(name, RopeMethod) and accepts_factor(name)
        beyond = [length for length in lengths if length > rotary.context_length and takes_factor]
        given: list[tuple[float | None, int | None]] = [(factor, None) for factor in choice.factor]
        if isinstance(name, RopeMethod):
            given = [(None, None)]
        for factor, fitted in given or [(None, length) for length in beyond or [longest]]:
            length = choice.target_length or fitted
            method = resolve_method(name, rotary, factor=factor, target_length=length, **parameters)
            yield method, length or stated_length(method, rotary, factor) or longest


def _parameters_for(name: str | RopeMethod, choice: MethodChoice) -> dict[str, Any]:
    """The further parameters for one of several methods: those it takes, and those that none of them takes."""
    fields = {other: method.parameters.keys() for other, method in list_methods().items()}

    def takes(method: str | RopeMethod, parameter: str) -> bool:  # a method without fields here is an alias, or unknown
        name = registered_name(method) if isinstance(method, str) else method
        return name not in fields or not fields[str(name)].isdisjoint({parameter, "frequency"})

    return {
        parameter: value
        for parameter, value in choice.parameters.items()
        if takes(name, parameter) or not any(takes(other, parameter) for other in choice.method)
    }


def apply_choice(choice: PatchChoice, model: nn.Module, *, native: bool = False) -> None:
    """Patch a model as a command asks; one without weights is refused what it would be refused with them."""
    if choice.method:
        patch(model, native=native, **choice.arguments_of_patch)
        check_without_weights(model)
