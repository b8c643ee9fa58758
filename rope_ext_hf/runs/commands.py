"""The commands that a run was started with, kept in its folder: whoever reads the report can repeat it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from rope_ext_hf.errors import FileError
from rope_ext_hf.files import write_text
from rope_ext_hf.runs.journal import read_plain

_COMMANDS = "commands.jsonl"
_MOST = 100_000  # bytes


def add_command(folder: Path, arguments: Sequence[str]) -> None:
    """Keep the arguments of a command of `rope-ext`, where they are not there yet, as a line of JSON.

    Raises:
        FileError: anything the disk refuses.
    """
    lines = dict.fromkeys(json.dumps(each) for each in [*_read(folder), list(arguments)])
    write_text(folder / _COMMANDS, "".join(f"{line}\n" for line in lines))


def read_commands(folder: Path) -> list[str]:
    """The commands of a run for a shell, oldest first; none where the file is missing or holds something else.

    A folder may be somebody else's: whatever stands in the file, each command is `rope-ext` with quoted arguments.
    """
    return [shlex.join(["rope-ext", *arguments]) for arguments in _read(folder)]


def _read(folder: Path) -> list[list[str]]:
    try:
        lines = [json.loads(line) for line in read_plain(folder / _COMMANDS, _MOST).splitlines()]
    except (FileError, ValueError, RecursionError):
        return []
    return [line for line in lines if isinstance(line, list) and all(isinstance(each, str) for each in line)]
