"""Retrieval by length and method: the share of questions that a model answers exactly, or ranks the right answer first.

    python benchmarks/retrieval.py --runs build/bench/retrieval [--lengths 256,512] [--methods as-loaded,self-extend]
        [--tasks key-value,quote] [--keys 1,4] [--device cuda] [--out benchmarks/results.jsonl]
    python benchmarks/retrieval.py --model build/bench/wide-heads-model --questions 20 --keys 1 --lengths 1024,4096
    python benchmarks/retrieval.py --score rank --tasks passkey --keys 1 --lengths 256,512,1024,2048

One cell is 100 questions, in equal shares of the tasks given (with wordings, names and values that the model is not
trained on), the same for every method. Of one key: a prompt for each, in equal shares at five depths. Of four keys: a
prompt for every four, with a statement at each of four depths. Methods with a factor are measured up to the length that
it extends to, and one that answers nothing at two lengths in a row no further; the model as loaded at every length. The
tables keep the cells that are not measured again. A model that answers nothing may still prefer the right answer: with
`--score rank`, the share of questions whose right answer is the likeliest of 20. What is measured is kept in --runs, so
that an interrupted run continues with the same command. Shares come with 95% Wilson intervals; the last line is JSON.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from record import benchmark_parser, record

DEPTHS = {1: (0.0, 0.25, 0.5, 0.75, 1.0), 4: (0.0, 1 / 3, 2 / 3, 1.0)}
"""By number of keys."""
METHODS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "as-loaded": None,
    "linear": ("linear", {"factor": 8.0}),
    "ntk": ("ntk", {"factor": 8.0}),
    "by-parts": ("by-parts", {"factor": 8.0}),
    "yarn": ("yarn", {"factor": 8.0}),
    "mrrope": ("mrrope", {"factor": 8.0}),
    "dynamic-ntk": ("dynamic-ntk", {}),
    "dynamic-yarn": ("dynamic-yarn", {}),
    "rerope": ("rerope", {}),
    "leaky-rerope": ("leaky-rerope", {}),
    "self-extend": ("self-extend", {}),
    "dynamic-self-extend": ("dynamic-self-extend", {}),
    "jet-long": ("jet-long", {}),
    "dca": ("dca", {}),
}
"""Everything that is not given is a default; remapping methods are fitted for the longest of the lengths."""


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """95% confidence interval of a share."""
    share = successes / trials
    centre = share + z * z / (2 * trials)
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return max(0.0, (centre - spread) / (1 + z * z / trials)), min(1.0, (centre + spread) / (1 + z * z / trials))


def settings(given: dict[str, Any], target_length: int) -> dict[str, Any]:
    return given if "factor" in given else given | {"target_length": target_length}


def shares(total: int, parts: int) -> list[int]:
    """Whole numbers that differ by at most one and sum to the total."""
    return [total // parts + (index < total % parts) for index in range(parts)]


def nothing_found(cells: list[dict[str, Any]], name: str, length: int) -> bool:
    """Return whether a method answered nothing at two lengths in a row; it is not measured at longer ones then."""
    found: dict[int, float] = {}
    for cell in cells:
        if cell["name"] == name and cell["length"] < length:
            found[cell["length"]] = found.get(cell["length"], 0.0) + cell["exact"]
    return len(found) >= 2 and not any(found[shorter] for shorter in sorted(found)[-2:])


def share_of(results: list[Any], attribute: str) -> dict[str, Any]:
    """The share of all trials, with its interval."""
    trials = sum(result.trials for result in results)
    successes = round(sum(getattr(result, attribute) * result.trials for result in results))
    return {"share": successes / trials, "interval": wilson(successes, trials)}


def grouped(results: list[Any], attribute: str) -> dict[Any, list[Any]]:
    """Results by the value of an attribute."""
    groups: dict[Any, list[Any]] = {}
    for result in results:
        groups.setdefault(getattr(result, attribute), []).append(result)
    return groups


def mean_exact(results: list[Any]) -> float:
    """The share of exact answers over results with different numbers of trials."""
    total = sum(result.trials for result in results)
    return round(sum(result.exact_match * result.trials for result in results) / total, 4)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--runs", type=Path, required=True, help="what is measured is kept here")
    parser.add_argument("--model", default=None, help="default: the bundled one")
    parser.add_argument("--lengths", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--target-length", type=int, default=None, help="default: the longest of the lengths")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--tasks", default="key-value", help="such as 'key-value,assignment,quote,copy'")
    parser.add_argument("--keys", default="1,4", help="statements in a prompt")
    parser.add_argument("--questions", type=int, default=100, help="in a cell")
    parser.add_argument("--score", choices=("exact", "rank"), default="exact", help="what a share is of")
    arguments = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import rope_ext_hf as rope
    from rope_ext_hf.eval import passkey
    from rope_ext_hf.reading.text.documents import Document
    from rope_ext_hf.reading.text.load import load
    from rope_ext_hf.reference import path

    lengths = [int(length) for length in arguments.lengths.split(",")]
    target = arguments.target_length or max(lengths)
    folder = arguments.model or path()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(arguments.device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # A part of every held-out module: tokenising all of them for every cell would take longer than reading.
    haystack = [Document(document.name, document.text[:24_000]) for document in load("stdlib")]
    trained = model.config.max_position_embeddings
    cells: list[dict[str, Any]] = []
    tasks, by_rank = arguments.tasks.split(","), arguments.score == "rank"
    todo = [
        (name, length, keys)
        for length in sorted(lengths)
        for name in arguments.methods.split(",")
        for keys in map(int, arguments.keys.split(","))
    ]
    for name, length, keys in todo:
        chosen = METHODS[name]
        beyond = chosen and length > chosen[1].get("factor", math.inf) * trained
        if beyond or (chosen and not by_rank and nothing_found(cells, name, length)):
            continue
        # of one key, prompts at different depths have names and values of their own
        together = [DEPTHS[keys]] if keys > 1 else [(depth,) for depth in DEPTHS[keys]]
        results = []
        with nullcontext() if chosen is None else rope.patched(model, chosen[0], **settings(chosen[1], target)):
            for seed, depths in enumerate(together):
                prompts = shares(arguments.questions // len(DEPTHS[keys]), len(tasks))
                for task, trials in zip(tasks, prompts, strict=True):
                    results += passkey(
                        model, lengths=[length], depths=depths, trials=trials, keys=keys, seed=seed, task=task,
                        distractors=19 if by_rank else 3, tokenizer=tokenizer, haystack=haystack, out=arguments.runs,
                    )  # fmt: skip
        trials = sum(result.trials for result in results)
        exact, first = share_of(results, "exact_match"), share_of(results, "top1")
        cell = {
            "name": name,
            "length": length,
            "keys": keys,
            "trials": trials,
            "exact": exact["share"],
            "interval": exact["interval"],
            "first": first["share"],
            "first_interval": first["interval"],
            "rank": sum(result.rank * result.trials for result in results) / trials,
            "exact_by": {
                kind: {str(value): mean_exact(some) for value, some in grouped(results, kind).items()}
                for kind in ("depth", "task")
            },
        }
        cells.append(cell)
        low, high = cell["interval"]
        print(
            f"{name} {length} keys={keys}: {cell['exact']:.2f} ({low:.2f}-{high:.2f}) first {cell['first']:.2f}",
            flush=True,
        )
    result = {
        "benchmark": "retrieval by rank" if by_rank else "retrieval" if len(tasks) == 1 else "retrieval by task",
        "model": Path(folder).name,
        "context_length": trained,
        "tasks": tasks,
        "rows": cells,
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
