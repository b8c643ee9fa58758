"""`make gpu`, whole, on the simulated CUDA device, and the page that is made from its record.

Times of the simulated device say nothing; kernels, launches, waits, bytes and values do.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import gpu
import gpu_machine
import gpu_prefill
import gpu_real_model
import gpu_shapes
import pytest
import torch
from stock import attention_kernels_and_launches, usual_dtype

import rope_ext_hf as rope
from docs.figures import gpu as pages
from tests.support.simulated_cuda import SimulatedCuda, why_unavailable

ROOT = Path(__file__).parent.parent
COMMIT = "0123456789abcdef"
Row = dict[str, Any]

simulated = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

EVERY_PROCESS = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.support.simulated_cuda import SimulatedCuda, why_unavailable
assert why_unavailable() is None
SimulatedCuda().__enter__()
"""
"""A sitecustomize.py, which Python runs before anything else in every process that a step starts."""

NVIDIA_SMI = """#!/bin/sh
case "$1" in
  *=driver_version) echo 580.65.06 ;;
  *) echo "700.00, 1980, [N/A]" ;;
esac
"""


def environment(folder: Path, *python_path: Path) -> dict[str, str]:
    """Of a process on a machine whose nvidia-smi answers as above."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI, encoding="ascii")
    program.chmod(0o755)
    # transformers reads weights in threads of its own, and the simulation is one thread's.
    return os.environ | {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(map(str, python_path)),  # the checkout is found without it
        "HF_DEACTIVATE_ASYNC_LOAD": "1",
        "OMP_NUM_THREADS": "1",
    }


def make_gpu(environment: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/gpu.py", *options]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3000)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Row:
    """What a tiny run on the simulated device leaves; every step of it is a process, as on a real one."""
    folder = tmp_path_factory.mktemp("make-gpu")
    texts = folder / "texts"
    texts.mkdir()
    for name in ("one", "two", "three"):  # longer than 384 tokens of a model that reads bytes
        (texts / f"{name}.txt").write_text(f"The text called {name}. " * 400, encoding="utf-8")
    (folder / "sitecustomize.py").write_text(EVERY_PROCESS, encoding="utf-8")
    out = folder / "gpu.json"
    real = ("--model", "reference", "--texts", str(texts), "--commit", COMMIT)
    done = make_gpu(environment(folder, folder), "--tiny", "--minutes", "60", "--out", str(out), *real)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "Failed: nothing" in done.stdout
    assert "Wrong: nothing" in done.stdout
    made: Row = json.loads(out.read_text(encoding="utf-8"))
    return made


# --- the whole run: a minute; `nox -s rehearse-gpu` does it in another environment -----------------------------------


@simulated
@pytest.mark.thorough
def test_every_step_has_its_result(record: Row) -> None:
    steps = gpu.steps("cuda", True, "reference", "texts")
    assert list(record["steps"]) == list(steps)
    for name, step in record["steps"].items():
        assert step["failed"] is None
        assert 0 < step["seconds"] < step["limit"], name
    for name in steps.keys() - {"tests", "shapes"}:
        assert record["steps"][name]["results"], name
    assert "2 passed" in record["steps"]["tests"]["output"]


@simulated
@pytest.mark.thorough
def test_the_record_names_the_machine(record: Row) -> None:
    machine = record["machine"]
    assert machine["commit"] == COMMIT
    assert machine["bandwidth"] > 0
    assert machine["product"] > 0
    assert (machine["driver"], machine["power_limit_watts"], machine["most_mhz"]) == ("580.65.06", 700.0, 1980.0)
    assert machine["most_memory_mhz"] is None  # "[N/A]"
    assert (record["device"], machine["capability"], machine["devices"]) == ("simulated", "9.0", 1)
    assert machine["rotations"] == "one Triton kernel"
    assert machine["cuda"] is None  # of torch, which the simulated device leaves as it is
    assert {"hip", "cudnn", "triton", "python", "gigabytes", "multiprocessors"} <= machine.keys()
    (model,) = record["models"]
    assert model["dtype"] == "bfloat16"
    assert all(model[key] > 0 for key in ("flops", "bandwidth", "parameters"))


def kernel_of(method: str) -> str:
    """The kernel of attention at tiny sizes, where one launch for all zones is faster than tiles."""
    return "flash_attention" if method in ("stock", "yarn", "dynamic-ntk", "dynamic-yarn") else "zones"


@simulated
@pytest.mark.thorough
def test_every_row_has_every_field(record: Row) -> None:
    shape = gpu_shapes.SHAPES["tiny"]
    expected = [(method, 1, tokens) for tokens in shape.lengths for method in gpu_shapes.METHODS]
    expected += [(method, gpu_shapes.ROWS, shape.padded) for method in gpu_shapes.METHODS]
    rows = {(row["method"], row["rows"], row["tokens"]): row for row in record["rows"]}
    assert sorted(rows) == sorted(expected)
    for (method, count, tokens), row in rows.items():
        assert row["finite"] is True
        assert all(value > 0 for value in row["predicted"].values())
        for way in ("whole", "chunks") if count == 1 else ("whole",):
            assert all(row[way][key] > 0 for key in ("first", "second", "gigabytes", "reserved_gigabytes"))
        step = row["decode"]
        assert 0 < step["least"] <= step["median"] <= step["most"]
        assert step["steps"] == shape.steps
        assert step["launches"] > 0
        if count == 1:
            assert step["waits"] == 0
            assert step["kernels"] == kernel_of(method)
            assert row["alone"] is None
        else:
            assert row["alone"] < gpu.MOST_DIFFERENCE
        if count == 1 and tokens == shape.lengths[0] and method not in ("stock", "yarn"):  # yarn changes every length
            assert row["unchanged"]["difference"] < gpu.MOST_DIFFERENCE
            assert 0 < row["unchanged"]["tokens"] <= shape.trained
        else:
            assert row["unchanged"] is None


@simulated
@pytest.mark.thorough
def test_a_stock_model_reads_whole_prompts_alone_by_flash_attention(record: Row) -> None:
    """Onto a cache transformers gives attention a mask, so that chunks are no measure of a patched model."""
    kernels = {
        row["method"]: (row["whole"]["kernels"], row["chunks"]["kernels"]) for row in record["rows"] if row["rows"] == 1
    }
    assert kernels["stock"] == ("flash_attention", "efficient_attention")
    assert kernels["rerope"] == ("zones", "zones")  # at tiny sizes launches take the time


@simulated
@pytest.mark.thorough
def test_a_trial_is_no_measurement(record: Row) -> None:
    assert record["trial"]
    assert not record["measured"]
    assert record["said"]["Slower or larger than expected"] == []
    nothing = [pages.prompts_table(record), pages.steps_table(record), pages.said_text(record)]
    assert nothing == [pages.NOTHING] * 3
    parts = (pages.perplexity_text, pages.reading_text, pages.decoding_text, pages.kernels_text)
    assert [part(record) for part in parts] == [""] * 4
    assert "not a measurement" in pages.machine_text(record)


@simulated
@pytest.mark.thorough
def test_a_real_model_is_read_under_every_method(record: Row) -> None:
    description, *rows = record["steps"]["real model"]["results"]
    assert (description["model"], description["trained"], description["lengths"]) == ("reference", 256, [256, 384])
    assert [(row["text"], row["method"]) for row in rows] == list(
        product(["one", "three", "two"], gpu_real_model.METHODS)
    )
    for row in rows:
        assert all(0 < loss < 20 for loss in row["loss"].values())
        assert all(speed > 0 for speed in row["tokens_per_second"].values())
        assert all(held > 0 for held in row["gigabytes"].values())
    unpatched = {row["text"]: row["loss"] for row in rows if row["method"] == "unpatched"}
    for row in rows:  # dca leaves what is within the trained length as it is
        if row["method"] == "dca":
            assert row["loss"]["256"] == pytest.approx(unpatched[row["text"]]["256"], abs=0.02)


@simulated
@pytest.mark.thorough
def test_reading_and_decoding_have_their_floors(record: Row) -> None:
    description, *rows = record["steps"]["reading and decoding"]["results"]
    scale = gpu_prefill.SCALES["tiny"]
    assert description["layers"] == scale.layers
    assert [{key: row[key] for key in vars(job)} for row, job in zip(rows, gpu_prefill.jobs(scale), strict=True)] == [
        vars(job) for job in gpu_prefill.jobs(scale)
    ]
    for row in rows:
        if row["kernel"] == "cudnn":  # the simulated device has flash attention alone
            assert "failed" not in row or "kernel" in row["failed"]
            continue
        assert row["finite"] is True
        assert row["seconds"] > 0
        assert row["floor"] > 0
        assert kernel_of(row["method"]) in row["kernels"]
        assert row["times"] == scale.layers / row["layers"]


@simulated
@pytest.mark.thorough
def test_kernels_give_what_their_definitions_give(record: Row) -> None:
    rows = record["steps"]["kernels"]["results"]
    assert {row["question"] for row in rows} == {"rotation", "window"}  # the simulated device has no backward
    for row in rows:
        for key in ("difference", "output", "query", "key", "value"):
            assert row.get(key, 0.0) <= gpu.TOLERANCES[row.get("dtype", "float32")]


@simulated
@pytest.mark.thorough
def test_the_tables_of_shapes_say_no_more_than_the_record(record: Row) -> None:
    """Every number of the tables is one of the record, in the page's units; what was not measured has no row."""
    measured = record | {"measured": True}
    first, *others = record["rows"]
    measured["rows"] = [
        {key: value for key, value in first.items() if key != "predicted"} | {"skipped": "why"},
        *others,
    ]
    measured["said"] = measured["said"] | {"Skipped": ["tiny stock: why"]}
    made = [pages.prompts_table(measured), pages.steps_table(measured), pages.said_text(measured)]
    text = "\n".join(made)
    known = {number for value in numbers(measured) for number in shown(value)}
    known |= {number for value in strings(measured) for number in re.findall(r"\d[\d,.]*", value)}
    found = re.findall(r"\d[\d,.]*", text)
    assert {number.rstrip(".,") for number in found} <= {number.rstrip(".,") for number in known}
    assert made[0].count("| whole |") == len(others)
    assert made[0].count("| in chunks |") == sum(row["rows"] == 1 for row in others)
    assert made[1].count(" to ") == len(others) + 1 + sum(row["rows"] > 1 for row in others)  # its head, "up to"
    assert "tiny stock: why" in made[2]


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from strings(each)
    elif isinstance(value, str):
        yield value


def shown(value: float) -> Iterator[str]:
    yield from (f"{value:,}", f"{value}", f"{value:.1f}", f"{value:.2f}", f"{1000 * value:.1f}")


# --- what does not fit, fails, or takes too long ----------------------------------------------------------------------


def rows_of(seconds: float = 1000) -> list[Row]:
    return list(gpu_shapes.ShapeMeasurement("tiny", "cuda", time.monotonic() + seconds).rows())


@simulated
def test_a_model_that_does_not_fit_has_its_reason() -> None:
    with SimulatedCuda(memory=100_000):
        (only,) = rows_of()
    assert only["skipped"] == "its weights are 0.0 GB, and 0.0 GB are free"
    assert gpu.skipped([only]) == [f"tiny: {only['skipped']}"]


@simulated
def test_what_no_time_is_left_for_has_its_reason() -> None:
    with SimulatedCuda():
        description, *rows = rows_of(seconds=-1)
    assert description["dtype"] == "bfloat16"
    assert {row["method"] for row in rows} == set(gpu_shapes.METHODS)
    assert all("no time was left" in row["skipped"] for row in rows)


@simulated
def test_a_reading_that_runs_out_of_memory_has_its_reason() -> None:
    """The device has room for the model and for a short prompt."""
    with SimulatedCuda() as device, torch.inference_mode():
        model = gpu_shapes.random_model("tiny", "cuda", torch.bfloat16)
        predicted = {"prefill": 0.1, "whole_gigabytes": 0.0}
        held = device.live
        device.memory = device.live + 200_000
        short, _, _ = gpu_shapes.measure_reading(
            model, gpu_shapes.Prompts.random(32, "cuda"), None, predicted, "cuda", steps=0
        )
        long, steps, _ = gpu_shapes.measure_reading(
            model, gpu_shapes.Prompts.random(256, "cuda"), None, predicted, "cuda", steps=4
        )
        assert device.live == held
        much = {"prefill": 0.1, "whole_gigabytes": 1.5}
        known, _, _ = gpu_shapes.measure_reading(
            model, gpu_shapes.Prompts.random(256, "cuda"), None, much, "cuda", steps=4
        )
    assert short["kernels"] == "flash_attention"
    assert (long, steps) == ({"skipped": long["skipped"]}, None)
    assert long["skipped"].startswith("out of memory: CUDA out of memory")
    assert known == {"skipped": "it needs about 1.5 GB, and 0.0 GB are free"}


@simulated
@pytest.mark.parametrize(("capability", "dtype"), [((7, 5), "float16"), ((8, 0), "bfloat16"), ((12, 0), "bfloat16")])
def test_half_precision_is_what_the_device_has_kernels_for(capability: tuple[int, int], dtype: str) -> None:
    with SimulatedCuda(capability):
        assert usual_dtype("cuda") == dtype
    assert usual_dtype("cpu") == "float32"


@simulated
@pytest.mark.parametrize("triton", [True, False])
def test_launches_waits_and_rotations_are_those_of_the_device(triton: bool) -> None:
    with SimulatedCuda(triton=triton) as device, torch.inference_mode():
        # Where Triton is installed, it says why it cannot build a kernel for a device that is none.
        assert gpu_machine.rotated_by("cuda").startswith("one Triton kernel" if triton else "torch's operators")
        model = gpu_shapes.random_model("tiny", "cuda", torch.bfloat16)
        ids = gpu_shapes.Prompts.random(64, "cuda").ids
        model(ids)
        device.reset()
        kernels, launches = attention_kernels_and_launches(lambda: model(ids))
        assert (kernels, launches) == ("flash_attention", device.launches)
        assert gpu_shapes.count_waits(lambda: [float(ids[0, at]) for at in range(3)]) == 3  # type: ignore[arg-type]


@simulated
def test_other_angles_are_seen_in_random_weights() -> None:
    """What the tolerance of the checks would let through is no wrong rotation."""
    with SimulatedCuda(), torch.inference_mode():
        model = gpu_shapes.random_model("tiny", "cuda", torch.bfloat16)
        prompts = gpu_shapes.Prompts.random(64, "cuda")
        stock = gpu_shapes.last_logits(model, prompts)
        with rope.patched(model, "linear", factor=1.1):
            assert gpu_shapes.difference(gpu_shapes.last_logits(model, prompts), stock) > 2 * gpu.MOST_DIFFERENCE
        row = gpu_shapes.check_unchanged(model, "rerope", {}, prompts.ids)
    assert row is not None
    assert row["difference"] < gpu.MOST_DIFFERENCE / 2


def test_a_step_that_fails_or_takes_too_long_keeps_its_results() -> None:
    code = "import sys, time; print('{\"row\": 1}', flush=True); {}"
    failed = gpu.run(["-c", code.replace("{}", "sys.exit('no kernel image')")], 60)
    assert "no kernel image" in failed["failed"]
    assert failed["results"] == [{"row": 1}]
    assert gpu.run(["-c", "print('text')"], 60)["output"] == "text"


def test_no_step_takes_the_time_of_another(tmp_path: Path) -> None:
    """One that hangs is ended with what it started, and the next one has its whole share."""
    started = tmp_path / "process"
    sleep = "import time; time.sleep(100)"
    hangs = f"""
import pathlib, subprocess, sys
print('{{"row": 1}}', flush=True)
child = subprocess.Popen([sys.executable, "-c", "{sleep}"])
pathlib.Path({str(started)!r}).write_text(str(child.pid))
{sleep}
"""
    todo = {"hangs": gpu.Step(["-c", hangs], 1), "works": gpu.Step(["-c", "print('text')"], 1)}
    done = dict(gpu.run_all(todo, 6))
    assert done["hangs"]["failed"] == "it did not end within its 3 s"
    assert done["hangs"]["results"] == [{"row": 1}]
    assert done["works"]["failed"] is None
    assert done["works"]["limit"] > 2
    child = int(started.read_text(encoding="ascii"))
    assert not Path(f"/proc/{child}").exists() or "(zombie)" in Path(f"/proc/{child}/status").read_text("ascii")


# --- what is said at the end -----------------------------------------------------------------------------------------

BASE: Row = {
    "shape": "8B", "method": "stock", "rows": 1, "tokens": 8192, "cudnn": True, "finite": True,
    "predicted": {"prefill": 0.5, "decode": 0.001, "whole_gigabytes": 10.0, "chunks_gigabytes": 10.0},
    "whole": {"first": 2.0, "second": 1.0, "kernels": "flash_attention", "gigabytes": 9.0},
    "chunks": {"first": 4.0, "second": 3.0, "kernels": "efficient_attention", "gigabytes": 9.0},
    "decode": {"median": 0.01, "kernels": "flash_attention", "launches": 1000, "waits": 0},
}  # fmt: skip


def patched(**changes: Row) -> Row:
    return BASE | {"method": "rerope"} | {key: {**BASE[key], **change} for key, change in changes.items()}


def test_what_is_above_its_prediction_is_named() -> None:
    assert gpu.above_prediction([BASE, patched(chunks={"second": 1.05})]) == []
    slow = patched(whole={"second": 1.3}, chunks={"second": 1.3}, decode={"median": 0.02})
    assert gpu.above_prediction([BASE, slow]) == [
        "8B rerope at 8,192 tokens, whole: 1300.0 ms, where 1000.0 were expected",
        # of the stock model's whole prompt: its chunks took 3 s
        "8B rerope at 8,192 tokens, chunks: 1300.0 ms, where 1000.0 were expected",
        "8B rerope at 8,192 tokens, decode: 20.0 ms, where 10.0 were expected",
    ]
    large = patched(chunks={"second": 1.0, "gigabytes": 20.0})
    assert gpu.above_prediction([BASE, large]) == [
        "8B rerope at 8,192 tokens, chunks: 20.0 GB, where 10.0 were expected"
    ]
    unlike = patched(whole={"second": 1.3}, chunks={"second": 1.0}) | {"cudnn": False}  # with nothing to compare
    assert gpu.above_prediction([BASE, unlike]) == []


def test_wrong_outputs_are_named() -> None:
    right = BASE | {"unchanged": {"tokens": 100, "difference": 0.02}, "alone": 0.01}
    assert gpu.wrong([right]) == []
    for change, said in (
        ({"finite": False}, "not finite"),
        ({"unchanged": {"tokens": 100, "difference": 0.3}}, "0.30 standard deviations from the stock model at 100"),
        ({"alone": float("nan")}, "nan standard deviations from the same row alone"),
        ({"failed": "no kernel image"}, "no kernel image"),
    ):
        (sentence,) = gpu.wrong([right | change])
        assert said in sentence


def test_what_parts_say_is_wrong_or_slow() -> None:
    stock = {
        "method": "stock",
        "way": "bare",
        "tokens": 32768,
        "layers": 4,
        "times": 8,
        "chunk": None,
        "kernel": "flash",
    }
    rows = [stock | {"seconds": 2.0}, stock | {"seconds": 1.0, "kernel": "cudnn"}]
    slow = stock | {"method": "rerope", "seconds": 1.2, "kernel": None}
    assert list(gpu.slower_parts([*rows, slow | {"seconds": 1.05}])) == []
    assert list(gpu.slower_parts([*rows, slow])) == [
        "rerope at 32,768 tokens, bare, 4 layers: 1.20 times as long as the stock model"
    ]
    assert list(gpu.slower_parts([{"question": "rotation", "of": "keys, half", "of_copy": 0.5}])) == [
        "rotating keys, half: 50% of the bandwidth of a copy"
    ]
    right = {"question": "window", "window": 30, "dtype": "float16", "difference": 1e-3}
    assert (
        list(gpu.wrong_parts([right, slow | {"finite": True}, {"text": "a", "method": "yarn", "loss": {"64": 2.0}}]))
        == []
    )
    for row, said in (
        (right | {"difference": 0.1}, "difference is off by 0.1, where rounding makes 0.003 at most"),
        (slow | {"finite": False}, "not finite"),
        (slow | {"failed": "no kernel image"}, "no kernel image"),
        ({"text": "a", "method": "yarn", "loss": {"64": float("nan")}}, "the loss at 64 tokens is not finite"),
    ):
        (sentence,) = gpu.wrong_parts([row])
        assert said in sentence


def test_what_no_time_was_left_for_is_counted() -> None:
    rows = [{"of": "a", "skipped": f"{gpu.NO_TIME}: 3 s"}, {"of": "b", "skipped": "out of memory"}, {"of": "c"}]
    assert gpu.left_out(rows, lambda row: str(row["of"]), "kernels") == [
        "b: out of memory",
        "kernels: no time was left for 1 of 3 rows",
    ]


def test_steps_that_were_run_before_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert gpu.kept(out) == {}
    lines = [{"shape": "1B", "skipped": None}, BASE]
    done: dict[str, Row] = {name: {"failed": None, "seconds": 1.0, "limit": 2.0} for name in ("machine", "shapes")}
    done["machine"]["results"], done["shapes"]["results"] = [{"device": "x"}], lines
    out.write_text(json.dumps(gpu.judge(done, "cpu", True)), encoding="utf-8")
    assert gpu.kept(out) == done


def test_each_device_has_a_file_of_its_own(tmp_path: Path) -> None:
    assert gpu.file_of(tmp_path, "cpu") == tmp_path / "gpu-cpu.json"
    assert gpu.file_of(tmp_path / "mine.json", "cpu") == tmp_path / "mine.json"
    with SimulatedCuda() if why_unavailable() is None else nullcontext():
        if why_unavailable() is None:
            assert gpu.file_of(tmp_path, "cuda") == tmp_path / "gpu-simulated.json"


def test_paths_of_this_machine_are_not_recorded() -> None:
    printed = [{"provenance": {"model": "/home/me/model"}, "results": [{"length": 256, "perplexity": 2.0, "x": 1}]}]
    assert gpu.brief(printed) == [{"length": 256, "perplexity": 2.0}]
    assert gpu.brief([{"row": 1}]) == [{"row": 1}]


# --- the page ---------------------------------------------------------------------------------------------------------


def made_up(texts: int) -> Row:
    """A record with losses whose table and sentences are known: `a` holds on, `b` costs short inputs."""
    losses = {"unpatched": (2.0, 5.0, 9.0), "a": (2.0, 2.02, 2.1), "b": (2.3, 2.3, 2.4)}
    rows = [
        {"text": f"t{at}", "method": name, "loss": dict(zip(("100", "200", "800"), values, strict=True)),
         "tokens_per_second": {"100": 1e4, "200": 1e4, "800": 1e4}, "gigabytes": {"100": 1.0, "200": 1.0, "800": 1.0}}
        for at in range(texts) for name, values in losses.items()
    ]  # fmt: skip
    about = {"model": "M.Q4", "trained": 100, "lengths": [100, 200, 800], "scored": 50, "dtype": "bfloat16"}
    return {"measured": True, "device": "G", "steps": {"real model": {"results": [about, *rows]}}}


def test_the_sentences_of_the_page_follow_from_the_table() -> None:
    first, second = pages.perplexity_sentences(made_up(2))
    assert first == (
        "Unpatched, perplexity goes from 7.4 at 100 tokens to 148 at 200 and 8,103 at 800; with `a` it is 7.5 and 8.2."
    )
    assert second == "Within 5% of 7.4 at 200 tokens: `a`. Within 1% of it at 100 tokens: `a`."
    assert "too few for intervals" in pages.perplexity_text(made_up(2))
    assert "too few for intervals" not in pages.perplexity_text(made_up(3))


def test_a_text_that_was_cut_short_is_left_out() -> None:
    record = made_up(3)
    record["steps"]["real model"]["results"].pop()
    assert {len(values) for each in pages.losses(record).values() for values in each.values()} == {2}


def test_missing_kernels_are_named() -> None:
    fused, without = ({"shape": "8B", "rotations": name} for name in ("one Triton kernel", "torch's operators: no gcc"))
    assert gpu.unfused([BASE, patched()], [fused]) == []
    row = patched(whole={"kernels": "attention_math"}, decode={"kernels": "none of them", "waits": 2})
    assert gpu.unfused([BASE, row], [without]) == [
        "8B: torch's operators: no gcc rotate keys and queries",
        "8B rerope at 8,192 tokens, whole: attention by attention_math",
        "8B rerope at 8,192 tokens, decode: attention by none of them",
        "8B rerope at 8,192 tokens: a step waits 2 times for the device, of the stock model 0",
    ]


# --- no device -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "hip", "driver", "amd", "expected"),
    [
        (None, None, "580.65", False, ["driver 580.65", "built for CPUs alone", "pip install"]),
        (None, "6.4", "580.65", False, ["built for ROCm 6.4", "pip install"]),
        ("13.0", None, "535.1", False, ["driver 535.1", "built for CUDA 13.0", "too old", "whl/cu"]),
        ("13.0", None, None, True, ["AMD", "built for CUDA 13.0", "whl/rocm"]),
        (None, None, None, True, ["AMD", "built for CPUs alone", "whl/rocm"]),
        (None, "6.4", None, True, ["ROCm 6.4", "too old", "render"]),
        ("13.0", None, None, False, ["no GPU"]),
        (None, None, None, False, ["no GPU"]),
    ],
)
def test_why_there_is_no_device(
    cuda: str | None, hip: str | None, driver: str | None, amd: bool, expected: list[str]
) -> None:
    sentence = gpu_machine.why_no_device(cuda, hip, driver, amd, "the driver is too old")
    assert all(text in sentence for text in expected), sentence


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_the_reason_is_printed(tmp_path: Path) -> None:
    done = make_gpu(environment(tmp_path), "--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 2
    assert "the machine has an NVIDIA GPU" in done.stderr
    assert "driver 580.65.06" in done.stderr
    assert not (tmp_path / "gpu.json").exists()
