"""The conversion between typer and commands: fields of dataclasses become options, and typed values dataclasses.

A command takes its options in groups, as dataclasses, beside single ones:

    @command("Patch a model")
    def describe(model: Model, methods: LayerChoice, colour: bool = argument(False, "In colours.")) -> None: ...

typer reads only single parameters. So it gets a function with another signature, in which every field of a dataclass
is a parameter of its own. When typer calls that function with the values that were typed, it makes the dataclasses of
them and calls the command. Commands and dataclasses have three kinds of parameters:

- a dataclass, which stands for its own parameters;
- a field described by `argument`, as all fields of an `Options` class are. It becomes an option as its `Argument` says;
- everything else, such as `Annotated[str, typer.Argument(...)]`. typer gets it as it is.

Importing this module does not import torch, so that --help answers at once.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import MISSING, Field
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from rope_ext_hf.cli.console import quiet_transformers
from rope_ext_hf.cli.parameters import parse_parameters
from rope_ext_hf.errors import MethodError
from rope_ext_hf.options.arguments import Argument, Options, kind_of, option_text
from rope_ext_hf.options.method_choice import MethodChoice

STATED = "rope_ext_hf.stated"
"""The key of a context's `meta` under which a command finds the names of the options that were typed or in a file."""
FROM_FILE = "rope_ext_hf.from_file"
"""The key of a context's `meta` under which the command `run` puts the options of a run file, by their names."""


def expand_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for typer in which each field of a command's dataclasses is a parameter of its own.

    The help shows the fields of a dataclass that has a PANEL together, under that title.
    """
    context_parameter = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    others = [parameter for parameter in _typer_parameters(command) if parameter.name != "context"]
    parameters = [context_parameter, *others]

    @wraps(command)
    def run(context: typer.Context, **values: Any) -> Any:
        of_file = _values_of_file(command, context, values)
        context.meta[STATED] = {*of_file, *(name for name in values if _is_typed(context, name))}
        values |= of_file
        arguments = _arguments(command, values | {"context": context})
        for options in _options_in(arguments.values()):
            options.check_early()
        # transformers takes seconds to import: errors that need no model come before.
        quiet_transformers(imports=not command.command_settings.light)  # type: ignore[attr-defined]
        return command(**arguments)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def options_of(group: Any) -> list[type[Options]]:
    """Return the `Options` classes (dataclasses of arguments) of a command, also those inside other dataclasses."""
    types = get_type_hints(group)
    kinds: list[type[Options]] = []
    for name in inspect.signature(group).parameters:
        kind = types[name]
        if _has_arguments(kind):
            kinds.append(kind)
        elif dataclasses.is_dataclass(kind):
            kinds += options_of(kind)
    return kinds


# --- from a command to the parameters that typer reads ----------------------------------------------------------------


def _typer_parameters(group: Any) -> list[inspect.Parameter]:
    """Return the function parameters that typer reads for a command or a dataclass, in order."""
    if _has_arguments(group):
        return [_option(group, field, argument) for field, argument in group.described_fields() if argument.option]
    types = get_type_hints(group, include_extras=True)
    described = {parameter.name: parameter for parameter in _typer_parameters(_own_options(group))}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(group).parameters.items():
        if name in described:
            parameters.append(described[name])
        elif dataclasses.is_dataclass(types[name]):
            parameters += _typer_parameters(types[name])
        else:
            parameters.append(parameter.replace(annotation=types[name], kind=inspect.Parameter.KEYWORD_ONLY))
    return parameters


@cache
def _own_options(group: Callable[..., Any]) -> type[Options]:
    """Return an `Options` class made of those of a command's own parameters that `argument` describes.

    They are then parsed and checked like the fields of any other `Options`.
    """
    parameters = inspect.signature(group).parameters.values()
    fields = [
        (parameter.name, parameter.annotation, parameter.default)
        for parameter in parameters
        if type(parameter.default) is Field
    ]
    return dataclasses.make_dataclass(group.__name__, fields, bases=(Options,), frozen=True, kw_only=True)


_OPTION_TYPES = {"int": int, "float": float, "bool": bool, "Path": Path}  # of fields; all others are text


def _option(options: type[Options], field: Field[Any], argument: Argument) -> inspect.Parameter:
    """Return the function parameter from which typer makes the option for one field of an `Options` class."""
    value_type: Any = _OPTION_TYPES.get(kind_of(field), str)
    if argument.parse:
        value_type = str
    if argument.repeated:
        value_type = list[str]
    default = _default(field, argument)
    limits = {}
    if value_type in (int, float) and argument.least > -math.inf:
        limits["min"] = value_type(argument.least)
    option = typer.Option(
        *_option_names(field.name, argument, default, is_flag=value_type is bool),
        metavar=argument.metavar,
        help=argument.help,
        rich_help_panel=_panel(options, field.name),
        **limits,
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[value_type | None if default is None else value_type, option],
    )


def _default(field: Field[Any], argument: Argument) -> Any:
    """Return the default that typer gets for an option; `inspect.Parameter.empty`: the option is required.

    If the option's value is parsed from text, its default is a text, too, which the help shows.
    """
    default = field.default if argument.typed is ... else argument.typed
    if default is MISSING:
        return inspect.Parameter.empty
    if argument.repeated or default is None:
        return None
    if not argument.parse:
        return default
    if argument.show and argument.typed is ...:
        return argument.show(default)
    return option_text(default)


def _option_names(field_name: str, argument: Argument, default: Any, *, is_flag: bool) -> tuple[str, ...]:
    """Return the names of an option, such as `--trials`; a flag that is on by default also gets `--no-NAME`."""
    if argument.names:
        return argument.names
    name = field_name.replace("_", "-")
    return (f"--{name}/--no-{name}",) if is_flag and default is not False else (f"--{name}",)


def _panel(options: type[Options], field_name: str) -> str | None:
    """Return the title under which the help lists a field: the PANEL of the class that declares the field."""
    for cls in options.__mro__:
        if field_name in vars(cls).get("__annotations__", ()):
            return getattr(cls, "PANEL", None)
    return None


# --- from typer's values to the arguments of a command ----------------------------------------------------------------


def _values_of_file(command: Callable[..., Any], context: typer.Context, values: dict[str, Any]) -> dict[str, Any]:
    """Return those options of a run file that the command line does not override.

    An option that was typed also overrides those that state the same in another way (`Argument.instead_of`): --factor
    overrides the file's target_length. --method overrides the parameters of the file's methods.
    """
    of_file: dict[str, Any] = dict(context.meta.pop(FROM_FILE, {}))
    alternatives = {
        field.name: argument.instead_of
        for options in options_of(command)
        for field, argument in options.described_fields()
    }
    for name in values:
        if not _is_typed(context, name):
            continue
        replaced = [name, *alternatives.get(name, ())]
        if name == "method":
            replaced.append("parameters")
        for other in replaced:
            of_file.pop(other, None)
    return of_file


def _is_typed(context: typer.Context, name: str) -> bool:
    """Return whether the option with this name stands on the command line."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _arguments(group: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a command, or of a dataclass that is not an `Options` class, built from typed values."""
    types = get_type_hints(group)
    arguments: dict[str, Any] = _built(_own_options(group), values).arguments
    for name in inspect.signature(group).parameters.keys() - arguments.keys():
        arguments[name] = _built(types[name], values) if dataclasses.is_dataclass(types[name]) else values[name]
    return arguments


def _built(kind: Any, values: dict[str, Any]) -> Any:
    """Return an instance of an `Options` class or another dataclass, built from the values of its options."""
    if not _has_arguments(kind):
        return kind(**_arguments(kind, values))
    arguments = {field.name: values[field.name] for field, _ in kind.described_fields() if field.name in values}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    if issubclass(kind, MethodChoice):
        arguments["parameters"] = arguments.get("parameters", {}) | parse_parameters(values["context"].args)
    try:
        return kind(**arguments)
    except MethodError as error:
        raise MethodError(_with_option_names(str(error), kind)) from error


def _with_option_names(message: str, options: type[Options]) -> str:
    """Return an error message with fields of an `Options` class as options: `--max-spans`, not `max_spans`.

    Messages name fields in three places: "trials must be ...", "...; give lengths, ..." and "what data names".
    """
    names = [field.name for field, argument in options.described_fields() if argument.option]
    any_name = "|".join(sorted(names, key=len, reverse=True))  # the longest first, of which others are beginnings
    places = rf"^({any_name})(?= (must|takes|is))|(?<=; give )({any_name})(?=,)|(?<= what )({any_name})(?= names)"
    return re.sub(places, lambda match: f"--{match[0].replace('_', '-')}", message)


def _options_in(values: Iterable[Any]) -> Iterator[Options]:
    """Yield those values that are `Options` instances, also those inside other dataclasses."""
    for value in values:
        if isinstance(value, Options):
            yield value
        elif dataclasses.is_dataclass(value):
            yield from _options_in(getattr(value, field.name) for field in dataclasses.fields(value))


def _has_arguments(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Options)
