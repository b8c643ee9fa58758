"""The model card of the bundled model, from the record of its training.

write_card(Path("rope_ext_hf/reference"))
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from training_prompts import WORDINGS, ask_in_training
from transformers import LlamaConfig, LlamaForCausalLM

from rope_ext_hf.reading.text.load import HELD_OUT

__all__ = ["write_card"]

CARD = """---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [llama, byte-level, rope, long-context]
---

# rope_ext_hf reference model

A Llama of {parameters:,} parameters over bytes (ByT5 tokenizer, no vocabulary file): {layers} layers, {heads} query and
{kv_heads} key/value heads of 64, RoPE with theta 10,000, trained at {trained_length} bytes and no further. It is there
so that the effect of RoPE methods beyond the trained length can be seen and tested without a download: how well it
predicts text, and whether it finds what the text stated.

## Training

`python benchmarks/train_reference.py --out DIR`, seed {seed}, in phases:

{phases}

Both use AdamW with a linear warm-up and a cosine down to zero, in rows of {trained_length} bytes. The text is
{training_bytes:,} bytes: the sources and documentation of the standard library of Python {python}, less tests, encoding
tables and the modules held out for measurements: {held_out}.

A retrieval prompt is a piece of that text with 1 to {max_keys} statements at random places (fewer where they do not
fit), and up to {asked} questions about them at its end, each followed by its answer. Its statements share words, and
often the same random characters stand before all its numbers. In the loss, a byte of an answer weighs {answer:g}, any
other byte of statements and questions {statement_or_question:g}, a byte of text {filler:g}. There are {tasks} tasks,
one a line: a statement, its question, its answer.

{examples}

The wordings, names and values of measurements are never trained on. Each task has wordings of its own for them, names
come from a second list of words, and of numbers and codes one in eight, by a checksum, is held out. The text around
the statements is then from the held-out modules. Only the task is the same.

## At the end of training

Made by torch {torch} on {device} with {threads} threads, in {minutes:.0f} minutes. Over {windows} whole windows of
{trained_length} bytes of held-out text: {held:.3f} bits per byte ({before:.3f} before the first retrieval prompt). Of
{probes} held-out prompts of {trained_length} bytes, {one:.1%} are answered exactly where one key is stated, and
{many:.1%} where 4 are.

![loss and retrieval during training](loss.png)

## What it cannot do

It writes plausible Python of no use. It answers no questions but those of the tasks above, where the answer stands in
the text word for word; it follows no instructions. Without a RoPE method it reads nothing beyond {trained_length}
bytes. That a method works on it does not show that the method works as well on a large model.

The text it was trained on is under the Python Software Foundation License; the weights are under Apache-2.0.
"""


def _phase_text(phase: dict[str, Any]) -> str:
    prompts = f" and {phase['prompt_rows']} retrieval prompts" if phase["prompt_rows"] else ""
    return (
        f"{phase['steps']:,} steps of {phase['text_rows']} rows of text{prompts}, peak learning rate "
        f"{phase['peak_learning_rate']:g}, {phase['curve'][-1]['seconds'] / 60:.0f} minutes"
    )


def _examples(seed: int) -> str:
    """A training prompt of every task that has wordings for it, in one line each."""
    lines = []
    for name in WORDINGS:
        question = ask_in_training(name, random.Random(seed), wording=0)
        texts = (question.statements[0], question.question, question.answer)
        lines.append(f"- {name}: " + ", ".join(f"`{text.strip()}`" for text in texts))
    return "\n".join(lines)


def write_card(folder: Path) -> None:
    """Write README.md and loss.png into a folder that `train_reference` wrote, from its config and training.json."""
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    phases = record["phases"]
    curve: list[dict[str, Any]] = []
    for phase in phases.values():
        done = curve[-1]["step"] if curve else 0
        curve += [point | {"step": done + point["step"]} for point in phase["curve"]]
    begin = phases["text"]["curve"][-1]
    last = list(phases.values())[-1]
    config = LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    card = CARD.format(
        **{key: value for key, value in record.items() if key not in ("phases", "loss_weights", "final")},
        **record["loss_weights"],
        **{key: last[key] for key in ("python", "torch", "device", "threads")},
        phases="\n".join(f"{number}. {_phase_text(phase)}" for number, phase in enumerate(phases.values(), 1)),
        parameters=model.num_parameters(),
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        held_out=", ".join(f"`{name}`" for name in HELD_OUT),
        tasks=len(WORDINGS),
        examples=_examples(record["seed"]),
        minutes=sum(phase["curve"][-1]["seconds"] for phase in phases.values()) / 60,
        held=record["final"]["held_out_bits_per_byte"],
        before=begin["held_out_bits_per_byte"],
        one=record["final"]["exact_match"],
        many=record["final"]["exact_match_of_4"],
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    _draw(curve, begin["step"], folder / "loss.png")


def _draw(curve: list[dict[str, Any]], begin: int, path: Path) -> None:
    """Bits per byte over all phases, and the share of prompts answered from step `begin` on."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    loss, found = figure.subplots(1, 2, width_ratios=(3, 2))
    steps = [point["step"] for point in curve]
    for key, label in (("train_bits_per_byte", "training text"), ("held_out_bits_per_byte", "held-out text")):
        loss.plot(steps, [point[key] for point in curve], label=label)
    loss.axvline(begin, color="#888888", linewidth=1, linestyle=":")
    loss.annotate(
        "retrieval prompts from here",
        (begin, 0.97),
        xycoords=("data", "axes fraction"),
        xytext=(-4, 0),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8,
        color="#666666",
    )
    loss.set(xlabel="step", ylabel="bits per byte", title="Loss on text")
    for key, label in (("exact_match", "one key"), ("exact_match_of_4", "one of 4 keys")):
        points = [(point["step"], point[key]) for point in curve if point["step"] > begin]
        found.plot(*zip(*points, strict=True), label=label)
    found.set(xlabel="step", ylim=(0, 1.02), title="Held-out prompts answered exactly")
    found.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    for axes in (loss, found):
        axes.grid(visible=True, axis="y", linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="lower right" if axes is found else "center right")
    figure.savefig(path)
