"""Forecast of what a fine-tuning does and takes, by the config and the texts; no weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rope_ext_hf.eval.questions import LengthsQuestion, Passkey, Perplexity
from rope_ext_hf.hub import find_device, load_empty, loaded_dtype
from rope_ext_hf.reading.forecast import Forecast
from rope_ext_hf.reading.memory import MemoryEstimate, widest_activation
from rope_ext_hf.reading.operations import estimate_flops, measure_flops
from rope_ext_hf.runs.chosen_methods import apply_choice
from rope_ext_hf.tools.training.finetuning import (
    RETRIEVAL_TRIALS,
    check_packages,
    doubling,
    lengths_and_texts,
    with_adapters,
)
from rope_ext_hf.tools.training.questions import Finetuning


def forecast(asked: Finetuning, out: Path) -> Forecast:
    """Return what a fine-tuning would take, in the folder `out`; raise what the run would raise before it loads."""
    check_packages(asked)
    short, long, tokenizer, (_, held_out) = lengths_and_texts(asked)
    model = load_empty(asked.model, **asked.source)
    apply_choice(asked, model)
    text: dict[str, Any] = {"targets": short // 2, "max_spans": asked.max_spans, "data": held_out}
    lengths, models = doubling(short, long), 5 if asked.control else 3
    read, flops = _reading(model, Perplexity(lengths=lengths, **text), tokenizer, models)
    if asked.retrieval is not None:
        question = Passkey(lengths=[long], task=asked.retrieval, trials=RETRIEVAL_TRIALS)
        more = _reading(model, question, tokenizer, 3 if asked.control else 2)
        read, flops = read + more[0], flops + more[1]
    rows, trainings = asked.batch * asked.accumulate, 2 if asked.control else 1
    of_row, guarded = long // short, bool(asked.guard)
    forward = estimate_flops(model, [long] * rows, rows * long)
    on_short = estimate_flops(model, [short] * of_row * rows, rows * of_row * short) if guarded else 0.0
    step = 3 * forward + 4 * on_short  # backwards takes twice as much; the model before reads the short rows too
    device, dtype = find_device(asked.device), loaded_dtype(model, asked.dtype)
    speed = measure_flops(device, dtype)
    trained = step * asked.steps / speed if asked.steps else 60 * (asked.minutes or 0.0)
    weights, width = model.num_parameters(), dtype.itemsize
    learner = model if asked.train_all else with_adapters(model, asked.rank)
    learned = learner.num_parameters(only_trainable=True)
    config: Any = model.config.get_text_config()
    tokens = asked.batch * long
    layers = config.num_hidden_layers * (4 * widest_activation(config) + 8 * config.hidden_size)
    held = MemoryEstimate(
        weights=(weights * (2 if guarded else 1) + (0 if asked.train_all else learned)) * width,
        cache=0,
        working=tokens * layers * width,
        logits=3 * tokens * config.vocab_size * 4,  # theirs in float32, and their gradients
        training=3 * learned * width,
    )
    length = f"{asked.steps} steps" if asked.steps else f"{asked.minutes or 0:g} minutes"
    what = "all weights" if asked.train_all else f"adapters of rank {asked.rank}, norms and embeddings"
    return Forecast(
        does=(
            f"measure {models} models at {', '.join(f'{each:,}' for each in lengths)} tokens",
            f"train {what} for {length}, {rows} rows of {long:,} tokens a step{', and a control' * asked.control}",
            f"write {out / 'model'}",
        ),
        tokens=read + trainings * rows * long * (asked.steps or 0),
        seconds=trainings * trained + flops / speed,
        device=device,
        memory=held,
        gpu=held,
        disk=(weights + 6 * trainings * learned) * width,  # two checkpoints each, with what the optimizer keeps
        folder=str(out),
    )


def _reading(model: PreTrainedModel, question: LengthsQuestion, tokenizer: Any, times: int) -> tuple[int, float]:
    """Tokens that a measurement of so many models or methods reads, and its floating-point operations."""
    measurement = question.plan(model, tokenizer=tokenizer).measurement
    passes = measurement.passes
    return times * sum(passes), times * estimate_flops(model, passes, measurement.scored)
