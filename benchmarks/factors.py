"""Gain and cost of every method without training, by factor and length: the tables of docs/choosing.md.

    python benchmarks/factors.py --model reference --data stdlib
    python benchmarks/factors.py --model build/bench/docstring-model --data 'build/bench/docstring-model/held-out/*.txt'
    python benchmarks/factors.py --methods stairs    # the tables keep the rows of the other methods
    python benchmarks/factors.py --longest 32 --factors 32 --methods yarn,dca    # they get a column for 32 times

Protocol `matched`: the same tokens are scored at every length, from the context length to the longest. Methods with a
factor are measured with each of `--factors`, up to the extended length; the others follow the input, or are fitted to
the longest length. `increase` is how much higher the loss is than that of the model as loaded at its context length, in
bits per byte, with the 95% interval that resampling the documents gives. The last line is JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import benchmark_parser, record
from reference import increase_over
from transformers import AutoModelForCausalLM

from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval import Result
from rope_ext_hf.eval.spans.perplexity_measurement import PerplexityMeasurement
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.methods.base import RopeMethod
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.patching import patched
from rope_ext_hf.reading.spans import EvalPlan, prepare
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import tokenize
from rope_ext_hf.reference import path
from rope_ext_hf.runs.measurement import RunPlan
from rope_ext_hf.runs.runner import carry_out

SCALES = (1, 2, 4, 8, 16, 32)
"""Lengths, in context lengths."""
BY_FACTOR = ("linear", "ntk", "by-parts", "yarn", "llama3", "mrrope")
FITTED = (
    "cope",
    "dynamic-ntk",
    "dynamic-yarn",
    "rerope",
    "leaky-rerope",
    "self-extend",
    "dynamic-self-extend",
    "jet-long",
    "dca",
    "stairs",
    "alibi",
    "kerple",
)
"""Methods that need no length, follow the input, or are fitted to the longest length."""


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="reference", help="reference, or a folder")
    parser.add_argument("--data", default="stdlib", help="the text, as `rope-ext ppl` takes it")
    parser.add_argument("--longest", type=int, default=16, help="the longest length, in context lengths")
    parser.add_argument("--factors", default="2,4,8,16", help="of methods that have one")
    parser.add_argument("--spans", type=int, default=16, help="spans per length")
    parser.add_argument("--methods", default=",".join((*BY_FACTOR, *FITTED)), help="names, separated by commas")
    arguments = parser.parse_args()
    folder = path() if arguments.model == "reference" else arguments.model
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(arguments.device)
    rotary = ModelRope.of_model(model).rotary
    trained = rotary.context_length
    longest = trained * arguments.longest
    tokens = tokenize(load(arguments.data), load_tokenizer(str(folder)))
    lengths = [trained * scale for scale in SCALES if scale <= arguments.longest]
    plan = prepare(model, tokens, lengths=lengths, targets=trained // 2, max_spans=arguments.spans, bos=False)
    chosen: list[tuple[str, float | None, RopeMethod | None]] = [("unpatched", None, None)]
    asked = arguments.methods.split(",")
    for name in (name for name in BY_FACTOR if name in asked):
        for factor in (factor for factor in map(int, arguments.factors.split(",")) if factor <= arguments.longest):
            try:
                chosen.append((name, factor, resolve_method(name, rotary, factor=factor)))
            except MethodError as error:  # a band in which this model has no pairs
                print(error, flush=True)
    for name in (name for name in FITTED if name in asked):
        chosen.append((name, None, resolve_method(name, rotary, target_length=longest)))

    rows: list[dict[str, Any]] = []
    base: Result | None = None
    for name, factor, method in chosen:
        until = factor * trained if factor else longest
        bound = None if method is None else ModelRope.of_model(model).bind(method, longest)
        with patched(model, bound) if bound else nullcontext():
            measurement = PerplexityMeasurement(up_to(plan, until))
            results: Sequence[Result] = carry_out(model, RunPlan(measurement, arguments.data)).results
        base = base or next(result for result in results if result.length == trained)
        for result in results:
            rows.append(
                {
                    "method": name,
                    "factor": factor,
                    "parameters": {} if bound is None else bound.to_dict(),
                    "length": result.length,
                    "nats": round(result.loss, 4),
                }
                | increase_over(result, base)
            )
        mine = rows[-len(results) :]
        print(name, factor or "", *(f"{row['length']}: {row['increase']:+.3f}" for row in mine), flush=True)
    assert base is not None
    result = {
        "benchmark": "factors",
        "model": Path(arguments.model).name,
        "model_type": model.config.model_type,
        "parameters": model.num_parameters(),
        "rotated_dims": rotary.dim,
        "theta": rotary.theta,
        "vocabulary": model.config.vocab_size,
        "context_length": trained,
        "spans": arguments.spans,
        "scored_tokens": base.tokens,
        "scored_bytes": sum(document.bytes for document in base.documents),
        "documents": len(base.documents),
        "rows": rows,
    }
    record(result, arguments)


def up_to(plan: EvalPlan, longest: float) -> EvalPlan:
    """The spans of a plan up to a length; the same tokens are scored."""
    lengths = tuple(length for length in plan.lengths if length <= longest)
    documents = tuple(
        (tokens, tuple(span for span in spans if span.length in lengths)) for tokens, spans in plan.documents
    )
    return replace(plan, lengths=lengths, documents=documents)


if __name__ == "__main__":
    main()
