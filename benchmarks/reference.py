"""Bits per byte of the bundled model by context length and method: the tables of README and docs/choosing.md.

    python benchmarks/reference.py [--spans 32] [--device cuda] [--out benchmarks/results.jsonl]

Protocol `matched` on the held-out modules of Python's standard library: the same tokens are scored at every length.
`increase` is how much higher the loss is than that of the model as loaded at its context length, in bits per byte, with
the 95% interval that resampling the documents gives. The last line is JSON.
"""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from record import record
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_ext_hf.eval import Result, perplexity
from rope_ext_hf.eval.corpora import load
from rope_ext_hf.eval.plan import tokenize
from rope_ext_hf.eval.results import difference, label
from rope_ext_hf.methods import resolve_method
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.patches.geometry import bind, patch_geometry
from rope_ext_hf.patches.patching import patched
from rope_ext_hf.reference import path

FACTOR = 8
METHODS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 8},
    "ntk": {"factor": 8},
    "dynamic-ntk": {"growth": "hf", "factor": 4},
    "by-parts": {"factor": 8},
    "yarn": {"factor": 8},
    "dynamic-yarn": {},
    "rerope": {},
    "leaky-rerope": {},
    "self-extend": {},
    "dca": {},
}
"""A method of every kind and its parameters; the remapping methods are fitted to the longest length."""


def rows_of(method: RopeMethod | None, results: list[Result], base: Result) -> list[dict[str, Any]]:
    rows = []
    for result in results:
        increase, low, high = (gap * result.bits_per_byte / result.loss for gap in difference(result, base))
        rows.append(
            {
                "method": label(method.to_dict()) if method else "as loaded",
                "temperature": getattr(method, "temperature", None),
                "length": result.length,
                "perplexity": round(result.perplexity, 4),
                "bits_per_byte": round(result.bits_per_byte, 4),
                "increase": round(increase, 4),
                "low": round(low, 4),
                "high": round(high, 4),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--spans", type=int, default=32, help="spans per length")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32).eval().to(arguments.device)
    rotary = patch_geometry(model)
    trained = rotary.context_length
    lengths = [trained * 2**k for k in range(int(math.log2(FACTOR)) + 1)]
    tokens = tokenize(load("stdlib"), AutoTokenizer.from_pretrained(path()))
    methods: list[RopeMethod | None] = [None]
    for name, parameters in METHODS.items():
        methods.append(bind(model, resolve_method(name, rotary, **parameters), lengths[-1]))
    everything: list[Result] = []
    rows: list[dict[str, Any]] = []
    for method in methods:
        with patched(model, method) if method else nullcontext():
            results = perplexity(model, tokens, lengths=lengths, max_spans=arguments.spans, bos=False)
        everything += results
        rows += rows_of(method, results, everything[0])
        print(rows[-len(lengths)]["method"], *(f"{row['bits_per_byte']:.3f}" for row in rows[-len(lengths) :]))
    result = {
        "benchmark": "reference",
        "parameters": model.num_parameters(),
        "context_length": trained,
        "spans": arguments.spans,
        "scored_tokens": everything[0].tokens,
        "documents": len(everything[0].documents),
        "rows": rows,
        "threads": torch.get_num_threads(),
    }
    record(result, arguments.out, arguments.device)


if __name__ == "__main__":
    main()
