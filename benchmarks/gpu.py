"""Everything to measure where there is a GPU, by one command, in at most ten minutes: `make gpu`.

    python benchmarks/gpu.py [--device cuda] [--out build/gpu.json] [--minutes 10]
    python benchmarks/gpu.py --device cpu --tiny            # the same steps at tiny sizes: does the script work?

Runs the tests that need a GPU; the benchmarks in bfloat16; perplexity and passkey of the bundled model; random weights
in the shapes of Llama 3.2 1B and Llama 3.1 8B at 8k to 131k tokens, stock and patched, with cuDNN's attention allowed
and not. Everything goes into one JSON file, and what was slower or larger than predicted is said at the end. A step
that does not fit into the time or the memory that is left is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from overhead import timed
from record import record, usual_dtype

import rope_ext_hf as rope
from rope_ext_hf.eval.preflight import estimate_memory

TRAINED = 8192
SHAPES: dict[str, dict[str, int]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16},
}
LENGTHS = {"1B": (8192, 32_768, 131_072), "8B": (8192, 32_768, 131_072), "tiny": (128, 256)}
METHODS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "stock": None,
    "yarn": ("yarn", {"factor": 16}),
    "dynamic-yarn": ("dynamic-yarn", {}),
    "self-extend": ("self-extend", {}),
    "dca": ("dca", {}),
}
PREDICTED = {  # of a method's time over that of the stock model: prefill, decode
    "yarn": (1.02, 1.05),
    "dynamic-yarn": (1.05, 2.0),
    "self-extend": (1.5, 1.3),
    "dca": (1.5, 1.3),
}
CHUNK = 4096  # tokens that go through the model at a time
SLACK = 1.1  # what is this much above a prediction is named at the end


def commands(device: str, tiny: bool) -> dict[str, list[str]]:
    """The steps that are programs of their own."""
    here, python = Path(__file__).parent, sys.executable
    short = ["--pairs", "3"] if tiny else []
    attention = ["--lengths", "256" if tiny else "1024,4096,16384,32768"]
    reading = ["--lengths", "256" if tiny else "2048,8192"]
    of_cli = ["reference", "--method", "yarn", "--factor", "8", "--device", device]
    steps = {} if tiny else {"tests": [python, "-m", "pytest", "-q", "-m", "gpu", "-n", "0"]}
    steps |= {
        name: [python, str(here / f"{name}.py"), "--device", device, *arguments]
        for name, arguments in (("attention", attention), ("reading", [*reading, "--pairs", "1"]))
    }
    if not tiny:
        steps["overhead"] = [python, str(here / "overhead.py"), "--device", device, *short]
        steps["dynamic"] = [python, str(here / "dynamic.py"), "--device", device, *short]
    ppl = ["--lengths", "256" if tiny else "256,1024,2048", "--max-spans", "2" if tiny else "16", "--json"]
    passkey = ["--lengths", "256" if tiny else "256,1024", "--trials", "1" if tiny else "6", "--json"]
    steps["perplexity"] = [python, "-m", "rope_ext_hf", "ppl", *of_cli, *ppl]
    steps["passkey"] = [python, "-m", "rope_ext_hf", "passkey", *of_cli, *passkey]
    return steps


def run(command: list[str], seconds: float) -> dict[str, Any]:
    """A step: how it ended, its time, and the last of its output."""
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(1.0, seconds))
    except subprocess.TimeoutExpired:
        return {"failed": f"it did not end within the {seconds:.0f} s that were left"}
    result: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 1)}
    lines = done.stdout.strip().splitlines()
    if done.returncode:
        return result | {"failed": "\n".join([*lines[-20:], *done.stderr.strip().splitlines()[-20:]])}
    for text in (done.stdout, lines[-1] if lines else ""):  # JSON alone, or after other output
        try:
            return result | {"result": json.loads(text)}
        except json.JSONDecodeError:
            continue
    return result | {"output": "\n".join(lines[-40:])}


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
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def read(model: Any, ids: torch.Tensor) -> Callable[[], None]:
    """One decoding step onto a cache of all ids, which is filled in chunks first."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for part in torch.split(ids, CHUNK, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)

    def step() -> None:
        model(ids[:, -1:], past_key_values=cache)

    return step


def measure_shape(
    shape: str, length: int, method: str, model: Any, device: str, kernels: AbstractContextManager[Any]
) -> dict[str, Any]:
    """Time of a prefill and of a decoding step, and the most memory, of one model at one length."""
    on_cuda = device.startswith("cuda")
    ids = torch.randint(3, 200, (1, length), generator=torch.Generator().manual_seed(0)).to(device)
    made: list[Callable[[], None]] = []
    with torch.inference_mode(), kernels:
        read(model, ids[:, :64])()  # first use of the kernels
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        prefill = timed(lambda: made.append(read(model, ids)), device)
        made[0]()
        steps = sorted(timed(made[0], device) for _ in range(10))
    row = {"shape": shape, "method": method, "tokens": length, "prefill": prefill, "decode": steps[5]}
    if on_cuda:
        row["gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
        predicted = estimate_memory(model, longest=length, device=torch.device(device))
        row["predicted_gigabytes"] = predicted.total / 1e9
    return row


def without_cudnn() -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    context: AbstractContextManager[Any] = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
    return context


def measure_shapes(shapes: list[str], device: str, until: float) -> list[dict[str, Any]]:
    """Every method at every length, as long as there is time; the stock model of a length comes first."""
    rows: list[dict[str, Any]] = []
    dtype = getattr(torch, usual_dtype(device))
    for shape in shapes:
        model, latest = random_model(shape, device, dtype), 0.0
        for length in LENGTHS[shape]:
            for method, cudnn in [(name, True) for name in METHODS] + [("stock", False), ("self-extend", False)]:
                row: dict[str, Any] = {"shape": shape, "method": method, "tokens": length, "cudnn": cudnn}
                if time.monotonic() + latest > until:
                    rows.append(row | {"skipped": "no time was left"})
                    continue
                started, chosen = time.monotonic(), METHODS[method]
                if chosen is not None:
                    rope.patch(model, chosen[0], **chosen[1])
                try:
                    kernels = nullcontext() if cudnn else without_cudnn()
                    row |= measure_shape(shape, length, method, model, device, kernels)
                except torch.OutOfMemoryError as error:
                    row["skipped"] = f"out of memory: {error}"
                finally:
                    if chosen is not None:
                        rope.unpatch(model)
                rows.append(row)
                latest = time.monotonic() - started
                print(json.dumps(row), flush=True)
    return rows


def above_prediction(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each row that took more time or memory than was predicted."""
    stock = {(r["shape"], r["tokens"], r["cudnn"]): r for r in rows if r["method"] == "stock" and "prefill" in r}
    found = []
    for row in rows:
        what = f"{row['shape']} {row['method']} at {row['tokens']:,} tokens"
        base = stock.get((row["shape"], row["tokens"], row["cudnn"]))
        if base is not None and row["method"] in PREDICTED and "prefill" in row:
            for key, most in zip(("prefill", "decode"), PREDICTED[row["method"]], strict=True):
                ratio = row[key] / base[key]
                if ratio > most * SLACK:
                    found.append(f"{what}: {key} takes {ratio:.2f} times the stock model's, predicted {most:.2f}")
        if row.get("gigabytes", 0) > SLACK * row.get("predicted_gigabytes", float("inf")):
            found.append(f"{what}: {row['gigabytes']:.1f} GB, predicted {row['predicted_gigabytes']:.1f}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/gpu.json"), help="where the result goes")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for everything")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--shapes-only", action="store_true", help="no tests and no other benchmarks")
    arguments = parser.parse_args()
    device, tiny = arguments.device, arguments.tiny
    if device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device cpu --tiny tries the script")
    end = time.monotonic() + 60 * arguments.minutes
    steps = {}
    # The shapes get the last 40% of the time at least.
    for name, command in {} if arguments.shapes_only else commands(device, tiny).items():
        left = end - 24 * arguments.minutes - time.monotonic()
        steps[name] = run(command, left) if left > 0 else {"failed": "no time was left"}
        print(name, json.dumps(steps[name])[:300], flush=True)
    rows = measure_shapes(["tiny"] if tiny else ["1B", "8B"], device, end)
    failed = [f"{name} failed: {step['failed']}" for name, step in steps.items() if "failed" in step]
    skipped = [f"{r['shape']} {r['method']} at {r['tokens']:,}: {r['skipped']}" for r in rows if "skipped" in r]
    above = above_prediction(rows)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.unlink(missing_ok=True)
    record({"benchmark": "gpu", "tiny": tiny, "steps": steps, "rows": rows, "above": above}, arguments.out, device)
    for title, lines in (("Failed", failed), ("Skipped", skipped), ("Slower or larger than predicted", above)):
        print(f"{title}: {'nothing' if not lines else ''}")
        print("".join(f"  {line}\n" for line in lines), end="")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
