"""Kernels of the Hub for models on a CPU, without the Hub: stand-ins in a local folder, for the `kernels` library.

A plug-in of pytest (`-p tests.support.hub_kernels`), because transformers takes in `kernels` when it is imported.
transformers 5.23 asks for 0.18.2. Under `nox -s kernels` it meets 0.17.2 by that name: all that it imports is there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_installed = importlib.metadata.version


def _version(distribution_name: str) -> str:
    return "0.18.2" if distribution_name == "kernels" else _installed(distribution_name)


if importlib.util.find_spec("kernels"):
    importlib.metadata.version = _version

SOURCE = '''
from types import SimpleNamespace

import torch
from torch import nn

calls = []


def rotate(q, k, cos, sin):
    calls.append(tuple(cos.shape))
    half = q.shape[-1] // 2
    cos, sin = cos[:, None, :, :half], sin[:, None, :, :half]
    firsts, seconds = (q[..., :half], k[..., :half]), (q[..., half:], k[..., half:])
    pairs = zip(firsts, seconds)
    return tuple(torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in pairs)


class OwnAngles(nn.Module):
    """As kernels-community/rotary (CUDA) does: every row by its own angles; the first half of them is read."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return rotate(q, k, cos, sin)


class AnglesOfFirst(nn.Module):
    """As kernels-community/aiter-rope (ROCm) does: every row by the angles of the first one."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return rotate(q, k, cos[:1], sin[:1])


layers = SimpleNamespace(OwnAngles=OwnAngles, AnglesOfFirst=AnglesOfFirst)
'''


def write_kernels(folder: Path) -> Path:
    """A folder of kernels, as the `kernels` library reads it."""
    variant = folder / "build" / "torch-cpu"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text(SOURCE, encoding="utf-8")
    metadata = {"id": "stand_in", "name": "stand-in", "version": 1, "license": "Apache-2.0", "python-depends": []}
    (variant / "metadata.json").write_text(json.dumps(metadata | {"backend": {"type": "cpu"}}), encoding="utf-8")
    return folder


@contextmanager
def rotated_by(folder: Path, name: str) -> Iterator[list[tuple[int, ...]]]:
    """Inside, `use_kernels=True` has queries and keys of Llama rotated by a kernel; gives the shapes of cos it met."""
    import kernels
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    repository = kernels.LocalLayerRepository(folder, layer_name=name)
    calls: list[tuple[int, ...]] = repository.load().forward.__globals__["calls"]
    calls.clear()
    kernels.register_kernel_mapping({"rotary_pos_emb": {"cpu": repository}})
    try:
        yield calls
    finally:
        function: Any = apply_rotary_pos_emb
        function.__dict__.pop("forward", None)  # one for all models of the process
