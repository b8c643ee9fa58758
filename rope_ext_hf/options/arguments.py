"""Options: frozen dataclasses, each of which holds the arguments of one measurement or change of a model.

    @dataclass(frozen=True, kw_only=True)
    class Passkey(Options):
        trials: int = argument(10, "Prompts per length and depth.", least=1, most=10_000)

The fields of such a class are the arguments of its function in Python, the options of its command (which
`rope_ext_hf.cli.dataclass_options` makes) and a part of the settings of a run. Each is written once, with its help and
its limits.
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

from rope_ext_hf.bounds import as_list, range_text
from rope_ext_hf.errors import MethodError, short

__all__ = ["Options", "anything", "argument", "command_line", "several", "with_fields_of"]

P = ParamSpec("P")
T = TypeVar("T")
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}


@dataclass(frozen=True)
class Argument:
    """Help text, limits and option names for one field of an `Options` class, which is one argument of a command."""

    help: str  # the help of the option
    metavar: str | None = None  # the name of its value in the help
    names: tuple[str, ...] = ()  # the names of the option, such as `--method`; default: the field's name
    parse: Callable[[Any], Any] | None = None  # converts what a caller passes to the field's value; None: it stays
    show: Callable[[Any], str] | None = None  # converts the field's value to the text of the option
    typed: Any = ...  # the default of the option, where it differs from the field's
    least: float = -math.inf  # the smallest number allowed, or the smallest in a tuple
    most: float = math.inf  # the largest
    among: tuple[str, ...] = ()  # the texts that are allowed; empty: any
    repeated: bool = False  # whether the option may be given several times
    option: bool = True  # whether the command has the option
    instead_of: tuple[str, ...] = ()  # fields that state the same in another way: exactly one of all must be given

    def value(self, field: Field[Any], passed: Any) -> Any:
        """Parse and check the value that a caller passed for a field, and return it.

        Raises:
            MethodError: a value of another type, or beyond the limits.
        """
        value = passed if self.parse is None else self.parse(passed)
        if value is None:
            return None
        kind = kind_of(field)
        if kind.startswith("tuple"):
            for item in value:
                self.check(field.name, kind.removeprefix("tuple[").removesuffix(", ...]"), item)
        else:
            self.check(field.name, kind, value)
        return value

    def check(self, name: str, kind: str, value: Any) -> None:
        """Raise MethodError, with the name of the field, for a value of another type or beyond the limits."""
        if self.among and value not in self.among:
            raise MethodError(f"{name} must be {' or '.join(map(repr, self.among))}, got {short(repr(value))}")
        number = type(value) is int or (kind == "float" and type(value) is float)
        right = number if kind in ("int", "float") else kind != "bool" or isinstance(value, bool)
        if right and (not number or self.least <= value <= self.most):
            return
        limits = range_text(self.least, self.most)
        raise MethodError(f"{name} must be {_KINDS[kind]}{limits}, got {short(repr(value))}")


def argument(default: Any, help: str, **attributes: Any) -> Any:  # noqa: A002 - as argparse and typer have it
    """Return a dataclass field for an argument of a command, with its default and its help text.

    `default=MISSING`: the argument has no default. `attributes` are those of `Argument`, such as limits.
    """
    return field(default=default, metadata={"argument": Argument(help, **attributes)})


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base class for the arguments of one measurement or change of a model, or for arguments that several share.

    Attributes:
        PANEL: the title under which the help of a command lists the fields; None: they stand among the other options.
        command: the command of `rope-ext` that takes these arguments; empty: the class is only a part of
            other classes of options.

    Raises:
        MethodError: a field has a value of another type, or beyond its limits.
    """

    PANEL: ClassVar[str | None] = None
    command: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        """Add the names and help texts of all fields to the docstring of the subclass."""
        super().__init_subclass__(**options)
        own = [(name, value.metadata["argument"].help) for name, value in vars(cls).items() if isinstance(value, Field)]
        cls.__doc__ = "\n".join([f"{cls.__doc__}\n\nFields:", *(f"    {name}: {text}" for name, text in own)])

    def check_early(self) -> None:
        """Raise MethodError for arguments that are wrong for every model.

        Commands call it before they import anything heavy.
        """

    def __post_init__(self) -> None:
        for item, described in self.described_fields():
            object.__setattr__(self, item.name, described.value(item, getattr(self, item.name)))

    @classmethod
    @cache
    def described_fields(cls) -> list[tuple[Field[Any], Argument]]:
        """Return the dataclass fields of these options, each with its `Argument` (help, limits, option names)."""
        return [(item, item.metadata["argument"]) for item in dataclasses.fields(cls)]

    @classmethod
    def split_kwargs(cls, passed: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split keyword arguments into those that are fields of these options, and all others."""
        names = {item.name for item, _ in cls.described_fields()}
        fields = {name: value for name, value in passed.items() if name in names}
        return fields, {name: value for name, value in passed.items() if name not in names}

    @classmethod
    def help_of(cls, name: str) -> str:
        """Return the help text of the field with this name."""
        return next(described.help for item, described in cls.described_fields() if item.name == name)

    @property
    def arguments(self) -> dict[str, Any]:
        """The values of all fields by name."""
        return {item.name: getattr(self, item.name) for item, _ in self.described_fields()}

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments with which `command_line` writes the command that has the same settings."""
        options: dict[str, Any] = {}
        for item, described in self.described_fields():
            value = getattr(self, item.name)
            default = item.default if described.typed is ... else described.typed
            if not described.option or value == default:
                continue
            name = described.names[0].lstrip("-").replace("-", "_") if described.names else item.name
            if value is False:
                options[f"no_{name}"] = True
            else:
                options[name] = value if described.show is None else described.show(value)
        return options


def kind_of(field: Field[Any]) -> str:
    """Return the type of a field's value as text, such as "int" or "tuple[int, ...]".

    `| None` is left out of the annotation, and so is `| Any`, which stands for values that are parsed later.
    """
    return str(field.type).split(" | ")[0]


def with_fields_of(options: type[Options]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that puts the fields of a class of options in place of `**fields` in a signature.

    `help` and editors then show the fields by name, as keyword arguments.
    """

    def with_signature(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        parameters = [
            parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
        ]
        own = {parameter.name for parameter in parameters}
        for item, _ in options.described_fields():
            if item.name not in own:
                default = inspect.Parameter.empty if item.default is MISSING else item.default
                keyword = inspect.Parameter.KEYWORD_ONLY
                parameters.append(inspect.Parameter(item.name, keyword, default=default, annotation=item.type))
        parameters.sort(key=lambda parameter: parameter.kind)
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return function

    return with_signature


def anything(value: Any) -> Any:
    """Return a value unchanged; used as the `parse` of fields that take a text or corpus in any form."""
    return value


def several(kind: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...] | None]:
    """Return a parser that makes a tuple from one value, several values, or a comma list; `kind` converts each value.

    The parser returns None for None.
    """

    def parse(passed: Any) -> tuple[Any, ...] | None:
        if passed is None:
            return None
        if isinstance(passed, str):
            parts = [part.strip() for part in passed.split(",") if part.strip()]
        else:
            parts = as_list(passed)
        try:
            return tuple(map(kind, parts))
        except ValueError as error:
            raise MethodError(f"expected {kind.__name__} values between commas, got {short(repr(passed))}") from error

    return parse


def command_line(command: str, *arguments: object, **options: object) -> str:
    """Return a command line of `rope-ext` as a user types it.

    Args:
        command: the command, such as "patch".
        *arguments: its arguments.
        **options: its options by their names in Python; those that are None, False or () are left out.
    """
    return shell_line(_command_words(command, *arguments, **options))


def option_words(**options: object) -> str:
    """Return options as a user types them, without a command; they are given as in `command_line`."""
    return shlex.join(_command_words("", **options)[1:])


def shell_line(words: Sequence[str]) -> str:
    """Return a command line of `rope-ext`, quoted for a shell, from the words that follow the name of the program."""
    return f"rope-ext {shlex.join(words)}"


def _command_words(command: str, *arguments: object, **options: object) -> list[str]:
    """Return the words of a command line after the name of the program; arguments are as in `command_line`."""
    words = [command, *map(str, arguments)]
    for name, value in options.items():
        if value is None or value is False or value == ():
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(option_text(value))
    return words


def option_text(value: Any) -> str:
    """Return an option's value as a user types it; several values become a comma list."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ",".join(map(option_text, value))
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    return str(value)
