"""Plug-ins: parts that other packages add to this one by entry points; each is loaded when it is first needed.

A package that has a method of its own, for example, states it in its pyproject.toml:

    [project.entry-points."rope_ext_hf.methods"]
    my-method = "my_package.my_method:MyMethod"

The tool box of this package (`rope_ext_hf.tools`) adds its parts in the same way, so that no other code imports it.

| group | what the name is | what the entry point names |
|---|---|---|
| rope_ext_hf.commands | a command of `rope-ext` | a function under `rope_ext_hf.cli.options.command` |
| rope_ext_hf.methods | a method | a class under `rope_ext_hf.register_method` |
| rope_ext_hf.model_files | the suffix of model files | a class under `rope_ext_hf.files.model_files.ModelFile` |
| rope_ext_hf.run_kinds | a kind of run, as run.json has it | a class under `rope_ext_hf.runs.kinds.register_run_kind` |
| rope_ext_hf.readers | an engine, as `--engine` names it | a function that returns a plan that the engine reads |
| rope_ext_hf.parts | a part of the tool box that the library looks up | that function or class |
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import MethodError, RopeExtError, one_line
from rope_ext_hf.installing import install_command


@cache
def _entries(group: str) -> dict[str, EntryPoint]:
    """Return the entry points in a group such as "rope_ext_hf.methods", by their names, in alphabetical order."""
    entries = [*entry_points(group=f"rope_ext_hf.{group}")]
    try:
        distribution("rope-ext-hf")
    except PackageNotFoundError:
        entries += _of_checkout(group)
    return {entry.name: entry for entry in sorted(entries, key=lambda entry: entry.name)}


def _of_checkout(group: str) -> list[EntryPoint]:
    """Return a group's entry points from this package's own pyproject.toml, for a checkout that is not installed."""
    project = Path(__file__).parent.parent / "pyproject.toml"
    if not project.is_file():
        return []
    groups = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]
    name = f"rope_ext_hf.{group}"
    return [EntryPoint(key, value, name) for key, value in groups.get(name, {}).items()]


def plug_in_names(group: str) -> list[str]:
    """Return the names of all plug-ins in a group, such as "commands", in alphabetical order."""
    return list(_entries(group))


def plug_in(group: str, name: str) -> Any:
    """Load and return the plug-in that has this name in a group; None if the group has no such name.

    Raises:
        RopeExtError: the package that provides the plug-in cannot be loaded; the message names it.
    """
    entry = _entries(group).get(name)
    if entry is None:
        return None
    try:
        return entry.load()
    except Exception as error:  # whatever the code of another package raises
        owner = entry.dist.name if entry.dist is not None else entry.value
        raise RopeExtError(f"{name!r}, which the package {owner} adds, cannot be loaded: {one_line(error)}") from error


def needed_plug_in(group: str, name: str, *, by: str = "") -> Any:
    """Load and return a plug-in of the tool box.

    Args:
        group, name: as in `plug_in`; errors are those of `plug_in`, too.
        by: what needs it, as the user wrote it; default: `name`.

    Raises:
        MethodError: the tool box is not installed.
    """
    loaded = plug_in(group, name)
    if loaded is None:
        raise MethodError(
            f"{by or name} needs rope_ext_hf.tools, a part of this package that is not installed; install the package "
            f"again: {install_command('', '--force-reinstall', '--no-deps')}"
        )
    return loaded
