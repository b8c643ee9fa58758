"""Score biases as aids beyond the trained length: bits per byte of the bundled model by length.

    python benchmarks/hybrids.py [--spans 32] [--device cuda] [--out benchmarks/results.jsonl]

Protocol `matched` on the held-out modules of Python's standard library: the same tokens are scored at every length.
`increase` is how much higher the loss is than that of the model as loaded at its context length, in bits per byte, with
the 95% interval that resampling the documents gives. The last line is JSON.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from record import record
from reference import rows_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_ext_hf.eval import Result, perplexity
from rope_ext_hf.eval.corpora import load
from rope_ext_hf.eval.plan import tokenize
from rope_ext_hf.methods import resolve_method
from rope_ext_hf.patches.geometry import bind, patch_geometry
from rope_ext_hf.patches.patching import patched
from rope_ext_hf.reference import path

SCALES = (1, 2, 4, 8)
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("alibi", {}),
    ("alibi", {"strength": 8.0}),
    ("alibi", {"frequency": {"method": "yarn", "factor": 4.0}}),
    ("kerple", {"kernel": "power", "r1": 0.1, "r2": 0.5}),
    ("yarn", {"factor": 8.0}),
    ("rerope", {}),
]
"""Biases, and a method of each other kind beside them."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--spans", type=int, default=32, help="spans per length")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32).eval().to(arguments.device)
    rotary = patch_geometry(model)
    lengths = [rotary.context_length * scale for scale in SCALES]
    tokens = tokenize(load("stdlib"), AutoTokenizer.from_pretrained(path()))
    base: list[Result] = []
    rows: list[dict[str, Any]] = []
    for name, parameters in [("", {}), *METHODS]:
        method = bind(model, resolve_method(name, rotary, **parameters), lengths[-1]) if name else None
        with patched(model, method) if method else nullcontext():
            results = perplexity(model, tokens, lengths=lengths, max_spans=arguments.spans, bos=False)
        base = base or results
        rows += rows_of(method, results, base[0])
        print(rows[-1]["method"], *(f"{row['bits_per_byte']:.3f}" for row in rows[-len(lengths) :]), flush=True)
    result = {
        "benchmark": "hybrids",
        "context_length": rotary.context_length,
        "spans": arguments.spans,
        "scored_tokens": base[0].tokens,
        "documents": len(base[0].documents),
        "rows": rows,
        "threads": torch.get_num_threads(),
    }
    record(result, arguments.out, arguments.device)


if __name__ == "__main__":
    main()
