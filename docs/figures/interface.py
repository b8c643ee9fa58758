"""The commands with their options, and what a saved folder states, from the program itself."""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from docs.figures.registry import figure


@figure
def commands() -> str:
    """Every command with its arguments, options and defaults, by the groups of `rope-ext --help`.

    What several commands have in common stands in one list before them, and by name in each.
    """
    import typer

    from rope_ext_hf.cli.app import app

    panels: dict[str, list[Any]] = {}
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        panels.setdefault(command.rich_help_panel, []).append(command)
    every = [command for listed in panels.values() for command in listed]
    counts = Counter(row for command in every for row in _rows(command.params))
    shared: dict[str, _Row] = {}  # by name: of two options of one name, the more common one
    for row, count in counts.most_common():
        if count > 1:
            shared.setdefault(row[0].partition(" ")[0], row)
    parts = (
        f"## {panel}\n\n" + "".join(_command(command, shared.values()) for command in listed)
        for panel, listed in panels.items()
    )
    common = [_linked(row) for row in counts if row in shared.values() and _option(row) != JSON]
    without = [f"`{each.name}`" for each in every if JSON not in (name for of in each.params for name in of.opts)]
    grouped = {name for names in GROUPS.values() for name in names}
    lists = [
        f"**{title}**:\n\n{_listed(row for row in common if _option(row) in names)}" for title, names in GROUPS.items()
    ]
    lists.append(f"**Others**:\n\n{_listed(row for row in common if _option(row) not in grouped)}")
    text = f"\n\n## Options of several commands\n\nEvery command but {' and '.join(without)} takes `{JSON}`"
    return f"{text}, which prints JSON instead of text.\n\n{''.join(lists)}" + "".join(parts)


JSON = "--json"
"""An option of nearly every command, which their lists leave out."""
GROUPS = {
    "Method": ("--method", "--factor", "--target-length", "--over", "--context-length"),
    "Loading": ("--revision", "--trust-remote-code"),
    "Running": ("--dtype", "--device", "--device-map"),
    "Memory": ("--tokens-per-pass", "--offload-cache"),
    "Upload": ("--push-to-hub", "--public", "--yes"),
    "Runs": ("--lengths", "--processes", "--out", "--dry-run"),
    "Spans": (
        "--data",
        "--protocol",
        "--targets",
        "--stride",
        "--max-spans",
        "--bos",
        "--keys-by",
        "--key-window",
        "--store-states",
    ),
    "GPUs": ("--gpus", "--gpu-memory", "--weight-bits"),
}
"""Options that commands have together, under the name that stands for them in a command's list."""


def _option(row: _Row) -> str:
    """The option that a row describes, as it is typed; "" for an argument."""
    return next(iter(re.findall(r"--[a-z-]+", row[0])), "")


def _listed(rows: Iterable[_Row]) -> str:
    """A list and no table: an option is as long as a telephone is wide."""
    return "".join(f"- {names}{f' ({default})' * bool(default)}: {text}\n" for names, default, text in rows) + "\n"


def _command(command: Any, shared: Collection[_Row]) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join([command.name, *map(_name, arguments)])
    summary = inspect.cleandoc(command.help).partition("\n\nExample:")[0]
    rows = list(_rows(command.params))
    own = _listed(own_rows) if (own_rows := [row for row in rows if row not in shared]) else ""
    names = [name for row in rows if row in shared and (name := _option(row)) not in ("", JSON)]
    whole = {title: of for title, of in GROUPS.items() if set(of) <= set(names)}
    single = [f"`{name}`" for name in names if not any(name in of for of in whole.values())]
    words = ", ".join([*whole, *single])
    also = f"[Also](#options-of-several-commands): {words}.\n\n" if words else ""
    return f"### {command.name}\n\n`{usage}`: {summary}\n\n{own}{also}"


def _name(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


SECTIONS = {
    "--protocol": "evaluation.md#protocols",
    "--bos": "evaluation.md#protocols",
    "--data": "evaluation.md#texts",
    "--over": "recipes.md#what-is-extended-over",
    "--layers": "models.md#several-rotary-embeddings",
    "--key-window": "evaluation.md#longppl",
}
"""Where an option of several commands is explained, of those whose help says what a page says."""

_Row = tuple[str, str, str]
"""Names, default and help of an argument or an option."""


def _rows(parameters: Any) -> Iterator[_Row]:
    for parameter in sorted(parameters, key=lambda each: each.param_type_name):  # arguments before options
        if parameter.name == "help":
            continue
        argument = parameter.param_type_name == "argument"  # in brackets where it is not required
        if argument:
            names = _name(parameter)
        else:
            value = "" if parameter.is_flag else f" {parameter.metavar or _kind(parameter.type_descriptor.annotation)}"
            names = ", ".join(f"`{name}{value}`" for name in (*parameter.opts, *parameter.secondary_opts))
        default = parameter.default if not callable(parameter.default) else None
        empty = default in (None, False, "", [], ())
        default = parameter.opts[0] if default is True else default
        shown = "required" if parameter.required and not argument else "" if empty else f"`{default}`"
        text = (parameter.help or "").replace("\n", " ")
        yield names, shown, text


def _kind(annotation: Any) -> str:
    """The word for the value of an option that has no word of its own, by the type of the value."""
    return "NUMBER" if annotation in (int, float) else "TEXT"


def _linked(row: _Row) -> _Row:
    """A row whose help ends after its first words where a page says the rest."""
    names, shown, text = row
    section = SECTIONS.get(_option(row))
    return (names, shown, f"{re.split(r'[.,:] ', text)[0]}: [more]({section}).") if section else row


@figure
def saved_config() -> str:
    """The RoPE part of the config.json of the bundled model, saved under YaRN x4."""
    import torch

    import rope_ext_hf as rope
    from rope_ext_hf.reference import path

    model = rope.patch(rope.from_pretrained(path(), dtype=torch.float32), "yarn", factor=4)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    keys = [key for key in config if key.startswith("rope_") or key == "max_position_embeddings"]
    shown = json.dumps({key: config[key] for key in sorted(keys)}, indent=2)
    shown = re.sub(r"\[\s+([\d.e-]+,).*?,\s+([\d.e-]+)\s+\]", r"[\1 ..., \2]", shown, flags=re.DOTALL)
    innermost = re.compile(r"(?<=: )([{\[])\s+([^{}\[\]]{,99}?)\s+([}\]])")  # what is short stands on a line
    shown = innermost.sub(lambda match: match[1] + " ".join(match[2].split()) + match[3], shown)
    return f"\n\n```json\n{shown}\n```\n\n"
