"""Does a program compute RoPE as published? A table of what agrees with the numbers of this folder.

    python run.py --port transformers            # the installed transformers; the models of models/ too
    python run.py --port mymodule:inv_freq       # a function: config (dict) -> list of inverse frequencies
    python run.py --port mymodule                # a module with any of the functions that kit.py lists
    python run.py --write FOLDER                 # the models of models/, as folders that programs load
    python run.py --server URL --model NAME      # a server over HTTP that serves one of them

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
Outcomes = Sequence[kit.Outcome]


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


def table(outcomes: Outcomes, titles: Sequence[str]) -> list[str]:
    """A line for each row."""
    rows: dict[str, list[str]] = {}
    for each in outcomes:
        rows.setdefault(title(each), []).append(cell(each))
    width = max(map(len, rows), default=0)
    columns = [max(11, len(each) + 2) for each in titles]
    lines = [("", list(titles)), *rows.items()] if rows else []
    return [
        f"{name:<{width}}" + "".join(f"{each:>{wide}}" for each, wide in zip(cells, columns, strict=True))
        for name, cells in lines
    ]


def report(tables: Outcomes, models: Outcomes) -> str:
    """Two tables, then what failed and the likely mistake."""
    both = [*tables, *models]
    lines = [*table(tables, TITLES), "", *table(models, kit.READ), ""] if models else table(tables, TITLES)
    lines += [f"{title(each)}: {each.check}: {each.error}" for each in both if each.error]
    agree = sum(each.error == "" for each in both)
    return "\n".join([*lines, f"{agree} agree, {sum(bool(each.error) for each in both)} differ"])


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--port", help="transformers, MODULE or MODULE:FUNCTION")
    what.add_argument("--write", type=Path, metavar="FOLDER", help="write the models there")
    what.add_argument("--server", metavar="URL", help="vLLM, SGLang, llama.cpp or another with OpenAI's completions")
    parser.add_argument("--model", metavar="NAME", help="that the server serves")
    parser.add_argument("--dtype", default="float32", choices=kit.about()["tolerances"], help="of what it computes")
    parser.add_argument("--cases", nargs="*", metavar="NAME", help="these configurations and models alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there")
    given = parser.parse_args()
    if given.write:
        print(*(kit.write_model(name, given.write) for name, _ in kit.models(given.cases)), sep="\n")
        return
    if given.server:
        import server

        if given.model not in dict(kit.models()):
            parser.error(f"--model must be one of {', '.join(dict(kit.models()))}")
        agrees, text = server.check(given.server, dict(kit.models())[given.model], given.dtype)
        print(f"{given.server}, {given.model}: {text}")
        sys.exit(not agrees)
    port = load(given.port)
    tables = list(kit.check_tables(port, given.dtype, given.cases))
    models = list(kit.check_models(port, given.dtype, given.cases))
    outcomes = [*tables, *models]
    name = port.version() if hasattr(port, "version") else given.port
    print(f"{kit.about()['name']} {kit.about()['version']}: {name}, {given.dtype}")
    print(report(tables, models))
    if given.json:
        content = {"port": name, "dtype": given.dtype, "outcomes": [asdict(each) for each in outcomes]}
        given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(each.error for each in outcomes))


if __name__ == "__main__":
    main()
