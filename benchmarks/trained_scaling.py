"""Extend a model that was trained under a scaling: from where it stands, against counting from the original length.

    python benchmarks/trained_scaling.py --folder trained-yarn [--device cuda] [--out benchmarks/results.jsonl]

The bundled model, trained at 256 bytes, is trained further at 1,024 bytes under YaRN x4 on the same text; a control
gets the same steps at 256 bytes without a patch. The trained model is saved, loaded again, and extended by 2 and 4.
Prints one JSON line with bits per byte at every length.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from record import record
from torch.nn import functional
from train_reference import encode

import rope_ext_hf as rope
from rope_ext_hf.eval import perplexity
from rope_ext_hf.eval.corpora import load as load_corpus
from rope_ext_hf.eval.plan import Tokens, tokenize
from rope_ext_hf.eval.stdlib_corpus import stdlib_training
from rope_ext_hf.hub import load_tokenizer
from rope_ext_hf.reference import path

SEED = 20240517
TRAINED, EXTENDED = 256, 1024
LENGTHS = [TRAINED, EXTENDED, 2 * EXTENDED, 4 * EXTENDED]


def load(folder: str | Path, device: str) -> Any:
    return rope.from_pretrained(folder, dtype=torch.float32).eval().to(device)


def train(model: Any, length: int, steps: int, batch: int, peak: float) -> None:
    """AdamW, a short warm-up and a cosine to zero; batches hold batch x EXTENDED bytes at either length."""
    torch.manual_seed(SEED)
    stream = encode(stdlib_training())
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.0)
    rows = batch * EXTENDED // length
    model.train()
    for step in range(steps):
        warm, left = min(1.0, (step + 1) / 10), 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = peak * warm * left
        starts = torch.randint(0, len(stream) - length - 1, (rows,))
        ids = stream[starts[:, None] + torch.arange(length + 1)].long().to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16):
            logits = model(ids[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 9:
            print(
                f"length {length}, step {step + 1} of {steps}: {loss.item() / math.log(2):.3f} bits per byte",
                flush=True,
            )
    model.eval()


@cache
def held_out() -> list[Tokens]:
    return tokenize(load_corpus("stdlib"), load_tokenizer("reference"))


def measure(model: Any, windows: int, lengths: list[int]) -> dict[int, float]:
    results = perplexity(model, held_out(), lengths=lengths, targets=128, max_spans=windows, bos=False)
    return {result.length: round(result.bits_per_byte, 4) for result in results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="where the trained model is kept")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch", type=int, default=8, help="rows of 1,024 bytes")
    parser.add_argument("--peak", type=float, default=2e-4, help="peak learning rate")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args()
    started = time.perf_counter()
    bits: dict[str, dict[int, float]] = {}
    control = load(path(), arguments.device)
    bits["as bundled"] = measure(control, arguments.windows, LENGTHS[:2])
    with rope.patched(control, "yarn", factor=4):
        bits["yarn x4, not trained"] = measure(control, arguments.windows, LENGTHS)
    train(control, TRAINED, arguments.steps, arguments.batch, arguments.peak)
    bits["control: trained at 256 without a patch"] = measure(control, arguments.windows, LENGTHS[:2])
    with rope.patched(control, "yarn", factor=4):
        bits["control under yarn x4"] = measure(control, arguments.windows, LENGTHS)

    model = rope.patch(load(path(), arguments.device), "yarn", factor=4)
    train(model, EXTENDED, arguments.steps, arguments.batch, arguments.peak)
    model.save_pretrained(arguments.folder)
    model = load(arguments.folder, arguments.device)
    bits["trained under yarn x4"] = measure(model, arguments.windows, LENGTHS)
    for factor in (2, 4):
        for method in ("yarn", "ntk"):
            with rope.patched(model, method, factor=factor, over="patched"):
                bits[f"{method} x{factor} over the patch"] = measure(model, arguments.windows, LENGTHS)
        for times in (4 * factor, factor):
            with rope.patched(model, "yarn", factor=times):
                bits[f"yarn x{times} from the original length"] = measure(model, arguments.windows, LENGTHS)
    for name, row in bits.items():
        print(f"{name:45} " + "  ".join(f"{length:,}: {value:.3f}" for length, value in row.items()))
    result = {
        "benchmark": "trained_scaling",
        "bits_per_byte": bits,
        "steps": arguments.steps,
        "batch": arguments.batch,
        "peak_learning_rate": arguments.peak,
        "windows": arguments.windows,
        "seconds": round(time.perf_counter() - started),
    }
    record(result, arguments.out, arguments.device)


if __name__ == "__main__":
    main()
