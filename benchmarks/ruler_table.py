"""RULER's 13 tasks for a model as loaded and under each method, beside what papers report: fills docs/benchmarks.md.

    python benchmarks/ruler_table.py --model Qwen/Qwen3-1.7B-Base [--device cuda] [--out FILE]

Every method is fitted to the longest length; `dynamic` is dynamic NTK as transformers has it. The 11 tasks of the
package's suite `ruler` and the two of `ruler_qa.py` are runs of `rope-ext tasks`, kept in --runs, so that the same
command continues where it was stopped. A score is the mean over tasks, in percent, with the difference to the model as
loaded: prompts are the same for all, and paired in its 95% interval. The last line is JSON.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import ruler_qa  # noqa: F401 - registers the suite
import torch
from record import benchmark_parser, record
from stock import usual_dtype
from transformers import AutoModelForCausalLM

from rope_ext_hf.bounds import parse_length
from rope_ext_hf.eval import measure
from rope_ext_hf.files.model_folders import model_source
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.runs.conclusions.labels import label
from rope_ext_hf.runs.conclusions.statistics import estimate_share_change
from rope_ext_hf.tools.suites import Tasks
from rope_ext_hf.tools.suites.base import suite

METHODS = "yarn,mrrope,dynamic,dca,self-extend,jet-long"
LENGTHS = "4k,8k,16k,32k,64k,128k"
SUITES = ("ruler", "ruler-qa")

Scores = dict[str, dict[int, dict[str, tuple[float, ...]]]]
"""Of every prompt, by the method's label, the length and the task."""


def measured(model: Any, lengths: list[int], arguments: Any) -> tuple[Scores, dict[str, str]]:
    """The scores, and the name of each method by its label."""
    rotary = ModelRope.of_model(model).rotary
    methods = [resolve_method(name, rotary, target_length=lengths[-1]) for name in arguments.methods.split(",")]
    asked = arguments.tasks.split(",") if arguments.tasks else None
    scores: Scores = defaultdict(lambda: defaultdict(dict))
    names: dict[str, str] = {}
    for name in SUITES:
        tasks = [task for task in suite(name).tasks if asked is None or task in asked]
        if not tasks:
            continue
        given = {"samples": arguments.samples, "haystack": arguments.haystack, "score": arguments.score}
        question = Tasks(suite=name, tasks=tuple(tasks), lengths=lengths, chat_template="never", **given)
        for result in measure(model, question, methods=methods, out=arguments.runs).results:
            shown = label(result.method)
            names[shown] = (result.method or {}).get("method", "unpatched")
            scores[shown][result.length][result.task] = result.scores
    return scores, names


def changed(mine: list[float], base: list[float]) -> list[float | None]:
    """The mean difference of the prompts in percent, and its interval."""
    change = estimate_share_change(mine, base)
    return [None if end is None else round(100 * end, 2) for end in change[:3]]


def rows_of(scores: Scores, names: dict[str, str]) -> list[dict[str, Any]]:
    """A row for every method and length, and one without a length for the mean over lengths."""
    prompts = {
        shown: {
            length: [fmean(each) for each in zip(*by_task.values(), strict=True)]
            for length, by_task in by_length.items()
        }
        for shown, by_length in scores.items()
    }
    rows = []
    for shown, by_length in prompts.items():
        every = by_length | {0: [fmean(each) for each in zip(*by_length.values(), strict=True)]}
        plain = prompts["unpatched"]
        base = plain | {0: [fmean(each) for each in zip(*plain.values(), strict=True)]}
        for length, values in every.items():
            tasks = {task: round(100 * fmean(each), 2) for task, each in scores[shown].get(length, {}).items()}
            row: dict[str, Any] = {"method": names[shown], "label": shown, "length": length or None}
            row |= {"score": round(100 * fmean(values), 2), "over_as_loaded": changed(values, base[length])}
            rows.append(row | {"tasks": tasks})
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", required=True, help="a Hub id or a folder, or reference: the bundled model")
    parser.add_argument("--lengths", default=LENGTHS)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--tasks", default="", help="names, separated by commas; default: all 13")
    parser.add_argument("--samples", type=int, default=100, help="prompts of each task and length")
    parser.add_argument("--haystack", default="hf:emozilla/pg19?split=validation", help="the text that needles are in")
    parser.add_argument("--score", choices=("generate", "rank"), default="generate", help="rank for the bundled model")
    parser.add_argument("--dtype", help="default: float32, on CUDA bfloat16")
    parser.add_argument("--runs", type=Path, default=Path("build/ruler"), help="what continues an interrupted run")
    arguments = parser.parse_args()
    dtype = arguments.dtype or usual_dtype(arguments.device)
    model: Any = AutoModelForCausalLM.from_pretrained(model_source(arguments.model), dtype=getattr(torch, dtype))
    model = model.eval().to(arguments.device)
    lengths = sorted({parse_length(text) for text in arguments.lengths.split(",")})
    rows = rows_of(*measured(model, lengths, arguments))
    for row in rows:
        print(row["label"], row["length"] or "mean", row["score"], row["over_as_loaded"], flush=True)
    line = {
        "benchmark": "ruler table",
        "model": arguments.model,
        "parameters": model.num_parameters(),
        "context_length": ModelRope.of_model(model).rotary.context_length,
        "dtype": dtype,
        "haystack": arguments.haystack,
        "samples": arguments.samples,
        "score": arguments.score,
        "tasks": list(rows[0]["tasks"]),
        "rows": rows,
    }
    record(line, arguments)


if __name__ == "__main__":
    main()
