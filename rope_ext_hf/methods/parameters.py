"""The values that the parameters of a method may have, read from the type annotations of its fields."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from rope_ext_hf.bounds import MOST_TOKENS


class _ParameterType(NamedTuple):
    """The values that one parameter may have."""

    number: type | None = None  # float, int or bool; None: another type, which the method itself checks
    several: bool = False  # whether it is a tuple of them
    optional: bool = False  # whether it may be None
    choices: tuple[str, ...] = ()  # the texts that are allowed; empty: any text
    least: float = -math.inf  # the smallest number
    most: float = math.inf  # the largest number
    above: float = -math.inf  # numbers must be above this one

    def fault(self, value: object) -> str | None:
        """Return what a value must be instead, in words for an error message; None: it is allowed.

        The choices of a text are checked by the caller, which suggests the nearest one.
        """
        numbers = value if self.several else (value,)
        if self.number is not None and not (isinstance(numbers, tuple) and all(map(self._is_number, numbers))):
            return f"{self._words}, got {value!r}"
        numbers = value if isinstance(value, tuple) else (value,)
        if not all(math.isfinite(number) for number in numbers if isinstance(number, float)):
            return f"finite, got {value}"
        number: Any = value if is_number(value) else None
        if number is None:
            return None
        if number < self.least:
            return f"at least {self.least}, got {number:g}"
        if number > self.most:
            return f"at most {self.most:,}, got {number:g}"
        return None if number > self.above else f"above {self.above}, got {number:g}"

    def _is_number(self, value: object) -> bool:
        if self.number is bool:
            return isinstance(value, bool)
        return is_number(value) and (self.number is float or isinstance(value, int))

    @property
    def _words(self) -> str:
        """The type in words."""
        if self.number is bool:
            return "a list of True and False" if self.several else "True or False"
        whole = "whole " if self.number is int else ""
        return f"a list of {whole}numbers" if self.several else f"a {whole}number"


_SIZES: dict[str, dict[str, Any]] = {
    "factor": {"least": 1, "most": MOST_TOKENS},
    "attention_factor": {"above": 0},
}
"""The sizes that parameters of these names may have, in every method."""


def is_number(value: object) -> bool:
    """Return whether a value is an int or a float; a bool does not count as a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@cache
def parameter_types(method: Any) -> dict[str, _ParameterType]:
    """Return the values that each parameter of a method class may have, by its name.

    float, int, bool, tuple[float, ...] and Literal["a", "b"] are understood, each also with `| None`. A parameter whose
    default is None may be None whatever its annotation says.
    """
    stated, types = field_annotations(method), {}
    for item in fields(method):
        annotation = stated.get(item.name)
        members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        others = [member for member in members if member is not NoneType]
        optional = len(others) < len(members) or item.default is None
        kind = _parameter_type(others[0] if len(others) == 1 else None, optional)
        types[item.name] = kind._replace(**_SIZES.get(item.name, {}))
    return types


def _parameter_type(annotation: Any, optional: bool) -> _ParameterType:
    """Return the values that an annotation allows beside None."""
    if get_origin(annotation) is Literal:
        return _ParameterType(optional=optional, choices=get_args(annotation))
    several = get_origin(annotation) is tuple
    number = get_args(annotation)[0] if several else annotation
    return _ParameterType(number if number in (float, int, bool) else None, several, optional)


@cache
def field_annotations(method: Any) -> dict[str, Any]:
    """Return the type annotation of each field of a method class.

    The result is empty if an annotation names a type that is imported for type checkers alone.
    """
    try:
        return get_type_hints(method)
    except NameError:
        return {}
