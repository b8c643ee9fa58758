"""The forecast of a run, which `--dry-run` prints: an estimate from the config and the text, without weights.

The time follows from the floating-point operations by the config, and from the measured speed of a device.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rope_ext_hf.errors import count_text, duration, size_text
from rope_ext_hf.reading.memory import MemoryEstimate, available, cached_layers
from rope_ext_hf.terminal import wrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["NOTHING_RUN", "Forecast", "estimate_flops", "measure_flops"]

NOTHING_RUN = "Nothing was run, and no weights were read."
"""The last line of a dry run."""
EFFICIENCY = 0.5
"""The share of the speed of a large matrix product that reading text was measured to reach."""


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
    """

    does: tuple[str, ...]
    tokens: int
    seconds: float
    device: torch.device
    memory: MemoryEstimate
    gpu: MemoryEstimate
    disk: int
    folder: str

    @property
    def room(self) -> int:
        """The free bytes on the disk that holds the folder, which need not exist yet."""
        path = Path(self.folder).absolute()
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        return shutil.disk_usage(existing).free

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as a dictionary that can be written as JSON, with sizes in bytes."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        sizes = {name: asdict(values[name]) | {"total": values[name].total} for name in ("memory", "gpu")}
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
            "memory": f"{self.device}: {self.memory}; {fits}",
            "gpu": "" if self.device.type == "cuda" else f"would hold {self.gpu}",
            "disk": f"{written}, in {self.folder}, where {size_text(self.room)} are free",
        }
        lines = [wrapped(text, f"{name:<9}") for name, text in rows.items() if text]
        return "\n".join([*lines, NOTHING_RUN])


def estimate_flops(model: PreTrainedModel, passes: Iterable[int], scored: int) -> float:
    """Estimate the floating-point operations of reading text.

    They are two per weight and token (of the experts, those that a token is routed to count), and four per head dim and
    pair of query and key.

    Args:
        model: a model, which may be on the meta device.
        passes: the number of tokens in each pass.
        scored: the number of tokens, in all passes together, that go through the head.
    """
    config: Any = model.config.get_text_config()
    routed = getattr(config, "num_experts_per_tok", None) or 1
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or routed
    tables = list(model.get_input_embeddings().parameters())
    embedding = sum(table.numel() for table in tables)
    body = 0.0
    for name, parameter in model.named_parameters():
        body += parameter.numel() * (routed / experts if ".experts." in name else 1.0)
    head = model.get_output_embeddings()
    body -= embedding
    if head is not None and id(head.weight) not in map(id, tables):
        body -= head.weight.numel()
    lengths = list(passes)
    pairs = sum(length * length / 2 for length in lengths)
    attention = 4 * pairs * sum(layer.heads * layer.head_dim for layer in cached_layers(config) if layer.per_token)
    return float(2 * body * sum(lengths) + attention + 2 * embedding * scored)


def measure_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """Return the floating-point operations per second to expect of a device: half the speed of a large linear layer.

    The layer grows as long as applying it takes little of `seconds`, because a CPU may multiply float16 a thousand
    times more slowly than float32. Where twice the size, which is eight times as many operations, takes less than four
    times as long, most of the time went into starting threads, so the layer grows further.
    """
    largest = 1024 if device.type == "cpu" else 4096

    def run(size: int, count: int) -> float:
        ones = torch.ones(size, size, device=device, dtype=dtype)
        started = time.perf_counter()
        for _ in range(count):
            product = torch.nn.functional.linear(ones, ones)
        float(product[0, 0])  # waits for the device
        return time.perf_counter() - started

    def fastest(size: int) -> float:
        return min(run(size, 1) for _ in range(3))

    size, previous = 64, math.inf
    latest = fastest(size)
    while size < largest and (latest < seconds / 32 or latest < 4 * previous):
        size, previous = 2 * size, latest
        latest = fastest(size)
    count = max(1, round(seconds / max(latest, 1e-6)))
    return EFFICIENCY * count * 2 * size**3 / run(size, count)
