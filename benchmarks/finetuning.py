"""`rope-ext finetune` on the bundled model, against the same training without a patch: bits per byte by length.

    python benchmarks/finetuning.py --method rerope --steps 100 --folder build/bench/finetuning-rerope
    python benchmarks/finetuning.py --steps 100 --folder build/bench/finetuning --against build/bench/finetuning-rerope

Trained on Python's standard library, read on its modules that are held out from every training here. A model trained
under `yarn` is also read with remapped positions on top, and the models of other folders beside it. Interrupted, the
same command continues. The last line is JSON.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from record import benchmark_parser, record
from training_text import stdlib_training

import rope_ext_hf as rope
from rope_ext_hf.eval import perplexity
from rope_ext_hf.eval.spans.perplexity_runs import Result, difference
from rope_ext_hf.tools.training import finetune

FACTOR, TASK = 4, "key-value"
REMAPPED = {"yarn": ("rerope", "dca")}
"""Methods that are put over a model trained under another."""


def written(folder: Path) -> str:
    """The training text as files; their pattern."""
    folder.mkdir(parents=True, exist_ok=True)
    for document in stdlib_training():
        (folder / f"{document.name.replace('/', '.')}.txt").write_text(document.text, encoding="utf-8")
    return str(folder / "*.txt")


def read(model: Any, lengths: list[int], spans: int) -> list[Result]:
    """The held-out text, as `finetune` measures it."""
    return list(perplexity(model, "stdlib", lengths=lengths, targets=lengths[0] // 2, max_spans=spans))


def remapped(trained: str, folder: str, lengths: list[int], spans: int) -> dict[str, dict[str, float]]:
    """Bits per byte of the model trained under a method, by method over it and by length."""
    by_method = {}
    for method in REMAPPED.get(trained, ()):
        model = rope.patch(rope.from_pretrained(folder), method, over="patched")
        results = read(model, lengths, spans)
        by_method[method] = {str(result.length): round(result.bits_per_byte, 4) for result in results}
    return by_method


def bits(gain: Any) -> list[float | None]:
    """A difference in nats per byte and the ends of its interval, in bits."""
    return [None if value is None else round(value / math.log(2), 4) for value in gain[:3]]


def against(others: list[Path], folder: str, lengths: list[int], spans: int) -> dict[str, dict[str, Any]]:
    """By method of another training, then by length: how much lower the loss of the model in `folder` is."""
    ours, gains = read(rope.from_pretrained(folder), lengths, spans) if others else [], {}
    for other in others:
        method = json.loads((other / "run" / "report.json").read_text(encoding="utf-8"))["settings"]["method"]
        pairs = zip(read(rope.from_pretrained(other / "run" / "model"), lengths, spans), ours, strict=True)
        gains[method] = {str(mine.length): bits(difference(theirs, mine)) for theirs, mine in pairs}
    return gains


def main() -> None:
    parser = benchmark_parser(__doc__)
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, help="of each training; 10 where neither is given")
    budget.add_argument("--steps", type=int)
    parser.add_argument("--method", default="yarn")
    parser.add_argument("--spans", type=int, default=48, help="spans per length")
    parser.add_argument("--folder", type=Path, default=Path("build/bench/finetuning"))
    parser.add_argument("--against", type=Path, nargs="*", default=[], help="folders of other trainings")
    arguments = parser.parse_args()
    minutes = 10.0 if arguments.minutes is None and arguments.steps is None else arguments.minutes
    report = finetune(
        "reference",
        arguments.folder / "run",
        data=written(arguments.folder / "text"),
        eval_data="stdlib",
        method=arguments.method,
        factor=FACTOR,
        minutes=minutes,
        steps=arguments.steps,
        control=True,
        retrieval=TASK,
        max_spans=arguments.spans,
        device=arguments.device,
        report=lambda line: print(line, flush=True),
    )
    print(report)
    lengths = [int(length) for length in report.losses["trained"]]
    in_bits = 1 / math.log(2)  # a token of the bundled model is a byte
    result: dict[str, Any] = {
        "benchmark": "finetuning",
        "method": arguments.method,
        "factor": FACTOR,
        "context_length": report.context_length,
        "target_length": report.target_length,
        "minutes": minutes,
        "steps": arguments.steps,
        "losses": {
            name: {length: round(loss * in_bits, 4) for length, loss in losses.items()}
            for name, losses in report.losses.items()
        },
        "gains": {name: {length: bits(gain) for length, gain in gains.items()} for name, gains in report.gains.items()},
        "retrieval": {"task": TASK} | {name: share.value for name, share in report.retrieval.items()},
        "remapped": remapped(arguments.method, report.folder, lengths, arguments.spans),
        "against": against(arguments.against, report.folder, lengths, arguments.spans),
        "training": {name: {key: ran[key] for key in ("steps", "seconds")} for name, ran in report.training.items()},
        "spans": arguments.spans,
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
