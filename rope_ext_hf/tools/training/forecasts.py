"""The forecast of a fine-tuning: its work, time and memory, from the config and the texts; no weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from rope_ext_hf.eval.measurement_options import MeasurementOptions, Passkey, Perplexity
from rope_ext_hf.hub import find_device, load_empty, loaded_dtype
from rope_ext_hf.reading.cost.forecast import Forecast
from rope_ext_hf.reading.cost.memory import MemoryEstimate, widest_activation
from rope_ext_hf.reading.cost.operations import ReadingSpeed, measure_speed
from rope_ext_hf.tools.training.finetuning import (
    RETRIEVAL_TRIALS,
    TrainingMaterial,
    check_packages,
    patch_to_train,
    training_defaults,
    training_material,
    with_adapters,
    with_defaults,
)
from rope_ext_hf.tools.training.finetuning_options import Finetuning


class _Work(NamedTuple):
    """An amount of computing: the number of tokens that are read, and the seconds for them."""

    tokens: int
    seconds: float

    def plus(self, other: _Work) -> _Work:
        return _Work(self.tokens + other.tokens, self.seconds + other.seconds)


def forecast(options: Finetuning, out: Path) -> Forecast:
    """Estimate the time, memory and disk space of a fine-tuning that writes to the folder `out`.

    The errors that the run would raise before it trains are raised here.
    """
    options = with_defaults(options)
    check_packages(options)
    material = training_material(options)
    model = load_empty(options.model, **options.source)
    patch_to_train(model, options)
    lengths = material.lengths
    models = 5 if options.control else 3
    rows, trainings = options.batch * options.accumulate, 2 if options.control else 1
    device, dtype = find_device(options.device), loaded_dtype(model, options.dtype)
    speed = measure_speed(model, device, dtype)
    measuring = _measuring_work(options, material, model, models, speed)
    step_seconds = _step_seconds(options, model, material, speed)
    if options.steps:
        training_seconds = step_seconds * options.steps
        duration = f"{options.steps} steps"
    else:
        training_seconds = 60 * (options.minutes or 0.0)
        duration = f"{options.minutes or 0:g} minutes"
    steps = options.steps or max(1, round(training_seconds / step_seconds))

    weights, width = model.num_parameters(), dtype.itemsize  # counted before adapters are put into the model
    learner = model if options.train_all else with_adapters(model, options.rank)
    learned = learner.num_parameters(only_trainable=True)
    memory = _memory(options, model.config, weights, learned, width, material.row)
    trained_parts = "all weights" if options.train_all else f"adapters of rank {options.rank}, norms and embeddings"
    control = ", and a control" if options.control else ""
    at = ", ".join(f"{length:,}" for length in lengths)
    return Forecast(
        does=(
            f"measure {models} models at {at} tokens ({_meaning(material)})",
            f"train {trained_parts} for {duration}, {rows} rows of {material.row:,} tokens a step{control}"
            + _published_tokens(options, steps * rows * material.row),
            f"write {out / 'model'}",
        ),
        tokens=measuring.tokens + trainings * rows * material.row * (options.steps or 0),
        seconds=trainings * training_seconds + measuring.seconds,
        device=device,
        memory=memory,
        gpu=memory,
        # The model, and two checkpoints of each training with the optimizer's state.
        disk=(weights + 6 * trainings * learned) * width,
        folder=str(out),
    )


def _meaning(material: TrainingMaterial) -> str:
    """Return a clause that says which lengths are measured."""
    if material.row == material.short:
        return "the context length, doubled"
    last = "up to the extended length" if material.lengths[-1] <= material.long else "beyond the extended length"
    return f"the context length, doubled {last} of {material.long:,}"


def _measuring_work(
    options: Finetuning, material: TrainingMaterial, model: PreTrainedModel, models: int, speed: ReadingSpeed
) -> _Work:
    """Return the work of measuring `models` models; on the patched ones among them, retrieval is measured, too."""
    perplexity = Perplexity(
        lengths=material.lengths,
        targets=material.short // 2,
        max_spans=options.max_spans,
        data=material.held_out,
    )
    work = _work_of(model, perplexity, material.tokenizer, models, speed)
    if options.retrieval is None:
        return work
    retrieval = Passkey(lengths=[material.long], task=options.retrieval, trials=RETRIEVAL_TRIALS)
    return work.plus(_work_of(model, retrieval, material.tokenizer, 3 if options.control else 2, speed))


def _work_of(
    model: PreTrainedModel, options: MeasurementOptions, tokenizer: Any, models: int, speed: ReadingSpeed
) -> _Work:
    """Return the work of one measurement, described by `options`, on `models` models."""
    measurement = options.plan(model, tokenizer=tokenizer).measurement
    passes = measurement.passes
    answers = measurement.short_passes * len(passes)
    return _Work(models * sum(passes), models * speed.seconds(model, passes, measurement.scored, answers))


def _published_tokens(options: Finetuning, tokens: int) -> str:
    """Return a clause on the tokens of the training beside those of the method's authors; empty if none are known."""
    published = training_defaults(options).published
    return f" ({tokens:,} tokens in all; {published})" if published else ""


def _step_seconds(
    options: Finetuning, model: PreTrainedModel, material: TrainingMaterial, speed: ReadingSpeed
) -> float:
    """Return the seconds of a training step; a backward pass counts as two forward passes."""
    short, row = material.short, material.row
    rows, short_rows = options.batch * options.accumulate, row // short
    seconds = 3 * speed.seconds(model, [row] * rows, rows * row)
    if options.guard:  # short rows are read by the teacher, too, which has no backward pass
        seconds += 4 * speed.seconds(model, [short] * short_rows * rows, rows * short_rows * short)
    return seconds


def _memory(options: Finetuning, model_config: Any, weights: int, learned: int, width: int, row: int) -> MemoryEstimate:
    """Return the memory in bytes that a training needs.

    Args:
        options: the settings of the training.
        model_config: the config of the model.
        weights: the number of parameters of the model.
        learned: the number of parameters that are trained.
        width: the number of bytes per parameter.
        row: the number of tokens in a row that is trained on.
    """
    models = 2 if options.guard else 1  # the teacher is in memory, too
    adapters = 0 if options.train_all else learned
    config: Any = model_config.get_text_config()
    tokens = options.batch * row
    activations = config.num_hidden_layers * (4 * widest_activation(config) + 8 * config.hidden_size)
    return MemoryEstimate(
        weights=(weights * models + adapters) * width,
        cache=0,
        working=tokens * activations * width,
        logits=3 * tokens * config.vocab_size * 4,  # in float32, with their gradients
        training=3 * learned * width,  # gradients and the two moments of the optimizer
    )
