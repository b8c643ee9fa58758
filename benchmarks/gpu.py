"""Everything to measure where there is a GPU, by one command, in at most ten minutes: `make gpu`.

    python benchmarks/gpu.py [--device cuda] [--out docs/results/gpu.json] [--minutes 10]
    python benchmarks/gpu.py --device cpu --tiny            # the same steps at tiny sizes: does the script work?
    python benchmarks/gpu.py --compute --out docs/results/gpu.json      # the computed figures alone, without a GPU

Records the machine; runs the tests that need a GPU; random weights in the shapes of Llama 3.2 1B and Llama 3.1 8B at 8k
to 131k tokens, stock and patched (gpu_shapes.py); the benchmarks in half precision; perplexity and passkey of the
bundled model. Every step is a process of its own and has a share of the time that is left, so that no step takes that
of another. One that fails, runs out of memory or out of time is named at the end, and the next one goes on. Everything
goes into one JSON file, also what was skipped and why. At the end stand outputs that are wrong, attention without a
fused kernel, and what was slower or larger than predicted. Predictions are computed: memory and operations by the
preflight of `rope-ext ppl`, times from these and from the speed of a large product and of a large copy, measured in the
same run. A tiny run compares nothing with predictions.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_machine import has_amd_device, nvidia_driver, why_no_device, why_torch_has_none
from gpu_shapes import random_model
from record import with_machine

from rope_ext_hf.reading.preflight import GPU_WORKING_BYTES, estimate_memory

ROOT = Path(__file__).parent.parent
FITTING = (2**17, 2**18, 2**19, 2**20)  # tokens of the table of what fits where
SLACK = 1.1  # what is this much above a prediction is named at the end
MOST_DIFFERENCE = 0.08  # of a standard deviation, root mean square; another order of sums in bfloat16 makes 0.02

FAILED, WRONG = "Failed", "Wrong"  # titles of what makes the run fail as a whole

Row = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One process of the run.

    Attributes:
        command: what follows the interpreter.
        share: of the time that is left, among the shares of this step and those after it.
    """

    command: Sequence[str]
    share: float


def steps(device: str, tiny: bool) -> dict[str, Step]:
    """All steps in their order; what the first GPU has to show comes first."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    tests = ["-q", "-m", "gpu", "-n", "0", "-p", "no:cacheprovider"]
    # In a trial: those without a backward, a compiler or memory of the device's own, which a simulated one lacks.
    tests += ["-k", "never_waits or before_and_after", "tests/test_gpu.py"] if tiny else map(str, marked)
    few = ["--pairs", "2", "--tokens", "64", "--layers", "1", "--heads", "4"]
    benchmarks = {
        "overhead": (few if tiny else [], 45),
        "attention": (["--pairs", "1", "--lengths", "256"] if tiny else ["--lengths", "1024,4096,16384,32768"], 45),
        "dynamic": (few if tiny else [], 35),
        "reading": (["--pairs", "1", "--lengths", *(["64", "--vocabulary", "512"] if tiny else ["2048,8192"])], 35),
    }
    bundled = ["reference", "--method", "yarn", "--factor", "8", "--device", device, "--json"]
    ppl = ["--lengths", "256" if tiny else "256,1024,2048", "--max-spans", "2" if tiny else "16"]
    passkey = ["--lengths", "256" if tiny else "256,1024", "--trials", "1" if tiny else "6"]
    passkey += ["--depths", "0.5"] if tiny else []
    on_device = ["--device", device]
    return {
        "machine": Step(["benchmarks/gpu_machine.py", *on_device], 40),
        "tests": Step(["-m", "pytest", *tests], 80),
        **{
            f"shape {shape}": Step(["benchmarks/gpu_shapes.py", "--shape", shape, *on_device], share)
            for shape, share in ({"tiny": 300} if tiny else {"1B": 100, "8B": 180}).items()
        },
        **{
            name: Step([f"benchmarks/{name}.py", *on_device, *options], share)
            for name, (options, share) in benchmarks.items()
        },
        "perplexity": Step(["-m", "rope_ext_hf", "ppl", *bundled, *ppl], 20),
        "passkey": Step(["-m", "rope_ext_hf", "passkey", *bundled, *passkey], 20),
    }


def run(command: Sequence[str], seconds: float) -> Row:
    """A step: its time, and its JSON lines, or its output where it has none; "failed" says why where it did.

    Args:
        command: what follows the interpreter.
        seconds: after which it and what it started are ended.
    """
    started, failed = time.perf_counter(), None
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = process.communicate(timeout=seconds)
        if process.returncode:
            last = [*output.strip().splitlines()[-20:], *errors.strip().splitlines()[-20:]]
            failed = "\n".join([f"it ended with {process.returncode}", *last])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # processes that it started would keep the device
        output, errors = process.communicate()
        failed = f"it did not end within its {seconds:.0f} s"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    result: Row = {"seconds": round(time.perf_counter() - started, 1), "limit": round(seconds, 1), "failed": failed}
    read = list(_json_in(output))
    return result | ({"results": read} if read else {"output": "\n".join(output.strip().splitlines()[-40:])})


def _json_in(output: str) -> Iterator[Any]:
    """The whole output if it is JSON, else every line that is."""
    for text in (output,) if output.lstrip().startswith(("{\n", "[\n")) else output.splitlines():
        if text.lstrip().startswith(("{", "[")):
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                continue


def run_all(todo: dict[str, Step], seconds: float) -> Iterator[tuple[str, Row]]:
    """Every step with its result; each has its share of the time that those before it left."""
    end = time.monotonic() + seconds
    names = list(todo)
    for at, name in enumerate(names):
        ahead = sum(todo[later].share for later in names[at:])
        limit = (end - time.monotonic()) * todo[name].share / ahead
        command = list(todo[name].command)
        if name.startswith("shape"):  # which plans its rows by the time, a tenth of it for loading libraries
            command += ["--minutes", str(0.9 * limit / 60)]
        yield name, run(command, limit)


def fitting_memory() -> list[Row]:
    """Computed: gigabytes that reading takes with the 8B shape in bfloat16, by length."""
    model = random_model("8B", "meta", torch.bfloat16)
    rows = []
    for length in FITTING:
        row: Row = {"tokens": length}
        for name, offload in (("gpu", False), ("offloading_gpu", True)):
            estimate = replace(
                estimate_memory(model, length, offload_cache=offload), working=GPU_WORKING_BYTES, logits=0
            )
            row[name] = round(estimate.total / 1e9, 1)
        rows.append(row | {"offloading_main": round(estimate.offloaded / 1e9, 1)})
    return rows


# --- what is said at the end -----------------------------------------------------------------------------------------


def title(row: Row) -> str:
    """What a row measured: "8B yarn at 8,192 tokens, without cuDNN"."""
    if "method" not in row:
        return f"{row['shape']}"
    batch = "" if row["rows"] == 1 else f"{row['rows']} padded rows of up to "
    return (
        f"{row['shape']} {row['method']} at {batch}{row['tokens']:,} tokens{'' if row['cudnn'] else ', without cuDNN'}"
    )


def ways(row: Row) -> Iterator[tuple[str, Row]]:
    """The ways of reading and the steps that a row measured."""
    for name in ("whole", "chunks", "decode"):
        if (values := row.get(name)) is not None and "skipped" not in values:
            yield name, values


def skipped(rows: Sequence[Row]) -> list[str]:
    """A sentence for each row, and each part of one, that was not measured."""
    sentences = [f"{title(row)}: {row['skipped']}" for row in rows if row.get("skipped")]
    for row in rows:
        parts = ((name, row.get(name) or {}) for name in ("whole", "chunks"))
        sentences += [f"{title(row)}, {name}: {part['skipped']}" for name, part in parts if "skipped" in part]
    return sentences


def wrong(rows: Sequence[Row]) -> list[str]:
    """A sentence for each row whose outputs are not what they must be, and for each that failed."""
    sentences = [f"{title(row)}: {row['failed']}" for row in rows if "failed" in row]
    for row in rows:
        if not row.get("finite", True):
            sentences.append(f"{title(row)}: outputs are not finite")
        if (unchanged := row.get("unchanged")) is not None and not unchanged["difference"] <= MOST_DIFFERENCE:
            sentences.append(
                f"{title(row)}: {unchanged['difference']:.2f} standard deviations from the stock model at "
                f"{unchanged['tokens']:,} tokens, which the method leaves as they are"
            )
        if (alone := row.get("alone")) is not None and not alone <= MOST_DIFFERENCE:
            sentences.append(
                f"{title(row)}: the shortest row is {alone:.2f} standard deviations from the same row alone"
            )
    return sentences


def unfused(rows: Sequence[Row], models: Sequence[Row]) -> list[str]:
    """A sentence for attention without a fused kernel, rotations without Triton, more waits than the stock model's."""
    sentences = [
        f"{model['shape']}: {model['rotations']} rotate keys and queries"
        for model in models
        if "Triton kernel" not in model.get("rotations", "Triton kernel")
    ]
    stock = {_place(row): row for row in rows if row.get("method") == "stock"}
    for row in rows:
        for way, values in ways(row):
            if "math" in values["kernels"] or "none of" in values["kernels"]:
                sentences.append(f"{title(row)}, {way}: attention by {values['kernels']}")
        base = (stock.get(_place(row), {}).get("decode") or {}).get("waits")
        waits = (row.get("decode") or {}).get("waits")
        if base is not None and waits is not None and waits > base:
            sentences.append(f"{title(row)}: a step waits {waits} times for the device, of the stock model {base}")
    return sentences


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("shape", "tokens", "rows", "cudnn"))


def best_of(values: Row | None) -> float | None:
    """Seconds of a reading: the second run, or the first where there is one alone; of a step the median."""
    values = values or {}
    chosen = values.get("median", values.get("second") or values.get("first"))
    return None if chosen is None else float(chosen)


def above_prediction(rows: Sequence[Row]) -> list[str]:
    """A sentence for each row that took more time or memory than was predicted.

    Launches and kernels below their best speed make every model slower than operations and bytes alone, so that a
    patched model is compared with what the stock model took, where that is more; for a prompt in chunks with the
    stock model's whole prompt, because stock chunks lose flash attention.
    """
    stock = {_place(row): row for row in rows if row.get("method") == "stock"}
    sentences = []
    for row in rows:
        base = stock.get(_place(row), {})
        for way, values in ways(row):
            compared = best_of(base.get("decode" if way == "decode" else "whole"))
            seconds, predicted = best_of(values), row["predicted"]["decode" if way == "decode" else "prefill"]
            if row["method"] != "stock" and compared is not None and seconds is not None:
                most = max(predicted, compared)
                if seconds > SLACK * most:
                    sentences.append(
                        f"{title(row)}, {way}: {1000 * seconds:.1f} ms, where {1000 * most:.1f} were expected"
                    )
            gigabytes = values.get("gigabytes")
            if gigabytes is not None and gigabytes > SLACK * (most := row["predicted"][f"{way}_gigabytes"]):
                sentences.append(f"{title(row)}, {way}: {gigabytes:.1f} GB, where {most:.1f} were expected")
    return sentences


# --- the whole run ---------------------------------------------------------------------------------------------------


def judge(done: dict[str, Row], device: str, trial: bool) -> Row:
    """The record of the steps that are done: rows apart from descriptions of models, and what is to be said of them."""
    lines = [line for name in done if name.startswith("shape") for line in done[name].get("results", [])]
    models = [line for line in lines if "method" not in line]
    rows = [line for line in lines if "method" in line]
    on_cuda = device.startswith("cuda")
    return {
        "measured": on_cuda and not trial,
        "trial": trial,
        "machine": next(iter(done.get("machine", {}).get("results", [])), None),
        "models": models,
        "rows": rows,
        "said": {
            FAILED: [f"{name}: {step['failed']}" for name, step in done.items() if step["failed"] is not None],
            WRONG: wrong(rows),
            "Without the kernels that are expected": unfused(rows, models) if on_cuda else [],
            "Skipped": skipped([*models, *rows]),
            "Slower or larger than predicted": [] if trial else above_prediction(rows),
        },
        "steps": {
            name: {key: value for key, value in step.items() if key != "results" or not name.startswith("shape")}
            for name, step in done.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("build/gpu.json"), help="where the result goes")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for everything")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    parser.add_argument("--compute", action="store_true", help="what is computed alone; needs no GPU")
    arguments = parser.parse_args()
    device, memory = arguments.device, {"memory": fitting_memory()}
    if arguments.compute:
        write(arguments.out, {"measured": False, "trial": False} | memory, "cpu")
        return
    if device.startswith("cuda") and not torch.cuda.is_available():
        reason = why_no_device(
            torch.version.cuda, torch.version.hip, nvidia_driver(), has_amd_device(), why_torch_has_none()
        )
        parser.error(f"torch has no CUDA device: {reason}. --device cpu --tiny tries the script")
    done: dict[str, Row] = {}
    for name, step in run_all(steps(device, arguments.tiny), 60 * arguments.minutes):
        done[name] = step
        print(f"{name}: {step['failed'] or 'done'}", flush=True)
        result = judge(done, device, arguments.tiny)
        write(arguments.out, result | memory, device)  # what is measured is kept, also where the run is cut off
        if name == "machine" and step["failed"] is not None:
            break  # nothing runs on this device
    for heading, sentences in result["said"].items():
        print(f"{heading}: {'nothing' if not sentences else ''}")
        print("".join(f"  {sentence}\n" for sentence in sentences), end="")
    sys.exit(bool(result["said"][FAILED] or result["said"][WRONG]))


def write(out: Path, result: Row, device: str) -> None:
    """One file; a result of before is replaced as a whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    recorded = with_machine({"command": "make gpu"} | result, "cpu")  # which leaves the device to the steps
    if device.startswith("cuda"):
        recorded["device"] = (result["machine"] or {}).get("device", device)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    partial.replace(out)


if __name__ == "__main__":
    main()
