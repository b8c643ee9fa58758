"""The memory that reading text takes, estimated from the config before any weights are read, and the free memory.

>>> from transformers import LlamaConfig
>>> config = LlamaConfig(num_hidden_layers=32, num_key_value_heads=8, head_dim=128)  # Llama 3.1 8B
>>> cached_bytes(config, tokens=131072, width=2) / 1e9  # the key-value cache, in bfloat16
17.179869184
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import torch

from rope_ext_hf.errors import CheckpointError, MethodError, size_text
from rope_ext_hf.files.whole import disk_folder, free_on_disk
from rope_ext_hf.models.layer_types import SLIDING, AttentionLayers
from rope_ext_hf.models.model_classes import vocabulary_size
from rope_ext_hf.reading.larger.offloaded_weights import LayerWeights, layer_map
from rope_ext_hf.reading.larger.waiting_states import Place

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["GPU_WORKING_BYTES", "MemoryEstimate", "cached_bytes", "cached_layers", "check_memory", "widest_activation"]

GPU_WORKING_BYTES = 2 * 2**30  # activations and logits
_WORKING_BYTES = {"cpu": 300 * 2**20}  # larger chunks were no faster on a CPU
_WORKING_SHARE = 16  # activations and logits get 1/16 of the free memory: the cache and other processes need room too
_MAIN_SHARE = 15 / 16  # hidden states take no more of the free main memory: other processes need room too
_AMPLE = 4  # an estimate is not worth a line if this many times the memory that is needed is free
_CPU = torch.device("cpu")
_WITHOUT_KEYS = frozenset({"linear_attention", "conv", "moe", "mlp", "mamba", "recurrent"})
"""Layer types that keep no keys and values: they have a state of fixed size, or none."""

_STATE_KEYS = (
    ("linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("n_mamba_heads", "mamba_headdim", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
)
"""Config keys whose product is the size of a recurrent state, in each family. A convolution's state is far smaller."""

_MORE_KEY_HEADS = {"mimo_v2_flash": 2}
"""By family, how many key heads layers with a window have for each one that the config states; no key states it."""

_STATE_WIDTH = 4  # bytes of a number of a recurrent state, which is kept in float32 because it sums over all tokens


# --- the key-value cache ----------------------------------------------------------------------------------------------


class _LayerMemory(NamedTuple):
    """The numbers that one layer keeps in a key-value cache, and the heads that may be shared between GPUs."""

    per_token: int  # numbers of the keys and values of one token
    window: int | None  # tokens that are kept at most; None: all
    state: int  # numbers that are kept however long the input is
    heads: int  # query heads
    head_dim: int  # dims of a query head
    shards: int  # GPUs that can each hold a different part of the keys and values; more GPUs hold copies


def cached_bytes(config: Any, tokens: int, *, width: int = 2, gpus: int = 1, ahead: int = 0, layers: Any = None) -> int:
    """Return the bytes that the key-value cache for one input takes on each GPU.

    A layer with a sliding window keeps as many tokens as its window. Latent attention keeps the latent, a short vector
    from which it computes keys and values. A layer that shares the keys and values of an earlier one keeps none. Linear
    attention and Mamba keep a state.

    Args:
        config: the config of the text model.
        tokens: the length of the input.
        width: bytes of each number of keys and values.
        gpus: the number of GPUs that share the heads (tensor parallelism).
        ahead: the number of tokens in the step that is being computed, which a layer with a window holds beyond its
            window.
        layers: the result of `cached_layers(config)`, if it was computed before.
    """
    total = 0
    for layer in layers or cached_layers(config):
        kept = min(tokens, (layer.window or tokens) + ahead)
        total += layer.per_token * kept * width // min(gpus, layer.shards)
        total += layer.state * _STATE_WIDTH // gpus
    return total


def _one_layer_bytes(config: Any, tokens: int, *, width: int = 2) -> int:
    """Return the most bytes that the keys, values and states of any one layer take; see `cached_bytes`."""
    layers = cached_layers(config)
    return max((cached_bytes(config, tokens, width=width, layers=[layer]) for layer in layers), default=0)


def state_bytes(config: Any, tokens: int, width: int = 2) -> int:
    """Return the bytes of the hidden states that wait between two layers, if texts are read layer by layer."""
    return int(config.hidden_size) * tokens * width


def waiting_bytes(config: Any, tokens: int, width: int = 2) -> int:
    """Return the bytes of all tensors that wait between two layers, if texts are read layer by layer.

    For each token these are a hidden state, a vector for cos and one for sin.
    """
    head_dim = max((layer.head_dim for layer in cached_layers(config)), default=0)  # some families have several
    return state_bytes(config, tokens, width) + 2 * head_dim * tokens * width


def place_of_states(
    config: Any, tokens: int, longest: int, dtype: torch.dtype, device: torch.device, *, coming: Sequence[int]
) -> tuple[Place, int]:
    """Return where the hidden states of texts wait between two layers: in the first place that has room for them.

    Args:
        config: the config of the text model.
        tokens: the number of tokens in all texts that are read together.
        longest: the number of tokens for which keys and values are held.
        dtype: the dtype of the hidden states.
        device: the device that reads.
        coming: the bytes that other tensors will take on the device, those of `longest` and of a chunk not counted:
            offloaded weights, less what is allocated already. There is a number for each way in which these weights can
            come, the fastest first.

    Returns:
        The place, and the way for which there is room, by its index.
    """
    width = torch.finfo(dtype).bits // 8
    states, waiting = state_bytes(config, tokens, width), waiting_bytes(config, tokens, width)
    others = _one_layer_bytes(config, longest, width=width) + sum(budgets(device))
    left = [available(device) - others - each for each in coming]
    for way, free in enumerate(left):
        if waiting <= free:
            return "device", way
    in_main = device.type != "cpu" and states <= _MAIN_SHARE * available(_CPU)
    way = next((way for way, free in enumerate(left) if free >= 0), len(left) - 1)
    return "memory" if in_main else "disk", way


def cached_layers(config: Any) -> list[_LayerMemory]:
    """Return the memory that each layer takes in the cache.

    Layers that share the keys and values of another layer are left out.
    """
    count = int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", None) or 0)
    attention = AttentionLayers(config)
    kinds = list(getattr(config, "layer_types", None) or [next(iter(SLIDING)) if attention.sliding else ""] * count)
    is_heterogeneous = getattr(config, "is_heterogeneous", False)
    configs = list(config.per_layer_config) if is_heterogeneous else [config] * count
    return [
        _layer_memory(kind, layer_config, attention)
        for kind, layer_config in zip(kinds[:count], configs[:count], strict=True)
    ]


def _layer_memory(kind: str, config: Any, attention: AttentionLayers) -> _LayerMemory:
    """Return the memory that one layer takes in the cache, from its layer type and the config."""
    known = vars(config)
    heads = int(config.num_attention_heads)
    head_dim = int(known.get("head_dim") or config.hidden_size // heads)
    if getattr(config, "kv_lora_rank", None):  # latent attention
        per_token, key_heads = int(config.kv_lora_rank + config.qk_rope_head_dim), 1
        per_token += int(getattr(config, "index_head_dim", None) or 0)  # keys of a sparse attention's indexer
    else:
        key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        if kind in SLIDING:
            key_heads *= _MORE_KEY_HEADS.get(config.model_type, 1)
        per_token = key_heads * (head_dim + int(known.get("v_head_dim") or head_dim))
    has_keys = kind not in _WITHOUT_KEYS
    return _LayerMemory(
        per_token=per_token if has_keys else 0,
        window=attention.window if kind in SLIDING else None,
        state=_state_numbers(config) if not has_keys or kind.startswith("hybrid") else 0,
        heads=heads,
        head_dim=head_dim,
        shards=key_heads,
    )


def _state_numbers(config: Any) -> int:
    """Return how many numbers the state of a recurrent layer has; 0 if the config has none of the known keys."""
    for keys in _STATE_KEYS:
        sizes: list[Any] = [getattr(config, key, None) for key in keys]
        if all(isinstance(size, int) for size in sizes):
            return int(math.prod(sizes))
    return 0


# --- all memory -------------------------------------------------------------------------------------------------------


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
        waiting: what waits on the device between two layers, if a span is read layer by layer: hidden states, cos and
            sin.
        in_main: the hidden states of one span that wait in main memory.
        on_disk: the hidden states of one span that wait in a file.
        fetched: weights that wait in main memory or on disk, and come to the device layer by layer.
        ahead: whether the weights of the next layer come while one computes, so that those of two layers count as
            `weights`. Otherwise those of one layer do.
    """

    weights: int
    cache: int
    working: int
    offloaded: int = 0
    logits: int = 0
    training: int = 0
    waiting: int = 0
    in_main: int = 0
    on_disk: int = 0
    fetched: int = 0
    ahead: bool = True

    @property
    def total(self) -> int:
        """The memory that is needed on the device."""
        return self.weights + self.cache + self.waiting + self.working + self.logits + self.training

    def to_dict(self) -> dict[str, int]:
        """Return every number of bytes by its name, and the total."""
        sizes = asdict(self)
        del sizes["ahead"]
        return sizes | {"total": self.total}

    @property
    def place(self) -> Place:
        """The place where the hidden states of one span wait between two layers."""
        return "disk" if self.on_disk else "memory" if self.in_main else "device"

    @property
    def moved(self) -> int:
        """The hidden states of one span that are moved to the device and back at each layer."""
        return self.in_main + self.on_disk

    def is_ample(self, device: torch.device) -> bool:
        """Return whether much more memory is free than is needed, on the device and in main memory.

        No estimate is shown then.
        """
        is_ample = _AMPLE * self.total <= available(device) and _AMPLE * self.offloaded <= available(_CPU)
        return is_ample and self.place == "device"

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients and optimizer": self.training,
            "keys and values": self.cache,
            "hidden states" if self.place == "device" else "cos and sin": self.waiting,
            "activations": self.working,
            "logits": self.logits,
        }
        listed = ", ".join(f"{size_text(size)} {name}" for name, size in parts.items() if size)
        text = f"{size_text(self.total)}: {listed}"
        if self.offloaded:
            text += f"; and {size_text(self.offloaded)} of main memory"
        if self.fetched:
            when = ": the next one while one computes" if self.ahead else ""
            text += f"; and {size_text(self.fetched)} of weights in main memory or on disk, read layer by layer{when}"
        if self.moved:
            where = f"in a file in {disk_folder()}" if self.on_disk else "in main memory"
            text += f"; and {size_text(self.moved)} of hidden states {where}"
        return text


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
    by_layer: bool = False,
    further_weights: int = 0,
) -> MemoryEstimate:
    """Estimate the memory that reading spans of text (stretches read at once) takes.

    Args:
        model: a model, which may be on the meta device.
        longest: the number of tokens in the longest span.
        dtype: the dtype of weights and cache; default: the model's.
        device: the device that reads; default: the CPU.
        offload_cache: whether keys and values wait in main memory, and those of one layer at a time are on the device.
        by_layer: whether the spans are read layer by layer, if no layer shares the keys of another.
        further_weights: bytes of weights on the device that are not the model's.
    """
    width = torch.finfo(dtype or model.dtype).bits // 8
    config: Any = model.config.get_text_config()
    cache = cached_bytes(config, longest, width=width)
    working, logits = budgets(device or _CPU)
    weights = model.num_parameters() * width + further_weights
    if by_layer and not getattr(config, "num_kv_shared_layers", None):
        cache, waiting = _one_layer_bytes(config, longest, width=width), waiting_bytes(config, longest, width)
        return MemoryEstimate(weights, cache, working, logits=logits, waiting=waiting)
    if not offload_cache:
        return MemoryEstimate(weights, cache, working, logits=logits)
    # Only layers without a window are offloaded, and the keys and values of one of them at a time are on the device.
    moved = [layer.per_token * longest * width for layer in cached_layers(config) if layer.window is None]
    # Keys and values are two tensors, for each of which torch pins a power of two of bytes.
    pinned = sum(2 << (size // 2 - 1).bit_length() for size in moved if size)
    on_device = cache - sum(moved) + max(moved, default=0)
    return MemoryEstimate(weights, on_device, working, offloaded=pinned, logits=logits)


def estimate_whole_memory(model: PreTrainedModel, longest: int, scored: int) -> MemoryEstimate:
    """Estimate the memory that reading texts whole takes, each in one forward without a cache.

    Args:
        model: the model.
        longest: the number of tokens in the longest text.
        scored: the number of tokens that are scored in it, whose logits are all there at once.
    """
    width = torch.finfo(model.dtype).bits // 8
    activations = 4 * width * widest_activation(model.config.get_text_config()) * longest
    vocabulary = vocabulary_size(model)
    logits = (width + 4) * vocabulary * scored  # in the dtype of the model, and in float32
    return MemoryEstimate(model.num_parameters() * width, 0, activations, logits=logits)


def fitting_memory(
    model: PreTrainedModel,
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    spread: bool = False,
    offload_cache: bool = False,
    by_layer: bool = False,
    fetch: bool = False,
    further_weights: int = 0,
) -> MemoryEstimate:
    """Return the estimated memory for reading spans of text, in a way for which enough is free if there is one.

    If the spans are read layer by layer and the device has too little room, weights may wait elsewhere (the result then
    has `fetched`), and so may hidden states (it has `in_main` or `on_disk`). If too little is free for all of this, the
    result is the estimate with everything on the device.

    Args:
        model, longest, dtype, device, offload_cache, by_layer, further_weights: as in `estimate_memory`.
        fetch: whether weights may come to the device layer by layer.
        spread: whether the weights are spread over all GPUs and main memory, so that the free memory is that of all of
            them.
    """
    how: dict[str, Any] = {"offload_cache": offload_cache, "by_layer": by_layer, "further_weights": further_weights}
    needed, free = estimate_memory(model, longest, dtype, device=device, **how), _free(device, spread=spread)
    if spread or not needed.waiting or _fits(needed, free):
        return needed
    ways = _moved(needed, model, longest, dtype, device, fetch=fetch)
    return next((way for way in ways if _fits(way, free)), needed)


def _moved(
    needed: MemoryEstimate,
    model: PreTrainedModel,
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    fetch: bool,
) -> list[MemoryEstimate]:
    """Return the estimates if weights or hidden states wait elsewhere; the one that takes least time comes first.

    Weights are read once for a whole text, and hidden states at every layer.
    """
    ways = [needed]
    if fetch:
        weights = LayerWeights.of(model)
        for ahead in (True, False):
            least = weights.least(ahead=ahead) * needed.weights // (weights.outside + sum(weights.layers))
            ways.append(replace(needed, weights=least, fetched=needed.weights - least, ahead=ahead))
    states = state_bytes(model.config.get_text_config(), longest, torch.finfo(dtype).bits // 8)
    places = ("on_disk",) if device.type == "cpu" else ("in_main", "on_disk")
    elsewhere: list[dict[str, Any]] = [{place: states} for place in places]
    moved = [replace(way, waiting=way.waiting - states, **where) for where in elsewhere for way in ways]
    return ways[1:] + moved


def _free(device: torch.device, *, spread: bool) -> int:
    """Return the bytes that are free on a device; `spread`: on all GPUs and in main memory."""
    if not spread:
        return available(device)
    return available(_CPU) + sum(available(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))


def _fits(needed: MemoryEstimate, free: int) -> bool:
    """Return whether there is room for what is needed; `free`: the free bytes on the device."""
    main = available(_CPU)
    in_main = needed.offloaded <= main and needed.in_main <= _MAIN_SHARE * main
    on_disk = not needed.on_disk or needed.on_disk <= free_on_disk()
    return needed.total <= free and in_main and on_disk


def check_memory(
    model: PreTrainedModel,
    longest: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    spread: bool = False,
    offload_cache: bool = False,
    by_layer: bool = False,
    fetch: bool = False,
    further_weights: int = 0,
) -> MemoryEstimate:
    """Return the estimated memory for reading spans of text; raise an error if less is free.

    The arguments and the result are those of `fitting_memory`.

    Raises:
        CheckpointError: there is too little; the message has the figures and what would fit.
        MethodError: `offload_cache` on a CPU.
    """
    if offload_cache and device.type == "cpu" and not spread:
        raise MethodError("on a CPU keys and values are in main memory anyway; leave out --offload-cache")
    how: dict[str, Any] = {"spread": spread, "offload_cache": offload_cache, "by_layer": by_layer, "fetch": fetch}
    how["further_weights"] = further_weights
    needed, free = fitting_memory(model, longest, dtype, device, **how), _free(device, spread=spread)
    if _fits(needed, free):
        return needed

    offers = []
    if not spread and device.type == "cuda" and needed.total <= _free(device, spread=True):
        offers.append("--device-map auto (over all GPUs and main memory)")
    if not (offload_cache or needed.waiting) and device.type == "cuda":
        how = {"device": device, "offload_cache": True, "further_weights": further_weights}
        offloaded = estimate_memory(model, longest, dtype, **how)
        if _fits(offloaded, free):
            offers.append("--offload-cache (keys and values in main memory)")
    if dtype == torch.float32:
        offers.append("--dtype bfloat16 (half of it)")
    least = needed
    if needed.waiting and not spread:
        least = _moved(needed, model, longest, dtype, device, fetch=fetch)[-1]
        if least.total <= free:
            offers.append(f"TMPDIR set to a folder on a disk with {size_text(least.on_disk)} free")
    by_length = least.cache + least.waiting
    fitting = (free - (least.total - by_length)) * longest // max(1, by_length)
    if least.on_disk:
        fitting = min(fitting, free_on_disk() * longest // least.on_disk)
    fitting = fitting // 256 * 256
    if fitting > 0:
        offers.append(f"shorter lengths: up to {min(fitting, longest):,} tokens fit")
    raise CheckpointError(
        f"spans of {longest:,} tokens need {needed}; {'all devices have' if spread else f'{device} has'} "
        f"{size_text(free)} free. Instead: {'; '.join(offers) or 'a machine with more memory'}"
    )


def weight_places(
    model: PreTrainedModel, needed: MemoryEstimate, dtype: torch.dtype, device: torch.device
) -> dict[str, Any] | None:
    """Return a device map for a model that is larger than its device; None for all others.

    `needed` is the result of `check_memory`.
    """
    if not needed.fetched:
        return None
    room = available(device) - (needed.total - needed.weights)
    return layer_map(model, room, (available(_CPU) - needed.in_main) // 2, torch.finfo(dtype).bits // 8, device)
