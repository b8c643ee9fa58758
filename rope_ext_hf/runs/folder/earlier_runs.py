"""The warning for a command that was run before and begins anew, because its model, text or code has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rope_ext_hf.errors import FileError, listed, short, warn_caller
from rope_ext_hf.files.whole import parse_json_object, with_tilde
from rope_ext_hf.runs.folder.folder import SETTINGS, identifying, other_settings, setting_name
from rope_ext_hf.runs.folder.journal import read_plain
from rope_ext_hf.runs.folder.run_file import IN_MEMORY, RUN_FILE, RunFile, read_run_files

_STATED = ("threads", "dtype", "device", "python")
"""Settings whose values are short enough to state both."""


def warn_if_begun_anew(file: RunFile, folder: Path, settings: Mapping[str, Any], changes_daily: str = "") -> None:
    """Warn if a folder beside that of a new run holds results of the same command, which the new run does not use.

    Args:
        file: the command of the new run.
        folder: the folder of the new run.
        settings: the settings of the new run.
        changes_daily: why the same command reads another text on another day, see `Measurement`.
    """
    others = [
        (other_settings(identifying(earlier), identifying(settings)), path, earlier)
        for path, earlier in _same_command(file, folder, settings["kind"])
    ]
    if not others:
        return
    changed, path, earlier = min(others, key=lambda other: len(other[0]))
    names = dict.fromkeys(_difference(name, earlier, settings) for name in changed)
    because = f" ({changes_daily})" if changes_daily and setting_name("text") in names else ""
    threads = earlier.get("threads")
    advice = f". OMP_NUM_THREADS={threads} continues that run" if changed == ["threads"] else ""
    warn_caller(
        f"the same command was run before, in {str(path)!r}; this run begins anew, because {listed(names)} "
        f"changed{because}{advice}"
    )


def _same_command(file: RunFile, folder: Path, kind: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folders of runs beside `folder` that the same command made, with their settings."""
    request = file.request
    if file.in_memory or IN_MEMORY in request:  # the same name stands for other weights or another text each time
        return
    if file.options.get("out") != with_tilde(str(folder.parent)):  # one of several runs of a larger command
        return
    for path in sorted(folder.parent.glob(f"*-{kind}-*/{RUN_FILE}")):
        with suppress(FileError, ValueError, RecursionError):  # a damaged run cannot be continued
            if path.parent != folder and request in [other.request for other in read_run_files(path)]:
                yield path.parent, parse_json_object(read_plain(path.with_name(SETTINGS)))


def _difference(name: str, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the name of a setting in messages, with both of its values if they are short."""
    if name == "versions":
        old, new = earlier.get(name), now[name]
        packages = [package for package in new if not isinstance(old, dict) or old.get(package) != new[package]]
        return f"the version of {listed(packages)}"
    if name not in _STATED:
        return setting_name(name)
    return f"{setting_name(name)} ({short(str(earlier.get(name)))} there, {short(str(now[name]))} now)"
