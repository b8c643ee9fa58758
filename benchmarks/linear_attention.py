"""Linear attention with RoPE against softmax attention: time and memory of one layer by length, and what models learn.

    python benchmarks/linear_attention.py [--lengths 1024,4096,16384,65536] [--rounds 1]
    python benchmarks/linear_attention.py --text [--steps 400] [--out benchmarks/results.jsonl]

One layer: 2 heads of 64 dims, float32, queries and keys rotated in every way. Prefill: all tokens, no gradients;
training: forward and backward, up to 16,384 tokens; decode: one token after so many, from a state or from all keys.
Softmax attention is torch's scaled_dot_product_attention. In a round every way runs once, in an order that rotates; a
ratio is the median over rounds (from 32,768 tokens on one round). On a CPU time is processor time, over all threads,
which other work on the machine changes little. Memory: the most bytes that live during the call, its
inputs included.

--text: small models over bytes that differ in their attention alone, trained on the text of the reference model at 256
bytes from one seed, and read beyond that: the same held-out bytes are scored at every length. The last line is JSON.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from memory import most_bytes
from record import benchmark_parser, record
from timing import timed as timed_on_device
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention
from train_reference import BYTE_OFFSET, encode
from training import in_bits, take_steps
from training_text import stdlib_training

import rope_ext_hf as rope
from rope_ext_hf.reading.text.load import stdlib_held_out
from rope_ext_hf.tools import modules

HEADS, DIM = 2, 64
KERNELS = ("elu", "relu", "cosine")
MANY = 32_768  # tokens; from here on one round
MOST_TRAINING = 16_384  # tokens of a forward and backward

SEED = 0
TRAINED_LENGTH, BATCH, WIDTH, LAYERS, TEXT_HEADS = 256, 8, 128, 2, 4
TEXT_LENGTHS = (256, 512, 1024, 2048)
TARGETS, SPANS = 128, 24  # bytes that are scored in a span, and spans
PEAK_LEARNING_RATE = 3e-3

Way = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # query, key, value, cos, sin


# --- cost ---------------------------------------------------------------------------------------------------------


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rope.apply_rotary_pos_emb(x.transpose(1, 2), cos, sin).transpose(1, 2)


def softmax(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return scaled_dot_product_attention(rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True)


def linear(kernel: str) -> Way:
    return partial(modules.linear_attention, kernel=kernel)


def inputs(tokens: int, device: str) -> list[Tensor]:
    torch.manual_seed(SEED)
    made = [torch.randn(1, HEADS, tokens, DIM, device=device) for _ in range(3)]
    table = rope.RotaryEmbedding("default", rope.Rotary(DIM, 10_000.0, TRAINED_LENGTH)).to(device)
    return [*made, *table(made[0], torch.arange(tokens, device=device)[None])]


def prefill(way: str, made: list[Tensor]) -> Callable[[], object]:
    run = softmax if way == "softmax" else linear(way)
    made = [x.clone() for x in made]

    @torch.inference_mode()
    def once() -> object:
        return run(*made)

    return once


def training(way: str, made: list[Tensor]) -> Callable[[], object]:
    run = softmax if way == "softmax" else linear(way)
    made = [*(x.clone().requires_grad_() for x in made[:3]), *made[3:]]

    def once() -> object:
        return torch.autograd.grad(run(*made).sum(), made[:3])

    return once


def decode(way: str, made: list[Tensor]) -> Callable[[], object]:
    """One token after the others."""
    query, key, value, cos, sin = made
    with torch.inference_mode():
        last = [x[:, :, -1:].clone() for x in (query, key, value)] + [x[:, -1:].clone() for x in (cos, sin)]
        if way == "softmax":
            cached = [rotate(key, cos, sin)[:, :, :-1], value[:, :, :-1]]
        else:
            before = modules.LinearAttentionState()
            linear(way)(*(x[:, :, :-1] for x in (query, key, value)), cos[:, :-1], sin[:, :-1], state=before)

    @torch.inference_mode()
    def once() -> object:
        if way != "softmax":
            return linear(way)(*last, state=copy.copy(before))
        query, key, value, cos, sin = last
        keys = torch.cat((cached[0], rotate(key, cos, sin)), 2)
        return scaled_dot_product_attention(rotate(query, cos, sin), keys, torch.cat((cached[1], value), 2))

    return once


def timed(run: Callable[[], object], device: str) -> float:
    """Seconds of one run."""
    if device != "cpu":
        return timed_on_device(run, device)
    started = time.process_time()
    run()
    return time.process_time() - started


WHAT = {"prefill": prefill, "training": training, "decode": decode}


def measured(what: str, tokens: int, rounds: int, device: str) -> list[dict[str, Any]]:
    """Time and memory of each kernel, and their ratios to softmax attention."""
    made = inputs(tokens, device)
    bytes_of = {way: most_bytes(partial(WHAT[what], way, made), device) for way in ("softmax", *KERNELS)}
    runs = {way: WHAT[what](way, made) for way in bytes_of}
    ways = list(runs)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds):
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            seconds[way].append(timed(runs[way], device))
    rows = []
    for way in KERNELS:
        ratios = [mine / theirs for mine, theirs in zip(seconds[way], seconds["softmax"], strict=True)]
        rows.append(
            {
                "what": what,
                "kernel": way,
                "tokens": tokens,
                "seconds": round(statistics.median(seconds[way]), 6),
                "time": round(statistics.median(ratios), 4),
                "megabytes": round(bytes_of[way] / 1e6, 2),
                "memory": round(bytes_of[way] / bytes_of["softmax"], 4),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


# --- text ---------------------------------------------------------------------------------------------------------


def unrotated(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return modules.linear_attention(query, key, value, torch.ones_like(cos), torch.zeros_like(sin), kernel="elu")


TEXT_WAYS: dict[str, Way] = {
    "softmax": softmax,
    **{kernel: linear(kernel) for kernel in KERNELS},
    "elu, not rotated": unrotated,
}


class Layer(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        split = self.qkv(self.norms[0](x)).unflatten(-1, (3, TEXT_HEADS, -1)).transpose(1, 3)
        x = x + self.out(self.way(*split.unbind(2), cos, sin).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Bytes(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.embed = nn.Embedding(256 + BYTE_OFFSET, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.rotary = rope.RotaryEmbedding("default", rope.Rotary(WIDTH // TEXT_HEADS, 10_000.0, TRAINED_LENGTH))
        self.layers = nn.ModuleList(Layer(way) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        cos, sin = self.rotary(x, torch.arange(ids.shape[1], device=ids.device)[None])
        for layer in self.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.norm(x), self.embed.weight)


def loss_of(model: nn.Module, batch: Tensor, targets: int) -> Tensor:
    logits = model(batch[:, :-1])[:, -targets:]
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, -targets:].flatten())


def trained(way: Way, stream: Tensor, steps: int, device: str) -> nn.Module:
    torch.manual_seed(SEED)
    model = Bytes(way).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LEARNING_RATE, total_steps=steps, pct_start=0.1)
    sampler = torch.Generator().manual_seed(SEED)

    def loss_of_step() -> Tensor:
        starts = torch.randint(0, len(stream) - TRAINED_LENGTH - 1, (BATCH, 1), generator=sampler)
        return loss_of(model, stream[starts + torch.arange(TRAINED_LENGTH + 1)].long().to(device), TRAINED_LENGTH)

    take_steps(optimizer, schedule, steps, loss_of_step, every=50, words=in_bits)
    return model.eval()


@torch.inference_mode()
def bits_per_byte(model: nn.Module, held_out: Tensor, length: int, device: str) -> float:
    """Over the last bytes of spans that end at the same places at every length."""
    ends = torch.linspace(max(TEXT_LENGTHS) + 1, len(held_out), SPANS).long()
    losses = [loss_of(model, held_out[end - length - 1 : end].long()[None].to(device), TARGETS) for end in ends]
    return statistics.mean(loss.item() for loss in losses) / math.log(2)


def text(steps: int, device: str) -> dict[str, Any]:
    stream, held_out = encode(stdlib_training()), encode(stdlib_held_out())
    rows, parameters = [], 0
    for name, way in TEXT_WAYS.items():
        started = time.perf_counter()
        model = trained(way, stream, steps, device)
        parameters = sum(p.numel() for p in model.parameters())
        row: dict[str, Any] = {"attention": name, "seconds": round(time.perf_counter() - started)}
        row |= {str(length): round(bits_per_byte(model, held_out, length, device), 4) for length in TEXT_LENGTHS}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return {
        "benchmark": "linear attention text",
        "parameters": parameters,
        "steps": steps,
        "batch": BATCH,
        "trained_length": TRAINED_LENGTH,
        "scored_bytes": SPANS * TARGETS,
        "rows": rows,
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--lengths", default="1024,4096,16384,65536")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--text", action="store_true", help="train small models instead")
    parser.add_argument("--steps", type=int, default=400, help="of their training")
    arguments = parser.parse_args()
    if arguments.text:
        result = text(arguments.steps, arguments.device)
    else:
        rows = []
        for tokens in (int(length) for length in arguments.lengths.split(",")):
            for what in WHAT:
                if what == "decode":
                    rows += measured(what, tokens, 20 * arguments.rounds, arguments.device)
                elif what == "prefill" or tokens <= MOST_TRAINING:
                    rows += measured(what, tokens, arguments.rounds if tokens < MANY else 1, arguments.device)
        result = {"benchmark": "linear attention", "dtype": "float32", "rows": rows}
    record(result, arguments)


if __name__ == "__main__":
    main()
