"""Overhead of a patch: prefill and decode of a patched model against the stock model, in interleaved pairs.

    python benchmarks/overhead.py [--methods yarn,jet-long] [--device cuda] [--out benchmarks/results.jsonl]
    python benchmarks/overhead.py --model SmolLM2-135M-Instruct --layers 2 --tokens 16384 --dtype bfloat16

The bundled model, and random weights: in float32 with 12 heads of queries and 4 of keys, on CUDA in bfloat16 with 32
and 8. With --model, a pretrained model in their place; its first few layers are enough where all layers are alike. The
patched model is a copy that shares its weights with the stock one, so that both read the same memory; which of a pair
runs first alternates. A row is the median ratio patched / stock with its 95% bootstrap interval, and names the kernel
of the stock model's attention. Methods that take a factor have the factor 8, the others are fitted to twice the tokens;
these lie beyond the context lengths of the bundled model (256) and of the random weights (512). `memory` is the ratio
of the most bytes that live during the forward, cache included and weights not. The last line is JSON.
"""

from __future__ import annotations

import copy
import random
import statistics
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from memory import most_bytes
from record import benchmark_parser, record
from stock import attention_kernels, heads_on, usual_dtype
from timing import timed
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.reference import path

FACTOR = 8.0
PREFILL = 2048
LAYERS = 12
HEADS_AND_KV_HEADS = (12, 4)  # on a CPU


def random_model(
    layers: int = LAYERS, heads_and_kv_heads: tuple[int, int] = HEADS_AND_KV_HEADS, **settings: Any
) -> LlamaForCausalLM:
    """Random weights, heads of 64 dims: about 100 million parameters with the defaults; further keys of the config."""
    torch.manual_seed(0)
    heads, kv_heads = heads_and_kv_heads
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=heads * 64,
        intermediate_size=heads * 64 * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        **{"max_position_embeddings": 512, "tie_word_embeddings": True, **settings},
    )
    return LlamaForCausalLM(config).eval()


def interleaved(stock: Callable[[], object], patched: Callable[[], object], pairs: int, device: str) -> dict[str, Any]:
    """Ratios patched / stock over pairs of single runs."""
    runs = {True: patched, False: stock}
    for run in (stock, patched) * 3:
        run()
    ratios, stock_seconds = [], []
    for pair in range(pairs):
        seconds = {which: timed(runs[which], device) for which in ((True, False) if pair % 2 else (False, True))}
        ratios.append(seconds[True] / seconds[False])
        stock_seconds.append(seconds[False])
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=pairs)) for _ in range(2000))
    return {
        "pairs": pairs,
        "stock_seconds": round(statistics.median(stock_seconds), 6),
        "ratio": round(statistics.median(ratios), 4),
        "low": round(medians[50], 4),
        "high": round(medians[1949], 4),
    }


def settings(method: str, tokens: int) -> dict[str, Any]:
    """Return the arguments for `patch`."""
    by_factor = "factor" in {field.name for field in fields(rope.list_methods()[method])}
    return {"method": method} | ({"factor": FACTOR} if by_factor else {"target_length": 2 * tokens})


def measure(
    name: str, model: LlamaForCausalLM, methods: list[str], tokens: int, pairs: tuple[int, int], device: str
) -> list[dict[str, Any]]:
    """Two rows for each method; `pairs` of prefills and of decoding steps."""
    model = model.to(device)
    ids = torch.randint(3, 200, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    shared = {id(tensor): tensor for tensor in model.parameters()}

    def prefill(which: LlamaForCausalLM) -> Callable[[], object]:
        return lambda: which(ids, use_cache=False, logits_to_keep=1)

    def decode(which: LlamaForCausalLM) -> Callable[[], object]:
        cache = DynamicCache(config=which.config)
        which(ids, past_key_values=cache, logits_to_keep=1)

        def step() -> None:
            which(ids[:, :1], past_key_values=cache)
            cache.crop(-1)

        return step

    rows = []
    with torch.inference_mode():
        for what, make, count in (
            (f"prefill {tokens}", prefill, pairs[0]),
            (f"decode at {tokens}", decode, pairs[1]),
        ):
            stock, theirs = make(model), most_bytes(partial(make, model), device)
            for method in methods:
                twin = rope.patch(copy.deepcopy(model, dict(shared)), **settings(method, tokens))
                row = {"model": name, "parameters": model.num_parameters(), "what": what, "method": method}
                row["kernel"] = attention_kernels(stock)
                row["memory"] = round(most_bytes(partial(make, twin), device) / theirs, 4)
                row |= interleaved(stock, make(twin), count, device)
                rows.append(row)
                print(
                    f"{name:8} {what:15} {method:20} {row['ratio']:.3f} [{row['low']:.3f}, {row['high']:.3f}] of "
                    f"{1000 * row['stock_seconds']:.2f} ms, memory {row['memory']:.3f}",
                    flush=True,
                )
    return rows


def patch_milliseconds() -> float:
    """Median time to patch a live model of 32 layers."""
    model = random_model(layers=32, heads_and_kv_heads=(6, 2))
    seconds = []
    for _ in range(15):
        seconds.append(timed(lambda: rope.patch(model, "yarn", factor=FACTOR), "cpu"))
        rope.unpatch(model)
    return round(1000 * statistics.median(seconds), 2)


def usual_models(dtype: torch.dtype, layers: int, heads: tuple[int, int]) -> dict[str, tuple[Any, int]]:
    """The two models that are measured by default, by name, each with its number of pairs of prefills."""
    bundled = AutoModelForCausalLM.from_pretrained(path(), dtype=dtype).eval()
    return {"bundled": (bundled, 40), "random": (random_model(layers, heads).to(dtype), 12)}


def pretrained(name: str, layers: int | None, dtype: torch.dtype) -> dict[str, tuple[Any, int]]:
    """A pretrained model by the name of its folder, cut to its first layers, with its number of pairs of prefills."""
    cut = {"num_hidden_layers": layers} if layers else {}
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **cut).eval()
    return {Path(name).name + (f", {layers} layers" if layers else ""): (model, 12)}


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--dtype", help="default: float32, on CUDA bfloat16")
    parser.add_argument("--methods", default="yarn", help="names, separated by commas")
    parser.add_argument("--pairs", type=int, help="default: 12 prefills, of the bundled model 40, and 400 steps")
    parser.add_argument("--tokens", type=int, default=PREFILL)
    parser.add_argument("--model", help="a folder or a Hub id, in place of the bundled model and random weights")
    parser.add_argument("--layers", type=int, help="of the random weights (default: 12), or the first ones of --model")
    parser.add_argument("--heads", type=int, help="of its queries; default: 12, on CUDA 32")
    arguments = parser.parse_args()
    name = arguments.dtype or usual_dtype(arguments.device)
    dtype = getattr(torch, name)
    pairs, device, methods = arguments.pairs, arguments.device, arguments.methods.split(",")
    heads = heads_on(device, HEADS_AND_KV_HEADS, arguments.heads)
    models = (
        pretrained(arguments.model, arguments.layers, dtype)
        if arguments.model
        else usual_models(dtype, arguments.layers or LAYERS, heads)
    )
    rows = []
    for which, (model, prefills) in models.items():
        rows += measure(which, model, methods, arguments.tokens, (pairs or prefills, pairs or 400), device)
    result = {
        "benchmark": "overhead",
        "dtype": name,
        "rows": rows,
        "patch_32_layers_ms": patch_milliseconds(),
    }
    if not arguments.model:
        result["heads"] = list(heads)
    else:
        options = f"--layers {arguments.layers} " if arguments.layers else ""
        options += f"--tokens {arguments.tokens} --dtype {name}"
        result |= {"model": Path(arguments.model).name, "options": f" --model {Path(arguments.model).name} {options}"}
    record(result, arguments)


if __name__ == "__main__":
    main()
