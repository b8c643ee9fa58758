"""Train the bundled reference model: a small Llama over bytes, on the Python standard library.

    python -m rope_ext_hf.eval.train_reference --out rope_ext_hf/reference

Seeded, a few million parameters, well under an hour on two CPU cores. It exists so that the effect of every RoPE
method on real text can be seen and tested without a download: the model is trained at 256 bytes and no further.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path

import torch
from torch.nn import functional
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

from rope_ext_hf.eval.documents import Document
from rope_ext_hf.eval.stdlib_corpus import HELD_OUT, stdlib_held_out, stdlib_training

SEED = 20240517
TRAINED_LENGTH = 256
BATCH = 32
STEPS = 3000
LOG_EVERY = 100
PROBES = 96  # held-out windows at every log line
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
END_OF_TEXT = 1  # ByT5's </s>
BYTE_OFFSET = 3  # ByT5 puts <pad>, </s>, <unk> before the 256 bytes


def config() -> LlamaConfig:
    """Grouped-query attention with heads of 64, as its big relatives have; under 8 MB in bfloat16."""
    return LlamaConfig(
        vocab_size=256 + BYTE_OFFSET,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=TRAINED_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=END_OF_TEXT,
        bos_token_id=None,
    )


def encode(documents: list[Document]) -> torch.Tensor:
    """All documents in one stream of token ids, (tokens,) int16, each closed by end-of-text."""
    ids: list[int] = []
    for document in documents:
        ids += [byte + BYTE_OFFSET for byte in document.text.encode("utf-8")]
        ids.append(END_OF_TEXT)
    return torch.tensor(ids, dtype=torch.int16)


def windows(stream: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """(batch, TRAINED_LENGTH + 1) int64: inputs and, shifted by one, targets."""
    return stream[starts[:, None] + torch.arange(TRAINED_LENGTH + 1)].long()


def mean_loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast(batch.device.type, torch.bfloat16):
        logits = model(batch[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def learning_rate(step: int) -> float:
    """Linear warm-up, then a cosine down to zero."""
    if step < WARMUP_STEPS:
        return PEAK_LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, STEPS - WARMUP_STEPS)
    return PEAK_LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * progress))


def train(out: Path, device: str) -> None:
    torch.manual_seed(SEED)
    stream = encode(stdlib_training())
    held_out = encode(stdlib_held_out())
    probe = windows(held_out, torch.linspace(0, len(held_out) - TRAINED_LENGTH - 2, PROBES).long()).to(device)
    model = LlamaForCausalLM(config()).to(device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    sampler = torch.Generator().manual_seed(SEED)
    print(
        f"{model.num_parameters():,} parameters, {len(stream):,} training bytes, {len(held_out):,} held out", flush=True
    )

    curve = []
    running, started = 0.0, time.perf_counter()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        starts = torch.randint(0, len(stream) - TRAINED_LENGTH - 1, (BATCH,), generator=sampler)
        loss = mean_loss(model, windows(stream, starts).to(device))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running += loss.item()
        if (step + 1) % LOG_EVERY == 0:
            with torch.no_grad():
                held_out_bits = mean_loss(model, probe).item() / math.log(2)
            point = {
                "step": step + 1,
                "seconds": round(time.perf_counter() - started, 1),
                "train_bits_per_byte": round(running / LOG_EVERY / math.log(2), 4),
                "held_out_bits_per_byte": round(held_out_bits, 4),
            }
            curve.append(point)
            print(json.dumps(point), flush=True)
            running = 0.0
            if not math.isfinite(loss.item()):
                sys.exit(f"the loss is {loss.item()} at step {step + 1}; stopping")

    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    ByT5Tokenizer(extra_ids=0).save_pretrained(out)
    record = {
        "seed": SEED,
        "steps": STEPS,
        "batch": BATCH,
        "trained_length": TRAINED_LENGTH,
        "peak_learning_rate": PEAK_LEARNING_RATE,
        "training_bytes": len(stream),
        "device": device,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "curve": curve,
    }
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_card(out)


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
so that the effect of RoPE methods beyond the trained length can be seen and tested without a download. It writes
plausible Python and is of no other use.

## Training

`python -m rope_ext_hf.eval.train_reference --out DIR`, seed {seed}: {steps:,} steps of {batch} x {trained_length} bytes
(AdamW, peak learning rate {peak_learning_rate:g}, cosine to zero) on {training_bytes:,} bytes: the sources and
documentation of the standard library of Python {python}, less tests, encoding tables and the modules held out for
measurements: {held_out}.

The shipped weights were made on {device} with {threads} threads by torch {torch} in {minutes:.0f} minutes. At the end,
over whole windows of {trained_length} bytes: {train:.3f} bits per byte on training text, {held:.3f} on held-out text.

![loss curve](loss.png)

The text it was trained on is under the Python Software Foundation License; the weights are under Apache-2.0.
"""


def write_card(folder: Path) -> None:
    """The model card and its loss curve, from the folder's config.json and training.json."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    model = LlamaForCausalLM(config())
    curve = record["curve"]
    card = CARD.format(
        **record,
        parameters=model.num_parameters(),
        layers=model.config.num_hidden_layers,
        heads=model.config.num_attention_heads,
        kv_heads=model.config.num_key_value_heads,
        held_out=", ".join(f"`{name}`" for name in HELD_OUT),
        minutes=curve[-1]["seconds"] / 60,
        train=curve[-1]["train_bits_per_byte"],
        held=curve[-1]["held_out_bits_per_byte"],
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    figure = Figure(figsize=(6.4, 3.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    steps = [point["step"] for point in curve]
    axes.plot(steps, [point["train_bits_per_byte"] for point in curve], label="training text (mean of 100 steps)")
    axes.plot(steps, [point["held_out_bits_per_byte"] for point in curve], label="held-out text")
    axes.set(xlabel="step", ylabel="bits per byte", title="Training of the reference model")
    axes.grid(visible=True, axis="y", linewidth=0.4, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(folder / "loss.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="folder the model is written to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    train(arguments.out, arguments.device)


if __name__ == "__main__":
    main()
