"""Length-dependent RoPE with a cache, against transformers' own "dynamic": the cost of a step, the loss of text.

    python benchmarks/dynamic.py [--tokens 4096,8192] [--dtype bfloat16] [--device cuda] [--out results.jsonl]
    python benchmarks/dynamic.py --pairs 0                  # memory alone: it does not mind a busy machine
    python benchmarks/dynamic.py --text [--documents 24]

Cost: a model of random weights, of about 100 million in float32 with four heads of keys for twelve of queries, and with
twelve; on CUDA in bfloat16 with eight for 32, and with 32. Stock and patched share their weights, steps are interleaved
in pairs, a row is the median ratio patched / stock with its 95% bootstrap interval, and names the kernel of the stock
model's attention. `memory` is the ratio of the most bytes that live during a step, cache included and weights
not; it is a step at which "even" turns all keys. Text: the bundled model reads held-out text through its cache, one
token after another, to eight times its trained length; the loss per stretch of positions, and the difference paired by
window with its 95% interval. The last line is JSON.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from memory import most_bytes
from overhead import LAYERS, interleaved, random_model
from record import benchmark_parser, record
from stock import attention_kernels, heads_on, usual_dtype
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM

import rope_ext_hf as rope
from rope_ext_hf.reading.text.load import load
from rope_ext_hf.reading.text.tokenizing import tokenize
from rope_ext_hf.reference import path

TRAINED = 1024
HEADS_AND_KV_HEADS = (12, 4)  # on a CPU
RULES: dict[str, dict[str, Any]] = {
    "even": {"growth": "even"},
    "hf": {"growth": "hf", "factor": 8.0},
    "paper": {"growth": "paper"},
}


def stock_model(heads: int, kv_heads: int, layers: int, device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
    model = random_model(
        layers=layers,
        heads_and_kv_heads=(heads, kv_heads),
        max_position_embeddings=TRAINED,
        tie_word_embeddings=False,
        rope_parameters=rope_parameters,
    )
    return model.to(device, dtype)


def filled(which: LlamaForCausalLM, ids: torch.Tensor) -> Callable[[], object]:
    """A decode step onto a cache that holds ids."""
    cache = DynamicCache(config=which.config)
    for part in torch.split(ids, 1024, dim=1):
        which(part, past_key_values=cache, logits_to_keep=1)
    return lambda: which(ids[:, :1], past_key_values=cache)


def cost(stock: LlamaForCausalLM, tokens: int, pairs: int) -> list[dict[str, Any]]:
    device, kv_heads = str(stock.device), stock.config.num_key_value_heads
    shared = {id(tensor): tensor for tensor in stock.parameters()}
    ids = torch.randint(3, 200, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    rows = []
    with torch.inference_mode():
        theirs = most_bytes(partial(filled, stock, ids), device)
        kernel = attention_kernels(filled(stock, ids))
        for name, parameters in RULES.items():
            twin = rope.patch(copy.deepcopy(stock, shared), "dynamic-ntk", **parameters)
            row = {
                "rule": name,
                "key heads": kv_heads,
                "tokens": tokens,
                "dtype": str(stock.dtype).removeprefix("torch."),
            }
            row["kernel"] = kernel
            row["memory"] = round(most_bytes(partial(filled, twin, ids), device) / theirs, 4)
            if pairs:
                row |= interleaved(filled(stock, ids), filled(twin, ids), pairs, device)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def losses(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Per token, (windows, tokens - 1), read one token at a time through the cache."""
    cache, found = DynamicCache(config=model.config), []
    for at in range(windows.shape[1] - 1):
        logits = model(windows[:, at : at + 1], past_key_values=cache).logits[:, -1].float()
        found.append(torch.nn.functional.cross_entropy(logits, windows[:, at + 1], reduction="none"))
    return torch.stack(found, dim=1).double()


def text(documents: int, device: str) -> list[dict[str, Any]]:
    stock = AutoModelForCausalLM.from_pretrained(path(), dtype=torch.float32)
    trained = stock.config.max_position_embeddings
    length = 8 * trained + 1
    held_out = torch.cat([d.ids for d in tokenize(load("stdlib"), AutoTokenizer.from_pretrained(path()))])
    starts = torch.linspace(0, len(held_out) - length, documents).long().tolist()
    windows = torch.stack([held_out[start : start + length] for start in starts]).to(device)
    rows = []
    for factor in (2.0, 4.0, 8.0):
        stock.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": factor}
        plain = LlamaForCausalLM(stock.config).to(device).eval()
        plain.load_state_dict(stock.state_dict())
        with torch.inference_mode():
            theirs = losses(plain, windows)
            ours = losses(rope.patch(plain, "dynamic-ntk", growth="hf", factor=factor), windows)
        for low, high in ((0, 1), (1, 2), (2, 4), (4, 8)):
            span = slice(max(0, low * trained - 1), high * trained - 1)
            gaps = (ours - theirs)[:, span].mean(dim=1)
            draws = torch.randint(documents, (2000, documents), generator=torch.Generator().manual_seed(0))
            interval = torch.quantile(gaps[draws].mean(dim=1), torch.tensor([0.025, 0.975], dtype=torch.float64))
            rows.append(
                {
                    "factor": factor,
                    "positions": f"{low}x to {high}x",
                    "stock": round(theirs[:, span].mean().item(), 4),
                    "ours": round(ours[:, span].mean().item(), 4),
                    "difference": round(gaps.mean().item(), 4),
                    "interval": [round(value, 4) for value in interval.tolist()],
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--tokens", default="4096,8192")
    parser.add_argument("--pairs", type=int, default=60, help="0: no times")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model of random weights")
    parser.add_argument("--heads", type=int, help="of its queries; default: 12, on CUDA 32")
    parser.add_argument("--dtype", help="default: float32, on CUDA bfloat16")
    parser.add_argument("--text", action="store_true", help="the loss of text instead of the cost of steps")
    parser.add_argument("--documents", type=int, default=24, help="windows of text")
    arguments = parser.parse_args()
    device = arguments.device
    if arguments.text:
        rows = text(arguments.documents, device)
    else:
        lengths = [int(tokens) for tokens in arguments.tokens.split(",")]
        heads, grouped = heads_on(device, HEADS_AND_KV_HEADS, arguments.heads)
        dtype = getattr(torch, arguments.dtype or usual_dtype(device))
        rows = []
        for kv_heads in (grouped, heads):
            stock = stock_model(heads, kv_heads, arguments.layers, device, dtype)
            rows += [row for tokens in lengths for row in cost(stock, tokens, arguments.pairs)]
    result = {
        "benchmark": "dynamic text" if arguments.text else "dynamic",
        **({"documents": arguments.documents} if arguments.text else {}),
        "rows": rows,
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
