"""How every benchmark here ends: one JSON line, printed last, and appended to a file where one is given."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any


def with_machine(result: dict[str, Any], device: str) -> dict[str, Any]:
    """A result with the name of the device and the versions that it was measured with."""
    name = platform.machine()
    if device.startswith("cuda"):
        import torch

        name = torch.cuda.get_device_name()
    versions = {package: version(package) for package in ("rope-ext-hf", "torch", "transformers")}
    return result | {"device": name, "versions": versions}


def record(result: dict[str, Any], out: Path | None, device: str = "cpu") -> None:
    """Print the result, with the device and the versions."""
    line = json.dumps(with_machine(result, device))
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    print(line)
