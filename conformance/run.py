"""Check that a program computes RoPE as published: a table of its agreement with the numbers of this folder.

    python run.py --port transformers            # the installed transformers; the models of models/ too
    python run.py --port mymodule:inv_freq       # a function: config (dict) -> list of inverse frequencies
    python run.py --port mymodule                # a module with any of the functions that kit.py lists
    python run.py --write FOLDER                 # the models of models/, as folders that programs load
    python run.py --server URL --model NAME      # a server over HTTP that serves one of them

It needs Python 3.11, numpy, and the packages of the port. The exit status is 1 if anything differs.
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
sys.path[:0] = [str(HERE), str(Path.cwd()), str(HERE / "examples")]

import kit  # noqa: E402

TITLES = ("inv_freq", "magnitude", "softmax", "cos, sin", "M-RoPE", "rotation")
Outcomes = Sequence[kit.Outcome]


def load(port: str) -> Any:
    """Return a port by its name."""
    if port == "transformers":
        return importlib.import_module("transformers_port")
    module, _, function = port.partition(":")
    loaded = importlib.import_module(module)
    return SimpleNamespace(inv_freq=getattr(loaded, function)) if function else loaded


def cell(outcome: kit.Outcome) -> str:
    """Return a cell of the table: pass, FAILS, or - for a function that the port lacks."""
    if outcome.error is None:
        return "-"
    return "FAILS" if outcome.error else "pass"


def title(outcome: kit.Outcome) -> str:
    """Return the name of an outcome's row."""
    length = "" if outcome.length is None else f", {outcome.length:,} tokens"
    return outcome.case + (f", {outcome.layer_type}" if outcome.layer_type else "") + length


def table(outcomes: Outcomes, titles: Sequence[str]) -> list[str]:
    """Return the lines of a table with a row for each case, layer type and length."""
    rows: dict[str, list[str]] = {}
    for outcome in outcomes:
        rows.setdefault(title(outcome), []).append(cell(outcome))
    name_width = max(map(len, rows), default=0)
    widths = [max(11, len(heading) + 2) for heading in titles]
    lines = [("", list(titles)), *rows.items()] if rows else []
    return [
        f"{name:<{name_width}}" + "".join(f"{text:>{width}}" for text, width in zip(cells, widths, strict=True))
        for name, cells in lines
    ]


def report(tables: Outcomes, models: Outcomes) -> str:
    """Return two tables, followed by the differences with the likely mistakes."""
    lines = table(tables, TITLES)
    if models:
        lines = [*lines, "", *table(models, kit.READ), ""]
    outcomes = [*tables, *models]
    failed = [outcome for outcome in outcomes if outcome.error]
    lines += [f"{title(outcome)}: {outcome.check}: {outcome.error}" for outcome in failed]
    agree = sum(outcome.error == "" for outcome in outcomes)
    return "\n".join([*lines, f"{agree} agree, {len(failed)} differ"])


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_mutually_exclusive_group(required=True)
    actions.add_argument("--port", help="check a port: transformers, MODULE or MODULE:FUNCTION")
    actions.add_argument("--write", type=Path, metavar="FOLDER", help="write the tiny models to this folder")
    actions.add_argument(
        "--server", metavar="URL", help="check a server: vLLM, SGLang, llama.cpp or one with OpenAI's completions"
    )
    parser.add_argument("--model", metavar="NAME", help="the tiny model that the server serves")
    parser.add_argument(
        "--dtype", default="float32", choices=kit.about()["tolerances"], help="the dtype of the computation"
    )
    parser.add_argument("--cases", nargs="*", metavar="NAME", help="check only these configurations and models")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes to this file")
    options = parser.parse_args()
    if options.write:
        print(*(kit.write_model(name, options.write) for name, _ in kit.models(options.cases)), sep="\n")
        return
    if options.server:
        import server

        if options.model not in dict(kit.models()):
            parser.error(f"--model must be one of {', '.join(dict(kit.models()))}")
        agrees, text = server.check(options.server, dict(kit.models())[options.model], options.dtype)
        print(f"{options.server}, {options.model}: {text}")
        sys.exit(not agrees)
    port = load(options.port)
    tables = list(kit.check_tables(port, options.dtype, options.cases))
    models = list(kit.check_models(port, options.dtype, options.cases))
    outcomes = [*tables, *models]
    name = port.version() if hasattr(port, "version") else options.port
    print(f"{kit.about()['name']} {kit.about()['version']}: {name}, {options.dtype}")
    print(report(tables, models))
    if options.json:
        content = {"port": name, "dtype": options.dtype, "outcomes": [asdict(outcome) for outcome in outcomes]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    sys.exit(any(outcome.error for outcome in outcomes))


if __name__ == "__main__":
    main()
