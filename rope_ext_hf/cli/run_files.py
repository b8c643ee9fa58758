"""The command `run`: repeat the run that a file describes."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rope_ext_hf.cli.console import print_note
from rope_ext_hf.cli.dataclass_options import FROM_FILE, options_of
from rope_ext_hf.cli.options import CONTINUES, command
from rope_ext_hf.cli.parameters import method_parameters
from rope_ext_hf.errors import FileError, MethodError, did_you_mean, listed, short
from rope_ext_hf.options.arguments import Argument, kind_of

if TYPE_CHECKING:
    from rope_ext_hf.runs.folder.run_file import Inputs, RunFile

_ACCEPT = "--accept-changes"
_NUMBERS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float}


@command("Measure", interrupted=CONTINUES, repeats=True)
def run(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE [OPTIONS]", help="The file, or the folder of a run, which holds run.yaml.")
    ],
) -> None:
    """Repeat a run from its run.yaml.

    Every run writes its options into run.yaml in its folder. Options of the same command, and --model, may follow the
    file and override it; --method replaces the methods of the file with their parameters. Results that exist already
    are shown; with another --out they are measured again. A model or text that has changed since ends the command,
    unless --accept-changes is given. You can also write such a file by hand: its keys are the options.

    Example: `rope-ext run examples/runs/perplexity.yaml --max-spans 4`
    """
    from rope_ext_hf.runs.folder.run_file import read_run_files

    files = read_run_files(file)
    if not files:
        raise FileError(f"{str(file)!r} describes no run; a run file begins with a line such as 'run: ppl'")
    for run_file in files:
        _repeat(context, run_file, context.args)


def _repeat(context: typer.Context, file: RunFile, typed: Sequence[str]) -> None:
    """Run the command that a run file names, with its options; options that were typed override those of the file."""
    from rope_ext_hf.runs.folder.identity import versions_now
    from rope_ext_hf.runs.folder.run_file import IN_MEMORY, comparing_inputs

    group: Any = context.find_root().command
    functions = _repeatable(group)
    if file.command not in functions:
        names = ", ".join(functions)
        raise file.mistake(
            "run",
            f"no such run: {short(file.command)!r}.{did_you_mean(file.command, functions)} Known runs: {names}",
        )
    accepts_changes = _ACCEPT in typed
    model, options = _model([word for word in typed if word != _ACCEPT], file.model)
    if not isinstance(model, str):
        in_memory = isinstance(model, dict) and IN_MEMORY in model
        problem = f"was {model[IN_MEMORY]}" if in_memory else "has no name"
        raise file.mistake("model", f"the model {short(problem)}; save it, and give its folder: --model FOLDER")
    values = _checked(file, functions[file.command], {word.partition("=")[0] for word in options})
    present = versions_now()
    changed = [f"{name} {version}" for name, version in file.versions.items() if present.get(name, version) != version]
    if changed:
        print_note("versions", f"this run used {', '.join(changed)}, other versions are installed: numbers may differ")
    repeated = group.commands[file.command]
    context.meta[FROM_FILE] = values
    # typer stops at a required option that is not on the line, so it gets the file's values as defaults
    required = {parameter.name for parameter in repeated.params if parameter.required}
    defaults = {name: str(value) for name, value in values.items() if name in required}
    words = [model, *options]
    expected = {} if accepts_changes else _comparable(file, functions[file.command], typed)
    with (
        repeated.make_context(file.command, words, parent=context.parent, default_map=defaults) as inner,
        comparing_inputs(expected),
    ):
        repeated.invoke(inner)


def _comparable(file: RunFile, function: Callable[..., Any], typed: Sequence[str]) -> Inputs:
    """Return the digests in a run file without those of inputs that typed options change."""
    options = {word.partition("=")[0] for word in typed if word.startswith("--")}
    fields = [
        described
        for options in options_of(function)
        if options.command == file.command
        for described in options.described_fields()
    ]
    of_text = {name for field, argument in fields for name in _option_names(field, argument)}
    overridden = {
        "the model": options & {"--model", "--revision", "--dtype"},
        "the text": options & {"--model", *of_text},
    }
    for name, by in overridden.items():
        if by and file.inputs:
            print_note("inputs", f"{name} is not compared with that of the run file, because of {listed(sorted(by))}")
    changed = tuple(name for name, by in overridden.items() if by)
    return {
        kind: {name: digest for name, digest in digests.items() if not name.startswith(changed)}
        for kind, digests in file.inputs.items()
    }


def _option_names(field: dataclasses.Field[Any], argument: Argument) -> tuple[str, ...]:
    """Return the names under which a field can be typed."""
    return argument.names or (f"--{field.name.replace('_', '-')}",)


def _repeatable(group: Any) -> dict[str, Callable[..., Any]]:
    """Return, by name, the functions of all commands whose runs a run file can repeat."""
    functions = {}
    for name, typer_command in group.commands.items():
        function = inspect.unwrap(typer_command.callback)
        if name in [options.command for options in options_of(function)]:
            functions[name] = function
    return functions


def _model(typed: Sequence[str], model: Any) -> tuple[Any, list[str]]:
    """Return the model after --model if it was typed, else that of the file; and the typed words without --model."""
    waiting, others = list(typed), list[str]()
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if name != "--model":
            others.append(word)
        elif equals:
            model = value
        elif waiting:
            model = waiting.pop(0)
        else:
            raise MethodError("--model takes a folder, a Hub id or 'reference'")
    return model, others


def _checked(file: RunFile, function: Callable[..., Any], typed: Collection[str]) -> dict[str, Any]:
    """Return, checked, those options of a run file that the command line does not override.

    The parameters of methods stand together under the key "parameters".
    """
    fields = [field for options in options_of(function) for field in options.described_fields()]
    checks: dict[str, Callable[[Any], Any]] = {"out": Path}
    names: dict[str, str] = {}  # a key as the option is called, to the name of its field
    for field, argument in fields:
        if field.name != "parameters":
            checks[field.name] = partial(_value, field, argument)
        for option in argument.names:
            names[option.lstrip("-").replace("-", "_")] = field.name
    takes_methods = "parameters" in [field.name for field, _ in fields]
    known_parameters = method_parameters() if takes_methods else set()
    values: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for key, value in file.options.items():
        name = names.get(key, key)
        if f"--{name.replace('_', '-')}" in typed:
            continue
        try:
            if name in checks:
                if value is not None:
                    values[name] = checks[name](value)
            elif key in known_parameters:
                parameters[key] = tuple(value) if isinstance(value, list) else value
            else:
                hint = did_you_mean(key, [*checks, *names, *known_parameters])
                raise MethodError(
                    f"a run file for {file.command} has no key {short(key)!r}.{hint} Its keys are the options of "
                    f"`rope-ext {file.command}`"
                )
        except MethodError as error:
            raise file.mistake(key, str(error)) from error
    if takes_methods:
        values["parameters"] = parameters
    return values


def _value(field: dataclasses.Field[Any], argument: Argument, value: Any) -> Any:
    """Check a value from a run file, and return it in the form in which the command takes it.

    Args:
        field: the dataclass field for one option of the command.
        argument: the limits of this option, and its parser.
        value: the value in the file, which YAML may have read as another type.

    Raises:
        MethodError: the value is wrong, or stands for an object that was in memory, which no file can hold.
    """
    from rope_ext_hf.runs.folder.run_file import IN_MEMORY

    kind = kind_of(field)
    if isinstance(value, dict) and IN_MEMORY in value:
        option = f"--{field.name.replace('_', '-')}"
        raise MethodError(
            f"{field.name} was in memory, under the name {short(str(value[IN_MEMORY]))!r}; give it again: {option} ..."
        )
    if isinstance(value, str) and kind in _NUMBERS and argument.parse is None:
        with suppress(ValueError):  # YAML reads 2e-4 as text
            value = _NUMBERS[kind](value)
    if kind == "str" and value is not None and argument.parse is None:
        value = str(value)
    argument.value(field, value)  # raises the error of a wrong value
    return value
