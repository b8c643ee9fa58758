"""MrRoPE against YaRN without training, by factor and by the band of pairs between fast and slow ones: docs/methods.md.

    python benchmarks/bands.py --folder build/bench/bands
    python benchmarks/bands.py --model build/bench/docstring-model --data 'build/bench/docstring-model/held-out/*.txt'
        --bands 16:1,8:1 --folder build/bench/bands

Protocol `matched`: the same tokens are scored at the context length and at the extended length of each of FACTORS. A
band is `beta_fast:beta_slow`. `over_yarn` is how much higher the loss is than under yarn with the same factor and its
own band, in bits per byte, with the 95% interval that resampling the documents gives. A band in which mrrope has no
pairs is left out for it. The last line is JSON; what is measured is kept in --folder, so that an interrupted run
continues with the same command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from record import benchmark_parser, record
from reference import increase_over
from transformers import AutoModelForCausalLM

from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval import Result, perplexity
from rope_ext_hf.eval.spans.perplexity_runs import difference
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.patches.patching import patched
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import tokenize
from rope_ext_hf.reference import path

FACTORS = "2,4,8,16"
BANDS = "16:1,8:1,32:4"
KINDS: list[tuple[str, dict[str, Any]]] = [("yarn", {}), ("mrrope", {}), ("mrrope", {"radix": "uniform"})]


def over(result: Result, yarn: Result) -> dict[str, float]:
    """The difference to yarn in bits per byte, and its interval."""
    per_nat = result.bits_per_byte / result.loss
    gaps = zip(("over_yarn", "over_low", "over_high"), difference(result, yarn)[:3], strict=True)
    return {name: round(gap * per_nat, 4) for name, gap in gaps if gap is not None}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", default="reference", help="reference, or a folder")
    parser.add_argument("--data", default="stdlib", help="the text, as `rope-ext ppl` takes it")
    parser.add_argument("--bands", default=BANDS, help="beta_fast:beta_slow, separated by commas")
    parser.add_argument("--factors", default=FACTORS, help="separated by commas")
    parser.add_argument("--spans", type=int, default=32, help="spans per length")
    parser.add_argument("--folder", type=Path, required=True, help="what is measured is kept here")
    arguments = parser.parse_args()
    folder = path() if arguments.model == "reference" else Path(arguments.model)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(arguments.device)
    rotary = ModelRope.of_model(model).rotary
    trained = rotary.context_length
    tokens = tokenize(load(arguments.data), load_tokenizer(str(folder)))
    bands: list[dict[str, float]] = [{}]
    for each in arguments.bands.split(","):
        fast, slow = map(float, each.split(":"))
        bands.append({"beta_fast": fast, "beta_slow": slow})
    options: dict[str, Any] = {"targets": trained // 2, "max_spans": arguments.spans, "bos": False}
    options |= {"data": arguments.data, "out": arguments.folder / folder.name}

    rows: list[dict[str, Any]] = []
    for factor in map(int, arguments.factors.split(",")):
        lengths = [trained, trained * factor]
        base = perplexity(model, tokens, lengths=lengths, **options)[0]
        yarn: list[Result] = []
        for band in bands:
            for name, parameters in KINDS:
                try:
                    method = resolve_method(name, rotary, factor=factor, **parameters, **band)
                except MethodError:
                    continue
                with patched(model, method):
                    results = perplexity(model, tokens, lengths=lengths, **options)
                yarn = yarn or results
                for result, reference in zip(results, yarn, strict=True):
                    rows.append(
                        {"method": method.label(), "name": name, "factor": factor, "length": result.length}
                        | parameters
                        | band
                        | increase_over(result, base)
                        | over(result, reference)
                    )
                    print(*rows[-1].values(), flush=True)
    result = {
        "benchmark": "bands",
        "model": folder.name,
        "parameters": model.num_parameters(),
        "rotated_dims": rotary.dim,
        "theta": rotary.theta,
        "context_length": trained,
        "spans": arguments.spans,
        "scored_tokens": base.tokens,
        "documents": len(base.documents),
        "rows": rows,
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
