"""What `need` says of the bundled model, and of one that was trained to read beyond its length: rises and answers.

    python benchmarks/needs.py [--steps 150] [--out benchmarks/results.jsonl]

The second model is the bundled one with a larger theta, trained on rows of its context length whose tokens stand at
random positions of a longer one. The last line is JSON.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from record import benchmark_parser, record
from torch import Tensor
from train_reference import encode
from training import take_steps
from training_text import stdlib_training
from transformers import AutoConfig, AutoModelForCausalLM

from rope_ext_hf.eval.needs import need
from rope_ext_hf.reference import path
from rope_ext_hf.training import RandomPositionsCollator

THETA, SCALE, BATCH, LEARNING_RATE, SEED = 1e6, 8, 8, 1e-3, 0


def reader(steps: int, device: str) -> Any:
    """The model that is trained to read `SCALE` times its context length."""
    config = AutoConfig.from_pretrained(path())
    config.rope_parameters = config.rope_parameters | {"rope_theta": THETA}
    model: Any = AutoModelForCausalLM.from_pretrained(path(), config=config, dtype=torch.float32).to(device)
    length, stream = config.max_position_embeddings, encode(stdlib_training()).long()
    collator = RandomPositionsCollator(length=length, target_length=SCALE * length, seed=SEED)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    draws = torch.Generator().manual_seed(SEED)

    def loss_of_step() -> Tensor:
        starts = torch.randint(0, len(stream) - length, (BATCH, 1), generator=draws)
        rows = stream[starts + torch.arange(length)]
        loss: Tensor = model(
            **{name: value.to(device) for name, value in collator([{"input_ids": row} for row in rows]).items()},
            use_cache=False,
        ).loss
        return loss

    model.train()
    take_steps(optimizer, schedule, steps, loss_of_step, every=20)
    return model.eval()


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    bundled: Any = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32).eval().to(arguments.device)
    rows = []
    for name, model in (("bundled", bundled), ("reader", reader(arguments.steps, arguments.device))):
        started = time.perf_counter()
        found = need(model)
        print(found, flush=True)
        rows.append({"model": name, "seconds": round(time.perf_counter() - started)} | found.to_dict())
    result = {
        "benchmark": "needs",
        "steps": arguments.steps,
        "theta": THETA,
        "scale": SCALE,
        "rows": rows,
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
