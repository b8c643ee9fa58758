"""The kernels that patched models rely on, on a GPU: bandwidth and values. A step of `make gpu`.

    python benchmarks/gpu_kernels.py [--device cuda]

A JSON line each:

- "rotation": how fast keys and queries are rotated, in bytes read and written, beside a copy of the same tensor.
- "window": flash attention with a window, which attention over remapped positions uses for bands of keys, against a
  masked softmax in float64: the norm of the difference over the norm of the result, and the largest difference of the
  log-sum-exp.
- "gradient": output and gradients of attention over remapped positions, which is put together from tiles, against its
  definition written out pair by pair in float64 (tests/support/oracles.py); each as the norm of the difference over the
  norm of the definition's.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_prefill import only
from stock import attention_kernels, usual_dtype
from timing import seconds_of
from torch import Tensor

from rope_ext_hf.attention.blockwise import attend
from rope_ext_hf.attention.kernels import run_kernel
from rope_ext_hf.attention.rules import Rotation, RotationTable, TokenPositions
from rope_ext_hf.methods.dual_chunk import DualChunk
from rope_ext_hf.methods.grouped import SelfExtend
from rope_ext_hf.methods.remapping import ReRoPE
from rope_ext_hf.methods.stairs import Stairs
from rope_ext_hf.rotary.key_rotation import KeyLayout, KeyRotation
from tests.support.oracles import naive_attention, rotate_to, stored_position

Row = dict[str, Any]

THETA = 10_000.0
WINDOWS = (1, 30, 300, 5000)
METHODS = (
    ReRoPE(window=100),
    SelfExtend(window=100, group=4),
    DualChunk(chunk=120, window=40),
    Stairs(window=80, start=40, chunk=100),
)


def relative(value: Tensor, wanted: Tensor) -> float:
    """The norm of the difference over the norm of what is wanted."""
    return float((value.detach().double().cpu() - wanted).norm() / wanted.norm())


# --- rotations --------------------------------------------------------------------------------------------------------


def rotations(device: str, tokens: int) -> Iterator[Row]:
    """Yield the speed of rotating keys of 8 heads and queries of 32, by both pairings, as `KeyRotation.apply` does."""
    dtype, dim = getattr(torch, usual_dtype(device)), 128
    angle = torch.rand(1, 1, tokens, dim // 2, device=device) * 6
    rotation = KeyRotation(angle.cos(), angle.sin())
    for name, heads, pairing in (("keys", 8, "half"), ("keys", 8, "interleaved"), ("queries", 32, "half")):
        # As projections make them: tokens first in memory.
        x = torch.randn(1, tokens, heads, dim, device=device).to(dtype).transpose(1, 2)
        layout, target = KeyLayout(pairing, 0, dim), torch.empty_like(x)
        moved = 2 * x.numel() * x.element_size() + 2 * rotation.cos.numel() * 4
        seconds = seconds_of(lambda: rotation.apply(x, layout), device)  # noqa: B023 - called at once
        copy = seconds_of(lambda: target.copy_(x), device)  # noqa: B023
        copied = 2 * x.numel() * x.element_size() / copy
        yield {
            "question": "rotation",
            "of": f"{name}, {pairing}",
            "tokens": tokens,
            "seconds": seconds,
            "bandwidth": moved / seconds,
            "copy_bandwidth": copied,
            "of_copy": moved / seconds / copied,
        }


# --- windows ----------------------------------------------------------------------------------------------------------


def masked_softmax(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp in float64 of attention that sees `window` keys, counted from the last ones."""
    groups, (queries, keys) = query.shape[1] // key.shape[1], (query.shape[-2], key.shape[-2])
    key, value = (x.double().repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * scale
    before = keys - queries + torch.arange(queries)[:, None] - torch.arange(keys)  # 0: the newest key of a query
    scores = scores.masked_fill((before < 0) | (before >= window), -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def windows(device: str) -> Iterator[Row]:
    """Yield how far flash attention with a window is from a masked softmax."""
    for dtype in (torch.float16, torch.bfloat16):
        for window in WINDOWS:
            generator = torch.Generator().manual_seed(window)
            query = torch.randn(2, 8, 500, 64, generator=generator).to(dtype)
            key, value = (torch.randn(2, 2, 700, 64, generator=generator).to(dtype) for _ in range(2))
            wanted, wanted_lse = masked_softmax(query, key, value, 0.125, window)
            out, lse = run_kernel(query.to(device), key.to(device), value.to(device), 0.125, window)
            yield {
                "question": "window",
                "window": window,
                "dtype": str(dtype).removeprefix("torch."),
                "difference": relative(out, wanted),
                "log_sum_exp": float((lse.cpu().double() - wanted_lse).abs().max()),
            }


# --- gradients --------------------------------------------------------------------------------------------------------


def gradients(device: str, tokens: int, dtypes: tuple[torch.dtype, ...]) -> Iterator[Row]:
    """Yield how far outputs and gradients through tiles are from the definition."""
    for method in METHODS:
        generator, dim = torch.Generator().manual_seed(0), 64

        def random(heads: int) -> Tensor:  # numbers that every dtype can hold, so that all begin with the same
            return torch.randn(1, heads, tokens, dim, generator=generator).bfloat16().double()  # noqa: B023

        given, upstream = tuple(random(heads).requires_grad_() for heads in (8, 2, 2)), random(8)
        expected = naive_attention(method, *(x[0] for x in given), dim, THETA)[None]
        wanted = (expected.detach(), *torch.autograd.grad(expected, given, upstream))
        for dtype in dtypes:
            kernels, made = attended(method, given, upstream, device, dtype)
            names = ("output", "query", "key", "value")
            yield {
                "question": "gradient",
                "method": method.name,
                "tokens": tokens,
                "dtype": str(dtype).removeprefix("torch."),
                "kernels": kernels,
                **{name: relative(each, right) for name, each, right in zip(names, made, wanted, strict=True)},
            }


def attended(
    method: Any, given: tuple[Tensor, ...], upstream: Tensor, device: str, dtype: torch.dtype
) -> tuple[str, tuple[Tensor, ...]]:
    """Return the kernels of an attention on the device, its output and the gradients of queries, keys and values."""
    tokens, dim = given[0].shape[-2:]
    positions = torch.arange(tokens)
    stored = torch.tensor([stored_position(method, int(n)) for n in positions], dtype=torch.float64)
    call = TokenPositions(positions[None].to(device), positions[None].to(device), (0,), None)
    inv_freq = THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    # The rotation to the stored positions is part of what is differentiated, in float64 on the CPU.
    query, key, value = (x.detach().requires_grad_() for x in given)
    rotated = [rotate_to(x, stored[None, None], dim, THETA).to(device, dtype) for x in (query, key)]
    rotation = Rotation(RotationTable(inv_freq), KeyLayout("half", 0, dim))
    outputs: list[Tensor] = []

    def run() -> None:
        outputs.append(attend(method, rotation, call, *rotated, value.to(device, dtype), dim**-0.5))

    kernels = attention_kernels(run)
    return kernels, (outputs[0], *torch.autograd.grad(outputs[0], (query, key, value), upstream.to(device, dtype)))


def attempts(device: str, tiny: bool) -> Iterator[tuple[str, Callable[[], Iterator[Row]]]]:
    """Yield every part with what makes its rows; one that fails says so, and the next one goes on."""
    on_cuda = device.startswith("cuda")
    yield "rotation", lambda: rotations(device, 256 if tiny else 2**17 if on_cuda else 2**13)
    if on_cuda:  # the kernels of CPUs take no windows
        yield "window", lambda: windows(device)
    dtypes = (torch.float32, torch.bfloat16) if on_cuda else (torch.float32,)
    if not on_cuda or torch.version.cuda or torch.version.hip:  # the simulated device of the tests has no backward
        yield "gradient", lambda: gradients(device, 130 if tiny else 300, dtypes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the script")
    arguments = parser.parse_args()
    for question, make in attempts(arguments.device, arguments.tiny):
        try:
            with only("flash") if question == "window" else only(None):
                for row in make():
                    print(json.dumps(row), flush=True)
        except RuntimeError as error:
            print(json.dumps({"question": question, "failed": str(error).strip()[-500:]}), flush=True)


if __name__ == "__main__":
    main()
