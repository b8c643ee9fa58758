"""Attention-level methods against plain attention, by length: time and memory of one layer's attention.

    python benchmarks/attention.py [--lengths 1024,2048,4096,8192,16384,32768] [--pairs 3] [--plot docs/attention.png]
    python benchmarks/attention.py --device cuda [--dtype bfloat16]

Queries of 4 heads and keys of 1 in float32, on CUDA of 32 and 8 in bfloat16, 128 dims each, a trained length of 4,096
and the methods' own defaults. Prefill: all queries at once, against torch's scaled_dot_product_attention (causal,
grouped), and against the eager way of whole score matrices while those are below 4 GB; decode: one query. Single runs
are interleaved in pairs, a ratio is their median. What a forward works out once for all of its layers (the cosines) is
worked out before. Memory: the most bytes that live during the call, queries, keys, values and those cosines included.
The last line is JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from memory import most_bytes
from record import benchmark_parser, record
from stock import attention_kernels, heads_on, usual_dtype
from timing import timed
from torch.nn.functional import scaled_dot_product_attention

from rope_ext_hf.attention.blockwise import attend
from rope_ext_hf.attention.rules import Rotation, RotationTable, TokenPositions
from rope_ext_hf.methods.base import Rotary
from rope_ext_hf.methods.registry import resolve_method
from rope_ext_hf.methods.remapping import RemappingMethod
from rope_ext_hf.rotary.key_rotation import KeyLayout

HEADS_AND_KV_HEADS = (4, 1)  # on a CPU
DIM = 128
ROTARY = Rotary(dim=DIM, theta=10_000.0, trained_length=4096)
METHODS = ("rerope", "leaky-rerope", "self-extend", "dynamic-self-extend", "jet-long", "dca")
MOST_SCORES = 4 * 10**9  # bytes of a score matrix
MANY = 32_768  # tokens; a third of the pairs are read of that many

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Way = Callable[[], Callable[..., torch.Tensor]]  # makes a way anew, with nothing worked out yet


def inputs(tokens: int, count: int, device: str, dtype: torch.dtype) -> Tensors:
    torch.manual_seed(0)
    heads, kv_heads = heads_on(device, HEADS_AND_KV_HEADS)
    shapes = ((heads, tokens), (kv_heads, count), (kv_heads, count))
    query, key, value = (torch.randn(1, *shape, DIM, device=device, dtype=dtype) for shape in shapes)
    return query, key, value


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=query.shape[-2] > 1, enable_gqa=True)


def eager(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * DIM**-0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1, dtype=torch.float32).to(query.dtype) @ value


def rule(name: str, count: int) -> RemappingMethod | None:
    """The rule of a row of `count` tokens; None: it is read by plain attention."""
    method = resolve_method(name, ROTARY)
    assert isinstance(method, RemappingMethod)
    return method.bind(ROTARY, max(count, ROTARY.trained_length)).at_length(count)


def ours(name: str, count: int, device: str) -> Callable[..., torch.Tensor]:
    method = rule(name, count)
    assert method is not None
    rotation = Rotation(RotationTable(ROTARY.inv_freq()), KeyLayout("half", 0, DIM))
    positions = torch.arange(count, device=device)[None]
    calls = {tokens: TokenPositions(positions[:, count - tokens :], positions, (0,), None) for tokens in (1, count)}

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        call = calls[query.shape[-2]]
        return attend(method, rotation, call, query, key, value, DIM**-0.5)

    return run


def measured(what: str, ways: dict[str, Way], made: Tensors, pairs: int, device: str) -> list[dict[str, Any]]:
    """Time and memory of each way, and their ratios to plain attention."""

    def memory(make: Way) -> int:
        def anew() -> Callable[[], object]:
            run, copies = make(), [x.clone() for x in made]
            return lambda: run(*copies)

        return most_bytes(anew, device)

    plain(*made)  # warm
    plainly, rows = memory(lambda: plain), []
    for way, make in ways.items():
        run, times = make(), []
        run(*made)
        for pair in range(pairs):
            order = (plain, run) if pair % 2 else (run, plain)
            seconds = [(which, timed(partial(which, *made), device)) for which in order]
            mine, theirs = (next(time for which, time in seconds if which is wanted) for wanted in (run, plain))
            times.append((mine, theirs))
        most = plainly if way == "plain" else memory(make)
        row = {
            "what": what,
            "way": way,
            **({"kernel": attention_kernels(partial(plain, *made))} if way == "plain" else {}),
            "tokens": made[1].shape[-2],
            "seconds": round(statistics.median(mine for mine, _ in times), 5),
            "time": round(statistics.median(mine / theirs for mine, theirs in times), 3),
            "megabytes": round(most / 1e6, 1),
            "memory": round(most / plainly, 3),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw time and memory by length; a time is plain attention's times the ratio, which other work hardly changes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    prefills = [row for row in rows if row["what"] == "prefill"]
    plain_seconds = {row["tokens"]: row["seconds"] for row in prefills if row["way"] == "plain"}
    for axes, unit in zip(figure.subplots(1, 2), ("seconds", "MB"), strict=True):
        for way in dict.fromkeys(row["way"] for row in prefills):
            mine = [row for row in prefills if row["way"] == way]
            style = "k--" if way == "plain" else "k:" if way == "eager" else "o-"
            values = [r["megabytes"] if unit == "MB" else plain_seconds[r["tokens"]] * r["time"] for r in mine]
            axes.loglog([r["tokens"] for r in mine], values, style, label=way, markersize=4)
        axes.set_xlabel("tokens")
        axes.set_ylabel(f"{unit} of one layer's attention")
        ticks = sorted({row["tokens"] for row in rows})
        axes.set_xticks(ticks, [f"{tick // 1024}k" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--dtype", help="default: float32, on CUDA bfloat16")
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    device, dtype, rows = arguments.device, getattr(torch, arguments.dtype or usual_dtype(arguments.device)), []
    heads, kv_heads = heads_on(device, HEADS_AND_KV_HEADS)
    with torch.inference_mode():
        for count in (int(length) for length in arguments.lengths.split(",")):
            ways: dict[str, Way] = {"plain": lambda: plain}
            ways |= {name: partial(ours, name, count, device) for name in METHODS if rule(name, count)}
            if heads * count**2 * dtype.itemsize <= MOST_SCORES:
                ways["eager"] = lambda: eager
            made = inputs(count, count, device, dtype)
            rows += measured(
                "prefill", ways, made, arguments.pairs if count < MANY else max(1, arguments.pairs // 3), device
            )
            made = inputs(1, count, device, dtype)
            rows += measured(
                "decode", {way: ways[way] for way in METHODS if way in ways}, made, 20 * arguments.pairs, device
            )
    if arguments.plot is not None:
        draw(rows, arguments.plot)
    result = {
        "benchmark": "attention",
        "dtype": str(dtype).removeprefix("torch."),
        "heads": [heads, kv_heads],
        "rows": rows,
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
