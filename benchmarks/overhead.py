"""What a patch costs: prefill and decode of a patched model against the stock model, in interleaved pairs.

    python benchmarks/overhead.py [--device cuda] [--out benchmarks/results.jsonl]

The patched model is a copy that shares its weights with the stock one, so that both read the same memory; which of a
pair runs first alternates. A row is the median ratio patched / stock with its 95% bootstrap interval. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import record, usual_dtype
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.reference import path

METHOD: dict[str, Any] = {"method": "yarn", "factor": 8.0}
PREFILL = 2048


def random_model(layers: int = 12, hidden: int = 768) -> LlamaForCausalLM:
    """About 100 million random parameters with the default 12 layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 192,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def timed(run: Callable[[], object], device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - started


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


def measure(name: str, model: LlamaForCausalLM, pairs: int, device: str) -> list[dict[str, Any]]:
    model = model.to(device)
    ids = torch.randint(3, 200, (1, PREFILL), generator=torch.Generator().manual_seed(0)).to(device)
    shared = {id(tensor): tensor for tensor in model.parameters()}
    twin = rope.patch(copy.deepcopy(model, shared), **METHOD)

    def prefill(which: LlamaForCausalLM) -> Callable[[], object]:
        return lambda: which(ids, use_cache=False, logits_to_keep=1)

    def decode(which: LlamaForCausalLM) -> Callable[[], object]:
        cache = DynamicCache(config=which.config)
        which(ids, past_key_values=cache, logits_to_keep=1)

        def step() -> None:
            which(ids[:, :1], past_key_values=cache)
            cache.crop(-1)

        return step

    with torch.inference_mode():
        whole = interleaved(prefill(model), prefill(twin), pairs, device)
        step = interleaved(decode(model), decode(twin), max(pairs, 400), device)
    parameters = model.num_parameters()
    rows = [{"what": f"prefill {PREFILL}", **whole}, {"what": f"decode at {PREFILL}", **step}]
    return [{"model": name, "parameters": parameters, **row} for row in rows]


def patch_milliseconds() -> float:
    """Median time to patch a live model of 32 layers."""
    model = random_model(layers=32, hidden=384)
    seconds = []
    for _ in range(15):
        seconds.append(timed(lambda: rope.patch(model, **METHOD), "cpu"))
        rope.unpatch(model)
    return round(1000 * statistics.median(seconds), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="default: float32, on CUDA bfloat16")
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    arguments = parser.parse_args()
    name = arguments.dtype or usual_dtype(arguments.device)
    dtype = getattr(torch, name)
    bundled = AutoModelForCausalLM.from_pretrained(path(), dtype=dtype).eval()
    rows = measure("bundled", bundled, max(arguments.pairs, 60), arguments.device)
    rows += measure("random", random_model().to(dtype), arguments.pairs, arguments.device)
    for row in rows:
        print(
            f"{row['model']:8} {row['parameters']:>12,}  {row['what']:15} {row['ratio']:.3f} "
            f"[{row['low']:.3f}, {row['high']:.3f}] of {1000 * row['stock_seconds']:.2f} ms"
        )
    result = {
        "benchmark": "overhead",
        "method": METHOD,
        "dtype": name,
        "rows": rows,
        "patch_32_layers_ms": patch_milliseconds(),
        "threads": torch.get_num_threads(),
    }
    record(result, arguments.out, arguments.device)


if __name__ == "__main__":
    main()
