"""Agreement of other programs with conformance/, written to docs/results/conformance.json.

    nox -s conformance
    python -m checks.conformance.run_engines --engines FOLDER --mlx-lm PYTHON --llama-cpp PYTHON --transformers-4 PYTHON

FOLDER holds the unpacked wheels of vLLM, SGLang and ExLlamaV3; the others are interpreters of environments with the
program. The smallest configs that show a deviation are run as well, and compared with the papers' formulas.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers.utils import logging

from checks import live_servers
from checks.conformance import engine_ports
from tests.conformance import formulas, models
from tests.conformance.generate import KIT

ROOT = KIT.parent
RESULT = ROOT / "docs" / "results" / "conformance.json"
HERE = Path(__file__).parent
Json = dict[str, Any]
CLASSES = "rotary classes out of its wheel"
HEAD: Json = {"model_type": "llama", "head_dim": 16, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 8}
HEAD |= {"num_key_value_heads": 1, "intermediate_size": 8, "num_hidden_layers": 1, "rope_theta": 10000.0}
YARN: Json = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LISTS: Json = {"short_factor": [1.0] * 8, "long_factor": [float(i + 1) for i in range(8)]}
SMALLEST: list[tuple[str, str, Json, int | None]] = [
    ("ExLlamaV3", "factor of yarn is not read", {"max_position_embeddings": 4096, "rope_scaling": YARN}, None),
    (
        "mlx-lm",
        "truncate of yarn is not read",
        {"max_position_embeddings": 16384, "rope_scaling": YARN | {"truncate": False}},
        None,
    ),
    (
        "mlx-lm",
        "attention_factor of yarn is not read",
        {"max_position_embeddings": 16384, "rope_scaling": YARN | {"attention_factor": 1.0}},
        None,
    ),
    (
        "mlx-lm",
        "longrope takes the long list for short inputs",
        {
            "model_type": "phi3",
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "rope_type": "longrope"} | LISTS,
        },
        4096,
    ),
    (
        "SGLang",
        "attention_factor of yarn is not read",
        {"max_position_embeddings": 16384, "rope_scaling": YARN | {"attention_factor": 1.0}},
        None,
    ),
    (
        "vLLM",
        "yarn with mrope_section has the ramp of four times the original length",
        {
            "model_type": "qwen2_5_vl_text",
            "max_position_embeddings": 16384,
            "rope_scaling": YARN | {"mrope_section": [2, 3, 3]},
        },
        None,
    ),
]
"""Program, what differs, the keys of a config that shows it, and the length of inputs, None: any."""


SERVED: list[tuple[str, Json]] = [*((name, {}) for name in ("llama", "llama-linear", "llama-llama3", "llama-yarn"))]
SERVED += [("qwen3-yarn", {}), ("llama-yarn", {"rope_scaling": None})]
"""Models of the kit that llama.cpp's server runs, and keys of their config that are changed before."""


def load_kit(name: str) -> ModuleType:
    """A module of the folder conformance/."""
    spec = importlib.util.spec_from_file_location(f"conformance_{name}", KIT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def in_process(port: Any, name: str, how: str) -> Json:
    """The outcomes of a port that is imported here."""
    kit = load_kit("kit")
    outcomes = [asdict(each) for each in (*kit.check_tables(port), *kit.check_models(port))]
    return {"program": name, "version": port.version(), "how": how, "outcomes": outcomes}


def in_another(python: str, port: str, name: str) -> Json:
    """The outcomes of a port that has an environment of its own, as the runner gives them."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "outcomes.json"
        command = [python, str(KIT / "run.py"), "--port", port, "--json", str(file)]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
        if not file.exists():
            raise SystemExit(f"{name}: {done.stderr}")
        found = json.loads(file.read_text(encoding="utf-8"))
    return {"program": name, "version": found["port"], "how": "models", "outcomes": found["outcomes"]}


ASK = """
import importlib, json, sys
config, length, port = json.loads(sys.argv[1])
module = importlib.import_module(port)
print(json.dumps([list(module.inv_freq(config)), float(module.magnitude(config))]))
"""


def smallest(ports: dict[str, Any], mlx: str) -> list[Json]:
    """Return the result of each smallest case beside the expected one."""
    rows = []
    for program, title, keys, length in SMALLEST:
        config = HEAD | keys
        right = formulas.read(config, None, length)
        if program == "mlx-lm":
            asked = json.dumps([config, length, "mlx_port"])
            done = subprocess.run([mlx, "-c", ASK, asked], cwd=HERE, capture_output=True, text=True, check=True)
            inv_freq, magnitude = json.loads(done.stdout.splitlines()[-1])
        else:
            port = ports[program]
            inv_freq, magnitude = port.inv_freq(config, length=length), port.magnitude(config, length=length)
        row: Json = {"program": program, "title": title, "config": config, "length": length}
        for name, numbers in (
            ("expected", ([float(f) for f in right.inv_freq], float(right.magnitude))),
            ("found", (inv_freq, magnitude)),
        ):
            row[name] = {"inv_freq": [float(f"{f:.6g}") for f in numbers[0]], "magnitude": float(f"{numbers[1]:.7g}")}
        rows.append(row)
    return rows


def live(python: str) -> list[Json]:
    """Run the kit against llama.cpp's server: with its models, and with one whose scaling was left out."""
    kit, rows = load_kit("kit"), []
    live_servers.WORK.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as ends:
        port, server = engine_ports.LlamaCppPort(python), live_servers.LlamaCpp(Path(python), ends)
        for name, change in SERVED:
            made = kit.write_model(name, Path(folder))
            config = json.loads((made / "config.json").read_text(encoding="utf-8")) | change
            (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
            made = made.rename(made.with_name(f"{name} {', '.join(change)}"))
            with server.serve(port.file(made), models.LENGTH) as url:
                command = [sys.executable, str(KIT / "run.py"), "--server", url, "--model", name, "--dtype", "float16"]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            said = (done.stdout or done.stderr).strip().split(": ", 1)[1]
            rows.append({"model": name, "without": list(change), "said": said})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=Path, required=True, metavar="FOLDER")
    for option in ("--mlx-lm", "--llama-cpp", "--transformers-4"):
        parser.add_argument(option, required=True, metavar="PYTHON")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    programs = [
        in_another(sys.executable, "transformers", "transformers"),
        in_another(given.transformers_4, "transformers", "transformers 4"),
        in_another(given.mlx_lm, "mlx_port", "mlx-lm"),
        in_process(engine_ports.LlamaCppPort(given.llama_cpp), "llama.cpp", "models"),
    ]
    whole = torch.arange

    def arange(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) == 2:
            return whole(args[0], min(args[1], args[0] + engine_ports.TABLE), **kwargs)
        return whole(min(args[0], engine_ports.TABLE), **kwargs) if len(args) == 1 else whole(*args, **kwargs)

    torch.arange = arange  # the tables of some are of ten million positions
    kinds = {"vLLM": engine_ports.VLLM, "SGLang": engine_ports.SGLang, "ExLlamaV3": engine_ports.ExLlama}
    ports = {name: kind(given.engines) for name, kind in kinds.items()}
    programs += [in_process(port, name, CLASSES) for name, port in ports.items()]
    content = {
        "command": "nox -s conformance",
        "versions": {package: version(package) for package in ("rope-ext-hf", "torch", "transformers")},
        "kit": json.loads((KIT / "kit.json").read_text(encoding="utf-8"))["version"],
        "date": datetime.now(UTC).date().isoformat(),
        "programs": [],
        "smallest": smallest(ports, given.mlx_lm),
        "servers": live(given.llama_cpp),
    }
    for each in programs:
        outcomes = each.pop("outcomes")
        cells: dict[str, str] = {}
        for outcome in outcomes:
            length = "" if outcome["length"] is None else f", {outcome['length']:,} tokens"
            name = outcome["case"] + (f", {outcome['layer_type']}" if outcome["layer_type"] else "") + length
            state = "-" if outcome["error"] is None else "differs" if outcome["error"] else "agrees"
            order = ("-", "agrees", "differs")
            cells[name] = max(cells.get(name, "-"), state, key=order.index)
            if outcome["error"]:
                each.setdefault("differences", []).append([name, outcome["check"], outcome["error"]])
        counts = [sum(outcome["error"] == "" for outcome in outcomes), sum(bool(o["error"]) for o in outcomes)]
        content["programs"].append(each | {"agree": counts[0], "differ": counts[1], "cells": cells})
        print(f"{each['version']}: {counts[0]} agree, {counts[1]} differ")
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
