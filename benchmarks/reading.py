"""Time and memory of reading long text: in chunks, against the ordinary way, `model(ids, labels=ids)`.

    python benchmarks/reading.py [--lengths 2048,8192,32768] [--device cuda] [--out benchmarks/results.jsonl]
    python benchmarks/reading.py --position 1024,2048,4096,8192       # one pass against one pass per length

A random Llama with a vocabulary of 151,936 and grouped-query attention (32 query and 8 key/value heads of 128), in
float32, on CUDA in bfloat16, all tokens scored; a row names the kernel of the model's attention. Every run is a process
of its own, the two ways in turn; memory is the process's peak above what it held with the model loaded, less the keys
and values of all tokens. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from record import benchmark_parser, record
from stock import attention_kernels, usual_dtype

VOCABULARY = 151_936
OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "can't allocate memory")
"""What an error says where memory runs out; an illegal memory access is another matter."""

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


def build(device: str, dtype: str, longest: int, vocabulary: int) -> Any:
    """The model that everything here reads with: random weights, the same each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2816,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(device, getattr(torch, dtype)).eval()


def one(way: str, lengths: list[int], device: str, dtype: str, vocabulary: int) -> dict[str, Any]:
    """One run in this process: one way of reading the longest length, or all lengths."""
    from rope_ext_hf.eval import perplexity
    from rope_ext_hf.reading.scorer import TokenScorer
    from rope_ext_hf.reading.text.documents import Tokens

    length = max(lengths)
    model = build(device, dtype, length, vocabulary)
    ids = torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(1))
    scorer = TokenScorer(model)
    with torch.inference_mode():
        kernel = attention_kernels(lambda: model(ids[None, :64].to(device)))  # and first-use allocations of the kernels
        held = torch.cuda.memory_allocated() if device.startswith("cuda") else resident()
        started = time.perf_counter()
        with Peak(device) as peak:
            if way == "chunks":
                loss = scorer.losses(ids, 1).mean().item()
            elif way == "ordinary":
                batch = ids[None].to(device)
                loss = model(batch, labels=batch, use_cache=False).loss.item()
            else:
                document = Tokens("random", ids, tuple(range(1, length + 1)))
                # lengths that are measured together share a pass
                together = [lengths] if way == "position" else [[length] for length in lengths]
                for measured in together:
                    results = perplexity(model, [document], lengths=measured, protocol="same-start", bos=False)
                loss = results[-1].loss
        seconds = time.perf_counter() - started
    layers = 1 if scorer.by_layer else LAYERS  # whose keys and values are held at a time
    cache = 2 * layers * KV_HEADS * HEAD_DIM * length * model.dtype.itemsize
    above = peak.highest - held - (0 if way == "ordinary" else cache)
    return {"seconds": seconds, "megabytes": above / 1e6, "loss": loss, "chunked": scorer.chunked, "kernel": kernel}


def run(way: str, lengths: list[int], device: str, dtype: str, vocabulary: int) -> dict[str, Any] | None:
    """One run in a process of its own; None where it does not fit into memory."""
    command = [sys.executable, __file__, "--one", way, "--lengths", ",".join(map(str, lengths))]
    command += ["--device", device, "--dtype", dtype, "--vocabulary", str(vocabulary)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        if any(sign in done.stderr for sign in OUT_OF_MEMORY):
            return None
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(
    ways: tuple[str, str], lengths: list[int], pairs: int, device: str, dtype: str, vocabulary: int
) -> dict[str, Any]:
    """Two ways in turn; `ratio` is the median over pairs of the first one's time over the second's."""
    runs = [{way: run(way, lengths, device, dtype, vocabulary) for way in ways} for _ in range(pairs)]
    row: dict[str, Any] = {"lengths": lengths, "pairs": pairs}
    for way in ways:
        found = [r[way] for r in runs]
        fits = all(found)
        row[way] = {
            "seconds": round(statistics.median(f["seconds"] for f in found if f), 2) if fits else None,
            "megabytes": round(max(f["megabytes"] for f in found if f)) if fits else None,
            "loss": found[0]["loss"] if fits and found[0] else None,
        }
    ratios = [one["seconds"] / other["seconds"] for r in runs if (one := r[ways[0]]) and (other := r[ways[1]])]
    row["kernel"] = next((f["kernel"] for r in runs for f in r.values() if f), None)
    row["ratios"] = [round(ratio, 3) for ratio in ratios]
    row["ratio"] = round(statistics.median(ratios), 3) if ratios else None
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--position", help="lengths: one pass with the loss by position, against a pass per length")
    parser.add_argument("--dtype", help="default: float32, on CUDA bfloat16")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="tokens the model knows")
    parser.add_argument("--pairs", type=int, default=3, help="above 16,384 tokens one pair is run")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    lengths = [int(length) for length in (arguments.position or arguments.lengths).split(",")]
    device, dtype, vocabulary = arguments.device, arguments.dtype or usual_dtype(arguments.device), arguments.vocabulary
    if arguments.one:
        if device == "cpu":  # an error, rather than the end of the whole machine
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            free = int(next(line for line in lines if "MemAvailable" in line).split()[1])
            resource.setrlimit(resource.RLIMIT_AS, (free * 1000, free * 1000))
        print(json.dumps(one(arguments.one, lengths, device, dtype, vocabulary)))
        return
    if arguments.position:
        rows = [compare(("position", "separate"), lengths, arguments.pairs, device, dtype, vocabulary)]
    else:
        rows = [
            compare(("chunks", "ordinary"), [each], 1 if each > 16384 else arguments.pairs, device, dtype, vocabulary)
            for each in lengths
        ]
    result = {
        "benchmark": "reading",
        "dtype": dtype,
        "rows": rows,
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
