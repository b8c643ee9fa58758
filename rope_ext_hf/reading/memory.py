"""The memory that reading text takes, estimated from the config before any weights are read, and the free memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psutil
import torch

from rope_ext_hf.errors import CheckpointError, MethodError, size_text
from rope_ext_hf.reading.cache_size import cached_bytes, cached_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GPU_WORKING_BYTES = 2 * 2**30  # activations and logits
_WORKING_BYTES = {"cpu": 300 * 2**20}  # larger chunks were no faster on a CPU
_WORKING_SHARE = 16  # activations and logits get 1/16 of the free memory: the cache and other processes need room too
_AMPLE = 4  # an estimate is not worth a line if this many times the memory that is needed is free
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a measurement or a training takes, in bytes.

    Attributes:
        weights: the weights.
        cache: the keys and values of one span (text read at once) on the device.
        working: activations.
        offloaded: the keys and values of one span in main memory.
        logits: logits.
        training: gradients and the state of the optimizer.
    """

    weights: int
    cache: int
    working: int
    offloaded: int = 0
    logits: int = 0
    training: int = 0

    @property
    def total(self) -> int:
        """The memory that is needed on the device."""
        return self.weights + self.cache + self.working + self.logits + self.training

    def is_ample(self, device: torch.device) -> bool:
        """Return whether much more memory is free than is needed, on the device and in main memory.

        No estimate is shown then.
        """
        return _AMPLE * self.total <= available(device) and _AMPLE * self.offloaded <= available(_CPU)

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients and optimizer": self.training,
            "keys and values": self.cache,
            "activations": self.working,
            "logits": self.logits,
        }
        listed = ", ".join(f"{size_text(size)} {name}" for name, size in parts.items() if size)
        text = f"{size_text(self.total)}: {listed}"
        return f"{text}; and {size_text(self.offloaded)} of main memory" if self.offloaded else text


def available(device: torch.device) -> int:
    """Return the bytes that are free on a device."""
    if device.type == "cuda":
        # torch's allocator holds memory for this process that no tensor uses; that is free too
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return int(psutil.virtual_memory().available)


def budgets(device: torch.device) -> tuple[int, int]:
    """Return the bytes to use for the activations of a chunk of tokens, and the bytes to use for logits."""
    working = _WORKING_BYTES.get(device.type, GPU_WORKING_BYTES)
    is_here = device.type != "cuda" or torch.cuda.is_available()  # a dry run plans for a GPU elsewhere as well
    if is_here:
        working = min(working, available(device) // _WORKING_SHARE)
    return working * 2 // 3, working // 3


def widest_activation(config: Any) -> int:
    """Return the largest number of activations per token that any operation of the decoder produces."""
    stated = getattr(config, "intermediate_size", None) or 0
    widths = [stated] if isinstance(stated, int) else list(stated)  # some families state one per layer
    return int(max(*widths, 4 * config.hidden_size))


def estimate_memory(
    model: PreTrainedModel,
    longest: int,
    dtype: torch.dtype | None = None,
    *,
    device: torch.device | None = None,
    offload_cache: bool = False,
) -> MemoryEstimate:
    """Estimate the memory that reading spans of text (stretches read at once) takes.

    Args:
        model: a model, which may be on the meta device.
        longest: the number of tokens in the longest span.
        dtype: the dtype of weights and cache; default: the model's.
        device: the device that reads; default: the CPU.
        offload_cache: whether keys and values wait in main memory, and those of one layer at a time are on the device.
    """
    width = torch.finfo(dtype or model.dtype).bits // 8
    config: Any = model.config.get_text_config()
    cache = cached_bytes(config, longest, width=width)
    working, logits = budgets(device or _CPU)
    weights = model.num_parameters() * width
    if not offload_cache:
        return MemoryEstimate(weights, cache, working, logits=logits)
    # Only layers without a window are offloaded, and the keys and values of one of them at a time are on the device.
    moved = [layer.per_token * longest * width for layer in cached_layers(config) if layer.window is None]
    # Keys and values are two tensors, for each of which torch pins a power of two of bytes.
    pinned = sum(2 << (size // 2 - 1).bit_length() for size in moved if size)
    on_device = cache - sum(moved) + max(moved, default=0)
    return MemoryEstimate(weights, on_device, working, offloaded=pinned, logits=logits)


def check_memory(
    model: PreTrainedModel,
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    spread: bool = False,
    offload_cache: bool = False,
) -> MemoryEstimate:
    """Return the estimated memory for reading spans of text; raise an error if less is free.

    Args:
        model, longest, dtype, device, offload_cache: as in `estimate_memory`.
        spread: whether the weights are spread over all GPUs and main memory, so that the free memory is that of all of
            them.

    Raises:
        CheckpointError: there is too little; the message has the figures and what would fit.
        MethodError: `offload_cache` on a CPU.
    """
    if offload_cache and device.type == "cpu" and not spread:
        raise MethodError("on a CPU keys and values are in main memory anyway; leave out --offload-cache")
    needed = estimate_memory(model, longest, dtype, device=device, offload_cache=offload_cache)
    main = available(_CPU)
    everywhere = main + sum(available(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))
    free = everywhere if spread else available(device)
    if needed.total <= free and needed.offloaded <= main:
        return needed

    offers = []
    if not spread and device.type == "cuda" and needed.total <= everywhere:
        offers.append("--device-map auto (over all GPUs and main memory)")
    if not offload_cache and device.type == "cuda":
        offloaded = estimate_memory(model, longest, dtype, device=device, offload_cache=True)
        if offloaded.total <= free and offloaded.offloaded <= main:
            offers.append("--offload-cache (keys and values in main memory)")
    if dtype == torch.float32:
        offers.append("--dtype bfloat16 (half of it)")
    room = free - (needed.total - needed.cache)
    fitting = room * longest // max(1, needed.cache) // 256 * 256
    if fitting > 0:
        offers.append(f"shorter lengths: up to {min(fitting, longest):,} tokens fit")
    raise CheckpointError(
        f"spans of {longest:,} tokens need {needed}; {'all devices have' if spread else f'{device} has'} "
        f"{size_text(free)} free. Instead: {'; '.join(offers) or 'a machine with more memory'}"
    )
