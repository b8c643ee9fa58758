"""Frequencies that are trained, against frozen ones and against yarn: bits per byte of the bundled model by length.

    python benchmarks/learnable.py [--steps 40] [--out benchmarks/results.jsonl]

The bundled model is trained on windows of 4 times its trained length, the same windows in the same order for every
model, and read at several lengths on the held-out modules of Python's standard library, the same tokens at each.
"frequencies alone" trains nothing but one number for each pair. The last line is JSON.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from record import benchmark_parser, record
from torch import Tensor, nn
from train_reference import encode
from training import take_steps
from training_text import stdlib_training
from transformers import AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.eval import perplexity
from rope_ext_hf.reading.text.documents import Tokens
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import tokenize
from rope_ext_hf.reference import path

SEED = 0
SCALE, BATCH = 4, 2
SCALES = (1, 2, 4, 8)
LEARNING_RATE, LEARNING_RATE_OF_FREQUENCIES = 2e-4, 2e-2
MODELS: dict[str, tuple[tuple[tuple[str, dict[str, Any]], ...], bool]] = {
    "frozen frequencies": ((), True),
    "yarn x4": ((("yarn", {"factor": SCALE}),), True),
    "learnable": ((("learnable", {}),), True),
    "learnable over yarn x4": ((("yarn", {"factor": SCALE}), ("learnable", {"over": "patched"})), True),
    "learnable, frequencies alone": ((("learnable", {}),), False),
}
"""The patches of each model, and whether its weights are trained."""


def train(model: nn.Module, stream: torch.Tensor, length: int, steps: int, weights: bool, device: str) -> None:
    """Next bytes of random windows; frequencies with a learning rate of their own."""
    frequencies = [parameter for name, parameter in model.named_parameters() if name.endswith(".trained")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith(".trained")]
    for parameter in others:
        parameter.requires_grad_(weights)
    groups = [{"params": others, "lr": LEARNING_RATE}] if weights else []
    if frequencies:
        groups.append({"params": frequencies, "lr": LEARNING_RATE_OF_FREQUENCIES})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in groups], total_steps=steps, pct_start=0.1
    )
    draws = torch.Generator().manual_seed(SEED)

    def loss_of_step() -> Tensor:
        starts = torch.randint(0, len(stream) - length, (BATCH, 1), generator=draws)
        ids = stream[starts + torch.arange(length)].long().to(device)
        loss: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return loss

    model.train()
    take_steps(optimizer, schedule, steps, loss_of_step, every=20)
    model.eval()


def measured(model: Any, tokens: list[Tokens], lengths: list[int], spans: int) -> dict[str, float]:
    results = perplexity(model, tokens, lengths=lengths, max_spans=spans, bos=False)
    return {str(result.length): round(result.bits_per_byte, 4) for result in results}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--spans", type=int, default=16, help="spans per length")
    arguments = parser.parse_args()
    tokens = tokenize(load("stdlib"), AutoTokenizer.from_pretrained(path()))
    stream = encode(stdlib_training())
    rows: list[dict[str, Any]] = []
    trained_length = 0
    for name, (patches, weights) in MODELS.items():
        started = time.perf_counter()
        model: Any = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32).eval().to(arguments.device)
        trained_length = model.config.max_position_embeddings
        lengths = [trained_length * scale for scale in SCALES]
        for method, parameters in patches:
            rope.patch(model, method, **parameters)
        before = measured(model, tokens, lengths, arguments.spans)
        train(model, stream, trained_length * SCALE, arguments.steps, weights, arguments.device)
        rows.append({"model": name, "before": before, "after": measured(model, tokens, lengths, arguments.spans)})
        print(json.dumps(rows[-1] | {"seconds": round(time.perf_counter() - started)}), flush=True)
    result = {
        "benchmark": "learnable",
        "context_length": trained_length,
        "length": trained_length * SCALE,
        "steps": arguments.steps,
        "batch": BATCH,
        "spans": arguments.spans,
        "rows": rows,
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
