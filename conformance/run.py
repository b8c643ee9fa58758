"""Does a program compute RoPE as published? A table of what agrees with the numbers of this folder.

    python run.py --port transformers            # the installed transformers; the models of models/ too
    python run.py --port mymodule:inv_freq       # a function: config (dict) -> list of inverse frequencies
    python run.py --port mymodule                # a module with any of the functions that kit.py lists

Needs Python 3.11 and numpy, and what the port needs. The exit status is 1 where something differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(Path.cwd())]

import kit  # noqa: E402

TITLES = ("inv_freq", "magnitude", "softmax", "cos, sin", "M-RoPE", "rotation")


def load(port: str) -> Any:
    """A port by its name."""
    if port == "transformers":
        return importlib.import_module("transformers_port")
    module, _, function = port.partition(":")
    loaded = importlib.import_module(module)
    return SimpleNamespace(inv_freq=getattr(loaded, function)) if function else loaded


def cell(outcome: kit.Outcome) -> str:
    """One word."""
    return "-" if outcome.error is None else "FAILS" if outcome.error else "pass"


def title(outcome: kit.Outcome) -> str:
    """The name of a row."""
    length = "" if outcome.length is None else f", {outcome.length:,} tokens"
    return outcome.case + (f", {outcome.layer_type}" if outcome.layer_type else "") + length


def table(outcomes: Sequence[kit.Outcome]) -> str:
    """A line for each row, then what failed and the likely mistake."""
    rows: dict[str, list[str]] = {}
    for each in outcomes:
        rows.setdefault(title(each), []).append(cell(each))
    width = max(map(len, rows))
    lines = ["".join([" " * width, *(f"{each:>11}" for each in TITLES)])]
    lines += ["".join([f"{name:<{width}}", *(f"{each:>11}" for each in cells)]) for name, cells in rows.items()]
    lines += [f"{title(each)}: {each.check}: {each.error}" for each in outcomes if each.error]
    agree = sum(each.error == "" for each in outcomes)
    return "\n".join([*lines, f"{agree} agree, {sum(bool(each.error) for each in outcomes)} differ"])


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", required=True, help="transformers, MODULE or MODULE:FUNCTION")
    parser.add_argument("--dtype", default="float32", choices=kit.about()["tolerances"], help="of what it computes")
    parser.add_argument("--cases", nargs="*", metavar="NAME", help="these configurations alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    given = parser.parse_args()
    port = load(given.port)
    outcomes = list(kit.check_tables(port, given.dtype, given.cases))
    name = port.version() if hasattr(port, "version") else given.port
    print(f"{kit.about()['name']} {kit.about()['version']}: {name}, {given.dtype}")
    print(table(outcomes))
    if given.json:
        content = {"port": name, "dtype": given.dtype, "outcomes": [asdict(each) for each in outcomes]}
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(each.error for each in outcomes))


if __name__ == "__main__":
    main()
