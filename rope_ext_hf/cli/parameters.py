"""The parameters of methods on the command line: options such as `--beta-fast 16`, which no command declares.

Every command with --method accepts the parameters of every method. They cannot be declared to typer as other options
are, because the list of methods is not known without importing torch, which would make --help slow; scripts and
plug-ins register methods of their own, too. So the arguments of a command are split before typer parses them:
`split_arguments` takes the parameters out, with their values, and `parse_parameters` reads them later.

typer itself can let undeclared options pass (`ignore_unknown_options`), but then it takes the value of one, such as the
16, for an argument of the command, and a misspelt option for a parameter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rope_ext_hf.errors import MethodError, did_you_mean, short

_MOST_NESTING = 100  # brackets in a value: the JSON parser of Python fails beyond some thousand


def method_parameters() -> set[str]:
    """Return the names of the parameters of all methods, as in Python."""
    from rope_ext_hf.methods.registry import list_methods

    return {name for method in list_methods().values() for name in method.parameters}


def split_arguments(
    arguments: Sequence[str], options: Mapping[str, bool], *, takes_methods: bool
) -> tuple[list[str], list[str]]:
    """Split the arguments of a command into those that typer parses and the parameters of methods.

    Args:
        arguments: the words behind the name of the command.
        options: the declared options by name, "--lengths" or "-m", and whether each takes a value.
        takes_methods: whether parameters of methods are allowed.

    Raises:
        MethodError: an option that is neither declared nor a parameter; the message suggests the nearest one.
    """
    declared: list[str] = []
    parameters: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return [*declared, word, *waiting], parameters
        name, equals, value = word.partition("=")
        hyphenated = name.replace("_", "-")
        if name not in options and hyphenated in options:  # lm-eval writes its options with underscores
            name, word = hyphenated, hyphenated + equals + value
        if name in options:
            declared.append(word)
            if options[name] and not equals and waiting:
                declared.append(waiting.pop(0))
            continue
        if not word.startswith("--"):
            declared.append(word)
            continue
        known = {f"--{parameter.replace('_', '-')}" for parameter in method_parameters()} if takes_methods else set()
        if hyphenated not in known:
            raise MethodError(f"no such option: {short(name)}.{did_you_mean(name, [*options, *known])}")
        parameters.append(word)
        if not equals and waiting and not (waiting[0].startswith("--") or waiting[0] in options):
            parameters.append(waiting.pop(0))
    return declared, parameters


def parse_parameters(words: Sequence[str]) -> dict[str, Any]:
    """Return the values that were typed for the parameters of methods, by the names of the parameters in Python.

    A value is read as JSON, a comma list as a tuple of floats, anything else stays text; a parameter without a value is
    True. `["--beta-fast", "16", "--sticky"]` becomes `{"beta_fast": 16, "sticky": True}`.
    """
    parameters: dict[str, Any] = {}
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--"):
            raise MethodError(f"unexpected argument {short(word)!r}")
        name, equals, text = word.removeprefix("--").partition("=")
        if not equals:
            text = waiting.pop(0) if waiting and not waiting[0].startswith("--") else "true"
        parameters[name.replace("-", "_")] = _parsed(text)
    return parameters


def _parsed(text: str) -> Any:
    if text.count("[") + text.count("{") > _MOST_NESTING:
        raise MethodError(f"a parameter is a number, a word or a comma list of numbers; got {short(text)!r}")
    with suppress(ValueError):
        if "," in text:
            return tuple(map(float, text.strip("[]").split(",")))
        return json.loads(text)
    return text
