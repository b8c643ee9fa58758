"""Options and output that all benchmarks share: one JSON line, printed last and appended to a file."""

from __future__ import annotations

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def benchmark_parser(doc: str | None, *, on_device: bool = True) -> argparse.ArgumentParser:
    """A parser that describes a script by the first paragraph of its docstring, with the options that `record` reads.

    Args:
        on_device: whether the script has an option for what it runs on.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.set_defaults(device="cpu")
    if on_device:
        parser.add_argument("--device", help="what models run on; default: cpu")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file")
    return parser


def processor() -> str:
    """The processor as Linux names it, with AMX where it has bfloat16 products; elsewhere its architecture."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    keys = dict(line.split("\t", 1) for line in reversed(lines) if "\t" in line)
    name = keys.get("model name", platform.machine()).strip("\t: ")
    return f"{name}, AMX" if "amx_bf16" in keys.get("flags", "") else name


def with_machine(result: dict[str, Any], device: str) -> dict[str, Any]:
    """A result with the name of the device and the versions that it was measured with.

    That of this package is its own word: a checkout on PYTHONPATH is not installed.
    """
    from rope_ext_hf import __version__

    name = platform.machine()
    if device.startswith("cuda"):
        import torch

        name = torch.cuda.get_device_name()
    else:
        result = result | {"processor": processor()}
    versions = {"rope-ext-hf": __version__} | {package: version(package) for package in ("torch", "transformers")}
    return result | {"device": name, "versions": versions, "intervals": "Student, Wilson, Newcombe"}


def record(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Print a result, with the device, the versions and torch's threads, and append it to `--out`."""
    import torch

    line = json.dumps(with_machine(result | {"threads": torch.get_num_threads()}, arguments.device))
    if arguments.out is not None:
        with arguments.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line)
