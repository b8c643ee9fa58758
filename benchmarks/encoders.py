"""Encoders with RoPE: longer windows, training on at another length, and added positions turned into rotary ones.

    python benchmarks/encoders.py [--steps 400] [--out benchmarks/results.jsonl]

Small encoders over the bytes of Python's standard library, from one seed; what is scored was never trained on.

windows: RoFormerForSequenceClassification tells from a window of bytes which of 16 modules it is from. One model for
    each window, the same number of steps and windows; RoFormer's paper compares 512 tokens with 1,024.
lengths: RoFormerForMaskedLM trained at one length, then for a tenth of the steps at others.
migration: BertForMaskedLM, the same after `rope.migrate_to_rope`, and after some steps of further training, beside a
    BERT trained on for as many steps.

Accuracy of masked bytes is over the same bytes at every length, in the middle of their windows. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import record
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    RoFormerConfig,
    RoFormerForMaskedLM,
    RoFormerForSequenceClassification,
)

import rope_ext_hf as rope
from rope_ext_hf.eval.stdlib_corpus import stdlib_held_out, stdlib_training
from rope_ext_hf.eval.train_reference import BYTE_OFFSET, encode

SEED = 0
FIRST, MASK = 256 + BYTE_OFFSET, 257 + BYTE_OFFSET  # tokens before a window, and in the place of a byte
SIZES: dict[str, Any] = {
    "vocab_size": 258 + BYTE_OFFSET,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 384,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
PEAK_LEARNING_RATE = 2e-3
BYTES_PER_STEP = 4096

WINDOWS, LABELS, SCORED_WINDOWS, WINDOWS_PER_STEP = (32, 64, 128, 256), 16, 512, 16
TRAINED_LENGTH, OTHER_LENGTHS, MASKED = 128, (32, 512), 0.15
SCORED_SPANS, SCORED_BYTES = 128, 16  # spans, and the bytes in the middle of each that may be masked


# --- training -----------------------------------------------------------------------------------------------------


def trained(model: nn.Module, steps: int, batch: Callable[[torch.Generator], dict[str, Tensor]], seed: int) -> None:
    """Train a model on batches drawn from one seed: a warm-up, then a cosine down to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=steps, pct_start=0.1)
    draws = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(steps):
        loss = model(**batch(draws)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    model.eval()


def built(cls: Any, config: Any) -> Any:
    torch.manual_seed(SEED)
    return cls(config)


# --- windows ------------------------------------------------------------------------------------------------------


def classes() -> tuple[list[Tensor], list[Tensor]]:
    """The largest modules as tokens: what is trained on, and the last quarter of each, which is scored."""
    modules = sorted((encode([document])[:-1] for document in stdlib_training()), key=len)[-LABELS:]
    cuts = [3 * len(each) // 4 for each in modules]
    return [m[:cut] for m, cut in zip(modules, cuts, strict=True)], [
        m[cut:] for m, cut in zip(modules, cuts, strict=True)
    ]


def labelled(streams: list[Tensor], count: int, window: int, draws: torch.Generator, device: str) -> dict[str, Tensor]:
    """Windows of random modules behind a first token, and the number of each one's module."""
    labels = torch.randint(0, len(streams), (count,), generator=draws)
    rows = []
    for label in labels.tolist():
        start = int(torch.randint(0, len(streams[label]) - max(WINDOWS), (1,), generator=draws))
        rows.append(torch.cat((torch.tensor([FIRST]), streams[label][start : start + window].long())))
    return {"input_ids": torch.stack(rows).to(device), "labels": labels.to(device)}


@torch.inference_mode()
def right(model: nn.Module, batch: dict[str, Tensor]) -> float:
    """The share of windows whose module is found."""
    found = [model(input_ids=ids).logits.argmax(-1) for ids in batch["input_ids"].split(64)]
    return (torch.cat(found) == batch["labels"]).double().mean().item()


def windows(steps: int, device: str) -> list[dict[str, Any]]:
    training, scored = classes()
    rows = []
    for window in WINDOWS:
        started = time.perf_counter()
        config = RoFormerConfig(**SIZES, max_position_embeddings=max(WINDOWS) + 1, num_labels=LABELS)
        model = built(RoFormerForSequenceClassification, config).to(device)
        trained(model, steps, lambda draws, n=window: labelled(training, WINDOWS_PER_STEP, n, draws, device), SEED)
        batch = labelled(scored, SCORED_WINDOWS, window, torch.Generator().manual_seed(SEED + 1), device)
        rows.append({"window": window, "accuracy": round(right(model, batch), 4)})
        print(json.dumps(rows[-1] | {"seconds": round(time.perf_counter() - started)}), flush=True)
    return rows


# --- masked bytes -------------------------------------------------------------------------------------------------


def masked(stream: Tensor, length: int, draws: torch.Generator, device: str) -> dict[str, Tensor]:
    """Random spans with some bytes masked, and those bytes as labels."""
    starts = torch.randint(0, len(stream) - length, (BYTES_PER_STEP // length, 1), generator=draws)
    ids = stream[starts + torch.arange(length)].long()
    hidden = torch.rand(ids.shape, generator=draws) < MASKED
    return {"input_ids": ids.masked_fill(hidden, MASK).to(device), "labels": ids.masked_fill(~hidden, -100).to(device)}


@torch.inference_mode()
def accuracy(model: nn.Module, held_out: Tensor, length: int, device: str) -> float:
    """The share of masked bytes that are found, the same bytes at every length: in the middle of their spans."""
    reach = max(TRAINED_LENGTH, *OTHER_LENGTHS)
    middles = torch.linspace(reach, len(held_out) - reach, SCORED_SPANS).long()[:, None]
    ids = held_out[middles + torch.arange(-length // 2, length // 2)].long()
    draws = torch.Generator().manual_seed(SEED + 2)
    hidden = torch.zeros(ids.shape, dtype=torch.bool)
    at = length // 2 - SCORED_BYTES // 2
    hidden[:, at : at + SCORED_BYTES] = torch.rand((SCORED_SPANS, SCORED_BYTES), generator=draws) < MASKED
    spans = ids.masked_fill(hidden, MASK).to(device)
    found = torch.cat([model(input_ids=each).logits.argmax(-1) for each in spans.split(4096 // length)])
    return (found.cpu() == ids)[hidden].double().mean().item()


def lengths(steps: int, stream: Tensor, held_out: Tensor, device: str) -> list[dict[str, Any]]:
    """A model trained at one length, read and trained on at others."""
    model = built(RoFormerForMaskedLM, RoFormerConfig(**SIZES, max_position_embeddings=TRAINED_LENGTH)).to(device)
    trained(model, steps, lambda draws: masked(stream, TRAINED_LENGTH, draws, device), SEED)
    rows = [{"trained": f"{steps} steps at {TRAINED_LENGTH}"}]
    models = [rope.patch(model, "default", target_length=max(OTHER_LENGTHS))]  # no largest position
    for other in OTHER_LENGTHS:
        models.append(copy.deepcopy(model))
        trained(models[-1], steps // 10, lambda draws, n=other: masked(stream, n, draws, device), SEED + 3)
        rows.append({"trained": f"{steps} steps at {TRAINED_LENGTH}, {steps // 10} at {other}"})
    for row, each in zip(rows, models, strict=True):
        for length in sorted((TRAINED_LENGTH, *OTHER_LENGTHS)):
            row[str(length)] = round(accuracy(each, held_out, length, device), 4)
        print(json.dumps(row), flush=True)
    return rows


def migration(steps: int, stream: Tensor, held_out: Tensor, device: str) -> list[dict[str, Any]]:
    """A BERT, and what becomes of it with rotary positions."""
    further = steps // 2
    bert = built(BertForMaskedLM, BertConfig(**SIZES, max_position_embeddings=TRAINED_LENGTH)).to(device)
    trained(bert, steps, lambda draws: masked(stream, TRAINED_LENGTH, draws, device), SEED)
    rotating = rope.migrate_to_rope(bert, target_length=max(OTHER_LENGTHS))
    rows: list[dict[str, Any]] = []

    def score(name: str, model: nn.Module) -> None:
        row: dict[str, Any] = {"model": name}
        for length in (TRAINED_LENGTH, max(OTHER_LENGTHS)):
            readable = length <= model.config.max_position_embeddings  # type: ignore[union-attr, operator]
            row[str(length)] = round(accuracy(model, held_out, length, device), 4) if readable else None
        rows.append(row)
        print(json.dumps(row), flush=True)

    score(f"BERT, {steps} steps", bert)
    score("migrated to RoPE", rotating)
    for count in (further // 4, further):
        each = copy.deepcopy(rotating)
        trained(each, count, lambda draws: masked(stream, TRAINED_LENGTH, draws, device), SEED + 3)
        score(f"migrated to RoPE, {count} steps", each)
    trained(bert, further, lambda draws: masked(stream, TRAINED_LENGTH, draws, device), SEED + 3)
    score(f"BERT, {steps} + {further} steps", bert)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=400, help="of each training")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args()
    stream, held_out = encode(stdlib_training()), encode(stdlib_held_out())
    result = {
        "benchmark": "encoders",
        "steps": arguments.steps,
        "labels": LABELS,
        "scored_windows": SCORED_WINDOWS,
        "trained_length": TRAINED_LENGTH,
        "windows": windows(arguments.steps, arguments.device),
        "lengths": lengths(arguments.steps, stream, held_out, arguments.device),
        "migration": migration(arguments.steps, stream, held_out, arguments.device),
    }
    record(result | {"threads": torch.get_num_threads()}, arguments.out, arguments.device)


if __name__ == "__main__":
    main()
