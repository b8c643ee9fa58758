"""Estimates of the memory that a server's GPUs need, and of the inputs that fit into it beside the weights."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rope_ext_hf.bounds import MOST_TOKENS
from rope_ext_hf.errors import MethodError, size_text
from rope_ext_hf.reading.cost.memory import GPU_WORKING_BYTES, cached_bytes, cached_layers
from rope_ext_hf.tools.serving.serving_options import GPUServer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHARE = 0.9  # of a GPU's memory for the server; the driver and libraries need the rest
_KV_BITS = (16, 8)  # bits that keys and values may have on a server, the best first
_STEP = 8192  # tokens that a server computes in one step by default, and that sliding windows keep in addition
_BLOCK = 16  # tokens in a block of keys and values
_MOST_INPUTS = 256  # inputs at a time, even if memory allows for more
_MOST_GPUS = 64  # GPUs that are tried
_SPLIT = ("num_attention_heads", "intermediate_size", "moe_intermediate_size", "linear_num_key_heads")
"""Config keys of sizes that tensor parallelism splits into equal parts."""
_REPLICATED = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "gate", "router"})
"""Names of linear layers that every GPU holds whole, as it does all vectors."""


@dataclass(frozen=True)
class GPUMemory:
    """The memory of a server's GPUs, and what fits into it, if all inputs have the same length.

    Attributes:
        gpus: the number of GPUs.
        bytes: the memory of each GPU.
        shared_by: the number of GPUs that can share the model (tensor parallelism), at most all of them.
        weights: the bytes of weights on each GPU.
        room: the bytes on each GPU for keys and values: 90% of its memory, less the weights and 2 GiB for activations.
        tokens: the length of an input.
        sizes: bits of a key or value, 16 or 8 -> the bytes of one input's keys and values on each GPU.
        longest: bits of a key or value -> the longest input, in tokens, that fits alone.
        fewest: the number of GPUs on which this length fits, if it does not fit on these; None: it fits, or it does not
            fit on 64 GPUs either.
    """

    gpus: int
    bytes: int
    shared_by: int
    weights: int
    room: int
    tokens: int
    sizes: dict[int, int]
    longest: dict[int, int]
    fewest: int | None = None

    @property
    def inputs(self) -> dict[int, int]:
        """The number of inputs of this length that fit at the same time, by the bits of a key or value."""
        return {bits: min(_MOST_INPUTS, max(0, self.room) // max(1, size)) for bits, size in self.sizes.items()}

    @property
    def kv_bits(self) -> int | None:
        """The most bits of a key or value, 16 or 8, with which one input fits; None: it fits with neither."""
        return next((bits for bits, inputs in self.inputs.items() if inputs), None)

    @property
    def options(self) -> dict[str, Any]:
        """The values with which the template `Engine.on_gpus`, an engine's options for GPUs, is filled."""
        static = math.floor(100 * (self.weights + self.room) / self.bytes) / 100
        keys = "fp8_e4m3" if self.kv_bits == 8 else "auto"
        inputs = self.inputs[self.kv_bits or 16]
        return {"gpus": self.shared_by, "keys": keys, "inputs": inputs, "share": _SHARE, "static": static}

    @property
    def sentences(self) -> list[str]:
        """Sentences for people on what fits into memory and what does not."""
        sizes = {bits: f"{size_text(size)} of each GPU in {bits} bits" for bits, size in self.sizes.items()}
        parts = [
            f"{self.gpus} GPU{'s' * (self.gpus > 1)} of {size_text(self.bytes)}: {size_text(self.weights)} of weights "
            f"on each, and room for {size_text(max(0, self.room))} of keys and values."
        ]
        if self.shared_by < self.gpus:
            parts.append(f"Only {self.shared_by} of them share the model: its heads or widths cannot be split further.")
        if self.kv_bits is None:
            fitting = [f"{tokens:,} tokens in {bits} bits" for bits, tokens in self.longest.items() if tokens]
            if self.fewest is not None:
                fitting.append(f"this length on {self.fewest} GPUs")
            size = " or ".join(sizes.values())
            sentence = f"An input of {self.tokens:,} tokens takes {size}, and does not fit."
            if fitting:
                return [*parts, f"{sentence} These fit: {'; '.join(fitting)}."]
            return [
                *parts,
                f"{sentence} It does not fit on {_MOST_GPUS} GPUs either: take weights in fewer bits, or a smaller "
                "model.",
            ]
        for bits, inputs in self.inputs.items():
            fits = f"{inputs} fit at a time" if inputs else "it does not fit"
            parts.append(
                f"An input of {self.tokens:,} tokens takes {sizes[bits]}: {fits}; the longest that fits has "
                f"{self.longest[bits]:,} tokens."
            )
        if self.kv_bits == 8:
            parts.append("Keys and values are in 8 bits; `rope-ext check-server --kv-bits 8` shows what that costs.")
        return parts

    def __str__(self) -> str:
        return " ".join(self.sentences)


def gpu_memory(model: PreTrainedModel, tokens: int, server: GPUServer) -> GPUMemory:
    """Compute how the weights, keys and values of a model fit into the memory of a server's GPUs.

    All inputs are taken to have `tokens` tokens. If `server` states no number of GPUs, there is one. The model may be
    on the meta device.

    Raises:
        MethodError: the weights are quantised, and their bits are not given.
    """
    whole: Any = model.config
    if server.weight_bits is None and getattr(whole, "quantization_config", None):
        raise MethodError("the weights of this model are quantised; give --weight-bits")
    config, gpus = whole.get_text_config(), server.gpus or 1
    layers = cached_layers(config)

    def shared_by(parts: int) -> GPUMemory:
        weights = weight_bytes(model, bits=server.weight_bits or 16, gpus=parts)
        room = int(_SHARE * server.gpu_memory) - weights - GPU_WORKING_BYTES
        sizes: dict[int, int] = {}
        longest: dict[int, int] = {}
        for bits in _KV_BITS:

            def size(blocks: int, width: int = bits // 8) -> int:
                ahead = _STEP + _BLOCK
                return cached_bytes(config, blocks * _BLOCK, width=width, gpus=parts, ahead=ahead, layers=layers)

            sizes[bits] = size(math.ceil(tokens / _BLOCK))
            longest[bits] = max(0, bisect_right(range(MOST_TOKENS // _BLOCK), room, key=size) - 1) * _BLOCK
        return GPUMemory(gpus, server.gpu_memory, parts, weights, room, tokens, sizes, longest)

    memory = shared_by(next(_possible_shares(config, range(gpus, 0, -1))))
    if memory.kv_bits is not None:
        return memory
    for more in _possible_shares(config, range(gpus + 1, _MOST_GPUS + 1)):
        if shared_by(more).kv_bits is not None:
            return replace(memory, fewest=more)
    return memory


def weight_bytes(model: PreTrainedModel, *, bits: int = 16, gpus: int = 1) -> int:
    """Return the bytes of weights on each GPU, when `gpus` GPUs share the model."""
    shards = min(_shards(model.config.get_text_config()) or {gpus})
    embeddings = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part}
    total = 0.0
    for name, parameter in model.named_parameters():
        layer, is_vector = name.split(".")[-2:][0], parameter.ndim < 2
        # weights of fewer than 8 bits have scales, of half a bit a weight; vectors and embeddings stay in 16 bits
        width = bits + 0.5 * (bits < 8)
        if is_vector or id(parameter) in embeddings:
            width = max(16.0, bits)
        parts = gpus
        if is_vector or layer in _REPLICATED:
            parts = 1
        elif layer in ("k_proj", "v_proj"):  # with more GPUs than key heads, several GPUs hold the same ones
            parts = min(gpus, shards)
        total += parameter.numel() * width / 8 / parts
    return math.ceil(total)


def _shards(config: Any) -> set[int]:
    """Return the numbers of equal parts into which the keys and values of the layers can be split."""
    return {layer.shards for layer in cached_layers(config) if layer.per_token}


def _possible_shares(config: Any, candidates: Iterable[int]) -> Iterator[int]:
    """Yield the candidate numbers of GPUs that can share a model in equal parts; keys and values may be copied."""
    sizes = [getattr(config, key, None) for key in _SPLIT]
    for gpus in candidates:
        split = all(size % gpus == 0 for size in sizes if isinstance(size, int))
        if split and all(shards % gpus == 0 or gpus % shards == 0 for shards in _shards(config)):
            yield gpus
