"""The commands with their options, and what a saved folder states, from the program itself."""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .registry import figure, markdown_table


@figure
def commands() -> str:
    """Every command with its arguments, options, defaults and example, by the groups of `rope-ext --help`."""
    import typer

    from rope_ext_hf.cli.app import app

    panels: dict[str, list[Any]] = {}
    for command in typer.main.get_command(app).commands.values():  # type: ignore[attr-defined]
        panels.setdefault(command.rich_help_panel, []).append(command)
    parts = (f"## {panel}\n\n" + "".join(map(_command, listed)) for panel, listed in panels.items())
    return "\n\n" + "".join(parts)


def _command(command: Any) -> str:
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join(["rope-ext", command.name, *(_name(argument) for argument in arguments), "[OPTIONS]"])
    return f"### {command.name}\n\n`{usage}`\n\n{inspect.cleandoc(command.help)}" + markdown_table(
        ["option", "default", "what it does"], _rows(command.params)
    )


def _name(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _rows(parameters: Any) -> Iterator[tuple[str, str, str]]:
    for parameter in sorted(parameters, key=lambda each: each.param_type_name):  # arguments before options
        if parameter.name == "help":
            continue
        if parameter.param_type_name == "argument":
            names = _name(parameter)
        else:
            value = "" if parameter.is_flag else f" {parameter.metavar or 'TEXT'}"
            names = ", ".join(f"`{name}{value}`" for name in (*parameter.opts, *parameter.secondary_opts))
        default = parameter.default if not callable(parameter.default) else None
        empty = default in (None, False, "", [], ())
        default = parameter.opts[0] if default is True else default
        shown = "required" if parameter.required else "–" if empty else f"`{default}`"
        yield names, shown, (parameter.help or "").replace("|", "\\|").replace("\n", " ")


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
    long_list = r"(\[\s+)([\d.e-]+,).*?,\s+([\d.e-]+\s+\])"
    shown = re.sub(long_list, r"\1\2 ..., \3", shown, flags=re.DOTALL)
    return f"\n\n```json\n{shown}\n```\n\n"
