"""Estimates of memory and time, made from the config before any weights are read: of a measurement, and of a cache.

>>> from transformers import LlamaConfig
>>> config = LlamaConfig(num_hidden_layers=32, num_key_value_heads=8, head_dim=128)  # Llama 3.1 8B
>>> cached_bytes(config, tokens=131072, width=2) / 1e9  # in bfloat16
17.179869184
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch

from rope_ext_hf.errors import CheckpointError, MethodError, count_text, duration, size_text
from rope_ext_hf.patches.layer_types import SLIDING, AttentionLayers
from rope_ext_hf.terminal import wrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WITHOUT_KEYS = frozenset({"linear_attention", "conv", "moe", "mlp", "mamba", "recurrent"})
"""Layer types that keep no keys and values: a state of fixed size, or nothing."""

_STATES = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("n_mamba_heads", "mamba_headdim", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
)
"""Config keys whose product is the numbers of a recurrent state; those of convolutions are far smaller."""

_MORE_KEY_HEADS = {"mimo_v2_flash": 2}  # times the key heads of a config in layers with a window, which no config says
_STATE_WIDTH = 4  # bytes of a number of a recurrent state, which sums over all tokens
_WORKING_BYTES = {"cpu": 300 * 2**20}  # activations and logits; larger chunks were no faster on a CPU
GPU_WORKING_BYTES = 2 * 2**30
_WORKING_SHARE = 16  # activations get 1/16 of the free memory: the cache and other processes need room too
EFFICIENCY = 0.5  # of the speed of a large matrix product, as measured when reading text


class _LayerMemory(NamedTuple):
    """The memory of one layer, in numbers."""

    per_token: int
    window: int | None  # tokens that are kept at most; None: all
    state: int  # numbers whatever the tokens
    heads: int  # of queries
    head_dim: int  # of queries
    shards: int  # GPUs that can have a part of the keys and values each; on more of them, parts are kept twice


def cached_bytes(config: Any, tokens: int, *, width: int = 2, gpus: int = 1, ahead: int = 0, layers: Any = None) -> int:
    """Bytes of the cache of one input, on one of several GPUs that share the heads (tensor parallelism).

    Layers with a sliding window keep that many tokens, and while a step is computed also its tokens, which are `ahead`;
    latent attention keeps what it makes keys and values from; layers that share the keys and values of an earlier one
    keep none; linear attention and Mamba keep a state. A number of keys and values has `width` bytes. `layers`: what
    `cached_layers` returns, where it is known.
    """
    sizes = [
        layer.per_token * min(tokens, (layer.window or tokens) + ahead) * width // min(gpus, layer.shards)
        + layer.state * _STATE_WIDTH // gpus
        for layer in layers or cached_layers(config)
    ]
    return sum(sizes)


def cached_layers(config: Any) -> list[_LayerMemory]:
    """The memory of each layer that does not share the keys and values of another."""
    count = int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", None) or 0)
    attention = AttentionLayers(config)
    kinds = list(getattr(config, "layer_types", None) or [next(iter(SLIDING)) if attention.sliding else ""] * count)
    several = getattr(config, "is_heterogeneous", False)
    each = list(config.per_layer_config) if several else [config] * count
    layers = []
    for kind, config in zip(kinds[:count], each[:count], strict=True):
        known = vars(config)
        heads = int(config.num_attention_heads)
        head_dim = int(known.get("head_dim") or config.hidden_size // heads)
        keyless = kind in _WITHOUT_KEYS
        state = _state(config) if keyless or kind.startswith("hybrid") else 0
        if getattr(config, "kv_lora_rank", None):  # what latent attention makes keys and values from
            per_token, key_heads = int(config.kv_lora_rank + config.qk_rope_head_dim), 1
            per_token += int(getattr(config, "index_head_dim", None) or 0)  # keys of a sparse attention's indexer
        else:
            key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
            if kind in SLIDING:
                key_heads *= _MORE_KEY_HEADS.get(config.model_type, 1)
            per_token = key_heads * (head_dim + int(known.get("v_head_dim") or head_dim))
        kept = attention.window if kind in SLIDING else None
        layers.append(_LayerMemory(0 if keyless else per_token, kept, state, heads, head_dim, key_heads))
    return layers


def _state(config: Any) -> int:
    stated = ([getattr(config, key, None) for key in keys] for keys in _STATES)
    known: list[list[Any]] = [sizes for sizes in stated if all(isinstance(size, int) for size in sizes)]
    return int(math.prod(known[0])) if known else 0


NOTHING_RUN = "Nothing was run, and no weights were read."  # the last line of a dry run
_AMPLE = 4  # memory of which this many times as much is free is not worth a line


@dataclass(frozen=True)
class MemoryEstimate:
    """Memory of a measurement, in bytes."""

    weights: int
    cache: int  # keys and values on the device, of one span
    working: int  # activations
    offloaded: int = 0  # keys and values in main memory
    logits: int = 0
    training: int = 0  # gradients, and what the optimizer keeps

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working + self.logits + self.training

    def is_ample(self, device: torch.device) -> bool:
        """Return whether so much more is free on the device, and in main memory, that nobody needs to read of it."""
        return _AMPLE * self.total <= available(device) and _AMPLE * self.offloaded <= available(torch.device("cpu"))

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients and optimizer": self.training, "keys and values": self.cache}
        parts |= {"activations": self.working, "logits": self.logits}
        text = f"{size_text(self.total)}: " + ", ".join(
            f"{size_text(each)} {name}" for name, each in parts.items() if each
        )
        return f"{text}; and {size_text(self.offloaded)} of main memory" if self.offloaded else text


@dataclass(frozen=True)
class Forecast:
    """What a run would do and take, by its config and its text alone."""

    does: tuple[str, ...]  # what would be done, line by line
    tokens: int  # that would be read, of all methods; 0: the time decides
    seconds: float  # about, by the speed of the device that was measured, or as was asked for
    device: torch.device
    memory: MemoryEstimate  # that the device must hold at most
    gpu: MemoryEstimate  # the same on a GPU, whose spans are read in larger parts
    disk: int  # bytes that would be written into `folder`, results aside
    folder: str

    @property
    def room(self) -> int:
        path = Path(self.folder).absolute()
        return shutil.disk_usage(next(each for each in (path, *path.parents) if each.exists())).free

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; sizes in bytes."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
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


def available(device: torch.device) -> int:
    """Bytes free on a device."""
    if device.type == "cuda":
        # and what torch's allocator holds for this process and does not use
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return int(psutil.virtual_memory().available)


def budgets(device: torch.device) -> tuple[int, int]:
    """Bytes for the activations of one chunk of tokens in the decoder, and for as many logits as are made at once."""
    working = _WORKING_BYTES.get(device.type, GPU_WORKING_BYTES)
    if device.type != "cuda" or torch.cuda.is_available():  # else of a GPU that is not here
        working = min(working, available(device) // _WORKING_SHARE)
    return working * 2 // 3, working // 3


def estimate_memory(
    model: PreTrainedModel,
    longest: int,
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | None = None,
    offload_cache: bool = False,  # keys and values wait in main memory, those of one layer at a time on the device
) -> MemoryEstimate:
    """Estimate the memory of reading spans of up to `longest` tokens, by default on the CPU, in the model's dtype."""
    width = torch.finfo(dtype or model.dtype).bits // 8
    config: Any = model.config.get_text_config()
    cache = cached_bytes(config, longest, width=width)
    working, logits = budgets(device or torch.device("cpu"))
    weights = model.num_parameters() * width
    if offload_cache:
        # Layers without a window alone are offloaded, and the keys of one of them at a time are on the device.
        moved = [layer.per_token * longest * width for layer in cached_layers(config) if layer.window is None]
        # keys, or values: torch pins a power of two of bytes
        pinned = sum(2 << (size // 2 - 1).bit_length() for size in moved if size)
        return MemoryEstimate(weights, cache - sum(moved) + max(moved, default=0), working, pinned, logits)
    return MemoryEstimate(weights, cache, working, logits=logits)


def check_memory(
    model: PreTrainedModel,
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    spread: bool = False,
    offload_cache: bool = False,
) -> MemoryEstimate:
    """Return the estimated memory if the devices have that much free, under `spread` all of them together.

    CheckpointError: too little; the message has the figures and what would fit. Others are as of `estimate_memory`.
    """
    if offload_cache and device.type == "cpu" and not spread:
        raise MethodError("on a CPU keys and values are in main memory as they are; leave out --offload-cache")
    needed = estimate_memory(model, longest, dtype, device=device, offload_cache=offload_cache)
    main = available(torch.device("cpu"))
    gpus = [available(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
    every = sum(gpus) + main
    free = every if spread else available(device)
    if needed.total <= free and needed.offloaded <= main:
        return needed
    offers = []
    if not spread and device.type == "cuda" and needed.total <= every:
        offers.append("--device-map auto (over all GPUs and main memory)")
    if not offload_cache and device.type == "cuda":
        offloaded = estimate_memory(model, longest, dtype, device=device, offload_cache=True)
        if offloaded.total <= free and offloaded.offloaded <= main:
            offers.append("--offload-cache (keys and values in main memory)")
    if dtype == torch.float32:
        offers.append("--dtype bfloat16 (half of it)")
    room = free - (needed.total - needed.cache)
    if (fitting := room * longest // max(1, needed.cache) // 256 * 256) > 0:
        offers.append(f"shorter lengths: up to {min(fitting, longest):,} tokens fit")
    raise CheckpointError(
        f"spans of {longest:,} tokens need {needed}; {'all devices have' if spread else f'{device} has'} "
        f"{size_text(free)} free. Instead: {'; '.join(offers) or 'a machine with more memory'}"
    )


def estimate_flops(model: PreTrainedModel, passes: Iterable[int], scored: int) -> float:
    """Estimate the floating-point operations of passes of these sizes, `scored` tokens of them through the head.

    Two per weight and token (of experts, the share that a token is routed to), four per head dim and query-key pair.
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
    pairs = sum([length * length / 2 for length in lengths])
    attention = 4 * pairs * sum([layer.heads * layer.head_dim for layer in cached_layers(config) if layer.per_token])
    return float(2 * body * sum(lengths) + attention + 2 * embedding * scored)


def measure_flops(device: torch.device, dtype: torch.dtype, seconds: float = 0.2) -> float:
    """Measure the floating-point operations per second to expect on a device: half the speed of a large linear layer.

    The layer grows as long as applying it takes little of `seconds`, because a CPU may multiply float16 a thousand
    times more slowly than float32. Where twice the size, which is eight times as many operations, takes less than four
    times as long, most of the time went into starting threads, so the layer grows further.
    """
    largest = 1024 if device.type == "cpu" else 4096

    def run(size: int, count: int) -> float:
        one = torch.ones(size, size, device=device, dtype=dtype)
        started = time.perf_counter()
        for _ in range(count):
            product = torch.nn.functional.linear(one, one)
        float(product[0, 0])  # waits for the device
        return time.perf_counter() - started

    def fastest(size: int) -> float:
        return min(run(size, 1) for _ in range(3))

    size, smaller = 64, math.inf
    once = fastest(size)
    while size < largest and (once < seconds / 32 or once < 4 * smaller):
        size, smaller = 2 * size, once
        once = fastest(size)
    count = max(1, round(seconds / max(once, 1e-6)))
    return EFFICIENCY * count * 2 * size**3 / run(size, count)


def sliding_window_warning(model: PreTrainedModel, longest: int) -> str | None:
    """A warning where spans are longer than the sliding window of some layers, else None."""
    config = model.config.get_text_config()
    attention = AttentionLayers(config)
    if not attention.sliding or attention.window is None or attention.window >= longest:
        return None
    return (
        f"{attention.sliding} of {config.num_hidden_layers} layers attend to the last {attention.window:,} tokens "
        f"only; spans of {longest:,} tokens are longer"
    )


def widest_activation(config: Any) -> int:
    """Numbers per token of the widest activation of a decoder."""
    stated = getattr(config, "intermediate_size", None) or 0
    widths = [stated] if isinstance(stated, int) else list(stated)  # one per layer in some families
    return int(max(*widths, 4 * config.hidden_size))
