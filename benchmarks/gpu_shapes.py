"""Random weights in a shape of Llama on a GPU, stock and patched, a JSON line each: a step of `make gpu`.

    python benchmarks/gpu_shapes.py --shape 8B [--device cuda] [--minutes 10]

The first line describes the model and the speed of the device. Every other one is a row: one method at one length, with
cuDNN's attention allowed or not, or a batch of rows that are padded on the left. A row has, each with the kernels of
its attention:

- whole: the prompt in one forward. "first" holds what is compiled and planned at first use, "second" does not.
- chunks: the prompt in chunks onto a cache. From the second chunk on transformers gives its own attention a mask, which
  flash attention does not take, so that stock chunks are no measure of a patched model: the whole prompt is.
- decode: steps of one token onto that cache.

Outputs must be finite, equal to those of the stock model up to the length that the method leaves as it is, and equal to
those of a row alone in a padded batch. What does not fit, or would take longer than there is time, has its reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gpu_machine import rotated_by
from stock import attention_kernels, attention_kernels_and_launches, usual_dtype
from timing import timed
from torch import Tensor

import rope_ext_hf as rope
from rope_ext_hf.patches.slots.patched_slot import patch_state
from rope_ext_hf.reading.cost.memory import available, cached_bytes, estimate_memory, widest_activation
from rope_ext_hf.reading.cost.operations import estimate_flops, measure_flops


@dataclass(frozen=True)
class Shape:
    """A model of random weights, and how long its prompts are.

    Attributes:
        sizes: keys of the config.
        lengths: tokens of a prompt, shortest first.
        padded: tokens of the longest row of a padded batch.
        trained: the trained length.
        chunk: tokens that go through the model at a time; at most half of every length, so that one chunk at least is
            read onto a cache.
        steps: decoding steps that are timed.
        copied: bytes of the copy that measures bandwidth, at most.
    """

    sizes: dict[str, Any]
    lengths: tuple[int, ...] = (8192, 32_768, 131_072)
    padded: int = 4096
    trained: int = 8192
    chunk: int = 4096
    vocabulary: int = 128_256
    steps: int = 20
    copied: int = 2**30


SHAPES = {
    "1B": Shape({"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}),
    "8B": Shape({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128}),
    "tiny": Shape(
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16},
        lengths=(128, 256), padded=128, trained=64, chunk=64, vocabulary=512, steps=4, copied=2**20,
    ),
}  # fmt: skip

WITH_PARAMETERS: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 16},
    "dynamic-yarn": {},
    "rerope": {},
    "leaky-rerope": {},
    "self-extend": {},
    "dca": {},
    "stairs": {},
    "jet-long": {},
}
METHODS = {"stock": None} | {name: WITH_PARAMETERS[name] for name in WITH_PARAMETERS if name in rope.list_methods()}
"""Every method that is measured, with its parameters; the stock model comes first, to be compared with."""

WITHOUT_CUDNN = ("stock", "self-extend")  # where torch takes cuDNN's attention, also measured without it
ROWS = 4  # of a padded batch: a whole one, and three quarters, half and a quarter of it
LONG = 5.0  # seconds; what is predicted to take longer runs once
MARGIN = 1.5  # times what is predicted, for what takes longer
COMPARED = 32  # tokens whose logits are compared
MOST_COPIED_ON_CPU = 2**26  # bytes

Row = dict[str, Any]


@dataclass(frozen=True)
class Prompts:
    """Token ids, (rows, tokens), and the mask of a batch that is padded on the left; None: nothing is padded."""

    ids: Tensor
    mask: Tensor | None = None

    @classmethod
    def random(cls, tokens: int, device: str, lengths: tuple[int, ...] = ()) -> Prompts:
        """One prompt of `tokens`; with `lengths`, one row for each, padded to `tokens`."""
        ids = torch.randint(3, 200, (len(lengths) or 1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
        if not lengths:
            return cls(ids)
        starts = tokens - torch.tensor(lengths)[:, None]
        return cls(ids, (torch.arange(tokens) >= starts).long().to(device))

    def mask_of(self, tokens: int) -> Tensor | None:
        """The mask of a prompt and of the tokens generated after it, (rows, tokens)."""
        if self.mask is None:
            return None
        after = self.mask.new_ones(len(self.mask), tokens - self.mask.shape[1])
        return torch.cat((self.mask, after), dim=1)


def random_model(shape: str, device: str, dtype: torch.dtype, *, layers: int | None = None) -> Any:
    """Make random weights in a shape of Llama where they are used, of all its layers or of `layers`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    given = SHAPES[shape]
    sizes = given.sizes if layers is None else given.sizes | {"num_hidden_layers": layers}
    heads = sizes["hidden_size"] // sizes["head_dim"]
    config = LlamaConfig(
        **sizes,
        vocab_size=given.vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=min(8, heads),
        max_position_embeddings=given.trained,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=shape == "1B",
        # Queries and keys of about 1 in every shape: with much less, attention hardly depends on positions.
        initializer_range=0.9 / sizes["hidden_size"] ** 0.5,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def measure_bandwidth(device: str, copied: int) -> float:
    """Bytes read and written per second by a copy of `copied` bytes."""
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [timed(lambda: target.copy_(source), device) for _ in range(10)]
    return 2 * source.numel() / min(seconds[1:])


def predict(model: Any, method: str, tokens: int, rows: int, device: str, speeds: Row) -> Row:
    """Seconds of a prefill and of a decoding step, and gigabytes in chunks and whole, from operations and bytes alone.

    A step reads weights and cache, and DynamicCache copies the cache; methods that follow the length rotate a copy of
    all keys, other remapping methods at most that of the keys of a window.
    """
    config, width = model.config, model.dtype.itemsize
    cache = rows * cached_bytes(config, tokens, width=width)
    window = rows * cached_bytes(config, min(tokens, config.max_position_embeddings), width=width)
    rotated = {"stock": 0, "yarn": 0, "dynamic-yarn": cache, "jet-long": cache}.get(method, window)
    memory = estimate_memory(model, longest=rows * tokens, device=torch.device(device))
    # The MLP of one layer holds four tensors of its width for every token of a prompt that is read whole.
    activations = 4 * widest_activation(config) * width * rows * tokens
    return {
        "prefill": estimate_flops(model, [tokens] * rows, scored=rows) / speeds["flops"],
        "decode": (model.num_parameters() * width + 3 * cache + rotated) / speeds["bandwidth"],
        "chunks_gigabytes": memory.total / 1e9,
        "whole_gigabytes": (memory.weights + memory.cache + activations) / 1e9,
    }


# --- one reading ------------------------------------------------------------------------------------------------------


class OneReading:
    """A prompt that is read into a cache of its own, whole or in chunks, and the steps that follow.

    Args:
        chunk: tokens of a forward; None: all at once.
    """

    def __init__(self, model: Any, prompts: Prompts, chunk: int | None, device: str) -> None:
        from transformers import DynamicCache

        self.model, self.prompts, self.device = model, prompts, device
        self.cache = DynamicCache(config=model.config)
        self.parts = [prompts.ids] if chunk is None else list(torch.split(prompts.ids, chunk, dim=1))
        self.held, self.logits = 0, torch.empty(0)

    def forward(self, ids: Tensor) -> None:
        self.held += ids.shape[1]
        mask = self.prompts.mask_of(self.held)
        given = {} if mask is None else {"attention_mask": mask}
        self.logits = self.model(ids, past_key_values=self.cache, logits_to_keep=1, **given).logits

    def read(self) -> tuple[float, str]:
        """Seconds of the reading, and the attention kernels of its last forward."""
        seconds = [timed(partial(self.forward, part), self.device) for part in self.parts[:-1]]
        last = partial(self.forward, self.parts[-1])
        kernels = attention_kernels(lambda: seconds.append(timed(last, self.device)))
        return sum(seconds), kernels

    def step(self) -> None:
        self.forward(self.prompts.ids[:, -1:])

    def decode(self, steps: int) -> Row:
        """Steps onto what was read: seconds, attention kernels, launches and waits of one, from the third on."""
        for _ in range(2):
            self.step()
        waits = count_waits(self.step) if self.device.startswith("cuda") else None
        kernels, launches = attention_kernels_and_launches(self.step)
        seconds = sorted(timed(self.step, self.device) for _ in range(steps))
        return {
            "median": statistics.median(seconds),
            "least": seconds[0],
            "most": seconds[-1],
            "steps": steps,
            "kernels": kernels,
            "launches": launches,
            "waits": waits,
        }

    def finite(self) -> bool:
        return bool(self.logits.isfinite().all())


def count_waits(run: Callable[[], None]) -> int:
    """Count the waits of the host for the device during a call, by torch's debug mode of synchronisation."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(each.message) for each in seen)


def measure_reading(
    model: Any, prompts: Prompts, chunk: int | None, predicted: Row, device: str, *, steps: int
) -> tuple[Row, Row | None, bool]:
    """One way of reading, and the steps after it, if any: its values, those of the steps, whether all is finite."""
    way = "whole" if chunk is None else "chunks"
    held = 0
    if device.startswith("cuda"):
        held = torch.cuda.memory_allocated()
        needed, free = predicted[f"{way}_gigabytes"], (available(torch.device(device)) + held) / 1e9
        if needed > free:
            return {"skipped": f"it needs about {needed:.1f} GB, and {free:.1f} GB are free"}, None, True
        torch.cuda.reset_peak_memory_stats()
    row: Row = {"first": None, "second": None, "kernels": None, "gigabytes": None, "reserved_gigabytes": None}
    decoding, finite, reading = None, True, None
    try:
        reading = OneReading(model, prompts, chunk, device)
        row["first"], row["kernels"] = reading.read()
        finite = reading.finite()
        if predicted["prefill"] <= LONG:
            del reading
            reading = OneReading(model, prompts, chunk, device)
            row["second"], _ = reading.read()
        if steps:
            decoding = reading.decode(steps)
            finite = finite and reading.finite()
    except torch.OutOfMemoryError as error:
        row = {"skipped": f"out of memory: {str(error).splitlines()[0]}"}
    if device.startswith("cuda") and "skipped" not in row:
        row["gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
        row["reserved_gigabytes"] = torch.cuda.max_memory_reserved() / 1e9
    del reading
    release(device, held)
    return row, decoding, finite


def release(device: str, held: int = 0) -> None:
    """Give memory that nothing uses any more back to the device, of which `held` bytes are still in use."""
    if device.startswith("cuda"):
        if torch.cuda.memory_allocated() > held:  # in cycles of objects
            gc.collect()
        torch.cuda.empty_cache()


# --- checks -----------------------------------------------------------------------------------------------------------


def difference(logits: Tensor, wanted: Tensor) -> float:
    """The root mean square of the difference, in standard deviations of what is wanted."""
    return float((logits.float() - wanted.float()).square().mean().sqrt() / wanted.float().std())


def last_logits(model: Any, prompts: Prompts) -> Tensor:
    given = {} if prompts.mask is None else {"attention_mask": prompts.mask}
    logits: Tensor = model(prompts.ids, logits_to_keep=COMPARED, use_cache=False, **given).logits
    return logits


def check_unchanged(model: Any, method: str, stock: dict[int, Tensor], prompt: Tensor) -> Row | None:
    """Compare with the stock model at the longest length that the method leaves unchanged, if there is one."""
    with as_method(model, method):
        state = patch_state(model)
        assert state is not None
        tokens = min(state.patch.method.unchanged_length(state.patch.rotary), prompt.shape[1])
        if not tokens:
            return None
        patched = last_logits(model, Prompts(prompt[:, :tokens]))
    if tokens not in stock:
        stock[tokens] = last_logits(model, Prompts(prompt[:, :tokens]))
    return {"tokens": tokens, "difference": difference(patched, stock[tokens])}


def check_padded(model: Any, prompts: Prompts) -> float:
    """Return the largest difference between the shortest row of a padded batch and the same row alone."""
    assert prompts.mask is not None
    tokens = int(prompts.mask[-1].sum())
    together = last_logits(model, prompts)[-1:]
    return difference(together, last_logits(model, Prompts(prompts.ids[-1:, -tokens:])))


# --- rows -------------------------------------------------------------------------------------------------------------


def without_cudnn() -> AbstractContextManager[Any]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    context: AbstractContextManager[Any] = sdpa_kernel(
        [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    )
    return context


@contextmanager
def as_method(model: Any, method: str) -> Iterator[None]:
    params = METHODS[method]
    with nullcontext() if params is None else rope.patched(model, method, **params):
        yield


def jobs(shape: Shape) -> Iterator[Row]:
    """Yield the measurements, the most wanted first: methods at the shortest length, in a batch, at longer lengths."""
    for at, tokens in enumerate(shape.lengths):
        for method in METHODS:
            yield {"method": method, "rows": 1, "tokens": tokens, "cudnn": True}
        for method in WITHOUT_CUDNN:
            yield {"method": method, "rows": 1, "tokens": tokens, "cudnn": False}
        for method in METHODS if at == 0 else ():
            yield {"method": method, "rows": ROWS, "tokens": shape.padded, "cudnn": True}


class ShapeMeasurement:
    """The rows of one shape, as long as there is time.

    Args:
        until: when to end, by time.monotonic().
    """

    def __init__(self, name: str, device: str, until: float) -> None:
        self.name, self.shape, self.device, self.until = name, SHAPES[name], device, until
        self.stock: dict[int, Tensor] = {}  # last logits by length
        self.takes_cudnn: set[tuple[str, int]] = set()

    def rows(self) -> Iterator[Row]:
        """The description of the model, then a row for every job."""
        dtype = getattr(torch, usual_dtype(self.device))
        description = {"shape": self.name, "dtype": str(dtype).removeprefix("torch."), "skipped": None}
        weights = 2 * random_model(self.name, "meta", dtype).num_parameters() / 1e9
        free = available(torch.device(self.device)) / 1e9
        if weights > free:
            yield description | {"skipped": f"its weights are {weights:.1f} GB, and {free:.1f} GB are free"}
            return
        model = random_model(self.name, self.device, dtype)
        copied = min(self.shape.copied, MOST_COPIED_ON_CPU) if self.device == "cpu" else self.shape.copied
        speeds = {
            "flops": measure_flops(torch.device(self.device), dtype),
            "bandwidth": measure_bandwidth(self.device, copied),
        }
        yield description | speeds | {"parameters": model.num_parameters(), "rotations": rotated_by(self.device)}
        with torch.inference_mode():
            model(Prompts.random(64, self.device).ids)  # libraries are loaded at the first forward of a process
            for job in jobs(self.shape):
                if not job["cudnn"] and (job["method"], job["tokens"]) not in self.takes_cudnn:
                    continue
                yield {"shape": self.name} | job | self.measure(model, job, speeds)

    def measure(self, model: Any, job: Row, speeds: Row) -> Row:
        predicted = predict(model, job["method"], job["tokens"], job["rows"], self.device, speeds)
        runs = (1 if predicted["prefill"] > LONG else 2) * (2 if job["rows"] == 1 else 1)
        needed = MARGIN * (runs * predicted["prefill"] + (self.shape.steps + 4) * predicted["decode"])
        left = self.until - time.monotonic()
        if needed > left:
            return {"skipped": f"no time was left: it takes about {needed:.0f} s, and {max(0.0, left):.0f} s were left"}
        try:
            with nullcontext() if job["cudnn"] else without_cudnn():
                return {"predicted": predicted} | self.one_row(model, job, predicted)
        except torch.OutOfMemoryError as error:
            release(self.device)
            return {"skipped": f"out of memory: {str(error).splitlines()[0]}"}
        except RuntimeError as error:  # of a kernel; the other rows go on
            return {"failed": str(error).strip()[-500:]}

    def one_row(self, model: Any, job: Row, predicted: Row) -> Row:
        device, method, batched = self.device, job["method"], job["rows"] > 1
        tokens = job["tokens"]
        lengths = tuple(tokens * part // ROWS for part in range(ROWS, 0, -1)) if batched else ()
        prompts = Prompts.random(tokens, device, lengths)
        row: Row = {"whole": None, "chunks": None, "decode": None, "finite": True, "unchanged": None, "alone": None}
        with as_method(model, method):
            row["whole"], row["decode"], row["finite"] = measure_reading(
                model, prompts, None, predicted, device, steps=self.shape.steps if batched else 0
            )
            if batched:
                row["alone"] = check_padded(model, prompts)
            else:
                row["chunks"], row["decode"], finite = measure_reading(
                    model, prompts, self.shape.chunk, predicted, device, steps=self.shape.steps
                )
                row["finite"] = row["finite"] and finite
        if "cudnn" in (row["whole"].get("kernels") or ""):
            self.takes_cudnn.add((method, tokens))
        if METHODS[method] is not None and not batched and tokens == self.shape.lengths[0]:
            row["unchanged"] = check_unchanged(model, method, self.stock, prompts.ids)
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all rows")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    for row in ShapeMeasurement(arguments.shape, arguments.device, until).rows():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
