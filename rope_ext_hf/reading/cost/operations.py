"""The time that reading text takes: floating-point operations by the config, and the speed of a device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from rope_ext_hf.reading.cost.memory import MemoryEstimate, available, cached_layers
from rope_ext_hf.reading.larger.waiting_states import measure_moving

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["MINUTES", "ReadingSpeed", "estimate_flops", "measure_flops", "measure_speed", "moving_seconds"]

EFFICIENCY = 0.5
"""The share of the speed of a large matrix product that reading text was measured to reach."""
_ELEMENTWISE = 40
"""Elementwise operations on a token's hidden state in one layer: norms, rotation, activation and sums, on average."""
_CALLS = 1000
"""Smallest operations that take as long as the Python code of one layer in one pass, as it was measured."""
_FEW_TOKENS = 8
MINUTES = 600.0
"""Seconds that a suggested measurement takes at most, where that is possible."""
_WIDEST = {"cpu": 1024}  # of the weights that are measured, by the kind of device
_WIDEST_ELSEWHERE = 4096


@dataclass(frozen=True)
class ReadingSpeed:
    """The speed of a device at the parts of reading text, as `measure_speed` measures them.

    They are kept apart because a device may be fast at one and slow at another: many CPUs multiply weights in bfloat16
    several times more slowly than in float32, and attend equally fast in both.

    Attributes:
        products: floating-point operations per second of a linear layer on many tokens.
        attention: floating-point operations per second of causal attention.
        elements: numbers per second of an elementwise operation.
        weights: weights per second of linear layers on a few tokens.
        calls: smallest operations per second.
    """

    products: float
    attention: float
    elements: float
    weights: float
    calls: float

    def seconds(self, model: PreTrainedModel, passes: Iterable[int], scored: int, short_passes: int = 0) -> float:
        """Estimate the seconds of reading text.

        Args:
            model, passes, scored: as in `estimate_flops`.
            short_passes: the number of passes over a few tokens that continue from a cache.
        """
        lengths = list(passes)
        body, embedding = _weights(model)
        config: Any = model.config.get_text_config()
        layers = config.num_hidden_layers
        many_tokens = (
            (2 * body * sum(lengths) + 2 * embedding * scored) / self.products
            + _attention_flops(config, lengths) / self.attention
            + _ELEMENTWISE * layers * config.hidden_size * sum(lengths) / self.elements
        )
        few_tokens = short_passes * (body + embedding) / self.weights
        return float(many_tokens + few_tokens + (len(lengths) + short_passes) * layers * _CALLS / self.calls)


def measure_speed(
    model: PreTrainedModel, device: torch.device, dtype: torch.dtype, seconds: float = 0.5, *, few_tokens: bool = True
) -> ReadingSpeed:
    """Measure the speed of a device at reading text with a model of this shape, for about `seconds`.

    A second call for the same shape, device and dtype returns the speed that was measured first.

    Args:
        model: the model, which may be on the meta device.
        device, dtype: where it reads, and the dtype of its weights.
        seconds: the time that measuring takes.
        few_tokens: whether to measure passes over a few tokens, too; without it they count as taking no time.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        dtype = torch.bfloat16  # quantised weights are multiplied in another dtype than they are saved in
    config: Any = model.config.get_text_config()
    layers = [layer for layer in cached_layers(config) if layer.per_token]
    heads, head_dim = (layers[0].heads, layers[0].head_dim) if layers else (1, 64)
    width = min(config.hidden_size, _WIDEST.get(device.type, _WIDEST_ELSEWHERE))
    return _measured_speed(width, min(heads, 16), head_dim, device, dtype, seconds, few_tokens)


@cache
def _measured_speed(
    width: int, heads: int, head_dim: int, device: torch.device, dtype: torch.dtype, seconds: float, few_tokens: bool
) -> ReadingSpeed:
    on_cpu = device.type == "cpu"
    most_tokens = 2048 if on_cpu else 8192
    weight = torch.ones(2 * width, width, device=device, dtype=dtype)

    def linear(tokens: int) -> Callable[[], torch.Tensor]:
        ones = torch.ones(tokens, width, device=device, dtype=dtype)
        return lambda: functional.linear(ones, weight)

    def attend(tokens: int) -> Callable[[], torch.Tensor]:
        ones = torch.ones(1, heads, tokens, head_dim, device=device, dtype=dtype)
        return lambda: functional.scaled_dot_product_attention(ones, ones, ones, is_causal=True)

    tokens, linear_time = _grown(linear, most_tokens, seconds / 16)
    attended, attention_time = _grown(attend, most_tokens, seconds / 16)
    numbers = torch.ones(2**20 if on_cpu else 2**24, device=device, dtype=dtype)
    weights, one = math.inf, torch.ones(16)
    if few_tokens:
        copies = [torch.ones_like(weight) for _ in range(max(1, 2**24 // weight.numel()))]  # more than a cache holds
        ones = torch.ones(_FEW_TOKENS, width, device=device, dtype=dtype)
        few_time = _shortest(lambda: [functional.linear(ones, copy) for copy in copies][-1], 2)
        weights = len(copies) * weight.numel() / few_time
    return ReadingSpeed(
        products=4 * tokens * width * width / linear_time,
        attention=2 * heads * head_dim * attended * attended / attention_time,
        elements=numbers.numel() / _shortest(lambda: numbers * numbers, 3),
        weights=weights,
        # Python code runs on the CPU, whatever the device is
        calls=1000 / _shortest(lambda: [one + one for _ in range(1000)][-1], 3),
    )


def _shortest(run: Callable[[], torch.Tensor], times: int) -> float:
    """Return the shortest of several times in seconds that a function takes; other processes lengthen some of them."""
    measured = []
    for _ in range(times + 1):  # the first one also loads kernels and allocates
        started = time.perf_counter()
        float(run().flatten()[0])  # waits for the device
        measured.append(time.perf_counter() - started)
    return max(min(measured[1:]), 1e-9)


def _grown(make: Callable[[int], Callable[[], torch.Tensor]], most: int, enough: float) -> tuple[int, float]:
    """Return the largest number of tokens, doubled from 32 on, that was measured, and its time in seconds.

    Tokens grow until they take as long as `enough`, and further while twice as many take less than 1.5 times as long,
    because then most of the time goes into starting.
    """
    tokens, previous = 32, math.inf
    latest = _shortest(make(tokens), 2)
    while tokens < most and (latest < enough or latest < 1.5 * previous < math.inf):
        tokens, previous = 2 * tokens, latest
        latest = _shortest(make(tokens), 2)
    return tokens, latest


def moving_seconds(
    model: PreTrainedModel, passes: Iterable[int], longest: int, needed: MemoryEstimate, device: torch.device
) -> float:
    """Estimate the seconds of moving hidden states between the device and the place where they wait.

    They move to the device and back at each layer, in the passes that are too long for them to stay there.

    Args:
        model: the model, which may be on the meta device.
        passes: the number of tokens in each pass.
        longest: the number of tokens in the longest pass.
        needed: the memory for the longest pass, as `memory.check_memory` returns it.
        device: the device that reads.
    """
    if not needed.moved:
        return 0.0
    config: Any = model.config.get_text_config()
    by_length = needed.cache + needed.waiting
    fitting = (available(device) - (needed.total - by_length)) * longest / (by_length + needed.moved)
    moved = sum(tokens for tokens in passes if tokens > fitting) * needed.moved / longest
    return float(2 * (config.num_hidden_layers + 1) * moved / measure_moving(needed.place, device))


def estimate_flops(model: PreTrainedModel, passes: Iterable[int], scored: int) -> float:
    """Estimate the floating-point operations of reading text.

    They are two per weight and token (of the experts, those that a token is routed to count), and four per head dim and
    pair of query and key.

    Args:
        model: a model, which may be on the meta device.
        passes: the number of tokens in each pass.
        scored: the number of tokens, in all passes together, that go through the head.
    """
    lengths = list(passes)
    body, embedding = _weights(model)
    attention = _attention_flops(model.config.get_text_config(), lengths)
    return float(2 * body * sum(lengths) + attention + 2 * embedding * scored)


def _weights(model: PreTrainedModel) -> tuple[float, int]:
    """Return the number of weights that each token goes through, and the number of those in the head.

    Of the experts, those that a token is routed to count.
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
    return body, embedding


def _attention_flops(config: Any, lengths: Iterable[int]) -> float:
    """Return the floating-point operations of causal attention in passes of these lengths, without its projections."""
    pairs = sum(length * length / 2 for length in lengths)
    return 4 * pairs * sum(layer.heads * layer.head_dim for layer in cached_layers(config) if layer.per_token)


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
