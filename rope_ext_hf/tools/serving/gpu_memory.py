"""What fits on the GPUs of a server: weights, keys and values of each dtype, inputs at a time, the longest length."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rope_ext_hf.bounds import MOST_TOKENS
from rope_ext_hf.errors import MethodError, size_text
from rope_ext_hf.reading.cache_size import cached_bytes, cached_layers
from rope_ext_hf.reading.memory import GPU_WORKING_BYTES
from rope_ext_hf.tools.serving.questions import GPUServer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SHARE = 0.9  # of a GPU's memory, for the server: the rest is the driver's, and what libraries keep
_KV_BITS = (16, 8)  # that keys and values may have on a server, the best first
_STEP, _BLOCK = 8192, 16  # tokens of a server's step by default, which windows keep for as long, and of a block of keys
_MOST_INPUTS, _MOST_GPUS = 256, 64  # inputs at a time where memory allows for more, and GPUs that are offered
_DEALT = ("num_attention_heads", "intermediate_size", "moe_intermediate_size", "linear_num_key_heads")
"""Config keys of what GPUs share in equal parts."""
_WHOLE = frozenset({"q_a_proj", "kv_a_proj_with_mqa", "gate", "router"})
"""Linear layers that every GPU has whole, by name, beside all vectors."""


@dataclass(frozen=True)
class GPUMemory:
    """What one server has room for."""

    gpus: int
    bytes: int  # the memory of each GPU
    shared_by: int  # the GPUs that the model can be dealt out to (tensor parallelism), at most all of them
    weights: int  # bytes on each GPU
    room: int  # bytes on each for keys and values: 90%, without weights and 2 GiB for activations
    tokens: int
    # bytes on each GPU of keys and values of an input of `tokens`, by their bits: 16, and 8 where they can
    sizes: dict[int, int]
    longest: dict[int, int]  # tokens of one input that fits alone, likewise
    # GPUs on which this length fits, where it does not on these; None: it does, or not on 64 either
    fewest: int | None = None

    @property
    def inputs(self) -> dict[int, int]:
        """Inputs of the length asked for that fit at a time, by the bits of keys and values."""
        return {bits: min(_MOST_INPUTS, max(0, self.room) // max(1, size)) for bits, size in self.sizes.items()}

    @property
    def kv_bits(self) -> int | None:
        """The bits of keys and values to take: the most with which one input fits; None: none do."""
        return next((bits for bits, inputs in self.inputs.items() if inputs), None)

    @property
    def options(self) -> dict[str, Any]:
        """What the template `Engine.on_gpus` is filled with."""
        static = math.floor(100 * (self.weights + self.room) / self.bytes) / 100
        keys = "fp8_e4m3" if self.kv_bits == 8 else "auto"
        inputs = self.inputs[self.kv_bits or 16]
        return {"gpus": self.shared_by, "keys": keys, "inputs": inputs, "share": _SHARE, "static": static}

    @property
    def sentences(self) -> list[str]:
        sizes = {bits: f"{size_text(size)} of each GPU in {bits} bits" for bits, size in self.sizes.items()}
        parts = [
            f"{self.gpus} GPU{'s' * (self.gpus > 1)} of {size_text(self.bytes)}: {size_text(self.weights)} of weights "
            f"on each, and room for {size_text(max(0, self.room))} of keys and values."
        ]
        if self.shared_by < self.gpus:
            parts.append(f"{self.shared_by} of them share the model: its heads or widths cannot be shared by more.")
        if self.kv_bits is None:
            fitting = [f"{tokens:,} tokens in {bits} bits" for bits, tokens in self.longest.items() if tokens]
            fitting += [] if self.fewest is None else [f"{self.fewest} GPUs"]
            return [
                *parts,
                f"An input of {self.tokens:,} tokens takes {' or '.join(sizes.values())}, and does not fit. What fits: "
                f"{'; '.join(fitting) or 'nothing on 64 GPUs either; weights in fewer bits, or a smaller model'}.",
            ]
        for bits, inputs in self.inputs.items():
            parts.append(
                f"An input of {self.tokens:,} tokens takes {sizes[bits]}: {inputs or 'none'} at a time; the longest "
                f"that fits has {self.longest[bits]:,}."
            )
        if self.kv_bits == 8:
            parts.append("Keys and values are in 8 bits: what that costs, check-server --kv-bits 8 shows.")
        return parts

    def __str__(self) -> str:
        return " ".join(self.sentences)


def gpu_memory(model: PreTrainedModel, tokens: int, server: GPUServer) -> GPUMemory:
    """Compute what fits on the GPUs of a server, one if it does not state them, at an input of so many tokens.

    The model may be on the meta device.
    """
    whole: Any = model.config
    if server.weight_bits is None and getattr(whole, "quantization_config", None):
        raise MethodError("the weights of this model are quantised: give --weight-bits")
    config, gpus, bits = whole.get_text_config(), server.gpus or 1, server.weight_bits or 16
    layers = cached_layers(config)

    def on(parts: int) -> GPUMemory:
        weights, sizes, longest = weight_bytes(model, bits=bits, gpus=parts), dict[int, int](), dict[int, int]()
        room = int(_SHARE * server.gpu_memory) - weights - GPU_WORKING_BYTES
        for each in _KV_BITS:

            def size(blocks: int, width: int = each // 8) -> int:
                ahead = _STEP + _BLOCK
                return cached_bytes(config, blocks * _BLOCK, width=width, gpus=parts, ahead=ahead, layers=layers)

            sizes[each] = size(math.ceil(tokens / _BLOCK))
            longest[each] = max(0, bisect_right(range(MOST_TOKENS // _BLOCK), room, key=size) - 1) * _BLOCK
        return GPUMemory(gpus, server.gpu_memory, parts, weights, room, tokens, sizes, longest)

    made = on(next(_parts(config, range(gpus, 0, -1))))
    more = _parts(config, range(gpus + 1, _MOST_GPUS + 1) if made.kv_bits is None else range(0))
    fewest = next((count for count in more if on(count).kv_bits is not None), None)
    return GPUMemory(**vars(made) | {"fewest": fewest})


def weight_bytes(model: PreTrainedModel, *, bits: int = 16, gpus: int = 1) -> int:
    """Bytes of the weights on one of several GPUs."""
    shards = min(_shards(model.config.get_text_config()) or {gpus})
    tables = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part}
    total = 0.0
    for name, parameter in model.named_parameters():
        layer, vector = name.split(".")[-2:][0], parameter.ndim < 2
        # vectors and tables have at least 16 bits; weights in fewer than 8 have scales of half a bit each
        width = max(16.0, bits) if vector or id(parameter) in tables else bits + 0.5 * (bits < 8)
        keys = layer in ("k_proj", "v_proj")  # on more GPUs than key heads several have the same ones
        parts = 1 if vector or layer in _WHOLE else min(gpus, shards) if keys else gpus
        total += parameter.numel() * width / 8 / parts
    return math.ceil(total)


def _shards(config: Any) -> set[int]:
    """Of each layer, the GPUs that can have a part of the keys and values each."""
    return {layer.shards for layer in cached_layers(config) if layer.per_token}


def _parts(config: Any, candidates: Iterable[int]) -> Iterator[int]:
    """The numbers of GPUs that a model can be dealt out to in equal parts, keys and values in equal parts or copies."""
    sizes = [size for key in _DEALT if isinstance(size := getattr(config, key, None), int)]
    for gpus in candidates:
        if all(size % gpus == 0 for size in sizes) and all(not (n % gpus and gpus % n) for n in _shards(config)):
            yield gpus
