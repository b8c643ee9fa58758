"""Time and memory of converting and detecting a checkpoint, against copying its folder.

    python benchmarks/conversion.py [--gigabytes 1.34] [--rounds 5] [--folder /somewhere] [--out results.jsonl]

A Llama with grouped-query attention (16 query and 4 key heads of 128, bfloat16, several parts) made of random numbers
in a temporary folder. They are finite: the detection that comes before a conversion stops at the first layer with NaN.
In turn, with the source in the page cache and nothing else waiting for the disk: the commands `rope-ext convert` (on
disk when it ends) and `rope-ext detect`, and `cp -r` followed by `sync` of the copy. The first round does not count.
Seconds are of the whole command, from the start of Python; the least of all rounds counts, because whatever else the
machine does only adds to them. Processor time includes children. Memory is the largest that the system counts as the
process's own (RssAnon, where pages of files are left out). The last line is JSON.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from record import benchmark_parser, record

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2048, 7168, 16, 4, 128, 32_000
PART = 10**9  # bytes of a weight file, at most
CONVERT_RATIO, CONVERT_SECONDS, CONVERT_MEGABYTES, DETECT_SECONDS = 1.1, 1.2, 80, 1.0  # the goals


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


def command_of(way: str, source: Path, target: Path) -> list[str]:
    program = [sys.executable, "-m", "rope_ext_hf"]
    commands = {
        "convert": [*program, "convert", str(source), str(target), "--to", "interleaved"],
        "detect": [*program, "detect", str(source)],
        "copy": ["sh", "-c", 'cp -r "$1" "$2" && sync "$2"/*', "sh", str(source), str(target)],
    }
    return commands[way]


def run(way: str, source: Path, target: Path) -> dict[str, float]:
    """Run one command: its seconds, its seconds of the processor, and the peak of its own memory in megabytes."""
    os.sync()
    for path in source.iterdir():  # read into the page cache
        with path.open("rb") as file:
            while file.read(2**24):
                pass
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started, peak = time.perf_counter(), 0
    # An installation has compiled modules; with this variable every command would compile them again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command, silent = command_of(way, source, target), subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=silent, stderr=silent, env=environment)
    while process.poll() is None:
        with suppress(OSError):  # it has ended
            lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
            peak = max([peak, *(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))])
        time.sleep(0.002)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise RuntimeError(f"{way} ended with the exit code {process.returncode}")
    shutil.rmtree(target, ignore_errors=True)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu": used, "megabytes": peak * 1024 / 1e6}


def main() -> None:
    parser = benchmark_parser(__doc__, on_device=False)
    parser.add_argument("--gigabytes", type=float, default=1.34)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made; default: the system's place")
    arguments = parser.parse_args()
    ways = ["convert", "copy", "detect"]
    rounds: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        source, target = Path(temporary, "source"), Path(temporary, "target")
        source.mkdir()
        make(source, int(arguments.gigabytes * 1e9))
        size = sum(path.stat().st_size for path in source.iterdir())
        parts = len(list(source.glob("*.safetensors")))
        for way in ways:
            run(way, source, target)  # a disk's first writes to a place may take several times as long
        for _ in range(arguments.rounds):
            rounds.append({way: run(way, source, target) for way in ways})
            ways.reverse()
            print(json.dumps(rounds[-1]), flush=True)
    least = {way: {key: min(each[way][key] for each in rounds) for key in ("seconds", "cpu")} for way in ways}
    peak = {way: max(each[way]["megabytes"] for each in rounds) for way in ways}
    ratio = least["convert"]["seconds"] / least["copy"]["seconds"]
    result = {
        "benchmark": "conversion",
        "gigabytes": round(size / 1e9, 2),
        "parts": parts,
        "rounds": arguments.rounds,
        "convert_seconds": round(least["convert"]["seconds"], 2),
        "copy_seconds": round(least["copy"]["seconds"], 2),
        "detect_seconds": round(least["detect"]["seconds"], 2),
        "ratio": round(ratio, 2),
        "convert_cpu": round(least["convert"]["cpu"], 2),
        "copy_cpu": round(least["copy"]["cpu"], 2),
        "detect_cpu": round(least["detect"]["cpu"], 2),
        "convert_megabytes": round(peak["convert"]),
        "detect_megabytes": round(peak["detect"]),
        "fast_enough": ratio <= CONVERT_RATIO
        and least["convert"]["cpu"] <= CONVERT_SECONDS
        and least["detect"]["cpu"] <= DETECT_SECONDS,
        "small_enough": peak["convert"] <= CONVERT_MEGABYTES,
        "cores": os.cpu_count(),
    }
    record(result, arguments)


if __name__ == "__main__":
    main()
