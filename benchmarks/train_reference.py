"""Train the bundled reference model: a small Llama over bytes, on Python's standard library and retrieval prompts.

    python benchmarks/train_reference.py --out rope_ext_hf/reference

Seeded, a few million parameters, one to two hours on two CPU cores, by their speed. It exists so that the effect of
every RoPE method on real text, and on finding something in it, can be shown and tested without a download: the model is
trained at 256 bytes and no further. An interrupted run continues from its last checkpoint with the same command.

A second recipe, for the benchmarks alone, has rotary dims like those of large models, see `RECIPES`:

    python benchmarks/train_reference.py --recipe wide-heads --out build/bench/wide-heads-model
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from reference_card import write_card
from torch import Tensor, nn
from torch.nn import functional
from training_prompts import Part, Prompt, training_prompt
from training_text import stdlib_training
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.load import stdlib_held_out

SEED = 20240517
TRAINED_LENGTH = 256


@dataclass(frozen=True)
class Phase:
    """A part of the training with its own schedule of the learning rate: linear warm-up, then a cosine down to zero.

    Attributes:
        text_rows, prompt_rows: of every step: rows of text, and retrieval prompts.
    """

    steps: int
    text_rows: int
    prompt_rows: int
    peak_learning_rate: float
    warmup_steps: int

    def learning_rate(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak_learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.peak_learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


PROMPT_TASKS = ("key-value", "assignment", "assignment", "quote", "quote", "copy")
"""What prompts are drawn from; the harder tasks twice."""
LOSS_WEIGHTS = {Part.FILLER: 1.0, Part.STATEMENT_OR_QUESTION: 0.2, Part.ANSWER: 5.0}
"""Of a prompt's bytes; a byte of text weighs 1."""
LOG_EVERY = 100
TEXT_PROBES = 96  # held-out windows at every log line
PROBES, FINAL_PROBES = 64, 400  # held-out prompts at every log line and at the end, for each number of keys
PROBED_KEYS = {"exact_match": 1, "exact_match_of_4": 4}
END_OF_TEXT = 1  # ByT5's </s>
BYTE_OFFSET = 3  # ByT5 puts <pad>, </s>, <unk> before the 256 bytes


@dataclass(frozen=True)
class Recipe:
    """Recipe of a training: geometry of the model, rows, and phases.

    Attributes:
        shape: keys of `LlamaConfig`.
        phases: one after the other.
        trained_length: bytes in a row.
        max_keys, asked: statements in a training prompt and questions at its end; fewer where so many do not fit.
        probes_over: the number by which the probes at a log line and at the end are fewer than the bundled model's.
        card: whether a model card is written.
    """

    shape: dict[str, Any]
    phases: dict[str, Phase]
    trained_length: int = TRAINED_LENGTH
    theta: float = 10_000.0
    max_keys: int = 12
    asked: tuple[int, ...] = (1, 4, 8, 8)
    probes_over: int = 1
    card: bool = True

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=256 + BYTE_OFFSET,
            max_position_embeddings=self.trained_length,
            rope_parameters={"rope_type": "default", "rope_theta": self.theta},
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=END_OF_TEXT,
            bos_token_id=None,
            **self.shape,
        )


RECIPES = {
    # Grouped-query attention with heads of 64, as its big relatives have; under 8 MB in bfloat16.
    "bundled": Recipe(
        shape={
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
        phases={
            "text": Phase(steps=3000, text_rows=32, prompt_rows=0, peak_learning_rate=2e-3, warmup_steps=100),
            "retrieval": Phase(steps=1200, text_rows=3, prompt_rows=13, peak_learning_rate=1e-3, warmup_steps=40),
        },
    ),
    # 17 of 64 rotary pairs between 1 and 32 turns over the trained length; 16 of 64 in Llama 3 8B, 12 of 32 above.
    "wide-heads": Recipe(
        shape={
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 128,
        },
        phases={
            "text": Phase(steps=3000, text_rows=4, prompt_rows=0, peak_learning_rate=2e-3, warmup_steps=100),
            "retrieval": Phase(steps=1000, text_rows=1, prompt_rows=3, peak_learning_rate=1e-3, warmup_steps=40),
        },
        trained_length=1024,
        theta=500_000.0,
        max_keys=32,
        asked=(1, 8, 16, 16),
        probes_over=4,
        card=False,
    ),
}


def encode(documents: list[Document]) -> Tensor:
    """All documents in one stream of token ids, (tokens,) int16, each closed by end-of-text."""
    ids: list[int] = []
    for document in documents:
        ids += [byte + BYTE_OFFSET for byte in document.text.encode("utf-8")]
        ids.append(END_OF_TEXT)
    return torch.tensor(ids, dtype=torch.int16)


def windows(stream: Tensor, starts: Tensor, length: int = TRAINED_LENGTH) -> Tensor:
    """(batch, length + 1) int64: inputs and, shifted by one, targets."""
    return stream[starts[:, None] + torch.arange(length + 1)].long()


def training_prompts(text: bytes, rng: random.Random, count: int, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Retrieval prompts to train on, with pieces of `text` around their statements.

    Returns:
        (count, trained length + 1) int64 token ids, and the `Part` that each belongs to, int64.
    """
    return _filled(
        text,
        rng,
        recipe.trained_length,
        (
            training_prompt(
                rng.choice(PROMPT_TASKS),
                rng,
                length=recipe.trained_length + 1,
                keys=rng.randint(1, recipe.max_keys),
                asked=rng.choice(recipe.asked),
            )
            for _ in range(count)
        ),
    )


def held_out_prompts(
    text: bytes, rng: random.Random, count: int, keys: int, length: int = TRAINED_LENGTH
) -> tuple[Tensor, Tensor]:
    """Retrieval prompts with names, values and wordings that training never uses, all tasks and wordings in turn.

    Returns:
        As `training_prompts`.
    """
    tasks = sorted(set(PROMPT_TASKS))
    return _filled(
        text,
        rng,
        length,
        (
            training_prompt(
                tasks[index % len(tasks)],
                rng,
                length=length + 1,
                keys=keys,
                held_out=True,
                wording=index // len(tasks),
            )
            for index in range(count)
        ),
    )


def _filled(text: bytes, rng: random.Random, length: int, prompts: Iterable[Prompt]) -> tuple[Tensor, Tensor]:
    rows, parts = [], []
    for prompt in prompts:
        start = rng.randrange(len(text) - length)
        filled, of_bytes = prompt.fill(text[start : start + prompt.filler_length])
        rows.append([byte + BYTE_OFFSET for byte in filled])
        parts.append(of_bytes)
    return torch.tensor(rows), torch.tensor(parts)


def logits_of(model: nn.Module, batch: Tensor) -> Tensor:
    """(rows, tokens - 1, vocabulary) float32: what each token but the last predicts."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=_has_bfloat16(batch.device)):
        logits: Tensor = model(batch[:, :-1], use_cache=False).logits
    return logits.float()


@cache
def _has_bfloat16(device: torch.device) -> bool:
    """Return whether bfloat16 is faster than float32: CPUs without instructions for it emulate it at half the speed."""
    if device.type != "cpu":
        return True
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def token_losses(logits: Tensor, batch: Tensor) -> Tensor:
    """(rows, tokens - 1): nats of every token but the first given those before."""
    return functional.cross_entropy(logits.mT, batch[:, 1:], reduction="none")


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Nats per token, a scalar."""
    return token_losses(logits_of(model, batch), batch).mean()


@torch.no_grad()
def exact_match(model: nn.Module, prompts: Tensor, parts: Tensor) -> float:
    """Share of prompts whose answers greedy decoding gives: every token of them is the likeliest after those before."""
    right = logits_of(model, prompts).argmax(-1) == prompts[:, 1:]
    return (right | (parts[:, 1:] != Part.ANSWER)).all(-1).float().mean().item()


class Material:
    """Training rows and probes, on a device."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        documents, unread = stdlib_training(), stdlib_held_out()
        self.recipe, self.device = recipe, device
        self.stream, held_out = encode(documents), encode(unread)
        self.text, unread_text = (
            "\n".join(document.text for document in some).encode("utf-8") for some in (documents, unread)
        )
        length = recipe.trained_length
        starts = torch.linspace(0, len(held_out) - length - 2, TEXT_PROBES // recipe.probes_over).long()
        self.probe = windows(held_out, starts, length).to(device)
        self.prompt_probes = {
            name: held_out_prompts(unread_text, random.Random(SEED), FINAL_PROBES // recipe.probes_over, keys, length)
            for name, keys in PROBED_KEYS.items()
        }

    def batches(self, phase: Phase) -> Iterator[tuple[Tensor, Tensor]]:
        """Of every step: rows of text, then prompts, (rows, trained length + 1) int64 token ids, and their parts."""
        length = self.recipe.trained_length
        sampler, rng = torch.Generator().manual_seed(SEED), random.Random(SEED)
        for _ in range(phase.steps):
            starts = torch.randint(0, len(self.stream) - length - 1, (phase.text_rows,), generator=sampler)
            rows = windows(self.stream, starts, length)
            parts = torch.full_like(rows, Part.FILLER)
            if phase.prompt_rows:
                prompts, of_prompts = training_prompts(self.text, rng, phase.prompt_rows, self.recipe)
                rows, parts = torch.cat([rows, prompts]), torch.cat([parts, of_prompts])
            yield rows.to(self.device), parts.to(self.device)

    def measure(self, model: nn.Module, prompts: int) -> dict[str, float]:
        """Held-out bits per byte, and the share answered exactly of this many prompts for each number of keys."""
        with torch.no_grad():
            measured = {"held_out_bits_per_byte": round(mean_loss(model, self.probe).item() / math.log(2), 4)}
        if prompts:
            for name, (rows, parts) in self.prompt_probes.items():
                some = rows[:prompts].to(self.device), parts[:prompts].to(self.device)
                measured[name] = round(exact_match(model, *some), 4)
        return measured


def train(out: Path, device: str, recipe: Recipe) -> None:
    """Train by a recipe and write all there is of it into `out`; continue a checkpoint there."""
    torch.manual_seed(SEED)
    material = Material(recipe, device)
    model = LlamaForCausalLM(recipe.config()).to(device)
    print(f"{model.num_parameters():,} parameters, {len(material.stream):,} training bytes", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"
    record: dict[str, Any] = {}
    state: dict[str, Any] = {}
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        record = state["record"]
        model.load_state_dict(state["model"])
    for name, phase in recipe.phases.items():
        continued = state.get("phase") == name
        if continued or name not in record:
            run_phase(name, phase, model, material, record, state if continued else {}, checkpoint)

    final = material.measure(model, FINAL_PROBES // recipe.probes_over)
    model.to(torch.bfloat16).save_pretrained(out)
    ByT5Tokenizer(extra_ids=0).save_pretrained(out)
    whole = {
        "seed": SEED,
        "trained_length": recipe.trained_length,
        "training_bytes": len(material.stream),
        "max_keys": recipe.max_keys,
        "asked": max(recipe.asked),
        "loss_weights": {part.name.lower(): weight for part, weight in LOSS_WEIGHTS.items()},
        "windows": TEXT_PROBES // recipe.probes_over,
        "probes": FINAL_PROBES // recipe.probes_over,
        "phases": record,
        "final": final,
    }
    (out / "training.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if recipe.card:
        write_card(out)
    checkpoint.unlink(missing_ok=True)


def run_phase(
    name: str,
    phase: Phase,
    model: LlamaForCausalLM,
    material: Material,
    record: dict[str, Any],
    state: dict[str, Any],
    checkpoint: Path,
) -> None:
    """Train the model, add what was measured to `record`, and keep `checkpoint` up to date.

    Args:
        state: a checkpoint of this phase to continue from, or nothing.
    """
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
    )
    curve: list[dict[str, Any]] = []
    done, seconds, cpu_seconds = 0, 0.0, 0.0
    if state:
        optimizer.load_state_dict(state["optimizer"])
        curve = record[name]["curve"]
        done, seconds, cpu_seconds = (curve[-1][key] for key in ("step", "seconds", "cpu_seconds"))
    record[name] = asdict(phase) | {
        "device": material.device,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "curve": curve,
    }
    started, cpu_started = time.perf_counter() - seconds, time.process_time() - cpu_seconds
    text_bits: list[float] = []
    answer_bits: list[float] = []
    weight_of_part = torch.tensor([LOSS_WEIGHTS[part] for part in Part], device=material.device)
    for step, (rows, parts) in enumerate(material.batches(phase)):
        if step < done:  # a continued run reads what an uninterrupted one reads
            continue
        for group in optimizer.param_groups:
            group["lr"] = phase.learning_rate(step)
        predicted = parts[:, 1:]
        losses, weights = token_losses(logits_of(model, rows), rows), weight_of_part[predicted]
        loss = (losses * weights).sum() / weights.sum()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        text_bits.append(losses[: phase.text_rows].mean().item() / math.log(2))
        if phase.prompt_rows:
            answer_bits.append(losses[predicted == Part.ANSWER].mean().item() / math.log(2))
        if not math.isfinite(loss.item()):
            sys.exit(f"the loss is {loss.item()} at step {step + 1}; stopping")
        if (step + 1) % LOG_EVERY and step + 1 < phase.steps:
            continue
        point = {
            "step": step + 1,
            "seconds": round(time.perf_counter() - started, 1),
            "cpu_seconds": round(time.process_time() - cpu_started, 1),
            "train_bits_per_byte": round(fmean(text_bits), 4),
            **({"answer_bits_per_byte": round(fmean(answer_bits), 4)} if answer_bits else {}),
            **material.measure(model, PROBES // material.recipe.probes_over if phase.prompt_rows else 0),
        }
        curve.append(point)
        print(json.dumps({"phase": name} | point), flush=True)
        text_bits, answer_bits = [], []
        kept = {"phase": name, "record": record, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        partial = checkpoint.with_suffix(".partial")
        torch.save(kept, partial)
        partial.replace(checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder the model is written to")
    parser.add_argument("--recipe", choices=RECIPES, default="bundled")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    train(arguments.out, arguments.device, RECIPES[arguments.recipe])


if __name__ == "__main__":
    main()
