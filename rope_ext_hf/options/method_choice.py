"""The choice of the methods that a model is measured or patched with, as plain values.

A choice names methods, factors or a target length, and what the methods extend; `rope_ext_hf.runs.chosen_methods` makes
method objects of it. Nothing here imports torch, so that `--help` answers at once.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from rope_ext_hf.bounds import MOST_TOKENS, as_list, parse_length
from rope_ext_hf.errors import MethodError, UnknownMethodError, did_you_mean, short
from rope_ext_hf.options.arguments import Options, argument
from rope_ext_hf.plug_ins import plug_in_names

__all__ = ["LayerChoice", "MethodChoice", "PatchChoice", "parse_numbers"]

_REGISTRY = "rope_ext_hf.methods.registry"
_LAST_VERSION = "0.1.0 as it was before 2026-11-27"
_REMOVED = {"profiles": _LAST_VERSION, "string": _LAST_VERSION}
"""Methods that were removed from the package, by name, each with the last version that has it."""


def folded(name: str) -> str:
    """Return a name in lower case without separators, to compare names: "NTK_aware" and "ntk-aware" give the same."""
    return re.sub(r"[-_\s]", "", name).casefold()


def unknown_method(name: str, known: Iterable[str]) -> UnknownMethodError:
    """Return the error for a name that no method has; `known` are the names and aliases that could be meant.

    For a method that was removed, as saved folders may still name it, the error states the last version that has it.
    """
    last_version = _REMOVED.get(folded(name))
    if last_version is not None:
        return UnknownMethodError(
            f"the method {name!r} was removed; the last version of this package that has it is {last_version}. Use a "
            "checkout of that version, or another method"
        )
    names = sorted(known)
    return UnknownMethodError(f"unknown method {name!r}.{did_you_mean(name, names)} Known methods: {', '.join(names)}")


@cache
def shipped_names() -> tuple[str, ...]:
    """Return the names and aliases of the methods of this package.

    They are read from the source, so that an unknown name is refused without the seconds that importing torch takes.
    """
    files = sorted((Path(__file__).parent.parent / "methods").glob("*.py"))
    return tuple(name for file in files for name in _registered_in(file.read_text(encoding="utf-8")))


def _registered_in(source: str) -> Iterator[str]:
    """Yield the names and aliases that `@register_method(name, aliases=...)` gives to classes in a module's source."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call):
                continue
            if isinstance(decorator.func, ast.Name) and decorator.func.id == "register_method":
                yield ast.literal_eval(decorator.args[0])
                for keyword in decorator.keywords:
                    if keyword.arg == "aliases":
                        yield from ast.literal_eval(keyword.value)


def _check_method_names(names: Iterable[Any]) -> None:
    """Raise UnknownMethodError for a name that no method of this package or of a plug-in has.

    Nothing is checked once the registry is imported. It also knows the methods that scripts have registered and the
    aliases of plug-ins, and checks names itself.
    """
    if _REGISTRY in sys.modules:
        return
    known = (*shipped_names(), *plug_in_names("methods"))
    for name in names:
        if isinstance(name, str) and folded(name) not in map(folded, known):
            raise unknown_method(name, known)


def _parts(values: Any) -> list[Any]:
    """Return one value, several values, or text with commas as a list; each text is stripped of blanks."""
    parts: list[Any] = []
    for value in [] if values is None else as_list(values):
        if isinstance(value, str):
            parts += [part.strip() for part in value.split(",")]
        else:
            parts.append(value)
    return parts


def _parse_methods(value: Any) -> tuple[Any, ...]:
    """Return the value of --method as a tuple of names or method objects; MethodError if it has only empty names."""
    methods = tuple(part for part in _parts(value) if part != "")
    if not methods and value not in (None, (), []):  # as by a script whose variable is empty
        raise MethodError("--method names no method; leave it out to use the model as loaded")
    return methods


def parse_numbers(option: str, values: Any, example: str) -> tuple[float, ...]:
    """Return the value of an option as floats: one number, several numbers, or text with commas between numbers.

    Args:
        option: the name of the option, for error messages.
        values: the numbers, or their texts.
        example: a value of the option, for error messages.

    Raises:
        MethodError: something is not a number, or is infinite, NaN, or beyond any length in tokens.
    """
    parts = _parts(values)
    try:
        numbers = tuple(map(float, parts))
    except (TypeError, ValueError) as error:
        text = ",".join(map(str, parts))
        raise MethodError(f"{option} takes numbers, e.g. {example}; got {short(text)!r}") from error
    for number in numbers:
        if not abs(number) <= MOST_TOKENS:
            raise MethodError(
                f"{option} must be a finite number of at most {MOST_TOKENS:,}, e.g. {example}; got {number}"
            )
    return numbers


def _parse_layers(value: Any) -> tuple[str | int, ...]:
    """Return the value of --layers as a tuple: layer types as text, layer numbers as int."""
    layers: list[str | int] = []
    for part in _parts(value):
        if isinstance(part, str) and part.isdigit():
            layers.append(int(part))
        elif part != "":
            layers.append(part)
    return tuple(layers)


@dataclass(frozen=True, kw_only=True)
class MethodChoice(Options):
    """The methods that a user chose, their factors or target length, what they extend, and their other parameters."""

    PANEL: ClassVar[str | None] = "Methods (rope-ext methods lists their parameters, which are options too)"

    method: tuple[Any, ...] | Any = argument(
        (),
        "Names, separated by commas; only ppl, sweep, passkey, tasks and gain take several.",
        names=("--method", "-m"),
        parse=_parse_methods,
        repeated=True,
        metavar="NAMES",
    )
    factor: tuple[float, ...] | Any = argument(
        (),
        "Extended length divided by context length, e.g. 8; 4,8 compares two.",
        parse=lambda value: parse_numbers("--factor", value, "2,4,8"),
        repeated=True,
        metavar="NUMBERS",
        instead_of=("target_length",),
    )
    target_length: int | Any | None = argument(
        None,
        "The extended length in tokens, e.g. 32k. An alternative to --factor.",
        parse=parse_length,
        metavar="TOKENS",
        instead_of=("factor",),
    )
    over: str = argument(
        "own",
        "What is extended. own: the model as loaded, with the scaling it was trained under. original: the model "
        "without that scaling. patched: the model with its present patch, if it was trained under that.",
        metavar="WHAT",
    )
    context_length: int | Any | None = argument(
        None,
        "The length that the model as loaded is for, instead of what its config states.",
        parse=parse_length,
        metavar="TOKENS",
    )
    parameters: dict[str, Any] | Any = argument(None, "", parse=lambda value: dict(value or {}), option=False)

    @property
    def base_arguments(self) -> dict[str, Any]:
        """The arguments `over` and `context_length` of `rope_ext_hf.patch`, which state what the method extends."""
        return {"over": self.over, "context_length": self.context_length}

    def check_early(self) -> None:
        """Raise UnknownMethodError for an unknown method, before torch is imported."""
        _check_method_names(self.method)

    def check(self, *, factor_alone: bool = False) -> None:
        """Raise MethodError if options that only make sense with a method are given without one.

        `factor_alone`: allow --factor, --over and --context-length, for a command whose own methods use them.
        """
        if self.method:
            return
        names = ("target_length", "factor", *self.parameters, "over", "context_length", "layers")
        stated = {*self.options, *self.parameters}
        if factor_alone:
            stated -= {"factor", "over", "context_length"}
        options = [f"--{name.replace('_', '-')}" for name in names if name in stated]
        if options:
            raise MethodError(f"{', '.join(options)} given without a method; add --method")


@dataclass(frozen=True, kw_only=True)
class PatchChoice(MethodChoice):
    """The choice of a single method, or none, with at most one factor, to patch a model with."""

    def check_single(self, *, required: bool = False) -> None:
        """Raise MethodError for several methods or factors, and for options of a method that are given without one.

        `required`: the method may not be left out either.
        """
        self.check()
        if required and not self.method:
            raise MethodError(
                "this command needs a method: add --method, e.g. --method yarn --factor 8; `rope-ext methods` lists all"
            )
        if len(self.method) > 1 or len(self.factor) > 1:
            values = ", ".join([*map(str, self.method), *(f"{factor:g}" for factor in self.factor)])
            raise MethodError(
                f"this command takes one method and one factor, got {values}; `rope-ext ppl` and `rope-ext sweep` "
                "compare several"
            )

    @property
    def arguments_of_patch(self) -> dict[str, Any]:
        """The arguments of `rope_ext_hf.patch`; `method` and `factor` are None where they were not chosen."""
        return {
            "method": self.method[0] if self.method else None,
            "factor": self.factor[0] if self.factor else None,
            "target_length": self.target_length,
            **self.base_arguments,
            **self.parameters,
        }


@dataclass(frozen=True, kw_only=True)
class LayerChoice(PatchChoice):
    """The choice of a single method, or none, and of the layers to patch (by default those that see all tokens)."""

    layers: tuple[str | int, ...] | Any = argument(
        (),
        "Layers to change, by layer type or number, e.g. sliding_attention or 0,2; default: those that attend to "
        "everything. Layers that share a rotary embedding change together, except under nope.",
        parse=_parse_layers,
        metavar="LIST",
    )

    @property
    def arguments_of_patch(self) -> dict[str, Any]:
        """The arguments of `rope_ext_hf.patch`, as in the base class, with `layers` where layers were chosen."""
        arguments = super().arguments_of_patch
        return arguments | {"layers": list(self.layers)} if self.layers else arguments
