"""Rank methods by loss, LongPPL and retrieval, at four and eight times the context length.

    python benchmarks/measures.py --docstring-model build/bench/docstring-model
        --wide-heads-model build/bench/wide-heads-model --folder build/bench/measures [--spans 32] [--trials 32]
        [--models reference,reader] [--out benchmarks/results.jsonl]

Four models: the bundled one; the one of `docstring_model.py`, which is trained on no questions, so that the rank of the
right answer among 20 counts; that of `train_reference.py --recipe wide-heads`, which answers no questions; and the
reader, the bundled model trained further with a larger theta on rows of its context length whose tokens stand at
random positions of a longer one, which needs no method. Every method has the factor 8.
The tables keep the rows of a model that is not measured again.
Key tokens are found by each model itself with rerope. What is measured is kept in --folder, so that an interrupted run
continues with the same command. The last line is JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from record import benchmark_parser, record
from torch import Tensor
from train_reference import encode
from training import take_steps
from training_text import stdlib_training
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import rope_ext_hf as rope
from rope_ext_hf.errors import MethodError
from rope_ext_hf.eval import Passkey, compare_runs, measure, sweep
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.patches.model_rope import ModelRope
from rope_ext_hf.reference import path
from rope_ext_hf.tools.training import RandomPositionsCollator

METHODS = (
    "linear",
    "ntk",
    "by-parts",
    "yarn",
    "llama3",
    "mrrope",
    "rerope",
    "self-extend",
    "dynamic-self-extend",
    "jet-long",
    "dca",
    "stairs",
)
FACTOR, STEPS = 8, 150
THETA, BATCH, LEARNING_RATE, SEED = 1e6, 8, 1e-3, 0  # of the reader's training


def reader(steps: int, device: str) -> Any:
    """The model that is trained to read `FACTOR` times its context length."""
    config = AutoConfig.from_pretrained(path())
    config.rope_parameters = config.rope_parameters | {"rope_theta": THETA}
    model: Any = AutoModelForCausalLM.from_pretrained(path(), config=config, dtype=torch.float32).to(device)
    length, stream = config.max_position_embeddings, encode(stdlib_training()).long()
    collator = RandomPositionsCollator(length=length, target_length=FACTOR * length, seed=SEED)
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


def compared(folder: Path, data: str, arguments: Any) -> dict[str, Any]:
    """Return the rankings of one model's runs, compared."""
    out = arguments.folder / folder.name
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(arguments.device)
    length = model.config.max_position_embeddings
    lengths = [length, 4 * length, FACTOR * length]
    evaluator = out / "evaluator"
    if not evaluator.exists():
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rope.patch(found, "rerope", target_length=lengths[-1], temperature="llama4").save_pretrained(evaluator)
        AutoTokenizer.from_pretrained(folder).save_pretrained(evaluator)
    rotary, methods = ModelRope.of_model(model).rotary, []
    for name in METHODS:
        try:
            resolve_method(name, rotary, target_length=lengths[-1])
            methods.append(name)
        except MethodError as error:  # a band in which this model has no pairs
            print(error, flush=True)
    losses = sweep(
        model, data, lengths=lengths, methods=methods, factors=[FACTOR], max_spans=arguments.spans,
        keys_by=evaluator, out=out, progress=True,
    )  # fmt: skip
    question = Passkey(lengths=lengths, depths=[0.5], task="key-value", trials=arguments.trials)
    answers = measure(model, question, methods=methods, factors=FACTOR, out=out)
    comparison = compare_runs([losses.folder, answers.folder])
    comparison.write_page(out / "comparison.html")
    print(comparison.conclusion, flush=True)
    return {"model": folder.name, "context_length": length} | comparison.to_dict() | {"runs": []}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--docstring-model", type=Path, required=True, help="the folder of docstring_model.py")
    parser.add_argument("--wide-heads-model", type=Path, required=True, help="what train_reference.py wrote")
    parser.add_argument("--folder", type=Path, required=True, help="what is measured is kept here")
    parser.add_argument("--spans", type=int, default=32, help="of text, per length")
    parser.add_argument("--trials", type=int, default=32, help="questions per length")
    parser.add_argument(
        "--models", default="reference,docstring-model,wide-heads-model,reader", help="separated by commas"
    )
    arguments = parser.parse_args()
    trained = arguments.folder / "reader"
    models = {
        "reference": path(),
        "docstring-model": arguments.docstring_model,
        "wide-heads-model": arguments.wide_heads_model,
        "reader": trained,
    }
    asked = arguments.models.split(",")
    if "reader" in asked and not trained.exists():
        AutoTokenizer.from_pretrained(path()).save_pretrained(trained)
        reader(STEPS, arguments.device).save_pretrained(trained)
    rows = [
        compared(Path(folder), f"{folder}/held-out/*.txt" if name == "docstring-model" else "stdlib", arguments)
        for name, folder in models.items()
        if name in asked
    ]
    result = {"benchmark": "measures", "spans": arguments.spans, "trials": arguments.trials, "rows": rows}
    record(result, arguments)


if __name__ == "__main__":
    main()
