"""Retrieval by length and method: the share of prompts that the bundled model answers exactly.

    python benchmarks/retrieval.py --cells retrieval.jsonl [--lengths 256,512,1024] [--methods as-loaded,self-extend]
        [--device cuda] [--out benchmarks/results.jsonl]

One cell is 100 prompts, 20 at each of five depths, all different; the same prompts for every method. Every finished
cell is a line of JSON in --cells, and a cell that is there already is not measured again, so that an interrupted run
continues with the same command. A markdown table with 95% Wilson intervals is printed at the end; the last line is
JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

from record import record

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
METHODS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "as-loaded": None,
    "yarn": ("yarn", {"factor": 8.0}),
    "dca": ("dca", {}),
    "rerope": ("rerope", {}),
    "leaky-rerope": ("leaky-rerope", {}),
    "self-extend": ("self-extend", {}),
}
"""Everything that is not given is a default; remapping methods are fitted for the longest of the lengths."""


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95% confidence interval of a share."""
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, (centre - spread) / (1 + z * z / trials)), min(1.0, (centre + spread) / (1 + z * z / trials))


def markdown(cells: list[dict[str, Any]], trained_length: int) -> str:
    """One row per task and method, one column per length: exact match and its interval, by number of keys."""
    lengths = sorted({cell["length"] for cell in cells})
    keys = sorted({cell["keys"] for cell in cells})
    head = [f"{length:,} ({length / trained_length:g}x)" for length in lengths]
    rows = [f"| | {' | '.join(head)} |", "|---" * (len(lengths) + 1) + "|"]
    for task, name in dict.fromkeys((cell["task"], cell["name"]) for cell in cells):
        by_cell = {(c["length"], c["keys"]): c for c in cells if (c["task"], c["name"]) == (task, name)}
        texts = [
            " / ".join(_cell(by_cell[length, key]) for key in keys if (length, key) in by_cell) for length in lengths
        ]
        rows.append(f"| {name}, {task} | {' | '.join(texts)} |")
    return "\n".join(rows)


def _cell(cell: dict[str, Any]) -> str:
    low, high = cell["interval"]
    return f"{cell['exact']:.2f} ({low:.2f}-{high:.2f})"


def settings(given: dict[str, Any], target_length: int) -> dict[str, Any]:
    return given if "factor" in given else given | {"target_length": target_length}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--cells", type=Path, required=True, help="JSON lines, one per cell")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    parser.add_argument("--model", default=None, help="default: the bundled one")
    parser.add_argument("--lengths", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--target-length", type=int, default=None, help="default: the longest of the lengths")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--tasks", default="key-value", help="names of forms")
    parser.add_argument("--keys", default="1,4")
    parser.add_argument("--trials", type=int, default=100)
    arguments = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import rope_ext_hf as rope
    from rope_ext_hf.eval import passkey
    from rope_ext_hf.eval.corpora import load
    from rope_ext_hf.eval.documents import Document
    from rope_ext_hf.reference import path

    lengths = [int(length) for length in arguments.lengths.split(",")]
    target = arguments.target_length or max(lengths)
    folder = arguments.model or path()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(arguments.device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # A part of every held-out module: tokenising all of them for every cell would take longer than reading.
    haystack = [Document(document.name, document.text[:24_000]) for document in load("stdlib")]
    trained = model.config.max_position_embeddings
    lines = arguments.cells.read_text(encoding="utf-8").splitlines() if arguments.cells.exists() else []
    cells = [json.loads(line) for line in lines]
    known = {(cell["task"], cell["name"], cell["length"], cell["keys"]) for cell in cells}
    todo = [
        (task, name, length, keys)
        for length in sorted(lengths)
        for task in arguments.tasks.split(",")
        for name in arguments.methods.split(",")
        for keys in map(int, arguments.keys.split(","))
    ]
    for task, name, length, keys in todo:
        if (task, name, length, keys) in known:
            continue
        started = time.perf_counter()
        chosen = METHODS[name]
        results = []
        with nullcontext() if chosen is None else rope.patched(model, chosen[0], **settings(chosen[1], target)):
            for seed, depth in enumerate(DEPTHS):
                results += passkey(
                    model, lengths=[length], depths=[depth], trials=arguments.trials // len(DEPTHS), keys=keys,
                    seed=seed, task=task, distractors=3, tokenizer=tokenizer, haystack=haystack,
                )  # fmt: skip
        trials = sum(result.trials for result in results)
        successes = round(sum(result.exact_match * result.trials for result in results))
        cell = {
            "task": task,
            "name": name,
            "length": length,
            "keys": keys,
            "trials": trials,
            "exact": successes / trials,
            "interval": wilson(successes, trials),
            "rank": sum(result.rank * result.trials for result in results) / trials,
            "exact_by_depth": {str(result.depth): result.exact_match for result in results},
            "method": results[0].method,
            "seconds": round(time.perf_counter() - started, 1),
            "machine": platform.machine(),
            "versions": {package: version(package) for package in ("rope-ext-hf", "torch", "transformers")},
        }
        cells.append(cell)
        arguments.cells.parent.mkdir(parents=True, exist_ok=True)
        with arguments.cells.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cell) + "\n")
        print(f"{task} {name} {length} keys={keys}: {_cell(cell)} rank {cell['rank']:.1f}", flush=True)
    print(markdown(cells, trained))
    kept = ("task", "name", "length", "keys", "trials", "exact", "interval", "rank")
    rows = [{key: cell[key] for key in kept} for cell in cells]
    result = {"benchmark": "retrieval", "context_length": trained, "rows": rows, "threads": torch.get_num_threads()}
    record(result, arguments.out, arguments.device)


if __name__ == "__main__":
    main()
