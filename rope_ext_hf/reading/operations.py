"""The time that reading text takes: floating-point operations by the config, and the speed of a device."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from rope_ext_hf.reading.cache_size import cached_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EFFICIENCY = 0.5
"""The share of the speed of a large matrix product that reading text was measured to reach."""


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
