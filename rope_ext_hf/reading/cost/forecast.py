"""The forecast of a run, which `--dry-run` prints: an estimate from the config and the text, without weights."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from rope_ext_hf.errors import count_text, duration, size_text
from rope_ext_hf.reading.cost.memory import MemoryEstimate, available
from rope_ext_hf.terminal import wrapped

NOTHING_RUN = "Nothing was run, and no weights were read."
"""The last line of a dry run."""


__all__ = ["NOTHING_RUN", "Forecast"]


@dataclass(frozen=True)
class Forecast:
    """Forecast of a run: its steps, and the time, memory and disk space that it would take.

    Attributes:
        does: what would be done, one clause for each step.
        tokens: the number of tokens that would be read, by all methods together; 0 if a training ends by its time.
        seconds: an estimate by the measured speed of the device, or the time that a training is limited to.
        device: the device of the run.
        memory: the most memory that is needed on the device.
        gpu: the most memory that is needed on a GPU, which reads text in larger chunks.
        disk: the bytes that would be written into `folder`, results aside.
        folder: the folder of the run.
        faster: options with which it takes minutes, and how long; empty if it does already.
    """

    does: tuple[str, ...]
    tokens: int
    seconds: float
    device: torch.device
    memory: MemoryEstimate
    gpu: MemoryEstimate
    disk: int
    folder: str
    faster: str = ""

    @property
    def room(self) -> int:
        """The free bytes on the disk that holds the folder, which need not exist yet."""
        return free_bytes(Path(self.folder))

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as a dictionary that can be written as JSON, with sizes in bytes."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        sizes = {name: values[name].to_dict() for name in ("memory", "gpu")}
        free = {"free_memory": available(self.device), "free_disk": self.room}
        return values | sizes | free | {"device": str(self.device)}

    def __str__(self) -> str:
        free = available(self.device)
        fits = f"{size_text(free)} are free" if self.memory.total <= free else f"NOT ENOUGH: {size_text(free)} are free"
        written = size_text(self.disk) if self.disk else "results only"
        rows = {
            "would": "; ".join(self.does),
            "reads": f"{count_text(self.tokens)} tokens" if self.tokens else "",
            "time": f"about {duration(self.seconds)} on {self.device}",
            "faster": self.faster,
            "memory": f"{self.device}: {self.memory}; {fits}",
            "gpu": "" if self.device.type == "cuda" else f"would hold {self.gpu}",
            "disk": f"{written}, in {self.folder}, where {size_text(self.room)} are free",
        }
        lines = [wrapped(text, f"{name:<9}") for name, text in rows.items() if text]
        return "\n".join([*lines, NOTHING_RUN])


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk that holds a folder, which need not exist yet."""
    path = folder.absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    return shutil.disk_usage(existing).free
