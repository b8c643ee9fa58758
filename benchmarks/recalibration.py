"""`rope-ext finetune --method nope` on the bundled model, by the length of the training: perplexity and answers.

    python benchmarks/recalibration.py --method nope --minutes 10 [--out benchmarks/results.jsonl]
    python benchmarks/recalibration.py --method yarn --minutes 0

`nope` is trained on rows of the context length, and `yarn` on rows of 16 times that length, as many bytes of the same
text in as many steps: Python's standard library and as many bytes of retrieval prompts, which the model was trained on
before, too. Each model is then read at 1 to 16 times its context length, on modules and prompts that are held out.
`--minutes 0` reads the model without a training, with `--method default` the model as loaded. A minute is a number of
steps, so that the result does not depend on what else the machine does. Interrupted, the same command continues. The
last line is JSON.
"""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from finetuning import written
from record import benchmark_parser, record
from train_reference import PROMPT_TASKS
from training_prompts import training_prompt
from training_text import stdlib_training

import rope_ext_hf as rope
from rope_ext_hf.eval import passkey, perplexity
from rope_ext_hf.eval.spans.perplexity_runs import difference
from rope_ext_hf.runs.conclusions.statistics import Estimate, estimate_share
from rope_ext_hf.tools.training import finetune

STEPS_A_MINUTE = 72
"""Steps in a minute of two cores of an AMD EPYC (Zen 5) under nope, with nothing else running."""
ROW_BYTES, ROWS = 256, 16
"""Bytes in a row of the context length, and rows in a step."""
FACTOR = 16
"""The factor of yarn; every model is read at up to so many context lengths."""
PROMPTS, PROMPT_BYTES = 60_000, 128
SPANS, TRIALS, TASK = 48, 12, "key-value"


def text(folder: Path) -> str:
    """The training text as files: the standard library, and prompts in a file of their own; their pattern."""
    prompts = folder / "prompts.txt"
    if not prompts.exists():
        filler = "\n".join(document.text for document in stdlib_training()).encode("utf-8")
        rng, pieces = random.Random(0), []
        for _ in range(PROMPTS):
            prompt = training_prompt(
                rng.choice(PROMPT_TASKS), rng, length=PROMPT_BYTES, keys=rng.randint(1, 4), asked=rng.choice((1, 4))
            )
            start = rng.randrange(len(filler) - PROMPT_BYTES)
            pieces.append(prompt.fill(filler[start : start + prompt.filler_length])[0])
        folder.mkdir(parents=True, exist_ok=True)
        prompts.write_text(b"\n".join(pieces).decode("utf-8", errors="replace"), encoding="utf-8")
    return written(folder)


def trained(arguments: Any, method: str, steps: int) -> tuple[Any, float]:
    """The model after its training, and the seconds of the training."""
    nope = method == "nope"
    report = finetune(
        "reference",
        arguments.folder / f"{method}-{arguments.minutes:g}",
        data=text(arguments.folder / "text"),
        eval_data="stdlib",
        method=method,
        factor=FACTOR,
        steps=steps,
        batch=ROWS if nope else ROWS // FACTOR,
        accumulate=1,
        train_all=True,
        guard=0,
        learning_rate=arguments.learning_rate,
        max_spans=1,  # it is measured below
        device=arguments.device,
        report=lambda line: print(line, flush=True),
    )
    return rope.from_pretrained(report.folder), report.training["trained"]["seconds"]


def ends(estimate: Estimate, scale: float = 1.0) -> list[float | None]:
    """An estimate times a number, and the ends of its interval, the lower one first; None where it has none."""
    value, low, high = (None if each is None else round(each * scale, 4) for each in estimate[:3])
    return [value, low, high] if scale > 0 else [value, high, low]


def measured(model: Any, lengths: list[int]) -> dict[str, Any]:
    """Bits per byte by length, their rise above the unpatched model at its context length, and the answers."""
    options: dict[str, Any] = {"targets": ROW_BYTES // 2, "max_spans": SPANS}
    unpatched = perplexity(rope.from_pretrained("reference"), "stdlib", lengths=lengths, **options)[0]
    results = perplexity(model, "stdlib", lengths=lengths, **options)
    in_bits = 1 / math.log(2)  # a token of the bundled model is a byte
    answers: dict[str, list[float]] = {}
    for length in lengths:
        cells = passkey(model, lengths=[length], task=TASK, trials=TRIALS)
        exact = [[float(score.exact) for score in cell.scores] for cell in cells]
        answers[str(length)] = [fmean(depths) for depths in zip(*exact, strict=True)]
    return {
        "losses": {str(result.length): round(result.loss * in_bits, 4) for result in results},
        # `difference` is by how much the second of two is lower
        "rises": {str(result.length): ends(difference(unpatched, result), -in_bits) for result in results},
        "answers": {length: ends(estimate_share(shares)) for length, shares in answers.items()},
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--method", default="nope", help="nope, yarn or default")
    parser.add_argument("--minutes", type=float, default=2, help="of the training; 0: none")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--folder", type=Path, default=Path("build/bench/recalibration"))
    parser.add_argument("--threads", type=int, help="of torch")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    steps, seconds = round(arguments.minutes * STEPS_A_MINUTE), 0.0
    if steps:
        model, seconds = trained(arguments, arguments.method, steps)
    else:
        model = rope.from_pretrained("reference")
        factor = {"factor": FACTOR} if arguments.method == "yarn" else {}
        rope.patch(model, arguments.method, **factor)
    lengths = [ROW_BYTES * 2**power for power in range(5)]
    result = {
        "benchmark": "recalibration",
        "method": arguments.method,
        "factor": FACTOR,
        "minutes": arguments.minutes,
        "steps": steps,
        "tokens": steps * ROW_BYTES * ROWS,
        "seconds": seconds,
        "learning_rate": arguments.learning_rate,
        "context_length": ROW_BYTES,
        "spans": SPANS,
        "task": TASK,
        "trials": TRIALS,
        **measured(model, lengths),
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
