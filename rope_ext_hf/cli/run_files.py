"""`run`: repeat the run that a file describes."""

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
from rope_ext_hf.cli.expansion import FROM_FILE, questions_of
from rope_ext_hf.cli.options import CONTINUES, command
from rope_ext_hf.cli.parameters import method_parameters
from rope_ext_hf.errors import FileError, MethodError, did_you_mean, short
from rope_ext_hf.questions import Argument, command_words, kind_of

if TYPE_CHECKING:
    from rope_ext_hf.runs.run_file import RunFile

_NUMBERS: dict[str, Callable[[Any], Any]] = {"int": int, "float": float}


@command("Measure", interrupted=CONTINUES, repeats=True)
def run(
    context: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE [OPTIONS]", help="The file, or the folder of a run, which holds run.yaml.")
    ],
) -> None:
    """Repeat a run from its run.yaml.

    Every run writes its options into run.yaml in its folder. Options of the same command may follow the file and
    override it; so may --model. --method replaces the methods of the file and their parameters. Results that exist
    already are shown; with another --out they are measured again. You can also write such a file by hand: its keys are
    the options.

    Example: `rope-ext run examples/runs/perplexity.yaml --max-spans 4`
    """
    from rope_ext_hf.runs.run_file import read_run_files

    files = read_run_files(file)
    if not files:
        raise FileError(f"{str(file)!r} holds no run; a run file begins with 'run: ppl', for example")
    for each in files:
        _repeat(context, each, context.args)


def _repeat(context: typer.Context, file: RunFile, typed: Sequence[str]) -> None:
    """Run the command of a file, with the options that were typed in place of those of the file."""
    from rope_ext_hf.runs.identity import versions_now
    from rope_ext_hf.runs.run_file import IN_MEMORY

    group: Any = context.find_root().command
    functions = {name: inspect.unwrap(each.callback) for name, each in group.commands.items()}
    runs = {name: each for name, each in functions.items() if name in (one.command for one in questions_of(each))}
    if file.command not in runs:
        raise file.mistake(
            "run", f"no such run: {short(file.command)!r}.{did_you_mean(file.command, runs)} Known: {', '.join(runs)}"
        )
    model, options = _model(typed, file.model)
    if not isinstance(model, str):
        was = f"was {model[IN_MEMORY]}" if isinstance(model, dict) and IN_MEMORY in model else "has no name"
        raise file.mistake("model", f"the model {short(was)}; save it, and give its folder: --model FOLDER")
    given = _checked(file, runs[file.command], {word.partition("=")[0] for word in options})
    changed = [f"{name} {then}" for name, then in file.versions.items() if versions_now().get(name, then) != then]
    if changed:
        print_note("versions", f"{', '.join(changed)} answered before, others are here: numbers may differ")
    repeated = group.commands[file.command]
    required = {each.name for each in repeated.params if each.required}
    context.meta[FROM_FILE] = given
    defaults = {name: str(value) for name, value in given.items() if name in required}
    words = [model, *options]
    with repeated.make_context(file.command, words, parent=context.parent, default_map=defaults) as inner:
        repeated.invoke(inner)


def _model(typed: Sequence[str], model: Any) -> tuple[Any, list[str]]:
    """The model that was typed, else that of the file; and the other options."""
    words, rest = list(typed), list[str]()
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name != "--model":
            rest.append(word)
        elif not equals and not words:
            raise MethodError("--model takes a folder, a Hub id or 'reference'")
        else:
            model = value if equals else words.pop(0)
    return model, rest


def _checked(file: RunFile, function: Callable[..., Any], typed: Collection[str]) -> dict[str, Any]:
    """The options of a file but those typed, each checked as its command asks for it, parameters of methods apart."""
    asked = [one for each in questions_of(function) for one in each.described_fields()]
    makers: dict[str, Callable[[Any], Any]] = {"out": Path}
    makers |= {each.name: partial(_value, each, how) for each, how in asked if each.name != "parameters"}
    names = {name.lstrip("-").replace("-", "_"): each.name for each, how in asked for name in how.names}
    takes_methods = any(each.name == "parameters" for each, _ in asked)
    of_methods = method_parameters() if takes_methods else set()
    given: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for key, value in file.options.items():
        name = names.get(key, key)
        try:
            if f"--{name.replace('_', '-')}" in typed:
                continue
            if name in makers:
                given |= {} if value is None else {name: makers[name](value)}
            elif key in of_methods:
                parameters[key] = tuple(value) if isinstance(value, list) else value
            else:
                near = did_you_mean(key, [*makers, *names, *of_methods])
                raise MethodError(f"{file.command} has no key {short(key)!r}.{near}")
        except MethodError as error:
            raise file.mistake(key, str(error)) from error
    return given | ({"parameters": parameters} if takes_methods else {})


def _value(field: dataclasses.Field[Any], how: Argument, value: Any) -> Any:
    """A value of a file, as the field of a question takes it; checked."""
    from rope_ext_hf.runs.run_file import IN_MEMORY

    kind = kind_of(field)
    if isinstance(value, dict) and IN_MEMORY in value:
        option = command_words("", **{field.name: "..."})[1]
        raise MethodError(
            f"{field.name} was in memory, called {short(str(value[IN_MEMORY]))!r}; give it anew: {option}"
        )
    if isinstance(value, str) and kind in _NUMBERS and how.parse is None:
        with suppress(ValueError):  # YAML takes 2e-4 for a text
            value = _NUMBERS[kind](value)
    if kind == "str" and value is not None and how.parse is None:
        value = str(value)
    how.value(field, value)
    return value
