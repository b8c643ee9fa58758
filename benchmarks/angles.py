"""Errors of cos and sin at far positions: transformers' float32 angles, and this package's.

    python benchmarks/angles.py [--device cuda] [--out benchmarks/results.jsonl]

128 dims, base 500,000 (Llama 3), 1,024 positions up to each; the largest difference to float64, before any cast to the
model's dtype, and for a model after `model.to(torch.bfloat16)`, computed in float32. The last line is JSON.
"""

from __future__ import annotations

from typing import Any

import torch
from record import benchmark_parser, record
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import rope_ext_hf as rope

ROTARY = rope.Rotary(dim=128, theta=500_000.0, trained_length=8192)
POSITIONS = (2**13, 2**17, 2**20, 2**24)


def stock() -> nn.Module:
    return LlamaRotaryEmbedding(
        LlamaConfig(head_dim=ROTARY.dim, rope_parameters={"rope_type": "default", "rope_theta": ROTARY.theta})
    )


def error(module: nn.Module, positions: torch.Tensor) -> float:
    """The largest difference of cos and sin to float64, computed on the CPU."""
    angles = positions.cpu().double()[..., None] * ROTARY.inv_freq()
    exact = torch.cat((angles, angles), dim=-1)
    x = torch.zeros(1, device=positions.device)  # float32: what cos and sin are cast to
    cos, sin = (values.cpu().double() for values in module(x, positions))
    return max((cos - exact.cos()).abs().max().item(), (sin - exact.sin()).abs().max().item())


def main() -> None:
    parser = benchmark_parser(__doc__)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for position in POSITIONS:
        positions = torch.arange(position - 1024, position, device=arguments.device)[None]
        row: dict[str, Any] = {"position": position}
        for name, make in (("transformers", stock), ("ours", lambda: rope.RotaryEmbedding("default", ROTARY))):
            for dtype in (torch.float32, torch.bfloat16):
                module = make().to(arguments.device, dtype)
                row[f"{name}, {str(dtype).removeprefix('torch.')}"] = float(f"{error(module, positions):.2g}")
        rows.append(row)
        print(row)
    record({"benchmark": "angles", "rows": rows}, arguments)


if __name__ == "__main__":
    main()
