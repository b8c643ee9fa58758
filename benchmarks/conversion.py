"""Time and memory of converting a checkpoint from one RoPE layout to the other, against copying its folder.

    python benchmarks/conversion.py [--gigabytes 4] [--pairs 3] [--folder /somewhere] [--out benchmarks/results.jsonl]

A Llama with grouped-query attention (16 query and 4 key heads of 128, bfloat16, several parts) made of random numbers
in a temporary folder. They are finite: the detection that comes before a conversion stops at the first layer with NaN.
In turn, with the source in the page cache and nothing else waiting for the disk: one process that
converts (`convert_checkpoint`, on disk when it ends), and one that calls `cp -r` followed by `sync`; either first in
every other pair, and one of each beforehand that does not count. Both import torch and transformers before they begin:
meanwhile a virtual machine gives memory that the run before has freed back to its host, and who writes first afterwards
pays for it. `ratio` compares the calls; start and imports (`import_seconds`) take the same for any size. Memory is the
process's peak (ru_maxrss), imports included, and the peak of one that loads the model. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from record import benchmark_parser, record

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2048, 7168, 16, 4, 128, 32_000
PART = 10**9  # bytes of a weight file, at most
LIMIT_RATIO, LIMIT_TENSORS, LIMIT_MEGABYTES = 1.3, 3, 300


def make(folder: Path, size: int) -> int:
    """Write the checkpoint; returns the bytes of its largest tensor."""
    import torch
    from transformers import LlamaConfig

    from rope_ext_hf.checkpoints.files.numbers import TensorInfo
    from rope_ext_hf.checkpoints.files.weight_files import write_safetensors

    heads, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    layer = {
        "self_attn.q_proj": (heads, HIDDEN),
        "self_attn.k_proj": (keys, HIDDEN),
        "self_attn.v_proj": (keys, HIDDEN),
        "self_attn.o_proj": (HIDDEN, heads),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
    }
    per_layer = 2 * sum(math.prod(shape) for shape in layer.values())
    layers = max(1, round((size - 2 * 2 * VOCABULARY * HIDDEN) / per_layer))
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    infos = {name: TensorInfo.from_shape("BF16", shape) for name, shape in shapes.items()}
    largest = max(info.size for info in infos.values())
    noise = torch.randn(largest // 2, dtype=torch.bfloat16)
    parts: list[dict[str, TensorInfo]] = [{}]
    room = most = min(PART, sum(info.size for info in infos.values()) // 3)
    for name, info in infos.items():
        if parts[-1] and info.size > room:
            parts.append({})
            room = most
        parts[-1][name] = info
        room -= info.size
    where = {}
    for i, part in enumerate(parts, 1):
        file = f"model-{i:05}-of-{len(parts):05}.safetensors"
        where |= dict.fromkeys(part, file)
        write_safetensors(
            folder / file,
            part,
            lambda name: noise[: math.prod(shapes[name])].view(shapes[name]),
            lambda count: None,
        )
    index = {"metadata": {"total_size": sum(info.size for info in infos.values())}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
    ).save_pretrained(folder)
    return largest


def one(way: str, source: Path, target: Path) -> dict[str, Any]:
    """Convert one checkpoint, in a process of its own, and return its time and memory."""
    import transformers

    from rope_ext_hf.checkpoints.conversion import convert_checkpoint

    model = transformers.LlamaForCausalLM  # imports the class
    started = time.perf_counter()
    if way == "copy":
        subprocess.run(["sh", "-c", 'cp -r "$1" "$2" && sync', "sh", str(source), str(target)], check=True)
    elif way == "convert":
        warnings.simplefilter("ignore")
        convert_checkpoint(source, target, "interleaved")
    else:
        loaded = model.from_pretrained(source, dtype="auto")
        for parameter in loaded.parameters():
            parameter.view(-1).sum()  # loads it: before, it is memory-mapped
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"call": time.perf_counter() - started, "megabytes": peak / 1e6}


def run(way: str, source: Path, target: Path) -> dict[str, Any]:
    """One process, from its start to its end."""
    command = [sys.executable, __file__, "--one", way, "--folder", str(source), "--target", str(target)]
    os.sync()
    for path in source.iterdir():  # read into the page cache
        with path.open("rb") as file:
            while file.read(2**24):
                pass
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(done.stderr)
    shutil.rmtree(target, ignore_errors=True)
    return {"seconds": seconds} | json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = benchmark_parser(__doc__, on_device=False)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made; default: the system's place")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(arguments.one, arguments.folder, arguments.target)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        source, target = Path(temporary, "source"), Path(temporary, "target")
        source.mkdir()
        largest = make(source, int(arguments.gigabytes * 1e9))
        size = sum(path.stat().st_size for path in source.iterdir())
        parts = len(list(source.glob("*.safetensors")))
        ways, pairs = ["convert", "copy"], []
        for way in ways:
            run(way, source, target)  # a disk's first writes to a place may take several times as long
        for _ in range(arguments.pairs):
            pair = {way: run(way, source, target) for way in ways}
            pairs.append(pair)
            ways.reverse()
            print(json.dumps(pair), flush=True)
        loaded = run("load", source, target)
    peak = max(pair["convert"]["megabytes"] for pair in pairs)
    ratios = [pair["convert"]["call"] / pair["copy"]["call"] for pair in pairs]
    most = LIMIT_TENSORS * largest / 1e6 + LIMIT_MEGABYTES
    result = {
        "benchmark": "conversion",
        "gigabytes": round(size / 1e9, 2),
        "parts": parts,
        "largest_tensor_megabytes": round(largest / 1e6),
        "convert_seconds": [round(pair["convert"]["call"], 2) for pair in pairs],
        "copy_seconds": [round(pair["copy"]["call"], 2) for pair in pairs],
        "import_seconds": round(statistics.median(p["convert"]["seconds"] - p["convert"]["call"] for p in pairs), 2),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 3),
        "fast_enough": statistics.median(ratios) <= LIMIT_RATIO,
        "convert_megabytes": round(peak),
        "allowed_megabytes": round(most),
        "small_enough": peak <= most,
        "load_megabytes": round(loaded["megabytes"]),
        "cores": os.cpu_count(),
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
