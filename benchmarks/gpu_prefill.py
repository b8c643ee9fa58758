"""Speed of reading and of decoding with random weights in the shape of Llama 3.1 8B: a step of `make gpu`.

    python benchmarks/gpu_prefill.py [--device cuda] [--minutes 2.5]
    python benchmarks/gpu_prefill.py --device cpu --shape tiny

Every row is one method, one length and one way of reading:

- "bare": the decoder over the whole prompt, without a cache and without the head. Of the stock model this is measured
  with flash attention and with cuDNN's; the faster one is what everything else is compared with.
- "scored N": `TokenScorer`, which evaluations run on: the prompt in chunks of N tokens onto a cache, and the losses of
  all its tokens.
- "read N": the same with the loss of the last token alone, that is, without the head.
- "step": one token onto a cache that holds the prompt.

Layers are alike, so that longer prompts are read by a few of them; "times" is what the seconds are multiplied by for
all layers. Beside every row stand the floating-point operations that cannot be avoided, and the seconds that they take
at the speed of a large matrix product on this device; a step has the bytes of weights and cache, at the bandwidth of a
large copy. Rows come in the order of their value. One that does not fit into the time or the memory has its reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_machine import TINY, measure_ceilings, rotated_by
from gpu_shapes import Prompts, as_method, count_waits, random_model, release
from stock import attention_kernels, attention_kernels_and_launches, usual_dtype
from timing import timed
from torch import Tensor

from rope_ext_hf.reading.cost.memory import cached_bytes
from rope_ext_hf.reading.cost.operations import estimate_flops
from rope_ext_hf.reading.scorer import TokenScorer

Row = dict[str, Any]

METHODS = ("stock", "yarn", "dynamic-yarn", "dca", "self-extend", "rerope", "stairs")
IN_MORE_CHUNKS = ("stock", "dca")
"""Methods that are also read in chunks of other sizes."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurement.

    Attributes:
        layers: of the whole model.
        short: tokens that the whole model reads under every method, and decodes after.
        long: tokens that the whole stock model reads, and `few` layers under every method.
        longest: tokens that one layer reads.
        chunks: tokens that go through the decoder at a time; the middle one is measured under every method.
    """

    layers: int = 32
    short: int = 2**15
    long: int = 2**17
    longest: int = 2**20
    few: int = 4
    chunks: tuple[int, int, int] = (4096, 8192, 16_384)
    steps: int = 20


SCALES = {"8B": Scale(), "tiny": Scale(2, 128, 256, 512, 2, (32, 64, 128), 4)}


@dataclass(frozen=True)
class Job:
    """One row: what is read, by how many layers, in which way."""

    layers: int
    tokens: int
    method: str
    way: str
    chunk: int | None = None
    kernel: str | None = None  # the one kernel that attention may use; None: torch chooses


def jobs(scale: Scale) -> Iterator[Job]:
    """Yield every row in the order of its value."""
    everything, middle = scale.layers, scale.chunks[1]
    for kernel in ("flash", "cudnn"):
        yield Job(everything, scale.short, "stock", "bare", kernel=kernel)
    for method in METHODS[1:]:
        yield Job(everything, scale.short, method, "bare")
    for method in METHODS:
        yield Job(everything, scale.short, method, "scored", middle)
    # Lengths of their own, as cuDNN's attention plans anew for every length that no step before has met.
    for at, method in enumerate(METHODS):
        yield Job(everything, scale.short - 2 * at * scale.steps, method, "step")
    yield Job(everything, scale.short, "stock", "read", middle)
    yield Job(everything, scale.long, "stock", "scored", middle)
    for kernel in ("flash", "cudnn"):
        yield Job(scale.few, scale.long, "stock", "bare", kernel=kernel)
    for method in METHODS[1:]:
        yield Job(scale.few, scale.long, method, "bare")
    for method in ("stock", "dca"):
        yield Job(1, scale.longest, method, "read", scale.chunks[2])
    for method in IN_MORE_CHUNKS:
        yield Job(scale.few, scale.long, method, "scored", middle)
    for method in IN_MORE_CHUNKS:
        for chunk in (scale.chunks[0], scale.chunks[2]):
            yield Job(everything, scale.short, method, "scored", chunk)


ABOVE_FLOOR = {"bare": 2.0, "scored": 2.5, "read": 2.5, "step": 4.0}
"""Times its floor that a row is expected to take at most, to see whether it fits into the time."""
ONCE = 3.0  # seconds; what is expected to take longer runs once, and that run is the one that counts


def only(kernel: str | None) -> AbstractContextManager[Any]:
    """Allow one kernel of attention alone."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    allowed = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    return nullcontext() if kernel is None else sdpa_kernel(allowed[kernel])


@dataclass
class Measurement:
    """The rows of one shape, as long as there is time.

    Args:
        until: when to end, by time.monotonic().
    """

    shape: str
    device: str
    until: float
    model: Any = None
    ceilings: Row = field(default_factory=dict)

    def rows(self) -> Iterator[Row]:
        """Yield the description of the model, then every row."""
        scale = SCALES[self.shape]
        self.dtype = getattr(torch, usual_dtype(self.device))
        self.ceilings = measure_ceilings(self.device, **({} if self.shape == "8B" else TINY))
        yield {
            "shape": self.shape,
            "dtype": str(self.dtype).removeprefix("torch."),
            "layers": scale.layers,
            "rotations": rotated_by(self.device),
            **self.ceilings,
        }
        with torch.inference_mode():
            for job in jobs(scale):
                row = {**vars(job), "times": scale.layers / job.layers}
                if job.kernel == "cudnn" and not self.device.startswith("cuda"):
                    continue
                yield row | self.measure(job, scale)

    def measure(self, job: Job, scale: Scale) -> Row:
        self.load(job.layers)
        row = self.floor(job)
        with as_method(self.model, job.method), only(job.kernel):
            runs = 1 if row["floor"] * ABOVE_FLOOR[job.way] > ONCE else 2
            # The first run of a step reads the prompt; that of a prompt compiles kernels and plans.
            reading = self.floor(Job(job.layers, job.tokens, job.method, "bare"))["floor"] if job.way == "step" else 0
            needed = ABOVE_FLOOR[job.way] * runs * (row["floor"] + reading)
            left = self.until - time.monotonic()
            if needed > left:
                return row | {
                    "skipped": f"no time was left: at most {needed:.0f} s, and {max(0.0, left):.0f} s were left"
                }
            try:
                if self.device.startswith("cuda"):
                    torch.cuda.reset_peak_memory_stats()
                row |= self.step(job, scale.steps) if job.way == "step" else self.prompt(job, runs)
                if self.device.startswith("cuda"):
                    row["gigabytes"] = torch.cuda.max_memory_allocated() / 1e9
            except torch.OutOfMemoryError as error:
                row["skipped"] = f"out of memory: {str(error).splitlines()[0]}"
            except RuntimeError as error:  # of a kernel; the other rows go on
                row["failed"] = str(error).strip()[-500:]
        release(self.device)
        return row

    def load(self, layers: int) -> None:
        """Make a model of so many layers, in place of the last one where that has others."""
        if self.model is None or self.model.config.num_hidden_layers != layers:
            self.model = None
            release(self.device)
            self.model = random_model(self.shape, self.device, self.dtype, layers=layers)

    def floor(self, job: Job) -> Row:
        """Return the operations of a prompt or the bytes of a step, and the least seconds that they take."""
        if job.way == "step":
            width = self.dtype.itemsize
            embeddings = self.model.get_input_embeddings().weight.numel()
            weights = self.model.num_parameters() - embeddings
            moved = weights * width + cached_bytes(self.model.config, job.tokens, width=width)
            return {"bytes": moved, "floor": moved / self.ceilings["bandwidth"]}
        scored = job.tokens if job.way == "scored" else 0
        operations = estimate_flops(self.model, [job.tokens], scored)
        return {"operations": operations, "floor": operations / self.ceilings["product"]}

    def prompt(self, job: Job, runs: int) -> Row:
        """Read a prompt: seconds of every run, the last of which counts, and the kernels of its attention."""
        ids = Prompts.random(job.tokens, self.device).ids
        if job.way == "bare":
            decoder = self.model.get_decoder()

            def read() -> Tensor:
                state: Tensor = decoder(ids, use_cache=False).last_hidden_state
                return state[:, -1]
        else:
            scorer = TokenScorer(self.model, chunk=job.chunk, longest=job.tokens)
            first = 1 if job.way == "scored" else job.tokens - 1
            if not scorer.chunked:
                return {"failed": f"not read in chunks: {scorer.reading}"}

            def read() -> Tensor:
                return scorer.losses(ids[0], first)

        last: list[Tensor] = []
        seconds: list[float] = []

        def timed_read() -> None:
            seconds.append(timed(lambda: last.append(read()), self.device))

        for run in range(runs):
            last.clear()
            if run == runs - 1:
                kernels = attention_kernels(timed_read)
            else:
                timed_read()
        return {"runs": seconds, "seconds": seconds[-1], "kernels": kernels, "finite": bool(last[0].isfinite().all())}

    def step(self, job: Job, steps: int) -> Row:
        """Decode onto the whole prompt: seconds, kernels, launches and waits of a step, from the third on."""
        from transformers import DynamicCache

        ids = Prompts.random(job.tokens, self.device).ids
        cache = DynamicCache(config=self.model.config)
        logits: list[Tensor] = [self.model(ids, past_key_values=cache, logits_to_keep=1).logits]

        def one() -> None:
            logits[0] = self.model(ids[:, -1:], past_key_values=cache, logits_to_keep=1).logits

        for _ in range(2):
            one()
        waits = count_waits(one) if self.device.startswith("cuda") else None
        kernels, launches = attention_kernels_and_launches(one)
        seconds = sorted(timed(one, self.device) for _ in range(steps))
        return {
            "runs": seconds,
            "seconds": statistics.median(seconds),
            "kernels": kernels,
            "launches": launches,
            "waits": waits,
            "finite": bool(logits[0].isfinite().all()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--shape", choices=SCALES, default="8B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=10.0, help="time for all rows")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    for row in Measurement(arguments.shape, arguments.device, until).rows():
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
