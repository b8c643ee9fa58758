"""Perplexity, retrieval and cost of any model, as loaded and patched: fills docs/benchmarks.md.

    python benchmarks/real_models.py --model Qwen/Qwen3-0.6B --lengths 32k,64k,128k [--device cuda] [--out FILE]

Every method is fitted to the longest length. The loss is that of `rope-ext sweep` (protocol matched: the same tokens at
every length), retrieval that of `rope-ext passkey`; both keep their runs in --runs, so that the same command continues
where it was stopped. The cost is what the perplexity runs took: tokens read per second, and memory of the GPU. The last
line is JSON.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from record import benchmark_parser, record
from stock import usual_dtype
from transformers import AutoModelForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.bounds import parse_length
from rope_ext_hf.eval import Result, passkey, perplexity
from rope_ext_hf.eval.perplexity_runs import difference
from rope_ext_hf.hub import model_source
from rope_ext_hf.patches.geometry import patch_geometry

METHODS = "yarn,dynamic-yarn,self-extend,rerope"


def row(name: str, result: Result, base: Result, found: float | None) -> dict[str, Any]:
    """One method at one length; `increase` is over the model as loaded at its context length, in nats per token."""
    increase = difference(result, base)[:3]
    return {
        "method": name,
        "length": result.length,
        "loss": round(result.loss, 4),
        "increase": [None if value is None else round(value, 4) for value in increase],
        "found": found,
        "tokens_per_second": result.tokens_per_second and round(result.tokens_per_second),
        "gpu_gigabytes": result.gpu_bytes and round(result.gpu_bytes / 1e9, 2),
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", required=True, help="a Hub id or a folder, or reference: the bundled model")
    parser.add_argument("--lengths", default="32k,64k,128k", help="beside the context length of the model")
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--data", default="hf:emozilla/pg19?split=validation", help="documents of the longest length")
    parser.add_argument("--spans", type=int, default=16, help="at each length")
    parser.add_argument("--targets", type=int, default=256, help="tokens scored in each span")
    parser.add_argument("--task", default="needle", help="of rope-ext passkey; key-value for the bundled model")
    parser.add_argument("--trials", type=int, default=10, help="questions at each length and each of five depths")
    parser.add_argument("--dtype", help="default: float32, on CUDA bfloat16")
    parser.add_argument(
        "--runs", type=Path, default=Path("build/real-models"), help="what continues an interrupted run"
    )
    arguments = parser.parse_args()
    dtype = arguments.dtype or usual_dtype(arguments.device)
    model = AutoModelForCausalLM.from_pretrained(model_source(arguments.model), dtype=getattr(torch, dtype))
    model = model.eval().to(arguments.device)
    context_length = patch_geometry(model).context_length
    asked = {parse_length(text) for text in arguments.lengths.split(",")}
    lengths = sorted({context_length, *asked})
    base: Result | None = None
    rows = []
    for name in ["", *arguments.methods.split(",")]:
        with rope.patched(model, name, target_length=lengths[-1]) if name else nullcontext():
            results = perplexity(
                model,
                arguments.data,
                lengths=lengths,
                targets=arguments.targets,
                max_spans=arguments.spans,
                out=arguments.runs,
            )
            cells = passkey(model, lengths=lengths, task=arguments.task, trials=arguments.trials, out=arguments.runs)
        base = base or results[lengths.index(context_length)]
        for result in results:
            exact = [cell.exact_match for cell in cells if cell.length == result.length]
            rows.append(row(name or "unpatched", result, base, sum(exact) / len(exact)))
            print(rows[-1], flush=True)
    assert base is not None
    line = {
        "benchmark": "real model",
        "model": arguments.model,
        "parameters": model.num_parameters(),
        "context_length": context_length,
        "dtype": dtype,
        "data": arguments.data,
        "scored_tokens": base.tokens,
        "documents": len(base.documents),
        "task": arguments.task,
        "questions": 5 * arguments.trials,
        "rows": rows,
    }
    record(line, arguments)


if __name__ == "__main__":
    main()
