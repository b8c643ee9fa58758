"""A run's folder: its settings and results read back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import FileError, one_line, short
from rope_ext_hf.files import parse_json_object
from rope_ext_hf.runs.journal import Cell, Record, RunContents, read_plain, read_records
from rope_ext_hf.runs.kinds import Run, RunKind, run_kind
from rope_ext_hf.runs.labels import method_key

SETTINGS = "run.json"


def read_run(folder: str | Path) -> Run[Any]:
    """Read a run from its folder, finished or not.

    Returns:
        The run with the results of all methods, in the order in which they were first finished.

    Raises:
        FileError: not the folder of a run, or a damaged one; the message names file and line.
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
    return Run(folder, settings, results_from_records(kind, setting, contents, records))


def results_from_records(kind: RunKind, setting: Any, contents: RunContents, records: Sequence[Record]) -> list[Any]:
    """One result per method and cell that has the values of all its items."""
    found: dict[tuple[str, Cell], dict[int, Record]] = {}
    for record in records:
        found.setdefault((method_key(record.method), record.cell), {})[record.item] = record
    return [
        kind.result(method, setting, cell, [each.value for each in complete], [each.cost for each in complete])
        for key, method in {method_key(record.method): record.method for record in records}.items()
        for cell, count in sorted(contents.counts.items())
        if len(complete := [record for _, record in sorted(found.get((key, cell), {}).items())]) == count
    ]


_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("model", "dtype", "device", "data", "kind", "over"), (str,)),
    **dict.fromkeys(("parameters", "context_length", "tokens"), (int,)),
    **dict.fromkeys(("versions", "setting"), (dict,)),
    "loaded": (dict, type(None)),
}


def check_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings that hold everything results, tables and pages need; ValueError names what is wrong."""
    for key, types in _TYPES.items():
        value = settings.get(key)
        if key not in settings or not isinstance(value, types) or isinstance(value, bool):
            raise ValueError(f"{key!r} must be {' or '.join(t.__name__ for t in types)}, got {short(repr(value))}")
    for key in ("parameters", "context_length", "tokens"):
        if not 1 <= settings[key] < 2**63:
            raise ValueError(f"{key!r} must be at least 1, got {short(str(settings[key]))}")
    if not all(isinstance(number, str) for number in settings["versions"].values()):
        raise ValueError("'versions' must map names to strings")
    setting, known = settings["setting"], fields(run_kind(settings["kind"]).setting)
    needed = {item.name for item in known if item.default is MISSING}
    expected = {item.name: item.type for item in known}
    if not needed <= set(setting) <= set(expected):
        raise ValueError(f"'setting' must have the keys {', '.join(expected)}, got {short(json.dumps(setting))}")
    for name, value in setting.items():
        if type(value).__name__ != expected[name]:
            raise ValueError(f"'setting': {name} must be {expected[name]}, got {short(repr(value))}")
    RunContents.from_settings(settings)
    return settings


def other_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of the settings in which two runs differ, as JSON; sorted."""
    now = json.loads(json.dumps(now))
    return sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
