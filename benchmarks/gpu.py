"""Everything to measure where there is a GPU, by one command, in less than nine minutes: `make gpu`.

    python benchmarks/gpu.py [--out docs/results] [--minutes 8.5] [--model MODEL --texts TEXTS]
    python benchmarks/gpu.py --device cpu --tiny            # the same steps at tiny sizes: does the script work?
    python benchmarks/gpu.py --steps machine,tests          # these alone; what the file has of other steps stays

It runs from a checkout with the Python that is there: nothing is installed and nothing is downloaded. In the order of
their value, it measures

- the machine and its two ceilings;
- kernels: bandwidth of rotations, values of windows, gradients (gpu_kernels.py);
- perplexity of a real model beyond its trained length (gpu_real_model.py; needs --model and --texts);
- reading and decoding in the shape of Llama 3.1 8B, by method (gpu_prefill.py);
- the tests that need a GPU;
- as far as there is time, random weights in the shape of Llama 3.2 1B, stock and patched, whole and in chunks, padded
  and not (gpu_shapes.py), the benchmarks in half precision, and perplexity and passkey of the bundled model.

Every step is a process of its own and has a share of the time that is left, so that no step takes that of another. One
that fails, runs out of memory or out of time is named at the end, and the next one goes on. The result is written anew
after every step, into one JSON file per device. The last lines say what is wrong, missing or slower than expected;
`make figures` makes the tables of docs/gpu.md from the file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parent.parent))  # this checkout, whether it is installed or not

import torch
from gpu_machine import has_amd_device, nvidia_driver, why_no_device, why_torch_has_none
from record import with_machine

ROOT = Path(__file__).parent.parent
SLACK = 1.1  # what is this much above a prediction is named at the end
MOST_DIFFERENCE = 0.08  # of a standard deviation, root mean square; another order of sums in bfloat16 makes 0.02
TOLERANCES = {"float32": 1e-4, "float16": 3e-3, "bfloat16": 2e-2}
"""Relative differences of kernels from their definitions that rounding may make."""

NO_TIME = "no time was left"  # how the reason of a row or a step that was skipped for time begins
FAILED, WRONG = "Failed", "Wrong"  # titles of what makes the run fail as a whole

Row = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One process of the run.

    Attributes:
        command: what follows the interpreter.
        seconds: its share: of the time that is left, it gets this much among those of the steps after it.
        plans: it takes `--minutes` and plans its rows by the time that it has.
        least: seconds below which it is not begun, because it has no result before its end.
    """

    command: Sequence[str]
    seconds: float
    plans: bool = False
    least: float = 0.0


def steps(device: str, tiny: bool, model: str | None = None, texts: str | None = None) -> dict[str, Step]:
    """All steps in their order; what the first GPU has to show comes first."""
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text("utf-8")]
    # A library's warning must not fail a test here. Several processes were not faster, because each imports everything.
    tests = ["-v", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider"]
    tests += ["-n", "0"] if importlib.util.find_spec("xdist") else []
    # In a trial: those without a backward, a compiler or memory of the device's own, which a simulated one lacks.
    tests += ["-k", "never_waits or before_and_after", "tests/test_gpu.py"] if tiny else map(str, marked)
    few = ["--pairs", "2", "--tokens", "64", "--layers", "1", "--heads", "4"]
    benchmarks = {
        "overhead": few if tiny else [],
        "attention": ["--pairs", "1", "--lengths", "256"] if tiny else ["--lengths", "1024,4096,16384,32768"],
        "dynamic": few if tiny else [],
        "reading": ["--pairs", "1", "--lengths", *(["64", "--vocabulary", "512"] if tiny else ["2048,8192"])],
    }
    bundled = ["reference", "--method", "yarn", "--factor", "8", "--device", device, "--json"]
    ppl = ["--lengths", "256" if tiny else "256,1024,2048", "--max-spans", "2" if tiny else "16"]
    passkey = ["--lengths", "256" if tiny else "256,1024", "--trials", "1" if tiny else "6"]
    passkey += ["--depths", "0.5"] if tiny else []
    on_device = ["--device", device]
    real = ["--model", str(model), "--texts", str(texts), *(["--longest", "384"] if tiny else [])]
    shape, least = ["--shape", "tiny" if tiny else "8B"], 0 if tiny else 25
    trial = ["--tiny"] if tiny else []
    chosen = {
        "machine": Step(["benchmarks/gpu_machine.py", *trial, *on_device], 15),
        "kernels": Step(["benchmarks/gpu_kernels.py", *trial, *on_device], 25),
        # On an H200, loading took 33 s, the first text 55 s and every further one 38 s.
        "real model": Step(["benchmarks/gpu_real_model.py", *real, *on_device], 190, plans=True),
        "reading and decoding": Step(["benchmarks/gpu_prefill.py", *shape, *on_device], 165, plans=True),
        "tests": Step(["-m", "pytest", *tests], 80),
        # The rest gets what the steps above leave of their time.
        "shapes": Step(
            ["benchmarks/gpu_shapes.py", "--shape", "tiny" if tiny else "1B", *on_device], 7, plans=True, least=least
        ),
        "perplexity": Step(["-m", "rope_ext_hf", "ppl", *bundled, *ppl], 6, least=least),
        "passkey": Step(["-m", "rope_ext_hf", "passkey", *bundled, *passkey], 6, least=least),
        **{
            name: Step([f"benchmarks/{name}.py", *on_device, *options], 4, least=least)
            for name, options in benchmarks.items()
        },
    }
    if model is None or texts is None:
        del chosen["real model"]
    return chosen


def process_environment() -> dict[str, str]:
    """The environment of every step: it finds this checkout, and nothing is asked of the network."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def run(command: Sequence[str], seconds: float) -> Row:
    """Run a step: return its time, and its JSON lines, or its output where it has none; "failed" says why it failed.

    Args:
        command: what follows the interpreter.
        seconds: after which it and what it started are ended.
    """
    started, failed = time.perf_counter(), None
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=process_environment(),
        start_new_session=True,
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
    return result | ({"results": brief(read)} if read else {"output": "\n".join(output.strip().splitlines()[-80:])})


BRIEF = ("method", "length", "depth", "perplexity", "bits_per_byte", "exact", "rank", "tokens_per_second", "gpu_bytes")


def brief(read: list[Any]) -> list[Any]:
    """Return the results that a command of the package printed as JSON, without paths of this machine."""
    if not (len(read) == 1 and isinstance(read[0], dict) and "provenance" in read[0]):
        return read
    return [{key: row[key] for key in BRIEF if key in row} for row in read[0]["results"]]


def _json_in(output: str) -> Iterator[Any]:
    """The whole output if it is JSON, else every line that is."""
    for text in (output,) if output.lstrip().startswith(("{\n", "[\n")) else output.splitlines():
        if text.lstrip().startswith(("{", "[")):
            try:
                yield json.loads(text)
            except json.JSONDecodeError:
                continue


def run_all(todo: dict[str, Step], seconds: float) -> Iterator[tuple[str, Row]]:
    """Yield every step with its result; each has its share of the time that those before it left."""
    end = time.monotonic() + seconds
    names = list(todo)
    for at, name in enumerate(names):
        ahead = sum(todo[later].seconds for later in names[at:])
        limit = (end - time.monotonic()) * todo[name].seconds / ahead
        command = list(todo[name].command)
        if todo[name].plans:  # a tenth of it for loading libraries
            command += ["--minutes", str(0.9 * limit / 60)]
        if limit < todo[name].least:
            reason = f"{NO_TIME}: {max(0.0, limit):.0f} s, and it takes at least {todo[name].least:.0f} s"
            yield name, {"seconds": 0.0, "limit": round(limit, 1), "failed": None, "skipped": reason}
        else:
            yield name, run(command, limit)


# --- what is said at the end -----------------------------------------------------------------------------------------


def title(row: Row) -> str:
    """Name what a row measured: "8B yarn at 8,192 tokens, without cuDNN"."""
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


def left_out(rows: Sequence[Row], name: Callable[[Row], str], several: str) -> list[str]:
    """A sentence for each row that was skipped, and one for all that no time was left for."""
    given = [row for row in rows if row.get("skipped")]
    late = [row for row in given if row["skipped"].startswith(NO_TIME)]
    sentences = [f"{name(row)}: {row['skipped']}" for row in given if row not in late]
    return sentences + ([f"{several}: {NO_TIME} for {len(late)} of {len(rows)} rows"] if late else [])


def skipped(rows: Sequence[Row]) -> list[str]:
    """A sentence for each row, and each part of one, that was not measured."""
    sentences = left_out(rows, title, "shapes")
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
                f"{unchanged['tokens']:,} tokens, which the method leaves as they are up to rounding"
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
            if way == "decode" and row["rows"] > 1 and "none of" in values["kernels"]:
                continue  # steps of padded rows compute the scores of all rows at once, which is faster
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


def results_of(done: dict[str, Row], name: str) -> list[Row]:
    """The JSON lines of a step; none where it was not run."""
    return list(done.get(name, {}).get("results", []))


def title_of_part(row: Row) -> str:
    """Name what a row of gpu_real_model.py, gpu_prefill.py or gpu_kernels.py measured."""
    if "way" in row:
        way = row["way"] + (f" in chunks of {row['chunk']:,}" if row["chunk"] else "")
        layers = "" if row["times"] == 1 else f", {row['layers']} layers"
        kernel = f", {row['kernel']} alone" if row["kernel"] else ""
        return f"{row['method']} at {row['tokens']:,} tokens, {way}{layers}{kernel}"
    named = [str(row[key]) for key in ("text", "question", "of", "window", "method", "dtype") if key in row]
    return ", ".join(named)


def wrong_parts(parts: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence for each row that failed, is not finite, or is further from its definition than rounding is."""
    for row in parts:
        if "failed" in row:
            yield f"{title_of_part(row)}: {row['failed']}"
        if not row.get("finite", True):
            yield f"{title_of_part(row)}: outputs are not finite"
        for length, loss in row.get("loss", {}).items():
            if loss != loss or loss == float("inf"):
                yield f"{title_of_part(row)}: the loss at {int(length):,} tokens is not finite"
        for key in ("difference", "output", "query", "key", "value"):
            if row.get("question") in ("window", "gradient") and row.get(key, 0.0) > TOLERANCES[row["dtype"]]:
                most = TOLERANCES[row["dtype"]]
                yield f"{title_of_part(row)}: {key} is off by {row[key]:.2g}, where rounding makes {most:g} at most"


def slower_parts(parts: Sequence[Row]) -> Iterator[str]:
    """Yield a sentence for each reading and step that took longer than the stock model's, and for slow rotations."""
    best: dict[tuple[Any, ...], float] = {}
    measured = [row for row in parts if "seconds" in row and "way" in row]
    for row in measured:
        if row["method"] == "stock":
            place = (row["layers"], row["tokens"], row["way"], row["chunk"])
            best[place] = min(row["seconds"], best.get(place, row["seconds"]))
    for row in measured:
        base = best.get((row["layers"], row["tokens"], row["way"], row["chunk"]))
        if row["method"] != "stock" and base is not None and row["seconds"] > SLACK * base:
            yield f"{title_of_part(row)}: {row['seconds'] / base:.2f} times as long as the stock model"
    for row in parts:
        if row.get("of_copy", 1.0) < 0.8:
            yield f"rotating {row['of']}: {row['of_copy']:.0%} of the bandwidth of a copy"


# --- the whole run ---------------------------------------------------------------------------------------------------


PARTS = ("real model", "reading and decoding", "kernels")
"""Steps whose rows are read from their results; those of shapes stand in the record by themselves."""


def judge(done: dict[str, Row], device: str, trial: bool) -> Row:
    """Return the record of the steps that are done, and what is to be said of them."""
    lines = results_of(done, "shapes")
    models = [line for line in lines if "method" not in line]
    rows = [line for line in lines if "method" in line]
    parts = [row for name in PARTS for row in results_of(done, name)]
    on_cuda = device.startswith("cuda")
    return {
        "measured": on_cuda and not trial,
        "trial": trial,
        "machine": next(iter(results_of(done, "machine")), None),
        "models": models,
        "rows": rows,
        "said": {
            FAILED: [f"{name}: {step['failed']}" for name, step in done.items() if step["failed"] is not None],
            WRONG: [*wrong_parts(parts), *wrong(rows)],
            "Without the kernels that are expected": unfused(rows, models) if on_cuda else [],
            "Skipped": [
                *(f"{name}: {step['skipped']}" for name, step in done.items() if "skipped" in step),
                *(each for name in PARTS for each in left_out(results_of(done, name), title_of_part, name)),
                *skipped([*models, *rows]),
            ],
            "Slower or larger than expected": [] if trial else [*slower_parts(parts), *above_prediction(rows)],
        },
        "steps": {
            name: {key: value for key, value in step.items() if key != "results" or name != "shapes"}
            for name, step in done.items()
        },
    }


def kept(out: Path) -> dict[str, Row]:
    """Return the steps that an earlier call wrote into the file; an empty dict if the file does not exist."""
    if not out.exists():
        return {}
    record = json.loads(out.read_text(encoding="utf-8"))
    steps: dict[str, Row] = record["steps"]
    if "shapes" in steps:
        steps["shapes"]["results"] = [*record["models"], *record["rows"]]
    return steps


def file_of(out: Path, device: str) -> Path:
    """The file of a record: `out`, or in a folder the one that is named for the device."""
    if out.suffix == ".json":
        return out
    name = torch.cuda.get_device_name() if device.startswith("cuda") else device
    return out / f"gpu-{re.sub('[^a-z0-9]+', '-', name.lower()).strip('-')}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument(
        "--out", type=Path, default=Path("build"), help="a .json file, or a folder for one that is named for the device"
    )
    parser.add_argument("--minutes", type=float, default=8.5, help="time for everything")
    parser.add_argument("--model", help="a real model: a folder, a Hub id, a .gguf file, or a wheel that holds one")
    parser.add_argument("--texts", help="what it reads: a folder or a zip archive of .txt files")
    parser.add_argument("--steps", help="names of the steps to run, separated by commas; default: all")
    parser.add_argument("--commit", help="the commit to record, if the folder has no .git")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    arguments = parser.parse_args()
    device = arguments.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        reason = why_no_device(
            torch.version.cuda, torch.version.hip, nvidia_driver(), has_amd_device(), why_torch_has_none()
        )
        parser.error(f"torch has no CUDA device: {reason}. --device cpu --tiny tries the script")
    todo = steps(device, arguments.tiny, arguments.model, arguments.texts)
    out, done = file_of(arguments.out, device), {}
    if arguments.steps is not None:
        chosen = [name.strip() for name in arguments.steps.split(",")]
        if unknown := set(chosen) - todo.keys():
            parser.error(f"no such step: {', '.join(sorted(unknown))}; the steps are {', '.join(todo)}")
        todo, done = {name: todo[name] for name in todo if name in chosen}, kept(out)
    result = judge(done, device, arguments.tiny)
    for name, step in run_all(todo, 60 * arguments.minutes):
        done[name] = step
        if name == "machine" and arguments.commit and step.get("results"):
            step["results"][0]["commit"] = arguments.commit
        print(f"{name}: {step['failed'] or step.get('skipped', 'done')} ({step['seconds']:.0f} s)", flush=True)
        result = judge(done, device, arguments.tiny)
        write(out, result, device)  # what is measured is kept, also where the run is cut off
        if name == "machine" and step["failed"] is not None:
            break  # nothing runs on this device
    for heading, sentences in result["said"].items():
        print(f"{heading}: {'nothing' if not sentences else ''}")
        print("".join(f"  {sentence}\n" for sentence in sentences), end="")
    sys.exit(bool(result["said"][FAILED] or result["said"][WRONG]))


def write(out: Path, result: Row, device: str) -> None:
    """Write one file; an earlier result is replaced as a whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    recorded = with_machine({"command": "make gpu"} | result, "cpu")  # which leaves the device to the steps
    if device.startswith("cuda"):
        recorded["device"] = (result["machine"] or {}).get("device", device)
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    partial.replace(out)


if __name__ == "__main__":
    main()
