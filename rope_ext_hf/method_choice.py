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

from rope_ext_hf.bounds import MOST_TOKENS, listed, parse_length
from rope_ext_hf.errors import MethodError, UnknownMethodError, did_you_mean, short
from rope_ext_hf.questions import Question, argument

_REGISTRY = "rope_ext_hf.methods.registry"
_REMOVED = {"profiles": "0.1.0", "string": "0.1.0"}
"""Methods that left the package, by name, with the last version that has them."""


def folded(name: str) -> str:
    """Return a name without case and separators, as names are compared: "NTK_aware" is "ntk-aware"."""
    return re.sub(r"[-_\s]", "", name).casefold()


def unknown_method(name: str, known: Iterable[str]) -> UnknownMethodError:
    """Return the error for a name that no method has."""
    if (version := _REMOVED.get(folded(name))) is not None:
        return UnknownMethodError(
            f"the method {name!r} was removed; the last version of this package that has it is {version}"
        )
    names = sorted(known)
    return UnknownMethodError(f"unknown method {name!r}.{did_you_mean(name, names)} Known methods: {', '.join(names)}")


@cache
def shipped_names() -> tuple[str, ...]:
    """Return the names and aliases of the methods of this package, read from their files without importing torch."""
    files = sorted((Path(__file__).parent / "methods").glob("*.py"))
    return tuple(name for file in files for name in _registered_in(file.read_text(encoding="utf-8")))


def _registered_in(source: str) -> Iterator[str]:
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    for call in (each for cls in classes for each in cls.decorator_list if isinstance(each, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id == "register_method":
            yield ast.literal_eval(call.args[0])
            yield from (
                name for each in call.keywords if each.arg == "aliases" for name in ast.literal_eval(each.value)
            )


def _check_method_names(names: Iterable[Any]) -> None:
    """Refuse an unknown name before torch is imported; once it is, others may have registered methods of their own."""
    known = set(map(folded, shipped_names()))
    for name in names:
        if isinstance(name, str) and _REGISTRY not in sys.modules and folded(name) not in known:
            raise unknown_method(name, shipped_names())


def _parts(given: Any) -> list[Any]:
    """One value or several, comma lists among them, in parts, without blanks around them."""
    given = [] if given is None else listed(given)
    parts = [part for each in given for part in (each.split(",") if isinstance(each, str) else [each])]
    return [part.strip() if isinstance(part, str) else part for part in parts]


def _methods(given: Any) -> tuple[Any, ...]:
    methods = tuple(part for part in _parts(given) if part != "")
    if not methods and given not in (None, (), []):  # of a script whose variable is empty, say
        raise MethodError("--method names no method; leave it out to have the model as loaded")
    return methods


def parse_numbers(option: str, given: Any, example: str) -> tuple[float, ...]:
    """One number or several, comma lists among them, all finite; the error shows the option and an example."""
    parts = _parts(given)
    try:
        numbers = tuple(map(float, parts))
    except (TypeError, ValueError) as error:
        text = ",".join(map(str, parts))
        raise MethodError(f"{option} takes numbers, e.g. {example}; got {short(text)!r}") from error
    for number in numbers:
        if not abs(number) <= MOST_TOKENS:
            raise MethodError(f"{option} must be a finite number of a possible size, e.g. {example}; got {number}")
    return numbers


def _layers(given: Any) -> tuple[str | int, ...]:
    return tuple(
        int(part) if isinstance(part, str) and part.isdigit() else part for part in _parts(given) if part != ""
    )


@dataclass(frozen=True, kw_only=True)
class MethodChoice(Question):
    """The methods asked for. Their further parameters keep their own names (--beta-fast 16)."""

    PANEL: ClassVar[str | None] = "Methods (rope-ext methods lists their parameters, which are options too)"

    method: tuple[Any, ...] | Any = argument(
        (),
        "Names, separated by commas; describe, patch and lm-eval take one.",
        names=("--method", "-m"),
        parse=_methods,
        repeated=True,
        metavar="NAMES",
    )
    factor: tuple[float, ...] | Any = argument(
        (),
        "Extended length divided by context length, e.g. 8; 4,8 compares two.",
        parse=lambda given: parse_numbers("--factor", given, "2,4,8"),
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
    parameters: dict[str, Any] | Any = argument(None, "", parse=lambda given: dict(given or {}), option=False)

    @property
    def underneath(self) -> dict[str, Any]:
        """What is extended, as `rope_ext_hf.patch` takes it."""
        return {"over": self.over, "context_length": self.context_length}

    def check_early(self) -> None:
        _check_method_names(self.method)

    def check(self, *, factor_alone: bool = False) -> None:
        """Refuse parameters without a method; a factor may stand alone for a command that has methods of its own."""
        names = ("target_length", "factor", *self.parameters, "over", "context_length", "layers")
        stated = {*self.options, *self.parameters} - ({"factor", "over", "context_length"} if factor_alone else set())
        given = [f"--{name.replace('_', '-')}" for name in names if name in stated]
        if given and not self.method:
            raise MethodError(f"{', '.join(given)} given without a method; add --method")


@dataclass(frozen=True, kw_only=True)
class PatchChoice(MethodChoice):
    """One method with one factor."""

    def check_single(self, *, required: bool = False) -> None:
        """Refuse several methods or factors, and options that no method was given for."""
        self.check()
        if required and not self.method:
            raise MethodError("which method? Add --method, e.g. --method yarn --factor 8; `rope-ext methods` lists all")
        if len(self.method) > 1 or len(self.factor) > 1:
            given = ", ".join([*map(str, self.method), *(f"{factor:g}" for factor in self.factor)])
            raise MethodError(
                f"this command takes one method and one factor, got {given}; ppl and sweep compare several"
            )

    @property
    def arguments_of_patch(self) -> dict[str, Any]:
        """The method with everything that was asked for, as `rope_ext_hf.patch` takes it; without one None."""
        return {
            "method": self.method[0] if self.method else None,
            "factor": self.factor[0] if self.factor else None,
            "target_length": self.target_length,
            **self.underneath,
            **self.parameters,
        }


@dataclass(frozen=True, kw_only=True)
class LayerChoice(PatchChoice):
    """One method with one factor, for the layers that attend to everything or for others."""

    layers: tuple[str | int, ...] | Any = argument(
        (),
        "Layers to change, by layer type or number, e.g. sliding_attention or 0,2; default: those that attend to "
        "everything. Layers that share a rotary embedding change together.",
        parse=_layers,
        metavar="LIST",
    )

    @property
    def arguments_of_patch(self) -> dict[str, Any]:
        return super().arguments_of_patch | ({"layers": list(self.layers)} if self.layers else {})
