"""Encoders with RoPE: longer windows, training on at another length, and added positions turned into rotary ones.

    python benchmarks/encoders.py [--steps 1000] [--out benchmarks/results.jsonl]

Small encoders on Python's standard library, from one seed; what is scored was never trained on.

windows: RoFormerModel, the mean of its outputs and a linear layer tell from a window of which of 16 modules it is a
    part. Tokens are words and signs, hashed into 1,024 numbers. One model for each window, a quarter of the steps, as
    many windows; RoFormer's paper compares 512 tokens with 1,024.
lengths: RoFormerForMaskedLM over bytes, trained at one length, then for a tenth of the steps at others.
migration: BertForMaskedLM over bytes, the same after `migrate_to_rope`, and after some steps of further training,
    beside a BERT trained on for as many steps.

Accuracy of masked bytes is over the same bytes at every length, in the middle of their spans. The last line is JSON.
"""

from __future__ import annotations

import copy
import json
import re
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from record import benchmark_parser, record
from torch import Tensor, nn
from torch.nn import functional
from train_reference import BYTE_OFFSET, encode
from training import take_steps, warmup_and_cosine
from training_text import stdlib_training
from transformers import BertConfig, BertForMaskedLM, RoFormerConfig, RoFormerForMaskedLM, RoFormerModel

from rope_ext_hf.reading.text.documents import Document
from rope_ext_hf.reading.text.load import stdlib_held_out
from rope_ext_hf.tools import modules

SEED = 0
WORDS, MASK = 1024, 256 + BYTE_OFFSET
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 256,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": None,
}
PEAK_LEARNING_RATE, PEAK_OF_FURTHER_TRAINING = 2e-3, 5e-4
MASKED_MODEL: dict[str, Any] = SIZES | {"vocab_size": MASK + 1, "initializer_range": 0.1}
"""With larger first weights a model finds the neighbours of a byte sooner."""

WINDOWS, LABELS, SCORED_WINDOWS, WINDOWS_PER_STEP = (32, 64, 128), 16, 512, 16
TRAINED_LENGTH, OTHER_LENGTHS, MASKED, BYTES_PER_STEP = 32, (16, 128), 0.15, 1024
SCORED_SPANS, SCORED_BYTES = 512, 16  # spans, and the bytes in the middle of each that may be masked


# --- training -----------------------------------------------------------------------------------------------------


def trained(model: nn.Module, steps: int, loss_of: Callable[[torch.Generator], Tensor], seed: int, peak: float) -> None:
    """Train a model on what is drawn from one seed: a warm-up, then a cosine down to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = warmup_and_cosine(optimizer, steps, steps // 10 + 1)
    draws = torch.Generator().manual_seed(seed)
    model.train()
    take_steps(optimizer, schedule, steps, lambda: loss_of(draws), every=100)
    model.eval()


def built(cls: Any, config: Any) -> Any:
    torch.manual_seed(SEED)
    return cls(config)


# --- windows ------------------------------------------------------------------------------------------------------


class Classifier(nn.Module):
    def __init__(self, config: RoFormerConfig) -> None:
        super().__init__()
        self.encoder = RoFormerModel(config)
        self.head = nn.Linear(config.hidden_size, LABELS)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(input_ids=ids).last_hidden_state.mean(1))
        return scores


def words(document: Document) -> Tensor:
    """The words and signs of a document, (tokens,) int64."""
    found = re.findall(r"\w+|[^\w\s]", document.text)
    return torch.tensor([zlib.crc32(word.encode()) % WORDS for word in found])


def drawn(streams: list[Tensor], count: int, window: int, draws: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    """Windows of random modules, and the number of each one's module; they begin at the same places at every length."""
    labels = torch.randint(0, len(streams), (count,), generator=draws)
    rows = []
    for label in labels.tolist():
        start = int(torch.randint(0, len(streams[label]) - max(WINDOWS), (1,), generator=draws))
        rows.append(streams[label][start : start + window])
    return torch.stack(rows).to(device), labels.to(device)


def windows(steps: int, device: str) -> list[dict[str, Any]]:
    modules = sorted(map(words, stdlib_training()), key=len)[-LABELS:]
    cuts = [3 * len(module) // 4 for module in modules]  # the last quarter of each is scored
    training = [module[:cut] for module, cut in zip(modules, cuts, strict=True)]
    scored = [module[cut:] for module, cut in zip(modules, cuts, strict=True)]
    rows = []
    for window in WINDOWS:
        started = time.perf_counter()
        model = built(Classifier, RoFormerConfig(**SIZES, vocab_size=WORDS, max_position_embeddings=max(WINDOWS))).to(
            device
        )

        def loss_of(draws: torch.Generator, model: nn.Module = model, window: int = window) -> Tensor:
            ids, labels = drawn(training, WINDOWS_PER_STEP, window, draws, device)
            return functional.cross_entropy(model(ids), labels)

        trained(model, steps, loss_of, SEED, PEAK_LEARNING_RATE)
        ids, labels = drawn(scored, SCORED_WINDOWS, window, torch.Generator().manual_seed(SEED + 1), device)
        with torch.inference_mode():
            found = torch.cat([model(each).argmax(-1) for each in ids.split(64)])
        rows.append({"window": window, "accuracy": round((found == labels).double().mean().item(), 4)})
        print(json.dumps(rows[-1] | {"seconds": round(time.perf_counter() - started)}), flush=True)
    return rows


# --- masked bytes -------------------------------------------------------------------------------------------------


def trained_on_masks(
    model: Any, stream: Tensor, length: int, steps: int, device: str, *, further: bool = False
) -> None:
    """Train a model to find masked bytes of random spans."""

    def loss_of(draws: torch.Generator) -> Tensor:
        starts = torch.randint(0, len(stream) - length, (BYTES_PER_STEP // length, 1), generator=draws)
        ids = stream[starts + torch.arange(length)].long()
        hidden = torch.rand(ids.shape, generator=draws) < MASKED
        labels = ids.masked_fill(~hidden, -100).to(device)
        loss: Tensor = model(input_ids=ids.masked_fill(hidden, MASK).to(device), labels=labels).loss
        return loss

    seed, peak = (SEED + 3, PEAK_OF_FURTHER_TRAINING) if further else (SEED, PEAK_LEARNING_RATE)
    trained(model, steps, loss_of, seed, peak)


@torch.inference_mode()
def accuracy(model: Any, held_out: Tensor, length: int, device: str) -> float:
    """The share of masked bytes that are found, the same bytes at every length: in the middle of their spans."""
    reach = max(TRAINED_LENGTH, *OTHER_LENGTHS)
    middles = torch.linspace(reach, len(held_out) - reach, SCORED_SPANS).long()[:, None]
    ids = held_out[middles + torch.arange(-length // 2, length // 2)].long()
    draws = torch.Generator().manual_seed(SEED + 2)
    hidden = torch.zeros(ids.shape, dtype=torch.bool)
    first = length // 2 - SCORED_BYTES // 2
    chosen = torch.rand((SCORED_SPANS, SCORED_BYTES), generator=draws) < MASKED
    hidden[:, first : first + SCORED_BYTES] = chosen
    spans = ids.masked_fill(hidden, MASK).to(device)
    found = torch.cat([model(input_ids=each).logits.argmax(-1) for each in spans.split(4096 // length)])
    return round((found.cpu() == ids)[hidden].double().mean().item(), 4)


def lengths(steps: int, stream: Tensor, held_out: Tensor, device: str) -> list[dict[str, Any]]:
    """A model trained at one length, read and trained on at others."""
    config = RoFormerConfig(**MASKED_MODEL, max_position_embeddings=max(OTHER_LENGTHS))
    model = built(RoFormerForMaskedLM, config).to(device)
    trained_on_masks(model, stream, TRAINED_LENGTH, steps, device)
    models = {f"{steps} steps at {TRAINED_LENGTH}": model}
    for other in (TRAINED_LENGTH, *OTHER_LENGTHS):
        further = copy.deepcopy(model)
        trained_on_masks(further, stream, other, steps // 10, device, further=True)
        models[f"{steps} steps at {TRAINED_LENGTH}, {steps // 10} at {other}"] = further
    rows: list[dict[str, Any]] = []
    for name, each in models.items():
        scores = {str(n): accuracy(each, held_out, n, device) for n in sorted((TRAINED_LENGTH, *OTHER_LENGTHS))}
        rows.append({"trained": name} | scores)
        print(json.dumps(rows[-1]), flush=True)
    return rows


def migration(steps: int, stream: Tensor, held_out: Tensor, device: str) -> list[dict[str, Any]]:
    """A BERT, and what becomes of it with rotary positions."""
    further = steps // 2
    config = BertConfig(**MASKED_MODEL, max_position_embeddings=TRAINED_LENGTH)
    bert = built(BertForMaskedLM, config).to(device)
    trained_on_masks(bert, stream, TRAINED_LENGTH, steps, device)
    rotating = modules.migrate_to_rope(bert, target_length=max(OTHER_LENGTHS))
    rows: list[dict[str, Any]] = []

    def score(name: str, model: Any) -> None:
        row: dict[str, Any] = {"model": name}
        for length in (TRAINED_LENGTH, max(OTHER_LENGTHS)):
            readable = length <= model.config.max_position_embeddings
            row[str(length)] = accuracy(model, held_out, length, device) if readable else None
        rows.append(row)
        print(json.dumps(row), flush=True)

    score(f"BERT, {steps} steps", bert)
    score("migrated to RoPE", rotating)
    for count in (further // 4, further):
        each = copy.deepcopy(rotating)
        trained_on_masks(each, stream, TRAINED_LENGTH, count, device, further=True)
        score(f"migrated to RoPE, {count} steps", each)
    trained_on_masks(bert, stream, TRAINED_LENGTH, further, device, further=True)
    score(f"BERT, {steps} + {further} steps", bert)
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="of each training")
    arguments = parser.parse_args()
    stream, held_out = encode(stdlib_training()), encode(stdlib_held_out())
    result = {
        "benchmark": "encoders",
        "steps": arguments.steps,
        "labels": LABELS,
        "scored_windows": SCORED_WINDOWS,
        "trained_length": TRAINED_LENGTH,
        "windows": windows(arguments.steps // 4, arguments.device),
        "lengths": lengths(arguments.steps, stream, held_out, arguments.device),
        "migration": migration(arguments.steps, stream, held_out, arguments.device),
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
