"""Usual checkpoints are converted and detected as bytes: without torch, in little memory, to bytes by definition."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from rope_ext_hf.checkpoints.files.numbers import to_float32
from rope_ext_hf.checkpoints.files.torch_files import TORCH_DTYPES, tensor_bits
from rope_ext_hf.checkpoints.files.weight_files import SafetensorsFile
from tests.support.checkpoint_folders import all_tensors, convert, same
from tests.support.models import build, build_known

HEAVY = ("torch", "transformers", "safetensors.torch")


def loaded_in(command: list[str], log: Path) -> tuple[int, list[str]]:
    """The exit code of a command, and the heavy libraries that it or a child of it had imported at its exit.

    `log` is a new folder. Every interpreter of the command runs a sitecustomize in it, which writes them down.
    """
    log.mkdir()
    (log / "sitecustomize.py").write_text(
        "import atexit, os, sys\n"
        "def note():\n"
        f"    names = [name for name in {HEAVY!r} if name in sys.modules]\n"
        f"    open(os.path.join({str(log)!r}, f'{{os.getpid()}}.txt'), 'w').write('\\n'.join(['exit', *names]))\n"
        "atexit.register(note)\n",
        encoding="utf-8",
    )
    paths = [str(log), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    notes = [path.read_text(encoding="utf-8").splitlines() for path in log.glob("*.txt")]
    assert notes, done.stderr
    return done.returncode, sorted({name for names in notes for name in names} - {"exit"})


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_usual_folder_is_detected_and_converted_without_torch(tmp_path: Path, name: str) -> None:
    build_known(name).save_pretrained(tmp_path / "source")
    program = [sys.executable, "-m", "rope_ext_hf"]
    source, copy = str(tmp_path / "source"), str(tmp_path / "copy")
    assert loaded_in([*program, "detect", source], tmp_path / "detect") == (0, [])
    assert loaded_in([*program, "convert", source, copy, "--to", "interleaved"], tmp_path / "convert") == (0, [])
    assert (tmp_path / "copy" / "model.safetensors").is_file()


def test_where_the_class_is_asked_torch_is_seen(tmp_path: Path) -> None:
    build("gemma2").save_pretrained(tmp_path / "source")
    command = [sys.executable, "-m", "rope_ext_hf", "detect", str(tmp_path / "source")]
    assert loaded_in(command, tmp_path / "log") == (0, sorted(HEAVY))


def test_transformers_stays_quiet_where_it_is_imported_later(tmp_path: Path) -> None:
    build("gemma2").save_pretrained(tmp_path / "source")
    command = [sys.executable, "-m", "rope_ext_hf", "detect", str(tmp_path / "source"), "--text"]
    text = tmp_path / "text.txt"
    text.write_text("a text that is too short", encoding="utf-8")
    done = subprocess.run([*command, str(text)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr  # no bar of the weights that were loaded


# --- the bytes, by a definition -----------------------------------------------------------------------------------

HEADS, KEYS, DIM, WIDTH, LAYERS = 4, 2, 8, 32, 2
CONFIG: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": DIM,
    "max_position_embeddings": 64,
    "vocab_size": 40,
    "rope_theta": 10_000.0,
}


def random_bytes(dtype: torch.dtype, *shape: int) -> Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape, size), dtype=torch.uint8).view(dtype)[..., 0].contiguous()


def interleaved(rows: Tensor) -> Tensor:
    """Of each head of 8 rows in half order: 0, 4, 1, 5, 2, 6, 3, 7."""
    count = rows.shape[0] // DIM
    return torch.cat([rows[head * DIM + torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])] for head in range(count)])


def folder_of(path: Path, model_type: str, dtype: torch.dtype, extra: dict[str, Tensor]) -> dict[str, Tensor]:
    """Write a folder of random bytes, with the tensors of `extra` in each attention module, and return its tensors."""
    tensors = {"model.embed_tokens.weight": random_bytes(dtype, 40, WIDTH)}
    for layer in range(LAYERS):
        attention = f"model.layers.{layer}.self_attn"
        tensors |= {
            f"{attention}.q_proj.weight": random_bytes(dtype, HEADS * DIM, WIDTH),
            f"{attention}.k_proj.weight": random_bytes(dtype, KEYS * DIM, WIDTH),
            f"{attention}.v_proj.weight": random_bytes(dtype, KEYS * DIM, WIDTH),
            f"{attention}.o_proj.weight": random_bytes(dtype, WIDTH, HEADS * DIM),
        }
        tensors |= {f"{attention}.{name}": tensor.clone() for name, tensor in extra.items()}
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG | {"model_type": model_type}), encoding="utf-8")
    return tensors


def norm(size: int) -> dict[str, Tensor]:
    return {"q_norm.weight": torch.randn(size), "k_norm.weight": torch.randn(size)}


CASES: dict[str, tuple[str, torch.dtype, dict[str, Tensor]]] = {
    "llama bfloat16": ("llama", torch.bfloat16, {}),
    "mistral float16": ("mistral", torch.float16, {}),
    "qwen2 biases": (
        "qwen2",
        torch.bfloat16,
        {"q_proj.bias": torch.randn(HEADS * DIM).half(), "k_proj.bias": torch.randn(KEYS * DIM).bfloat16()},
    ),
    "qwen3 norms": ("qwen3", torch.bfloat16, norm(DIM)),
    "float8 with a scale for each row": (
        "llama",
        torch.float8_e4m3fn,
        {"q_proj.weight_scale": torch.randn(HEADS * DIM, 1), "k_proj.weight_scale": torch.randn(KEYS * DIM, 1)},
    ),
    "int8 with a scale for each row": (
        "llama",
        torch.int8,
        {"q_proj.weight_scale": torch.randn(HEADS * DIM, 1), "k_proj.SCB": torch.randn(KEYS * DIM)},
    ),
    "float8 with one scale": ("llama", torch.float8_e5m2, {"q_proj.weight_scale": torch.randn(1)}),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_a_definition(tmp_path: Path, case: str) -> None:
    tensors = folder_of(tmp_path / "source", *CASES[case])
    moves = [name for name, tensor in tensors.items() if ".q_" in name or ".k_" in name if tensor.numel() > 1]
    report = convert(tmp_path / "source", tmp_path / "copy", "interleaved")
    expected = {name: interleaved(tensor) if name in moves else tensor for name, tensor in tensors.items()}
    assert same(all_tensors(tmp_path / "copy"), expected)
    assert report.converted == len(moves)
    convert(tmp_path / "copy", tmp_path / "back", "half")
    weights = "model.safetensors"
    assert (tmp_path / "back" / weights).read_bytes() == (tmp_path / "source" / weights).read_bytes()


def test_rows_move_a_few_heads_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.arange(6 * DIM, dtype=torch.int32).reshape(-1, 1).repeat(1, 3)
    save_file({"rows": rows}, tmp_path / "file.safetensors")
    monkeypatch.setattr("rope_ext_hf.checkpoints.files.weight_files._ROWS_BYTES", 2 * DIM * 3 * 4)
    order = np.concatenate([head * DIM + np.array([0, 4, 1, 5, 2, 6, 3, 7]) for head in range(6)])
    parts = [bytes(part) for part in SafetensorsFile(tmp_path / "file.safetensors").moved_rows("rows", order)]
    assert [len(part) for part in parts] == [2 * DIM * 3 * 4] * 3
    assert b"".join(parts) == interleaved(rows).numpy().tobytes()


@pytest.mark.parametrize("dtype", [name for name in TORCH_DTYPES if name != "C64"])
def test_numbers_are_read_as_torch_reads_them(dtype: str) -> None:
    size = TORCH_DTYPES[dtype].itemsize
    bits = np.arange(256**size, dtype=f"u{size}") if size < 3 else tensor_bits(torch.randn(4096)).astype(f"u{size}") * 7
    bits = bits[:2] if dtype == "BOOL" else bits
    found = torch.from_numpy(to_float32(bits, dtype).copy())
    expected = torch.from_numpy(bits.view("u1")).view(TORCH_DTYPES[dtype]).float()
    assert torch.equal(found.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(found[numbers].view(torch.int32), expected[numbers].view(torch.int32))


# --- memory -------------------------------------------------------------------------------------------------------

MEGABYTE = 2**20


def peak_of_own_memory(command: list[str]) -> int:
    """The most bytes of its own that a process has by the count of the system; pages of files are not among them."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    status, peak = Path(f"/proc/{process.pid}/status"), 0
    while process.poll() is None:
        lines = status.read_text(encoding="utf-8").splitlines()
        peak = max([peak, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))])
        time.sleep(0.002)
    assert process.returncode == 0
    return peak


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux says how much memory is of files")
def test_memory_does_not_follow_the_weights(tmp_path: Path) -> None:
    """A folder of 220 MB takes less than 80 MB, although one of its tensors alone has 134 MB."""
    width, heads, vocabulary = 1024, 16, 65_536
    config = CONFIG | {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads}
    config |= {"head_dim": 64, "vocab_size": vocabulary, "intermediate_size": 4096, "model_type": "llama"}
    tensors = {"model.embed_tokens.weight": torch.randn(vocabulary, width).bfloat16()}
    for layer in range(LAYERS):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.randn(width, width).bfloat16()
        for name, shape in (("up_proj", (4096, width)), ("gate_proj", (4096, width)), ("down_proj", (width, 4096))):
            tensors[f"model.layers.{layer}.mlp.{name}.weight"] = torch.randn(shape).bfloat16()
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert (source / "model.safetensors").stat().st_size > 190 * MEGABYTE
    program = [sys.executable, "-m", "rope_ext_hf"]
    assert peak_of_own_memory([*program, "detect", str(source)]) < 80 * MEGABYTE
    target = str(tmp_path / "copy")
    assert peak_of_own_memory([*program, "convert", str(source), target, "--to", "interleaved"]) < 80 * MEGABYTE
