"""Commands of rope-ext in this process, as they are typed."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

__all__ = ["run", "run_json"]


def run(*arguments: object) -> tuple[int, str, str]:
    """Run one command: its exit code and what it printed to the two streams. An exception that escapes is raised."""
    from rope_ext_hf.cli.app import app

    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def run_json(*arguments: object, code: int = 0) -> Any:
    """What one command prints with --json; it must end with this exit code."""
    given, out, err = run(*arguments, "--json")
    assert given == code, err
    return json.loads(out)
