"""The folder of a run: a lock on it, and its settings and results, read back and checked."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import FileError, one_line, short
from rope_ext_hf.files.whole import disk_errors, locked, parse_json_object
from rope_ext_hf.runs.conclusions.labels import Method, method_key
from rope_ext_hf.runs.folder.journal import read_plain, read_records
from rope_ext_hf.runs.kinds import RunKind, run_kind
from rope_ext_hf.runs.measurement import Cell, Record, RunContents
from rope_ext_hf.runs.run import Run

__all__ = ["exclusive", "identifying", "other_settings", "read_run", "setting_name"]

SETTINGS = "run.json"


@contextmanager
def exclusive(folder: Path, rank: int = 0) -> Iterator[None]:
    """Hold a lock on a folder for the process with this rank inside the `with` block; FileError if another holds it.

    The system releases the lock of a process that ends.
    """
    path = folder / f"run.{rank}.lock"
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise FileError(f"{str(path)!r} is not a plain file; delete it")
    with ExitStack() as held:
        with disk_errors(path):
            held.enter_context(locked(path, folder))
        yield


def read_run(folder: str | Path) -> Run[Any]:
    """Read a run from its folder, finished or not.

    Returns:
        The run with the results of all methods, in the order in which their first values were measured.

    Raises:
        FileError: the folder does not hold a run, or is damaged; the message names the file and the line.
    """
    folder = Path(folder)
    path = folder / SETTINGS
    try:
        settings = check_settings(parse_json_object(read_plain(path)))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{str(path)!r} does not describe a run: {one_line(error)}") from error
    except FileError as error:
        raise FileError(f"{str(folder)!r} is not the folder of a run: {one_line(error)}") from error
    contents = RunContents.from_settings(settings)
    kind = run_kind(settings["kind"])
    records = read_records(folder, contents, kind.parse)
    setting = kind.setting(**settings["setting"])
    return Run(folder, settings, results_from_records(kind, setting, contents, records), kind)


def results_from_records(kind: RunKind, setting: Any, contents: RunContents, records: Sequence[Record]) -> list[Any]:
    """Return one result for each method and cell (a context length, maybe with a depth) whose items all have a value.

    Args:
        kind: the kind of the run, which makes the results.
        setting: how the items (documents or prompts) were read, an instance of `RunKind.setting`.
        contents: the cells, and how many values a complete one has.
        records: the values, in any order of items and cells; methods come in the order of their first record.
    """
    methods: dict[str, Method] = {}
    by_cell: dict[tuple[str, Cell], dict[int, Record]] = defaultdict(dict)
    for record in records:
        key = method_key(record.method)
        methods[key] = record.method
        by_cell[key, record.cell][record.item] = record
    results = []
    for key, method in methods.items():
        for cell, count in sorted(contents.counts.items()):
            by_item = by_cell.get((key, cell), {})
            if len(by_item) == count:
                in_order = [by_item[item] for item in sorted(by_item)]
                values, costs = [record.value for record in in_order], [record.cost for record in in_order]
                results.append(kind.result(method, setting, cell, values, costs))
    return results


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "dtype", "device", "data", "kind", "over"), (str,)),
    **dict.fromkeys(("parameters", "context_length", "tokens"), (int,)),
    **dict.fromkeys(("versions", "setting"), (dict,)),
    "loaded": (dict, type(None)),
}
"""The types of the settings that every run has."""


def check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a run, after checking that results, tables and pages can be made with them.

    Raises:
        ValueError: a setting is missing, or its type or value is wrong; the message names it.
    """
    for key, types in _TYPES.items():
        value = settings.get(key)
        if key not in settings or not isinstance(value, types) or isinstance(value, bool):
            raise ValueError(f"{key!r} must be {' or '.join(t.__name__ for t in types)}, got {short(repr(value))}")
    for key in ("parameters", "context_length", "tokens"):
        if not 1 <= settings[key] < 2**63:
            raise ValueError(f"{key!r} must be at least 1, got {short(str(settings[key]))}")
    if not all(isinstance(number, str) for number in settings["versions"].values()):
        raise ValueError("'versions' must map names to strings")
    _check_setting(settings["setting"], run_kind(settings["kind"]).setting)
    RunContents.from_settings(settings)
    return settings


def _check_setting(setting: dict[str, Any], setting_class: type) -> None:
    """Raise ValueError unless a dict holds the fields of the dataclass `setting_class`, with values of their types."""
    described = fields(setting_class)
    needed = {field.name for field in described if field.default is MISSING}
    types = {field.name: field.type for field in described}
    if not needed <= set(setting) <= set(types):
        raise ValueError(f"'setting' must have the keys {', '.join(types)}, got {short(json.dumps(setting))}")
    for name, value in setting.items():
        if type(value).__name__ != types[name]:
            raise ValueError(f"'setting': {name} must be {types[name]}, got {short(repr(value))}")


def identifying(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings that the numbers depend on: all but the place from which the model was loaded."""
    return {name: value for name, value in settings.items() if name != "model"}


_NAMES = {
    **dict.fromkeys(("weights", "parameters", "patches", "of_patch", "loaded"), "the model"),
    **dict.fromkeys(("basis", "context_length"), "what the methods extend"),
    **dict.fromkeys(("text", "items", "cell_texts"), "the text"),
    **dict.fromkeys(("setting", "per_cell", "tokens"), "the protocol"),
    **{"cells": "the lengths", "kind": "the kind of measurement", "code": "the source of the packages"},
    **{"data": "the name of the text", "over": "--over", "threads": "the number of threads"},
}


def setting_name(setting: str) -> str:
    """Return the name of a setting of a run in messages: "the model" for `weights`; other names stay as they are."""
    return _NAMES.get(setting, setting)


def other_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the sorted names of the settings in which two runs differ.

    Args:
        before: the settings of one run, read from a file.
        now: the settings of the other run, in this process. They are converted to JSON values first, so that a tuple
            equals a list.
    """
    now = json.loads(json.dumps(now))
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
