"""Questions as values: what is asked of a model, or done to it, as a frozen dataclass.

    @dataclass(frozen=True, kw_only=True)
    class Passkey(Question):
        trials: int = argument(10, "Prompts per length and depth.", least=1, most=10_000)

Its fields are the arguments in Python, the options of the command (`rope_ext_hf.cli.expansion` makes them) and
a part of the settings of a run. Each is written once, with its help and its limits.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field
from functools import cache
from typing import Any, ClassVar, ParamSpec, TypeVar

from rope_ext_hf.bounds import listed, range_text
from rope_ext_hf.errors import MethodError, short

P = ParamSpec("P")
T = TypeVar("T")
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


@dataclass(frozen=True)
class Argument:
    """How one field of a question is asked for."""

    help: str  # what it is, in the help of the command
    metavar: str | None = None  # what its value is called there
    names: tuple[str, ...] = ()  # of the option, such as `--method`; default: the field's name
    parse: Callable[[Any], Any] | None = None  # makes its value of what is given; default: the value as it is
    show: Callable[[Any], str] | None = None  # makes the text of an option of its value
    typed: Any = ...  # the default of the option, where another one than in Python
    least: float = -math.inf  # a number, or each of several, is from this
    most: float = math.inf  # to this
    among: tuple[str, ...] = ()  # the texts that are allowed
    repeated: bool = False  # whether the option may be given several times
    option: bool = True  # whether the command has it
    instead_of: tuple[str, ...] = ()  # the fields that say the same in another way: one of all is given

    def value(self, field: Field[Any], given: Any) -> Any:
        if given is None and not self.parse:
            return None
        value = given if self.parse is None else self.parse(given)
        kind = kind_of(field)
        for one in value if kind.startswith("tuple") and value is not None else [value] * (value is not None):
            self.check(field.name, kind.removeprefix("tuple[").removesuffix(", ...]"), one)
        return value

    def check(self, name: str, kind: str, value: Any) -> None:
        """Refuse a value of another kind, or outside the limits; the message names the field."""
        if self.among and value not in self.among:
            raise MethodError(f"{name} must be {' or '.join(map(repr, self.among))}, got {short(repr(value))}")
        number = type(value) is int or (kind == "float" and type(value) is float)
        right = number if kind in ("int", "float") else kind != "bool" or isinstance(value, bool)
        if right and (not number or self.least <= value <= self.most):
            return
        limits = range_text(self.least, self.most)
        raise MethodError(f"{name} must be {_KINDS[kind]}{limits}, got {short(repr(value))}")


def argument(default: Any, help: str, **how: Any) -> Any:  # noqa: A002 - as argparse and typer have it
    """A field of a question, by its default (`MISSING`: it must be given) and the attributes of `Argument`."""
    return field(default=default, metadata={"argument": Argument(help, **how)})


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked of a model, or done to it; a MethodError names a field of another kind or outside its limits.

    Attributes:
        PANEL: the title under which the help of a command lists the fields; None: among the other options.
        command: the command of `rope-ext` that asks it; empty: it is a part of what a command asks.
    """

    PANEL: ClassVar[str | None] = None
    command: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the docstring list the fields, with their help."""
        super().__init_subclass__(**options)
        own = [(name, value.metadata["argument"].help) for name, value in vars(cls).items() if isinstance(value, Field)]
        cls.__doc__ = "\n".join([f"{cls.__doc__}\n\nFields:", *(f"    {name}: {text}" for name, text in own)])

    def check_early(self) -> None:
        """Refuse what cannot be right whatever the model is, before anything heavy is imported; commands call it."""

    def __post_init__(self) -> None:
        for each, how in self.described_fields():
            object.__setattr__(self, each.name, how.value(each, getattr(self, each.name)))

    @classmethod
    @cache
    def described_fields(cls) -> list[tuple[Field[Any], Argument]]:
        """Its fields, and how each is asked for."""
        return [(each, each.metadata["argument"]) for each in dataclasses.fields(cls)]

    @classmethod
    def apart(cls, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arguments that are fields, and the others."""
        names = {each.name for each, _ in cls.described_fields()}
        fields = {name: given[name] for name in given if name in names}
        return fields, {name: given[name] for name in given if name not in names}

    @property
    def arguments(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each, _ in self.described_fields()}

    @property
    def options(self) -> dict[str, Any]:
        """The options that a command must be given to ask the same, by their names in Python; see `command_line`."""
        given: dict[str, Any] = {}
        for each, how in self.described_fields():
            value, default = getattr(self, each.name), each.default if how.typed is ... else how.typed
            if how.option and value != default:
                name = how.names[0].lstrip("-").replace("-", "_") if how.names else each.name
                if value is False:
                    given[f"no_{name}"] = True
                else:
                    given[name] = value if how.show is None else how.show(value)
        return given


def kind_of(field: Field[Any]) -> str:
    """The type of a field's value, of which `| None` and `| Any`, for what is parsed, are left out."""
    return str(field.type).split(" | ")[0]


def forward(question: type[Question]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A function whose `**fields` are those of a question: `help` and editors show them by name; a decorator."""

    def shown(function: Callable[P, T]) -> Callable[P, T]:
        own = [each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
        of_question = [
            inspect.Parameter(
                each.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if each.default is MISSING else each.default,
                annotation=each.type,
            )
            for each, _ in question.described_fields()
            if each.name not in {parameter.name for parameter in own}
        ]
        parameters = sorted([*own, *of_question], key=lambda each: each.kind)
        result = inspect.signature(function).return_annotation
        function.__signature__ = inspect.Signature(parameters, return_annotation=result)  # type: ignore[attr-defined]
        return function

    return shown


def anything(given: Any) -> Any:
    """What parses a text or corpus in any form: as it is given."""
    return given


def several(kind: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...] | None]:
    """What parses one value, a comma list or several values, each by `kind`; None stays None."""

    def parse(given: Any) -> tuple[Any, ...] | None:
        if given is None:
            return None
        parts = [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else listed(given)
        try:
            return tuple(map(kind, parts))
        except ValueError as error:
            raise MethodError(f"expected {kind.__name__} values between commas, got {short(repr(given))}") from error

    return parse


def command_line(command: str, *arguments: object, **options: object) -> str:
    """A command of `rope-ext` as it is typed; options by their names in Python, without None, False and empty ones."""
    return shell_line(command_words(command, *arguments, **options))


def shell_line(words: Sequence[str]) -> str:
    return f"rope-ext {shlex.join(words)}"


def command_words(command: str, *arguments: object, **options: object) -> list[str]:
    """The words of a command, without the program's; see `command_line`."""
    words = [command, *map(str, arguments)]
    for name, value in options.items():
        if value is None or value is False or value == ():
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(option_text(value))
    return words


def option_text(value: Any) -> str:
    """The value of an option as it is typed."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(option_text, value))
    short_form = f"{value:g}" if isinstance(value, float) else str(value)
    return repr(value) if isinstance(value, float) and float(short_form) != value else short_form
