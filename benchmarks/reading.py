"""Time and memory of reading long text: in chunks, against the ordinary way, `model(ids, labels=ids)`.

    python benchmarks/reading.py [--lengths 2048,8192,32768] [--device cuda] [--out benchmarks/results.jsonl]

A random Llama with a vocabulary of 151,936 and grouped-query attention (32 query and 8 key/value heads of 128), all
tokens scored. Every run is a process of its own, the two ways in turn; memory is the process's peak above what it held
with the model loaded, less the keys and values of all tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 151_936
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 2, 32, 8, 128, 1024


def resident() -> int:
    """Bytes of memory this process holds now."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * resource.getpagesize()


class Peak:
    """The highest memory use between entering and leaving, sampled on the CPU, exact on CUDA."""

    def __init__(self, device: str) -> None:
        self.device, self.highest, self.stop = device, 0, threading.Event()

    def _watch(self) -> None:
        while not self.stop.wait(0.002):
            self.highest = max(self.highest, resident())

    def __enter__(self) -> Peak:
        if self.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        else:
            self.thread = threading.Thread(target=self._watch)
            self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
            self.highest = torch.cuda.max_memory_allocated()
        else:
            self.stop.set()
            self.thread.join()


def one(way: str, length: int, device: str, dtype: str) -> dict[str, Any]:
    """One run in this process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from rope_ext_hf.eval.reading import Reader

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=2816,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=length,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).to(device, getattr(torch, dtype)).eval()
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(1))
    reader = Reader(model)
    with torch.inference_mode():
        model(ids[None, :64].to(device))  # first-use allocations of the kernels
        held = torch.cuda.memory_allocated() if device.startswith("cuda") else resident()
        started = time.perf_counter()
        with Peak(device) as peak:
            if way == "chunks":
                loss = reader.losses(ids, 1).mean().item()
            else:
                batch = ids[None].to(device)
                loss = model(batch, labels=batch, use_cache=False).loss.item()
        seconds = time.perf_counter() - started
    cache = 2 * LAYERS * KV_HEADS * HEAD_DIM * length * ids.new_empty(0, dtype=model.dtype).element_size()
    above = peak.highest - held - (cache if way == "chunks" else 0)
    return {"seconds": seconds, "megabytes": above / 1e6, "loss": loss, "chunked": reader.chunked}


def run(way: str, length: int, device: str, dtype: str) -> dict[str, Any] | None:
    """One run in a process of its own; None where it does not fit into memory."""
    command = [sys.executable, __file__, "--one", way, "--lengths", str(length), "--device", device, "--dtype", dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    if arguments.one:
        if arguments.device == "cpu":  # an error, rather than the end of the whole machine
            free = int(
                next(x for x in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in x).split()[1]
            )
            resource.setrlimit(resource.RLIMIT_AS, (free * 1000, free * 1000))
        print(json.dumps(one(arguments.one, lengths[0], arguments.device, arguments.dtype)))
        return
    rows = []
    for length in lengths:
        pairs = 1 if length > 16384 else arguments.pairs
        runs = [
            {way: run(way, length, arguments.device, arguments.dtype) for way in ("chunks", "ordinary")}
            for _ in range(pairs)
        ]
        row: dict[str, Any] = {"length": length, "pairs": pairs}
        for way in ("chunks", "ordinary"):
            found = [r[way] for r in runs if r[way] is not None]
            fits = len(found) == pairs
            row[way] = {
                "seconds": round(statistics.median(f["seconds"] for f in found), 2) if fits else None,
                "megabytes": round(max(f["megabytes"] for f in found)) if fits else None,
                "loss": found[0]["loss"] if fits else None,
            }
        both = row["ordinary"]["seconds"] is not None
        row["ratio"] = (
            round(statistics.median(r["chunks"]["seconds"] / r["ordinary"]["seconds"] for r in runs), 3)
            if both
            else None
        )
        rows.append(row)
        print(json.dumps(row), flush=True)
    result = {
        "benchmark": "reading",
        "dtype": arguments.dtype,
        "rows": rows,
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else platform.machine(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("rope-ext-hf", "torch", "transformers")},
    }
    line = json.dumps(result)
    if arguments.out:
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
