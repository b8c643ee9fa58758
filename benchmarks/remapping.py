"""Remapping methods up to 32 times the trained length, with each temperature: the tables of docs/remapping.md.

    python benchmarks/remapping.py --spans 200 --methods "rerope,rerope window=192" --folder build/bench/remapping
    python benchmarks/remapping.py --spans 32 --temperatures none,log-n,llama4 --folder build/bench/remapping

Protocol `matched`, 128 targets per span, on the held-out modules of Python's standard library: the same tokens are
scored at every length. `increase` is how much higher the loss is than that of the model as loaded at its context
length, in bits per byte, with the 95% interval that resampling the documents gives. The default temperature was chosen
on the documents of CHOICE; the others confirm it or not. A run that was stopped continues. The last line is JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from record import benchmark_parser, record
from reference import increase_over, load_bundled

from rope_ext_hf.eval import Result, perplexity
from rope_ext_hf.eval.spans.perplexity_measurement import DocumentLoss, PerplexityMeasurement
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.patching import patched
from rope_ext_hf.reading.spans import EvalPlan, prepare
from rope_ext_hf.runs.measurement import RunPlan
from rope_ext_hf.runs.runner import carry_out

METHODS = ("self-extend", "rerope", "leaky-rerope", "dca")
TARGETS, SCALES = 128, (1, 2, 4, 8, 16, 32)
CHOICE = frozenset({"_pydecimal", "inspect", "pydoc_data/topics", "turtle"})


def bits(documents: Iterable[DocumentLoss]) -> float:
    """Bits per byte over some documents."""
    chosen = list(documents)
    nats, scored = (math.fsum(getattr(document, name) for document in chosen) for name in ("nats", "bytes"))
    return round(nats / scored / math.log(2), 4)


def row_of(result: Result, base: Result) -> dict[str, Any]:
    return increase_over(result, base) | {
        "length": result.length,
        "choice": bits(document for document in result.documents if document.name in CHOICE),
        "confirmation": bits(document for document in result.documents if document.name not in CHOICE),
    }


def as_loaded(model: Any, plan: EvalPlan) -> Result:
    """The model as loaded at its context length, over the tokens that the plan scores at every length."""
    length = min(plan.lengths)
    documents = [(document, tuple(s for s in spans if s.length == length)) for document, spans in plan.documents]
    shortest = replace(plan, lengths=(length,), documents=tuple(documents))
    result: Result = carry_out(model, RunPlan(PerplexityMeasurement(shortest), "stdlib")).results[0]
    return result


def parse_method(text: str) -> tuple[str, dict[str, Any]]:
    """ "rerope window=192" as a name and parameters."""
    name, *parameters = text.split()
    return name, {key: int(value) for key, value in (each.split("=") for each in parameters)}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--methods", default=",".join(METHODS), help="such as 'rerope,rerope window=192'")
    parser.add_argument("--temperatures", default="", help="default: the default of every method alone")
    parser.add_argument("--spans", type=int, default=200, help="spans per length")
    parser.add_argument("--folder", type=Path, required=True, help="what is measured is kept here")
    arguments = parser.parse_args()
    model, rotary, tokens = load_bundled(arguments.device)
    lengths = [rotary.context_length * scale for scale in SCALES]
    options: dict[str, Any] = {"targets": TARGETS, "max_spans": arguments.spans, "bos": False}
    base = as_loaded(model, prepare(model, tokens, lengths=lengths, **options))
    rows = [{"method": "unpatched", "temperature": None} | row_of(base, base)]
    for asked in arguments.methods.split(","):
        name, parameters = parse_method(asked)
        for temperature in arguments.temperatures.split(",") if arguments.temperatures else (None,):
            given = parameters if temperature is None else parameters | {"temperature": temperature}
            method = resolve_method(name, rotary, target_length=lengths[-1], **given)
            method = ModelRope.of_model(model).bind(method, lengths[-1])
            with patched(model, method):
                results = perplexity(model, tokens, lengths=lengths, out=arguments.folder, data="stdlib", **options)
            used = method.to_dict().get("temperature", temperature)
            rows += [{"method": asked, "temperature": used} | row_of(result, base) for result in results]
            print(asked, used, *(f"{row['bits_per_byte']:.3f}" for row in rows[-len(lengths) :]), flush=True)
    result = {
        "benchmark": "remapping",
        "context_length": rotary.context_length,
        "spans": arguments.spans,
        "targets": TARGETS,
        "temperatures": arguments.temperatures,
        "scored_tokens": base.tokens,
        "documents": len(base.documents),
        "rows": rows,
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
