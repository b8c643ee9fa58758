"""Rank methods by the gain from evidence, by retrieval and by the loss of key tokens, at four context lengths.

    python benchmarks/gain.py --folder build/bench/gain [--models reference build/bench/docstring-model ...]
        [--rows 16] [--out benchmarks/results.jsonl]

The models: the bundled one, those of `docstring_model.py` and of `train_reference.py --recipe wide-heads`. Every method
has the factor 4. Evidence is docstrings of the standard library that no model was trained on; it stands half a context
length and two of them before the answer. Retrieval is of key-value lines, and key tokens are found by each model itself
with rerope. What is measured is kept in --folder, so that an interrupted run continues with the same command. The
tables keep the rows of a model that is not measured again. The last line is JSON.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import benchmark_parser, record
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.errors import CorpusError
from rope_ext_hf.eval import Passkey, Perplexity, compare_runs, measure
from rope_ext_hf.reference import path
from rope_ext_hf.tools.suites import Gain

METHODS = ("linear", "ntk", "yarn", "llama3", "rerope", "self-extend")
FACTOR = 4


def compared(folder: Path, arguments: Any) -> dict[str, Any]:
    """Return the rankings of one model's runs, compared."""
    out = arguments.folder / folder.name
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(arguments.device)
    length = model.config.max_position_embeddings
    lengths, count = [length, FACTOR * length], arguments.rows
    evaluator = out / "evaluator"
    if not evaluator.exists():
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rope.patch(found, "rerope", target_length=lengths[-1], temperature="llama4").save_pretrained(evaluator)
        AutoTokenizer.from_pretrained(folder).save_pretrained(evaluator)
    held_out = folder / "held-out"
    data = f"{held_out}/*.txt" if held_out.exists() else "stdlib"
    ask = partial(measure, model, methods=METHODS, factors=FACTOR, out=out, progress=True)
    runs = [
        ask(Gain(lengths=lengths, samples=count)),
        ask(Passkey(lengths=lengths, depths=[0.5], task="key-value", trials=count)),
    ]
    text = Perplexity(lengths=lengths, data=data, max_spans=count, keys_by=evaluator)
    try:
        runs.append(ask(text))
    except CorpusError:  # a model too weak to predict any token much better with the long context
        runs.append(ask(replace(text, keys_by=None)))
    comparison = compare_runs([run.folder for run in runs])
    comparison.write_page(out / "comparison.html")
    print(comparison.conclusion, flush=True)
    gains = [{key: value for key, value in row.items() if key != "parameters"} for row in runs[0].rows()]
    about = {"model": folder.name, "context_length": length, "rows": runs[0].settings["setting"]["rows"]}
    return about | {"gains": gains} | comparison.to_dict() | {"runs": []}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--models", nargs="*", default=["reference"], help="reference and folders of models")
    parser.add_argument("--folder", type=Path, required=True, help="what is measured is kept here")
    parser.add_argument("--rows", type=int, default=16, help="rows, questions and spans per length")
    arguments = parser.parse_args()
    folders = (path() if model == "reference" else Path(model) for model in arguments.models)
    rows = [compared(folder, arguments) for folder in folders]
    record({"benchmark": "gain", "factor": FACTOR, "rows": rows}, arguments)


if __name__ == "__main__":
    main()
