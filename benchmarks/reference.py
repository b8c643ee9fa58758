"""Bits per byte of the bundled model by context length and method: the tables of docs/choosing.md.

    python benchmarks/reference.py [--spans 32] [--device cuda] [--out benchmarks/results.jsonl]
    python benchmarks/reference.py --biases         # score biases beyond the trained length: docs/own-models.md

Protocol `matched` on the held-out modules of Python's standard library: the same tokens are scored at every length.
`increase` is how much higher the loss is than that of the model as loaded at its context length, in bits per byte, with
the 95% interval that resampling the documents gives. The last line is JSON.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from record import benchmark_parser, record
from transformers import AutoModelForCausalLM, AutoTokenizer

from rope_ext_hf.eval import Result, perplexity
from rope_ext_hf.eval.spans.perplexity_runs import difference
from rope_ext_hf.methods.base import RopeMethod, Rotary
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.patching import patched
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import tokenize
from rope_ext_hf.reference import path
from rope_ext_hf.runs.conclusions.labels import label

SCALES = (1, 2, 4, 8)
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"factor": 8}),
    ("ntk", {"factor": 8}),
    ("dynamic-ntk", {"growth": "hf", "factor": 4}),
    ("by-parts", {"factor": 8}),
    ("yarn", {"factor": 8}),
    ("dynamic-yarn", {}),
    ("rerope", {}),
    ("leaky-rerope", {}),
    ("self-extend", {}),
    ("dca", {}),
]
"""A method of every kind and its parameters; the remapping methods are fitted to the longest length."""
BIASES: list[tuple[str, dict[str, Any]]] = [
    ("alibi", {}),
    ("alibi", {"strength": 8.0}),
    ("alibi", {"frequency": {"method": "yarn", "factor": 4.0}}),
    ("kerple", {"kernel": "power", "r1": 0.1, "r2": 0.5}),
    ("yarn", {"factor": 8.0}),
    ("rerope", {}),
]
"""Biases, and a method of each other kind beside them."""


def load_bundled(device: str) -> tuple[Any, Rotary, list[Tokens]]:
    """The bundled model in float32, what it says of its rotary embedding, and the held-out text."""
    model = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32).eval().to(device)
    return model, ModelRope.of_model(model).rotary, tokenize(load("stdlib"), AutoTokenizer.from_pretrained(path()))


def increase_over(result: Result, base: Result) -> dict[str, float]:
    """Bits per byte, and how much higher the loss is than another one, with its 95% interval."""
    gaps = zip(("increase", "low", "high"), difference(result, base)[:3], strict=True)
    return {"bits_per_byte": round(result.bits_per_byte, 4)} | {
        name: round(gap * result.bits_per_byte / result.loss, 4) for name, gap in gaps if gap is not None
    }


def rows_of(method: RopeMethod | None, results: list[Result], base: Result) -> list[dict[str, Any]]:
    return [
        {
            "method": label(method.to_dict()) if method else "unpatched",
            "temperature": getattr(method, "temperature", None),
            "length": result.length,
            "perplexity": round(result.perplexity, 4),
        }
        | increase_over(result, base)
        for result in results
    ]


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--spans", type=int, default=32, help="spans per length")
    parser.add_argument("--biases", action="store_true", help="score biases instead of a method of every kind")
    arguments = parser.parse_args()
    model, rotary, tokens = load_bundled(arguments.device)
    lengths = [rotary.context_length * scale for scale in SCALES]
    methods: list[RopeMethod | None] = [None]
    for name, parameters in BIASES if arguments.biases else METHODS:
        method = resolve_method(name, rotary, **parameters)
        methods.append(ModelRope.of_model(model).bind(method, lengths[-1]))
    base: list[Result] = []
    rows: list[dict[str, Any]] = []
    for method in methods:
        with patched(model, method) if method else nullcontext():
            results = perplexity(model, tokens, lengths=lengths, max_spans=arguments.spans, bos=False)
        base = base or results
        rows += rows_of(method, results, base[0])
        print(rows[-1]["method"], *(f"{row['bits_per_byte']:.3f}" for row in rows[-len(lengths) :]), flush=True)
    result = {
        "benchmark": "hybrids" if arguments.biases else "reference",
        "parameters": model.num_parameters(),
        "context_length": rotary.context_length,
        "spans": arguments.spans,
        "scored_tokens": base[0].tokens,
        "documents": len(base[0].documents),
        "rows": rows,
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
