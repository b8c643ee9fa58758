"""Everything to measure where there is a GPU, by one command, in at most ten minutes: `make gpu`.

    python benchmarks/gpu.py [--device cuda] [--out docs/results/gpu.json] [--minutes 10]
    python benchmarks/gpu.py --device cpu --tiny            # the same steps at tiny sizes: does the script work?
    python benchmarks/gpu.py --compute --out docs/results/gpu.json      # the computed figures alone, without a GPU

Runs the tests that need a GPU; the benchmarks in bfloat16; perplexity and passkey of the bundled model; random weights
in the shapes of Llama 3.2 1B and Llama 3.1 8B at 8k to 131k tokens, stock and patched, with cuDNN's attention allowed
and not. Every step is a process of its own. One that fails, runs out of memory or out of time is named at the end, and
the next one goes on. Everything goes into one JSON file, and what was slower or larger than predicted is said at the
end. Predictions are computed: memory and operations by the preflight of `rope-ext ppl`, times from these and from the
speed of a large product and of a large copy, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from overhead import timed
from record import with_machine
from stock import attention_kernels, usual_dtype

import rope_ext_hf as rope
from rope_ext_hf.reading.cache_memory import cached_bytes
from rope_ext_hf.reading.preflight import GPU_WORKING_BYTES, estimate_flops, estimate_memory, measure_flops

ROOT = Path(__file__).parent.parent
TRAINED = 8192
SHAPES: dict[str, dict[str, int]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16},
}
LENGTHS = {"1B": (8192, 32_768, 131_072), "8B": (8192, 32_768, 131_072), "tiny": (128, 256)}
FITTING = (2**17, 2**18, 2**19, 2**20)  # tokens of the table of what fits where
METHODS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "stock": None,
    "yarn": ("yarn", {"factor": 16}),
    "dynamic-yarn": ("dynamic-yarn", {}),
    "self-extend": ("self-extend", {}),
    "dca": ("dca", {}),
}
CHUNK = 4096  # tokens that go through the model at a time
COPIED_BYTES = {"cuda": 2**30, "cpu": 2**26}
SLACK = 1.1  # what is this much above a prediction is named at the end
LEFT_FOR_SHAPES = 0.4  # of all time, at least


def commands(device: str, tiny: bool) -> dict[str, list[str]]:
    """The steps before the shapes."""
    here, python = ROOT / "benchmarks", sys.executable
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    tests = [str(path.relative_to(ROOT)) for path in marked]
    options = {
        "overhead": ["--pairs", "2", "--tokens", "64"] if tiny else [],
        "dynamic": ["--pairs", "2", "--tokens", "64"] if tiny else [],
        "attention": ["--pairs", "1", "--lengths", "256"] if tiny else ["--lengths", "1024,4096,16384,32768"],
        "reading": ["--pairs", "1", "--lengths", "64" if tiny else "2048,8192"],
    }
    of_cli = ["reference", "--method", "yarn", "--factor", "8", "--device", device, "--json"]
    ppl = ["--lengths", "256" if tiny else "256,1024,2048", "--max-spans", "2" if tiny else "16"]
    passkey = ["--lengths", "256" if tiny else "256,1024", "--trials", "1" if tiny else "6"]
    return {
        "tests": [python, "-m", "pytest", "-q", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider", *tests],
        **{
            name: [python, str(here / f"{name}.py"), "--device", device, *arguments]
            for name, arguments in options.items()
        },
        "perplexity": [python, "-m", "rope_ext_hf", "ppl", *of_cli, *ppl],
        "passkey": [python, "-m", "rope_ext_hf", "passkey", *of_cli, *passkey],
    }


def run(command: list[str], seconds: float) -> dict[str, Any]:
    """A step: its time, and its JSON lines, or its output where it has none; "failed" says why where it did."""
    if seconds <= 0:
        return {"failed": "no time was left"}
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds, cwd=ROOT)
        output, failed = done.stdout, None
        if done.returncode:
            last = [*output.strip().splitlines()[-20:], *done.stderr.strip().splitlines()[-20:]]
            failed = "\n".join([f"it ended with {done.returncode}", *last])
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        failed = f"it did not end within the {seconds:.0f} s that were left"
    result: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 1)}
    if failed is not None:
        result["failed"] = failed
    found = list(_json_in(output))
    return result | ({"results": found} if found else {"output": "\n".join(output.strip().splitlines()[-40:])})


def _json_in(output: str) -> Iterator[Any]:
    """The whole output if it is JSON, else every line that is."""
    for text in (output,) if output.lstrip().startswith(("{\n", "[\n")) else output.splitlines():
        if text.lstrip().startswith(("{", "[")):
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                continue


def random_model(shape: str, device: str, dtype: torch.dtype) -> Any:
    """Random weights in a shape of Llama, made where they are used."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = SHAPES[shape]
    heads = sizes["hidden_size"] // sizes["head_dim"]
    config = LlamaConfig(
        **sizes,
        vocab_size=128_256 if shape != "tiny" else 512,
        num_attention_heads=heads,
        num_key_value_heads=min(8, heads),
        max_position_embeddings=TRAINED if shape != "tiny" else 64,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=shape == "1B",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def fitting_memory() -> list[dict[str, Any]]:
    """Computed: gigabytes that reading takes with the 8B shape in bfloat16, by length."""
    model = random_model("8B", "meta", torch.bfloat16)
    rows = []
    for length in FITTING:
        row: dict[str, Any] = {"tokens": length}
        for name, offload in (("gpu", False), ("offloading_gpu", True)):
            estimate = replace(estimate_memory(model, length, offload_cache=offload), working=GPU_WORKING_BYTES)
            row[name] = round(estimate.total / 1e9, 1)
        rows.append(row | {"offloading_main": round(estimate.offloaded / 1e9, 1)})
    return rows


def measure_bandwidth(device: str) -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.zeros(COPIED_BYTES[torch.device(device).type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [timed(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * source.numel() / min(seconds[1:])


def predict(model: Any, method: str, length: int, device: str, flops: float, bandwidth: float) -> dict[str, float]:
    """Seconds of a prefill and of a decoding step, and gigabytes, from operations and bytes alone.

    A step reads weights and cache, and DynamicCache copies the cache; dynamic-yarn rotates a copy of all keys,
    remapping methods at most that of the keys of a window.
    """
    config, width = model.config, model.dtype.itemsize
    cache = cached_bytes(config, length, width=width)
    window = cached_bytes(config, min(length, config.max_position_embeddings), width=width)
    rotated = {"dynamic-yarn": cache, "self-extend": window, "dca": window}.get(method, 0)
    read = model.num_parameters() * width + 3 * cache + rotated
    return {
        "predicted_prefill": estimate_flops(model, [length], scored=length // CHUNK + 1) / flops,
        "predicted_decode": read / bandwidth,
        "predicted_gigabytes": estimate_memory(model, longest=length, device=torch.device(device)).total / 1e9,
    }


def read(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    """One decoding step onto a cache of all ids, which is filled in chunks first."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for part in torch.split(ids, CHUNK, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)

    def step() -> None:
        model(ids[:, -1:], past_key_values=cache)

    return step


def measure(model: Any, length: int, device: str) -> dict[str, Any]:
    """Seconds of a prefill and of a decoding step, and the most memory, of one model at one length."""
    on_cuda = device.startswith("cuda")
    ids = torch.randint(3, 200, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    made: list[Callable[[], None]] = []
    read(model, ids[:, :64])()  # first use of the kernels
    row: dict[str, Any] = {"kernel": attention_kernels(lambda: read(model, ids[:, :256]))}
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    row["prefill"] = timed(lambda: made.append(read(model, ids)), device)
    made[0]()
    row["decode"] = sorted(timed(made[0], device) for _ in range(10))[5]
    if on_cuda:
        row["gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
    return row


def without_cudnn() -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    context: AbstractContextManager[Any] = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
    return context


@contextmanager
def as_method(model: Any, method: str) -> Iterator[None]:
    chosen = METHODS[method]
    with nullcontext() if chosen is None else rope.patched(model, chosen[0], **chosen[1]):
        yield


def measure_shape(shape: str, device: str, until: float) -> Iterator[dict[str, Any]]:
    """Every method at every length, as long as there is time; the stock model of a length comes first."""
    model, latest = random_model(shape, device, getattr(torch, usual_dtype(device))), 0.0
    speeds = measure_flops(torch.device(device), model.dtype), measure_bandwidth(device)
    for length in LENGTHS[shape]:
        for method, cudnn in [(name, True) for name in METHODS] + [("stock", False), ("self-extend", False)]:
            row: dict[str, Any] = {"shape": shape, "method": method, "tokens": length, "cudnn": cudnn}
            if time.monotonic() + latest > until:
                yield row | {"skipped": "no time was left"}
                continue
            started = time.monotonic()
            row |= predict(model, method, length, device, *speeds)
            try:
                kernels = nullcontext() if cudnn else without_cudnn()
                with torch.inference_mode(), as_method(model, method), kernels:
                    row |= measure(model, length, device)
            except torch.OutOfMemoryError as error:
                row["skipped"] = f"out of memory: {error}"
            if device.startswith("cuda"):
                torch.cuda.empty_cache()
            latest = time.monotonic() - started
            yield row


def above_prediction(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each row that took more time or memory than was predicted.

    Launches and kernels below their best speed make every model slower than operations and bytes alone, so that a
    patched model is compared with what the stock model took, where that is more.
    """
    stock = {(r["shape"], r["tokens"], r["cudnn"]): r for r in rows if r["method"] == "stock" and "prefill" in r}
    sentences = []
    for row in rows:
        what = f"{row['shape']} {row['method']} at {row['tokens']:,} tokens"
        base = stock.get((row["shape"], row["tokens"], row["cudnn"]), {})
        for key in ("prefill", "decode"):
            most = max(row.get(f"predicted_{key}", 0.0), base.get(key, 0.0))
            if row["method"] != "stock" and base and row.get(key, 0.0) > SLACK * most:
                sentences.append(f"{what}: {key} takes {1000 * row[key]:.1f} ms, predicted {1000 * most:.1f}")
        if row.get("gigabytes", 0.0) > SLACK * row.get("predicted_gigabytes", float("inf")):
            sentences.append(f"{what}: {row['gigabytes']:.1f} GB, predicted {row['predicted_gigabytes']:.1f}")
    return sentences


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/gpu.json"), help="where the result goes")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for everything")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--compute", action="store_true", help="what is computed alone; needs no GPU")
    parser.add_argument("--shape", choices=SHAPES, help="this shape alone, its rows as JSON lines")
    arguments = parser.parse_args()
    device, tiny = arguments.device, arguments.tiny
    if arguments.compute:
        write(arguments.out, {"measured": False, "memory": fitting_memory()}, "cpu")
        return
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny tries the script")
    end = time.monotonic() + 60 * arguments.minutes
    if arguments.shape is not None:
        for row in measure_shape(arguments.shape, device, end):
            print(json.dumps(row), flush=True)
        return
    steps = {}
    for name, command in commands(device, tiny).items():
        steps[name] = run(command, end - LEFT_FOR_SHAPES * 60 * arguments.minutes - time.monotonic())
        print(f"{name}: {steps[name].get('failed', 'done')}", flush=True)
    rows = []
    for shape in ["tiny"] if tiny else ["1B", "8B"]:
        left = end - time.monotonic()
        command = [sys.executable, __file__, "--shape", shape, "--device", device, "--minutes", str(0.95 * left / 60)]
        step = run(command, left)
        rows += step.pop("results", [])
        steps[f"shape {shape}"] = step
        print(f"shape {shape}: {step.get('failed', 'done')}", flush=True)
    above = above_prediction(rows)
    measured = device.startswith("cuda")
    result = {"measured": measured, "memory": fitting_memory(), "steps": steps, "rows": rows, "above": above}
    write(arguments.out, result, device)
    failed = [f"{name}: {step['failed']}" for name, step in steps.items() if "failed" in step]
    skipped = [f"{r['shape']} {r['method']} at {r['tokens']:,}: {r['skipped']}" for r in rows if "skipped" in r]
    for title, lines in (("Failed", failed), ("Skipped", skipped), ("Slower or larger than predicted", above)):
        print(f"{title}: {'nothing' if not lines else ''}")
        print("".join(f"  {line}\n" for line in lines), end="")
    sys.exit(bool(failed))


def write(out: Path, result: dict[str, Any], device: str) -> None:
    """One file; a result of before is replaced as a whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial")
    partial.write_text(
        json.dumps(with_machine({"command": "make gpu"} | result, device), indent=1) + "\n", encoding="utf-8"
    )
    partial.replace(out)


if __name__ == "__main__":
    main()
