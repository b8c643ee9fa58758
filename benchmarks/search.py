"""What ten minutes of search find for the bundled model at eight times its context length, for docs/search.md.

    python benchmarks/search.py --out docs/results
    python benchmarks/search.py --out docs/results --longrope CLONE     # of microsoft/LongRoPE
    python benchmarks/search.py --out docs/results --fitness key-tokens --minutes 7

With --longrope, LongRoPE's own search (evolution/algorithms/dim_mono.py of that clone, from its YaRN divisors and with
its attention factor) reads the same passages for as many CPU seconds, and what it finds is measured on the same text.
The run in --folder is not repeated where it is there already. The text is the standard library's, so that anybody can
run it. The results go into search.json (with another fitness than the loss, into search-FITNESS.json) and
search-longrope.json of a folder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from record import with_machine

from rope_ext_hf.eval import sweep
from rope_ext_hf.eval.perplexity_runs import difference
from rope_ext_hf.hub import load_model, load_tokenizer
from rope_ext_hf.methods.registry import method_from_dict, resolve_method
from rope_ext_hf.patches.geometry import patch_geometry
from rope_ext_hf.reading.corpora import load
from rope_ext_hf.reading.spans import tokenize
from rope_ext_hf.tools.training import search
from rope_ext_hf.tools.training.candidates import (
    Candidate,
    Reader,
    pieces,
    scored_tokens,
    short_passages,
    text_passages,
    two_lists,
)
from rope_ext_hf.tools.training.run_folder import split

TARGET = 2048
PASSAGES, SPANS = 24, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--folder", type=Path, default=Path("build/bench/search"))
    parser.add_argument("--fitness", default="loss")
    parser.add_argument("--max-spans", type=int, default=SPANS, help="passages measured at the end")
    parser.add_argument("--longrope", type=Path, help="a clone of microsoft/LongRoPE")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
    arguments = parser.parse_args()
    standard, spans = arguments.fitness == "loss", arguments.max_spans
    folder = arguments.folder if standard else arguments.folder.with_name(f"search-{arguments.fitness}")
    report = search(
        "reference", folder, data="stdlib", target_length=TARGET, minutes=arguments.minutes, passages=PASSAGES,
        max_spans=spans, fitness=arguments.fitness, dtype="float32", device="cpu",
        report=lambda line: print(line, flush=True),
    )  # fmt: skip
    print(report, flush=True)
    trials = json.loads((folder / "trials.json").read_text(encoding="utf-8"))["trials"]
    shown = ("stage", "label", "loss", "lost", "stopped")
    result: dict[str, Any] = {
        "command": "python benchmarks/search.py --out docs/results"
        + ("" if standard else f" --fitness {arguments.fitness} --max-spans {spans} --minutes {arguments.minutes:g}"),
        "report": {key: value for key, value in asdict(report).items() if key not in ("folder", "settings")},
        "best_fixed": report.best_fixed,
        "minutes": arguments.minutes,
        "trials": [{key: trial[key] for key in shown} for trial in trials],
        "threads": torch.get_num_threads(),
    }
    write(result, arguments.out / ("search.json" if standard else f"search-{arguments.fitness}.json"))
    if arguments.longrope:
        theirs = by_longrope(arguments.longrope, report.cpu_seconds, report.method)
        write(theirs, arguments.out / "search-longrope.json")


def write(result: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(with_machine(result, "cpu"), indent=1) + "\n", encoding="utf-8")


def by_longrope(clone: Path, cpu_seconds: float, chosen: dict[str, Any]) -> dict[str, Any]:
    """What LongRoPE's search finds in the same time, and by how much the chosen method's loss is lower."""
    sys.path.insert(0, str(clone))
    from evolution.algorithms.dim_mono import DimMonoGeneticAlgorithm  # type: ignore[import-not-found]

    model, tokenizer = load_model("reference", dtype="float32", device="cpu"), load_tokenizer("reference")
    rotary = patch_geometry(model)
    searched, held_out = split(tokenize(load("stdlib"), tokenizer), 2)
    targets = scored_tokens(rotary.context_length)
    texts = text_passages(searched, TARGET, PASSAGES, tokenizer, targets)
    underneath: dict[str, Any] = {"over": "own", "context_length": None}
    reader = Reader(model, texts, short_passages(texts, rotary.context_length), math.inf, **underneath)
    scale = TARGET / rotary.context_length
    magnitude = math.sqrt(1 + math.log(scale) / math.log(rotary.context_length))  # rope/longrope.py there
    read: list[Candidate] = []

    class OutOfTimeError(Exception):
        pass

    class Queue:
        """Takes the place of the processes that read there."""

        def __init__(self, evaluators: Any) -> None:
            pass

        def push(self, individual: Any, rope_args: dict[str, Any]) -> None:
            if sum(trial.cpu_seconds for trial in read) >= cpu_seconds:
                raise OutOfTimeError
            static = resolve_method("factors", rotary, factors=rope_args["rescale_factors"], attention_factor=magnitude)
            # no candidate before: there, every candidate is read to the end
            read.append(reader.read("longrope", two_lists(static, rotary, TARGET), [], {}, "LongRoPE"))
            individual.ppl = math.exp(read[-1].loss)
            print(f"LongRoPE's search: {len(read)} candidates, best {min(t.loss for t in read):.4f}", flush=True)

        def join(self) -> None:
            pass

    sys.modules["evolution.algorithms.genetic_base"].EvaluatorQueue = Queue  # type: ignore[attr-defined]
    import numpy as np

    np.random.seed(0)
    settings = json.loads((clone / "evolution/default_hyper_params/dim_mono.json").read_text(encoding="utf-8"))
    begin = resolve_method("yarn", rotary, factor=scale, truncate=True).frequencies(rotary).inv_freq
    inside = Path("build/bench")
    with suppress(OutOfTimeError):
        DimMonoGeneticAlgorithm(
            evaluators=[], scale=scale, target_length=TARGET, hyper_params=settings,
            init_factors=(rotary.inv_freq() / begin).numpy(), rope_args={}, log_json_path=str(inside / "longrope.json"),
            output_dir=str(inside),
        ).run_genetic_algorithm()  # fmt: skip
    best = min(read, key=lambda trial: trial.loss)
    methods = [method_from_dict(best.method), method_from_dict(chosen)]
    results = sweep(
        model, pieces(held_out, TARGET, SPANS), lengths=[rotary.context_length, TARGET], methods=methods,
        targets=targets, max_spans=SPANS, tokenizer=None, bos=False, data="stdlib",
        out=inside / "longrope measured",
    ).results  # fmt: skip
    found = {(str(each.method), each.length): each for each in results}
    theirs, ours = (found[str(method.to_dict()), TARGET] for method in methods)
    short, plain = found[str(methods[0].to_dict()), rotary.context_length], found["None", rotary.context_length]
    return {
        "command": "python benchmarks/search.py --out docs/results --longrope CLONE",
        "candidates": len(read),
        "first_loss": read[0].loss,
        "searched_loss": best.loss,
        "cpu_seconds": round(sum(trial.cpu_seconds for trial in read), 1),
        "loss": theirs.loss,
        "lost": difference(short, plain)[:3],
        "gain_of_chosen": difference(theirs, ours)[:3],
    }


if __name__ == "__main__":
    main()
